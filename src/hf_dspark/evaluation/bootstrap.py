"""95 % intervals by resampling prompts, seeded."""

from typing import Any

import numpy as np


DRAWS = 2000
LOW, HIGH = 2.5, 97.5
# Intervals from fewer are too narrow: of the means of 3, 5, 10 and 20 normal numbers they hold the truth in 74, 84, 90
# and 93 % of cases rather than 95 % (simulated).
FEWEST_PROMPTS = 20


def resamples(count: int, seed: int) -> np.ndarray:
    """Indices of `DRAWS` samples with replacement, `(DRAWS, count)`."""
    return np.random.default_rng([seed, count]).integers(count, size=(DRAWS, count))


def ratios(numerators: np.ndarray, denominators: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Per draw the ratio of sums, `nan` where nothing is divided by."""
    above, below = numerators[draws].sum(1), denominators[draws].sum(1)
    return np.divide(above, below, out=np.full(len(draws), np.nan), where=below > 0)


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> float:
    """The ratio of sums."""
    return float(numerators.sum() / denominators.sum()) if denominators.sum() > 0 else float("nan")


def estimate(value: float, drawn: np.ndarray) -> dict[str, Any]:
    """
    A number with its interval, as in `results.json`.

    Args:
        value (`float`): The number itself.
        drawn (`np.ndarray` of shape `(DRAWS,)`): What it was in each draw.
    """
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) == 0:
        return {"value": value, "low": None, "high": None}
    low, high = np.percentile(drawn, [LOW, HIGH])
    return {"value": value, "low": float(low), "high": float(high)}
