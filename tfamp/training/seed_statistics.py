"""Whether two modes differ beyond seed noise: paired differences and their interval."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CONFIDENCE = 0.95
# Fractions. A score that Keras computes is a float32, rounded by up to 6e-8.
_EQUAL = 1e-6
_ENOUGH = "use --seeds=3 or more"
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
        `base_mode`; None where a score is not finite, and then there is nothing of what
        follows but the verdict.
      mean: Mean of the differences.
      deviation: Their sample standard deviation; None for one seed.
      base_deviation: The same of the base mode's scores; of an error over its mean.
      interval: 95 % confidence interval of the mean difference; None for one seed, and
        where all differences are equal.
      detectable: Half the interval's width: a smaller mean difference counts as noise
        here. It is not the test's power: of true differences of this size about half
        are found. None without an interval.
      verdict: What a reader may conclude; see `compare`.
      relative: Whether the score is an error.
    """

    score: str
    mode: str
    base_mode: str
    seeds: tuple[int, ...]
    differences: tuple[float | None, ...]
    mean: float | None
    deviation: float | None
    base_deviation: float | None
    interval: tuple[float, float] | None
    detectable: float | None
    verdict: str
    relative: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {**self._asdict(), "confidence": CONFIDENCE}

    def to_text(self) -> str:
        """Returns the difference in points, with its interval where it has one."""
        text = f"{self.mode} minus {self.base_mode}: "
        if self.mean is None:
            return f"{text}no mean of {self.score}"
        text += _points(self.mean)
        if self.deviation is None:
            return f"{text} {self._unit} of {self.score}"
        text += (
            f" ± {_points(self.deviation, '')} {self._unit} of {self.score} "
            f"(mean and deviation of {len(self.seeds)} seeds)"
        )
        if self.interval is not None:
            low, high = map(_points, self.interval)
            text += f", {CONFIDENCE:.0%} interval {low} to {high}"
        return text

    @property
    def _unit(self):
        return _UNITS[self.relative]

    def to_verdict(self) -> str:
        """Returns what the difference means, and how large it is beside the noise."""
        return f"verdict on {self.score}: {self.verdict}{self._scale()}"

    def _scale(self):
        """How far the base mode moves by itself, and what counts as noise."""
        text = ""
        if self.base_deviation is not None and self.base_deviation >= _EQUAL:
            text += (
                f"; {self.base_mode} alone deviates by "
                f"{_points(self.base_deviation, '')} {self._unit} from seed to seed"
            )
        if self.detectable is not None:
            text += (
                "; the interval's half width, below which a mean difference counts as "
                f"noise, is {_points(self.detectable, '')} {self._unit}"
            )
        return text


def compare(
    score: str,
    base: tuple[str, Mapping[int, float | None]],
    other: tuple[str, Mapping[int, float | None]],
    relative: bool = False,
) -> PairedDifference:
    """Compares two modes by the differences between runs of the same seed.

    A seed fixes the first weights and the order of the data in both modes, so that
    pairs differ by less noise than runs of different seeds do. The interval is
    mean ± t * deviation / sqrt(n), with Student's t for n - 1 degrees of freedom; it
    takes the differences for independent and roughly normal.

    ```
    seeds                        | verdict
    with a score not finite      | no verdict
    one                          | one seed shows no noise
    all differences 0            | equal in every seed
    all differences equal        | no interval
    the interval contains 0      | within seed noise
    else                         | lower or higher by the interval's ends
    two                          | as above, and that two say little
    ```

    Args:
      score: Name of the score.
      base: (name of the base mode, {seed: score as a fraction; None or not finite
        where there is none}).
      other: The same of the mode that is compared; the same seeds.
      relative: Whether the score is an error, in any unit and above 0: differences are
        then relative to the base mode's.

    Returns:
      A `PairedDifference`.

    Raises:
      ValueError: If the seeds differ, or there are none.

    References:
      Student, "The probable error of a mean", Biometrika 6 (1908), 1-25,
      https://doi.org/10.1093/biomet/6.1.1. Paired runs of classifiers: Dietterich,
      "Approximate statistical tests", Neural Computation 10 (1998), 1895-1923,
      https://doi.org/10.1162/089976698300017197.
    """
    (base_mode, before), (mode, after) = base, other
    zero = relative and 0 in before.values()
    if relative:  # Nothing is so many percent of 0.
        base = base_mode, {seed: score or None for seed, score in before.items()}
        before = base[1]
    if not before or before.keys() != after.keys():
        raise ValueError(
            "Both modes must have the same seeds, at least one. Received: "
            f"{base_mode}: {sorted(before)}, {mode}: {sorted(after)}."
        )
    seeds = tuple(sorted(before))
    places = score, mode, base_mode, seeds
    differences = tuple(
        _difference(after[seed], before[seed], relative) for seed in seeds
    )
    missing = _missing((base, other), zero)
    if missing:
        verdict = f"no verdict: {missing}"
        return PairedDifference(*places, differences, *[None] * 5, verdict, relative)
    interval = _interval(differences)
    return PairedDifference(
        *places,
        differences=differences,
        mean=statistics.fmean(differences),
        deviation=_deviation(differences),
        base_deviation=_base_deviation([before[seed] for seed in seeds], relative),
        interval=interval,
        detectable=(interval[1] - interval[0]) / 2 if interval else None,
        verdict=_verdict(differences, interval, base_mode, _UNITS[relative]),
        relative=relative,
    )


def _missing(runs, zero):
    """Says which scores are not finite; "" if all are."""
    if zero:
        return f"the score of {runs[0][0]} is 0 with a seed, which has no percentage"
    found = {
        mode: [str(s) for s in sorted(scores) if not _is_finite(scores[s])]
        for mode, scores in runs
    }
    return " and ".join(
        f"the score of {mode} is not finite with seed {', '.join(seeds)}"
        for mode, seeds in found.items()
        if seeds
    )


def _is_finite(score):
    return score is not None and math.isfinite(score)


def _difference(after, before, relative):
    if not _is_finite(after) or not _is_finite(before):
        return None
    return (after - before) / before if relative else after - before


def critical_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Returns how many standard errors an interval reaches to each side.

    Solves for the angle of Student's distribution, which has a closed form for whole
    degrees of freedom; 12.71 for one, 4.30 for two, 1.96 in the limit.

    Args:
      freedom: Degrees of freedom, at least 1.
      confidence: Probability that the interval covers the mean, in (0, 1).

    References:
      Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 26.7.3 and
      26.7.4.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # Halves the angle's range to less than its rounding.
        angle = (low + high) / 2
        if _probability_within(angle, freedom) < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle, freedom):
    """P(|T| < sqrt(freedom) * tan(angle)) of Student's distribution."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if not odd:
        return math.sin(angle) * total
    return (angle + (math.sin(angle) * total if freedom > 1 else 0)) * 2 / math.pi


def _deviation(values: Sequence[float]):
    return statistics.stdev(values) if len(values) > 1 else None


def _base_deviation(values, relative):
    deviation = _deviation(values)
    if deviation is None or not relative:
        return deviation
    return deviation / (statistics.fmean(values) or 1.0)


def _interval(differences):
    deviation = _deviation(differences)
    if deviation is None or deviation < _EQUAL:
        return None
    error = deviation / math.sqrt(len(differences))
    reach = critical_t(len(differences) - 1) * error
    mean = statistics.fmean(differences)
    return (mean - reach, mean + reach)


def _verdict(differences, interval, base_mode, unit):
    if len(differences) == 1:
        return f"one seed shows no noise: {_ENOUGH}"
    mean = statistics.fmean(differences)
    if interval is None:
        every = f"in each of the {len(differences)} seeds"
        if abs(mean) < _EQUAL:
            text = f"equal to {base_mode} {every}"
        else:
            text = f"no interval: {_points(mean)} {unit} {every}"
        text += ", which leaves no deviation to judge by"
    elif interval[0] <= 0 <= interval[1]:
        text = "within seed noise"
    else:
        side = "lower" if mean < 0 else "higher"
        low, high = sorted(map(abs, interval))
        text = f"{side} than {base_mode} by {_points(low, '')} to "
        text += f"{_points(high, '')} {unit}"
    if len(differences) == 2:
        text += f" (two seeds say little: {_ENOUGH})"
    return text


def _points(fraction, sign="+"):
    """A fraction in points; two digits of what would be shown as nothing."""
    points = 100 * fraction
    small = 100 * _EQUAL <= abs(points) < 0.01
    return f"{points:{sign}.2g}" if small else f"{points:{sign}z.2f}"
