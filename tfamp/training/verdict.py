"""Whether modes differ beyond seed noise: differences, their intervals, the table."""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfamp.training import run_files

SCHEMA_VERSION = 3  # Of `comparison.json`.
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

    def to_verdict(self) -> str:
        """Returns what the difference means, and how large it is beside the noise."""
        text, unit = f"verdict on {self.score}: {self.verdict}", _UNITS[self.relative]
        if self.base_deviation is not None and self.base_deviation >= _EQUAL:
            text += (
                f"; {self.base_mode} alone deviates by "
                f"{_points(self.base_deviation, '')} {unit} from seed to seed"
            )
        if self.detectable is not None:
            text += (
                "; the interval's half width, below which a mean difference counts as "
                f"noise, is {_points(self.detectable, '')} {unit}"
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
    pairs differ by less noise than runs of different seeds do. The interval is SciPy's
    of Student's paired t-test, which takes the differences for independent and roughly
    normal.

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

    References:
      Student, "The probable error of a mean", Biometrika 6 (1908), 1-25,
      https://doi.org/10.1093/biomet/6.1.1. Paired runs of classifiers: Dietterich,
      "Approximate statistical tests", Neural Computation 10 (1998), 1895-1923,
      https://doi.org/10.1162/089976698300017197.
    """
    (base_mode, before), (mode, after) = base, other
    seeds = tuple(sorted(before))
    places = score, mode, base_mode, seeds
    pairs = [(before[seed], after[seed]) for seed in seeds]
    differences = tuple(_difference(*pair, relative) for pair in pairs)
    found = [value for value in differences if value is not None]
    if len(found) < len(differences):
        why = _missing(base_mode, before, mode, after)
        nothing = [None] * 5
        return PairedDifference(
            *places, differences, *nothing, f"no verdict: {why}", relative
        )
    interval = _interval(found)
    several = len(found) > 1
    base_scores = [score for score, _ in pairs]
    scale = statistics.fmean(base_scores) if relative else 1.0
    return PairedDifference(
        *places,
        differences=differences,
        mean=statistics.fmean(found),
        deviation=statistics.stdev(found) if several else None,
        base_deviation=statistics.stdev(base_scores) / scale if several else None,
        interval=interval,
        detectable=(interval[1] - interval[0]) / 2 if interval else None,
        verdict=_verdict(found, interval, base_mode, _UNITS[relative]),
        relative=relative,
    )


def _is_finite(score):
    return score is not None and math.isfinite(score)


def _difference(before, after, relative):
    if not _is_finite(after) or not _is_finite(before) or (relative and not before):
        return None  # Nothing is so many percent of 0.
    return (after - before) / before if relative else after - before


def _missing(base_mode, before, mode, after):
    """Says which scores are not finite, or that a base is 0."""
    parts = []
    for name, scores in ((base_mode, before), (mode, after)):
        seeds = [str(seed) for seed in sorted(scores) if not _is_finite(scores[seed])]
        if seeds:
            seeds = ", ".join(seeds)
            parts.append(f"the score of {name} is not finite with seed {seeds}")
    if not parts:
        return f"the score of {base_mode} is 0 with a seed, which has no percentage"
    return " and ".join(parts)


def _interval(differences):
    """The confidence interval of the mean; None where there is no deviation."""
    from scipy import stats

    if len(differences) < 2 or statistics.stdev(differences) < _EQUAL:
        return None
    found = stats.ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE)
    return float(found.low), float(found.high)


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


# ---- The table ----


class Comparison(NamedTuple):
    """Runs of float32 and of one or two others over the same seeds, as plain data.

    Attributes:
      name: Name of the configuration.
      results: The runs' `RunResult`s.
      note: What a reader must know of the choice of modes; may be empty.
      export: `ExportReport` of the first mixed run's model as a dict.
      environment: Versions and devices, as in `environment.json`.
    """

    name: str
    results: list[run_files.RunResult]
    note: str
    export: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `comparison.json` holds."""
        fields = self._asdict()
        fields["results"] = [result._asdict() for result in self.results]
        found = [each.to_dict() for each in self.differences()]
        return {"schema_version": SCHEMA_VERSION, **fields, "statistics": found}

    def by_mode(self) -> dict[str, list[run_files.RunResult]]:
        """Returns the runs of each mode, in order of seeds.

        Those without the loss scaling that the mode needs are apart.
        """
        return {
            name: [r for r in self.results if r.variant == name]
            for name in dict.fromkeys(r.variant for r in self.results)
        }

    def score_names(self) -> list[str]:
        """Returns the scores that every run has, the task's own first."""
        scores = [run.scores for run in self.results]
        return [name for name in scores[0] if all(name in each for each in scores)]

    def differences(self) -> list[PairedDifference]:
        """Returns the paired differences from float32, score by score."""
        lower = {name for run in self.results for name in run.errors}
        found = []
        for name in self.score_names():
            base, *others = (
                (mode, {run.seed: run.scores[name] for run in runs})
                for mode, runs in self.by_mode().items()
            )
            found += [compare(name, base, each, name in lower) for each in others]
        return found

    def rows(self) -> list[dict[str, str]]:
        """Returns the table's rows by column; mean and deviation over seeds."""
        return [
            {
                "mode": mode,
                "steps/s": _mean([run.steps_per_second for run in runs], ".2f"),
                "final loss": _mean([run.final_loss for run in runs], ".4f"),
                **{
                    f"test {name}": _mean([run.scores[name] for run in runs], ".4f")
                    for name in self.score_names()
                },
                "skipped steps": _mean([run.skipped_steps for run in runs], ".0f"),
                "final loss scale": _mean([run.loss_scale for run in runs], ".0f"),
            }
            for mode, runs in self.by_mode().items()
        ]

    def to_text(self) -> str:
        """Returns the table for a terminal, with the notes below."""
        return "\n".join([table(self.rows(), "  ", ("", "")), *self.notes()])

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        notes = [f"- {note}" for note in self.notes()]
        figure = "![Training curves and loss scale](comparison.png)"
        title = f"# {self.name}: float32 and mixed precision side by side"
        rows = table(self.rows(), " | ", ("| ", " |"))
        return "\n".join([title, "", rows, "", *notes, "", figure, ""])

    def notes(self) -> list[str]:
        """Returns the lines below the table."""
        device = self.environment["precision"]
        packages = self.environment["packages"]
        lines = [
            self.results[0].description,
            self.note,
            *dict.fromkeys(r.graph_rewrite for r in self.results if r.graph_rewrite),
            *_batch_sizes(self.by_mode()),
            *_diverged(self.by_mode()),
            *_verdicts(self.differences()),
            f"device: {device['device']}; "
            f"tensorflow {packages['tensorflow']}, keras {packages['keras']}",
            f"gradients of embeddings, in every run: {device['embedding_gradients']}",
            "steps/s are of runs one after the other, of which no speed-up follows: "
            "--job=train_benchmark measures it",
        ]
        return [line for line in lines if line]


def table(rows: list[dict[str, str]], between: str, ends: tuple[str, str]) -> str:
    """Returns rows as lines of text in columns, the head and a rule above.

    Args:
      rows: By column; all have the same.
      between: What stands between two cells.
      ends: What stands before and after a line.
    """
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join(
        (ends[0] + between.join(line) + ends[1]).rstrip() for line in padded
    )


def _verdicts(found):
    """The notes on the scores: all of the task's own, a line on each of the others."""
    if not found:
        return ["no verdict: the runs have no score in common"]
    lines = []
    for each in found:
        if each.score == found[0].score:
            lines += [each.to_text(), each.to_verdict()]
        else:
            lines.append(f"besides, {each.to_text()}: {each.verdict}")
    return lines


def _batch_sizes(groups):
    """A note where modes had batches of different sizes."""
    sizes = {mode: runs[0].batch_size for mode, runs in groups.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{mode} {size}" for mode, size in sizes.items())
        yield f"steps are of batches of different sizes: {listed}"


def _diverged(groups):
    """A note on each mode whose loss ended up as no number; its score may look well."""
    for mode, runs in groups.items():
        seeds = [str(r.seed) for r in runs if None in (r.final_loss, r.test_loss)]
        if seeds:
            yield f"the loss of {mode} is not finite with seed {', '.join(seeds)}"


def _mean(values, form):
    """Mean, and with several values the standard deviation; "-" where there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    text = format(statistics.fmean(found), form)
    if len(found) > 1:
        text += " ± " + format(statistics.stdev(found), form)
    return text if len(found) == len(values) else f"{text} (of {len(found)} seeds)"
