"""What the backward pass of code keeps, and what follows for the code inside."""

import enum


class RematMode(enum.Enum):
    """What the backward pass of code keeps; see `remat`."""

    SAVE_ALL = enum.auto()  # what JAX would
    REGIONS = enum.auto()  # in straight-line code, of a region its inputs alone
    REGIONS_IN_LOOP = enum.auto()  # the same in the body of a loop
    REGIONS_UNDER_POLICY = enum.auto()  # in a loop, under the policy `save_marked`
    RECOMPUTED = enum.auto()  # the backward pass recomputes all of it
    SAVE_STATISTICS = enum.auto()  # as `RECOMPUTED`, but TPUs keep large sums
    SAVE_REDUCTIONS = enum.auto()  # as `RECOMPUTED`, but what reduces an array is kept

    @property
    def is_straight_line(self) -> bool:
        """Whether the code is forward code outside of loops, rules and checkpoints."""
        return self == RematMode.REGIONS

    @property
    def has_regions(self) -> bool:
        """Whether cheap steps stand in remat regions, which are run again."""
        return self in (
            RematMode.REGIONS,
            RematMode.REGIONS_IN_LOOP,
            RematMode.REGIONS_UNDER_POLICY,
        )

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass runs the code again as a whole."""
        return self in (
            RematMode.RECOMPUTED,
            RematMode.SAVE_STATISTICS,
            RematMode.SAVE_REDUCTIONS,
        )

    @property
    def in_loop(self) -> "RematMode":
        """For the bodies of a loop."""
        return RematMode.REGIONS_IN_LOOP if self == RematMode.REGIONS else self

    @property
    def under_policy(self) -> "RematMode":
        """For code in a `jax.checkpoint` with a policy of what is kept."""
        return RematMode.REGIONS_UNDER_POLICY if self.has_regions else self

    @property
    def in_rule(self) -> "RematMode":
        """For derivative rules, whose authors chose what to keep."""
        return self if self.is_recomputed else RematMode.SAVE_ALL
