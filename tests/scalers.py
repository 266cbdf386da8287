"""The scaler in plain Python, and draws of its settings."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

LEAST, GREATEST = 2.0**-126, 2.0**126
MOST = 2**31 - 1


def more(count, by=True):
    return min(count + by, MOST)


@dataclasses.dataclass
class PlainScaler:
    """The scaler in plain Python. Every float32 quotient is exact enough in float64."""

    patience: int
    adjust_factor: float
    scaler: float
    count: int = 0
    total_resets: int = 0
    min_scaler: float = LEAST
    max_scaler: float = GREATEST
    stuck: int = 0
    hysteresis: int = 1
    overflows: int = 0
    skipped: int = 0

    def update(self, finite, forgiving=True):
        low = min(max(self.min_scaler, LEAST), GREATEST)
        high = max(min(self.max_scaler, GREATEST), low)
        now = min(max(self.scaler, low), high)  # one that is out of bounds is moved
        forgiven = forgiving and more(self.overflows) < self.hysteresis
        if not finite:
            scaler, count = now / (1 if forgiven else self.adjust_factor), 0
        elif self.count >= self.patience:
            scaler, count = now * self.adjust_factor, 0
        else:
            scaler, count = now, more(self.count)
        return dataclasses.replace(
            self,
            scaler=float(np.float32(min(max(scaler, low), high))),
            count=count,
            total_resets=more(self.total_resets, not finite and not forgiven),
            overflows=0 if finite else more(self.overflows),
            stuck=more(self.stuck) if not finite and now <= low else 0,
            skipped=more(self.skipped, not finite),
        )

    def redo(self, is_finite, redo):
        """A step that may be repeated `redo` times."""
        state = self
        for _ in range(redo):
            lower = state.update(False, forgiving=False)
            if is_finite(state.scaler) or lower.scaler == state.scaler:
                break
            state = lower
        finite = is_finite(state.scaler)
        # Attempts that a retry mended are not skipped.
        state = dataclasses.replace(state if finite else self, skipped=self.skipped)
        return state.update(finite)


@st.composite
def plain_scalers(draw, low=-126, high=126):
    least, scaler, greatest = sorted(draw(st.integers(low, high)) for _ in range(3))
    return PlainScaler(
        patience=draw(st.integers(1, 4)),
        adjust_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 2.0**60])),
        scaler=2.0**scaler,
        min_scaler=2.0**least,
        max_scaler=2.0**greatest,
        hysteresis=draw(st.integers(1, 3)),
    )


@st.composite
def extreme_scalers(draw):
    """Settings that are allowed and make no sense, beside those that do."""
    sizes = st.sampled_from([1e-45, LEAST, 1.0, 3.0, 2.0**15, GREATEST, 3e38])
    least, greatest = sorted(draw(st.tuples(sizes, sizes)))
    least, greatest = draw(st.sampled_from([(least, greatest), (0.0, np.inf)]))
    factors = st.sampled_from([1 + 2.0**-23, 1.1, 2.0, 1000.0, 2.0**120, 3e38])
    patience = draw(st.sampled_from([1, 2, 50, 2000, MOST]))
    return PlainScaler(
        patience=patience,
        adjust_factor=float(np.float32(draw(factors))),
        scaler=float(np.float32(draw(sizes))),
        count=draw(st.sampled_from([0, patience, MOST])),
        total_resets=draw(st.sampled_from([0, MOST - 5])),
        min_scaler=float(np.float32(least)),
        max_scaler=float(np.float32(greatest)),
        stuck=draw(st.sampled_from([0, MOST - 5])),
        hysteresis=draw(st.sampled_from([1, 2, 7, MOST])),
        overflows=draw(st.sampled_from([0, 1, MOST - 5])),
    )
