"""Whether two modes differ beyond seed noise: paired differences, their intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp import extras

CONFIDENCE = 0.95
# A score or loss that Keras computes is a float32, rounded by up to 6e-8.
EQUAL = 1e-6
_ENOUGH = "use seeds=3 or more"  # A flag, or an argument of `compare_modes`.
_UNITS = {False: "points", True: "%"}


class PairedDifference(NamedTuple):
    """One score in two modes over the same seeds.

    Scores are fractions, and their differences points; of an error the differences are
    relative to the base mode's, and given in percent.

    Attributes:
      score: Name of the score.
      mode: The mode that is compared.
      base_mode: The mode it is compared with.
      seeds: The seeds, in the order of `differences`.
      differences: `mode` minus `base_mode`, seed by seed, of an error divided by
        `base_mode`; None where that is not finite, and then there is no mean.
      mean: Mean of the differences.
      deviation: Their sample standard deviation; None for one seed.
      interval: 95 % confidence interval of the mean difference; None for one seed, and
        where all differences are equal.
      relative: Whether the score is an error.
      learned: Whether any run of the two modes is better than a constant answer.
    """

    score: str
    mode: str
    base_mode: str
    seeds: tuple[int, ...]
    differences: tuple[float | None, ...]
    mean: float | None = None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    relative: bool = False
    learned: bool = True

    @property
    def verdict(self) -> str:
        """What a reader may conclude."""
        count, unit = len(self.seeds), _UNITS[self.relative]
        if self.mean is None:
            pairs = zip(self.seeds, self.differences, strict=True)
            seeds = ", ".join(str(seed) for seed, each in pairs if each is None)
            return f"no verdict: the difference is not finite with seed {seeds}"
        if not self.learned:
            return (
                f"no verdict: {self.base_mode} and {self.mode} are both at the chance "
                "level, and models that have learned nothing are no comparison"
            )
        if count == 1:
            return f"unknown with one seed: {_ENOUGH}"
        if self.interval is None:
            text = f"no interval: {_points(self.mean)} {unit}"
            if abs(self.mean) < EQUAL:
                text = f"equal to {self.base_mode}"
            text += f" in each of the {count} seeds, which leaves no deviation to judge"
        elif self.interval[0] <= 0 <= self.interval[1]:
            text = "within seed noise"
        else:
            side = "lower" if self.mean < 0 else "higher"
            low, high = (_points(x, "") for x in sorted(map(abs, self.interval)))
            text = f"{side} than {self.base_mode} by {low} to {high} {unit}"
        return text + (f" (two seeds say little: {_ENOUGH})" if count == 2 else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {**self._asdict(), "verdict": self.verdict, "confidence": CONFIDENCE}

    def to_text(self) -> str:
        """Returns the difference in points, with its interval where it has one."""
        text = f"{self.mode} minus {self.base_mode}: "
        if self.mean is None:
            return f"{text}no mean of {self.score}"
        text += _points(self.mean)
        unit = _UNITS[self.relative]
        if self.deviation is None:
            return f"{text} {unit} of {self.score}"
        text += (
            f" ± {_points(self.deviation, '')} {unit} of {self.score} "
            f"(mean and deviation of {len(self.seeds)} seeds)"
        )
        if self.interval is not None:
            low, high = map(_points, self.interval)
            text += f", {CONFIDENCE:.0%} interval {low} to {high}"
        return text


def compare(
    score: str,
    base: tuple[str, Mapping[int, float | None]],
    other: tuple[str, Mapping[int, float | None]],
    relative: bool = False,
) -> PairedDifference:
    """Compares two modes by the differences between runs of the same seed.

    A seed fixes the first weights and the order of the data in both modes, so that
    pairs differ by less noise than runs of different seeds do.

    Args:
      score: Name of the score.
      base: (name of the base mode, {seed: score as a fraction; None or not finite
        where there is none}).
      other: The same of the mode that is compared; the same seeds.
      relative: Whether the score is an error, in any unit and above 0: differences are
        then relative to the base mode's.

    Returns:
      A `PairedDifference`.

    References:
      Dietterich, "Approximate statistical tests", Neural Computation 10 (1998),
      1895-1923, https://doi.org/10.1162/089976698300017197.
    """
    (base_mode, before), (mode, after) = base, other
    seeds = tuple(sorted(before))
    first, second = (
        np.array([scores[seed] for seed in seeds], "float64")  # None becomes NaN.
        for scores in (before, after)
    )
    with np.errstate(all="ignore"):
        raw = ((second - first) / (first if relative else 1.0)).tolist()
    differences = tuple(value if math.isfinite(value) else None for value in raw)
    places = score, mode, base_mode, seeds, differences
    if None in differences:
        return PairedDifference(*places, relative=relative)
    return PairedDifference(
        *places,
        mean=statistics.fmean(raw),
        deviation=statistics.stdev(raw) if len(raw) > 1 else None,
        interval=interval(raw),
        relative=relative,
    )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a mean, by Student's paired t-test.

    Args:
      values: Differences, taken for independent and roughly normal.

    Returns:
      None where there is no deviation: of one value, or of equal ones.

    References:
      Student, "The probable error of a mean", Biometrika 6 (1908), 1-25,
      https://doi.org/10.1093/biomet/6.1.1.
    """
    stats = extras.require("scipy.stats")
    if len(values) < 2 or statistics.stdev(values) < EQUAL:
        return None
    bounds = stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return float(bounds.low), float(bounds.high)


def _points(fraction, sign="+"):
    """A fraction in points; two digits of what would be shown as nothing."""
    points = 100 * fraction
    small = 100 * EQUAL <= abs(points) < 0.01
    return f"{points:{sign}.2g}" if small else f"{points:{sign}z.2f}"
