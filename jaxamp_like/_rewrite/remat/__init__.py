"""Remat regions: what is cheap to compute again is not saved for the backward pass.

Norms, softmax, activations and gates, which lie between contractions, are put into
regions. Each region is bound inside a `jax.checkpoint` of its own, so that the backward
pass keeps what goes into it and nothing from within. What goes in is low where a
contraction made it, and kept so. A float32 value is kept as it is: what is made again
from a rounded one, a difference or a sine, errs by the rounding of its size, which an
offset makes large. Of a sum of two results of contractions that only gates read, a low
copy is kept, from which the backward pass runs the gates again, while the forward pass
reads the sum itself.

Here the regions of one jaxpr are found; `bind` binds them. `cost` says what the
backward pass keeps, `grouping` which steps belong together, `regions` what of that
pays, and `schedule` in which order it all runs. Two steps are in one region if a value
flows between them and as many costly ops lie before the one as before the other: so no
path leaves a region and comes back. Linear steps that lead to a region stay outside
if their result takes no more to keep than what they are made of, as a sum of two. Those
that lead there from one result of a contraction alone (a bias, a factor, a split) are
run again inside the region, and so is what is made of inputs and constants alone, such
as a mask.

Recomputation instead of storage is that of Chen et al., "Training Deep Nets with
Sublinear Memory Cost", arXiv:1604.06174; that cheap ops are best run again even where
memory is no concern, since reading costs more than computing, is the reason of the
min-cut partitioner of PyTorch's functorch."""

from .regions import (
    as_region as as_region,
    plain_schedule as plain_schedule,
    remat_schedule as remat_schedule,
)
from .schedule import Region as Region, Schedule as Schedule, schedule as schedule
