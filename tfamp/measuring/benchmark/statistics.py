"""Means over repeats that share a seed, with an interval for noise."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from tfamp.runs import paired

# Of fewer repeats there is no interval: that of two values is twelve times as wide as
# they differ.
ENOUGH = 3


class Estimate(NamedTuple):
    """A mean over repeats.

    Attributes:
      mean: The mean.
      low, high: Its 95 % interval by Student's t; None of less than three repeats.
      repeats: How many pairs there were.
    """

    mean: float
    low: float | None
    high: float | None
    repeats: int


def ratio(base: Mapping[int, float], other: Mapping[int, float]) -> Estimate | None:
    """Returns the geometric mean of `other / base`, pair by pair.

    The mean of a ratio and that of its inverse must agree, so the logarithms
    are averaged. Repeats are interleaved: what slows one slows its pair.

    Args:
      base: {repeat: value above 0}.
      other: The same of what is compared.

    Returns:
      None if no repeat is in both.

    References:
      Fleming and Wallace, "How not to lie with statistics: the correct way to summarize
      benchmark results", CACM 29 (1986), https://doi.org/10.1145/5666.5673.
    """
    estimate = _estimate(
        [math.log(other[k] / base[k]) for k in base.keys() & other.keys()]
    )
    if estimate is None:
        return None
    low, high = (
        None if x is None else math.exp(x) for x in (estimate.low, estimate.high)
    )
    return Estimate(math.exp(estimate.mean), low, high, estimate.repeats)


def difference(
    base: Mapping[int, float], other: Mapping[int, float]
) -> Estimate | None:
    """Returns the mean of `other / base - 1`, pair by pair.

    Args:
      base: {repeat: loss}; a repeat fixes first weights and batches.
      other: The same of what is compared.

    Returns:
      None if no repeat is in both, or the base's losses are 0.
    """
    both = [k for k in base.keys() & other.keys() if base[k]]
    return _estimate([other[k] / base[k] - 1 for k in both])


def _estimate(values):
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count < ENOUGH:
        return Estimate(mean, None, None, count)
    return Estimate(mean, *(paired.interval(values) or (mean, mean)), count)


def judge(estimate: Estimate) -> str:
    """Returns what a difference of losses means, in a word or two."""
    if all(x is None or abs(x) < paired.EQUAL for x in estimate[:3]):
        return "equal"
    if estimate.low is None or estimate.high is None:
        return "no interval"
    if estimate.low <= 0 <= estimate.high:
        return "within noise"
    return "higher" if estimate.mean > 0 else "lower"


def times(estimate: Estimate | None) -> str:
    """Returns a ratio with its interval, as "1.70x (1.65 to 1.74)"."""
    if estimate is None:
        return "-"
    return _interval(estimate, ".2f" if estimate.mean >= 0.1 else ".3f", "x")


def percent(estimate: Estimate) -> str:
    """Returns a difference with its interval, as "+0.1 % (-1.1 to +1.3)"."""
    return _interval(
        estimate, "+.1f" if abs(estimate.mean) >= 0.01 else "+.2f", " %", 100
    )


def _interval(estimate, form, unit, factor=1):
    text = f"{factor * estimate.mean:{form}}{unit}"
    if estimate.low is None:
        return f"{text} (no interval)"
    return f"{text} ({factor * estimate.low:{form}} to {factor * estimate.high:{form}})"
