"""Whether modes differ beyond seed noise: differences, their intervals, the table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp import extras, tables
from tfamp.runs import results

SCHEMA_VERSION = 4  # Of `comparison.json`.
CONFIDENCE = 0.95
# A score or loss that Keras computes is a float32, rounded by up to 6e-8.
EQUAL = 1e-6
_ENOUGH = "use seeds=3 or more"  # A flag, or an argument of `compare_modes`.
_UNITS = {False: "points", True: "%"}
NOTHING_LEARNED = (
    "the model has learned nothing that this score shows; give it more epochs, or "
    "another learning rate"
)


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
    results: list[results.RunResult]
    note: str
    export: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `comparison.json` holds."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self._asdict(),
            "results": [result._asdict() for result in self.results],
            "statistics": [each.to_dict() for each in self.differences()],
        }

    def by_mode(self) -> dict[str, list[results.RunResult]]:
        """Returns the runs of each mode, without loss scaling apart, by seed."""
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
        groups = self.by_mode()
        learned = {run.variant for run in self.results if not run.at_chance}
        differences = []
        for name in self.score_names():
            base, *others = (
                (mode, {run.seed: run.scores[name] for run in runs})
                for mode, runs in groups.items()
            )
            for each in others:
                found = compare(name, base, each, name in lower)
                better = bool(learned & {found.base_mode, found.mode})
                differences.append(found._replace(learned=better))
        return differences

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
        return "\n".join([tables.of_dicts(self.rows(), markdown=False), *self.notes()])

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        notes = [f"- {note}" for note in self.notes()]
        figure = "![Training curves and loss scale](comparison.png)"
        title = f"# {self.name}: float32 and mixed precision side by side"
        return "\n".join(
            [title, "", tables.of_dicts(self.rows()), "", *notes, "", figure, ""]
        )

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
            *_at_chance(self.by_mode()),
            *_verdicts(self.differences()),
            f"device: {device['device']}; "
            f"tensorflow {packages['tensorflow']}, keras {packages['keras']}",
            *_embeddings(self.environment),
            "steps/s of runs one after the other do not show a speed-up; a benchmark "
            "measures it (`tfamp benchmark`, `benchmark_model`)",
        ]
        return [line for line in lines if line]


def _verdicts(differences):
    """The notes on the scores: all of the task's own, a line on each of the others."""
    if not differences:
        return ["no verdict: the runs have no score in common"]
    lines = []
    for each in differences:
        if each.score == differences[0].score:
            lines += [each.to_text(), f"verdict on {each.score}: {each.verdict}"]
        else:
            lines.append(f"besides, {each.to_text()}: {each.verdict}")
    return lines


def _embeddings(environment):
    """A note on a model with embeddings, or in a folder of before on any model."""
    if environment.get("embedding_layers") != 0:
        gradients = environment["precision"]["embedding_gradients"]
        yield f"gradients of embeddings, in every run: {gradients}"


def _batch_sizes(groups):
    """A note where modes had batches of different sizes."""
    sizes = {mode: runs[0].batch_size for mode, runs in groups.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{mode} {size}" for mode, size in sizes.items())
        yield f"steps have different batch sizes: {listed}"


def _diverged(groups):
    """A note on each mode whose loss ended up as no number; its score may look well."""
    for mode, runs in groups.items():
        seeds = [str(r.seed) for r in runs if None in (r.final_loss, r.test_loss)]
        if seeds:
            yield f"the loss of {mode} is not finite with seed {', '.join(seeds)}"
        for run in runs:
            if run.nonfinite_losses and run.final_loss is not None:
                yield (
                    f"{run.nonfinite_losses} losses of {mode} in the last epoch with "
                    f"seed {run.seed} are not finite; the final one is the others' mean"
                )


def _at_chance(groups):
    """A note on each mode with a run that is no better than a constant answer."""
    for mode, runs in groups.items():
        if there := [run for run in runs if run.at_chance]:
            seeds, first = ", ".join(str(run.seed) for run in there), there[0]
            yield (
                f"test {first.score_name} of {mode} with seed {seeds} is at the chance "
                f"level, {first.chance:.4f}: {NOTHING_LEARNED}"
            )


def _mean(values, form):
    """Mean, and with several values the standard deviation; "-" where there is none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    text = format(statistics.fmean(numbers), form)
    if len(numbers) > 1:
        text += " ± " + format(statistics.stdev(numbers), form)
    return text if len(numbers) == len(values) else f"{text} (of {len(numbers)} seeds)"
