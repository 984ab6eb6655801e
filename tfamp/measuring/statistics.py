"""Means over repeats that share a seed, with an interval for noise."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from tfamp.runs import verdict

# A loss is a float32, rounded by up to 6e-8.
_EQUAL = 1e-6
_ENOUGH = 3  # An interval of two values is twelve times as wide as they differ.


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
    found = _estimate(
        [math.log(other[k] / base[k]) for k in base.keys() & other.keys()]
    )
    if found is None:
        return None
    low, high = (None if x is None else math.exp(x) for x in (found.low, found.high))
    return Estimate(math.exp(found.mean), low, high, found.repeats)


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
    if count < _ENOUGH:
        return Estimate(mean, None, None, count)
    return Estimate(mean, *(verdict.interval(values) or (mean, mean)), count)


def judge(found: Estimate) -> str:
    """Returns what a difference of losses means, in a word or two."""
    if all(x is None or abs(x) < _EQUAL for x in found[:3]):
        return "equal"
    if found.low is None or found.high is None:
        return "no interval"
    if found.low <= 0 <= found.high:
        return "within noise"
    return "higher" if found.mean > 0 else "lower"


def times(found: Estimate | None) -> str:
    """Returns a ratio with its interval, as "1.70x (1.65 to 1.74)"."""
    if found is None:
        return "-"
    return _interval(found, ".2f" if found.mean >= 0.1 else ".3f", "x")


def percent(found: Estimate) -> str:
    """Returns a difference with its interval, as "+0.1 % (-1.1 to +1.3)"."""
    return _interval(found, "+.1f" if abs(found.mean) >= 0.01 else "+.2f", " %", 100)


def _interval(found, form, unit, factor=1):
    text = f"{factor * found.mean:{form}}{unit}"
    if found.low is None:
        return f"{text} (no interval)"
    return f"{text} ({factor * found.low:{form}} to {factor * found.high:{form}})"
