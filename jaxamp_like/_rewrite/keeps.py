"""What the backward pass of code keeps, and what follows for the code inside."""

import enum


class Keeps(enum.Enum):
    """What the backward pass of code keeps; see `remat`."""

    ALL = enum.auto()
    LEAN = enum.auto()
    LEAN_IN_LOOP = enum.auto()
    MARKED = enum.auto()  # lean, in a loop, under the policy `save_marked`
    NOTHING = enum.auto()  # all of it is run again
    STATISTICS = enum.auto()  # the same, but on TPUs sums over many numbers are kept

    @property
    def is_lean(self) -> bool:
        return self in (Keeps.LEAN, Keeps.LEAN_IN_LOOP, Keeps.MARKED)

    @property
    def runs_again(self) -> bool:
        return self in (Keeps.NOTHING, Keeps.STATISTICS)

    @property
    def in_loop(self) -> "Keeps":
        """For the bodies of a loop."""
        return Keeps.LEAN_IN_LOOP if self == Keeps.LEAN else self

    @property
    def under_policy(self) -> "Keeps":
        """For code in a `jax.checkpoint` with a policy of what is kept."""
        return Keeps.MARKED if self.is_lean else self

    @property
    def in_rule(self) -> "Keeps":
        """For derivative rules, whose authors chose what to keep."""
        return self if self.runs_again else Keeps.ALL
