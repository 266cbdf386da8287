"""Whether a contraction gains from operands of 8 bits."""

from .._rules import Site
from .._rules.conditions import Predicate, positive
from .axes import matmul_sizes


def worth_eight_bits(
    side: int = 1024, volume: int = 2**35, multiple_of: int = 16
) -> Predicate:
    """Holds where a contraction is so large that quantising it saves time.

    A maximum and a cast read and write each operand once more. The sides of a matrix
    product are its rows, its columns and the length of its sums; of a batch of
    products, those of one of them. A symbolic side counts as large.

    Args:
        side: the least length of the shortest side.
        volume: the least product of the three sides.
        multiple_of: what all three are multiples of. XLA pads 8-bit operands of
            cuBLASLt to 16 by kernels of their own.
    Returns:
        A predicate for `float8`, `int8` and `when`.
    Raises:
        ValueError: an argument is no positive integer.

    >>> worth_eight_bits(side=512)
    worth_eight_bits(512, 34359738368, 16)

    The defaults fit roofline times on an H200, and the two sizes that torchao's float8
    training publishes."""
    return Predicate(
        _worth_eight_bits,
        (
            positive(side, "side"),
            positive(volume, "volume"),
            positive(multiple_of, "multiple_of"),
        ),
    )


def _worth_eight_bits(site: Site, side: int, volume: int, multiple_of: int) -> bool:
    lengths = matmul_sizes(site.params, site.avals)
    if lengths is None:
        return True
    rows, columns, summed = lengths
    is_large = min(lengths) >= side and rows * columns * summed >= volume
    return is_large and all(length % multiple_of == 0 for length in lengths)


WORTH_IT = worth_eight_bits()
