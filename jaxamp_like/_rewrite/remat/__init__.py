"""Remat regions: what is cheap to compute again is not saved for the backward pass.

Norms, softmax, activations and gates, which lie between contractions, are put into
regions. Each region is bound inside a `jax.checkpoint` of its own, so that the backward
pass keeps what goes into it and nothing from within. What goes in is low where a
contraction made it, and kept so. A float32 value is kept in float32: a difference or a
sine that is made again from a rounded value errs by that rounding, which is large if
the value has a large offset. There is one exception: if only gates read the sum of two
contractions' results, a low copy of the sum is kept. The backward pass runs the gates
again from the copy, while the forward pass reads the sum itself.

Here the regions of one jaxpr are found; `bind` binds them. `cost` says what the
backward pass keeps, `grouping` which steps belong together, `regions` what of that
pays, and `schedule` in which order it all runs. Two steps are in one region if a value
flows between them and they have the same depth, which is the largest number of costly
ops on a path to a step. So no path leaves a region and comes back. Linear steps that
lead to a region stay outside if it costs no more to keep their result than their
operands, as with a sum of two. But steps that lead there from a single contraction's
result (a bias, a factor, a split) are run again inside the region, and so is what is
made of inputs and constants alone, such as a mask.

Recomputation instead of storage is due to Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv:1604.06174. The min-cut partitioner of PyTorch's functorch
also runs cheap ops again where memory is no concern, since reading costs more than
computing."""

from .eight_bits import (
    is_centred as is_centred,
    is_contraction_result as is_contraction_result,
    is_kept_anyway as is_kept_anyway,
    reading_of as reading_of,
)
from .regions import (
    as_region as as_region,
    schedule_of as schedule_of,
)
from .schedule import Region as Region, Schedule as Schedule, schedule as schedule
