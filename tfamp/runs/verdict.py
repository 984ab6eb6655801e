"""What a comparison of modes shows: its table, and the notes and verdicts below."""

import statistics
from typing import Any, NamedTuple

from tfamp import tables
from tfamp.runs import paired, results

SCHEMA_VERSION = 4  # Of `comparison.json`.
NOTHING_LEARNED = (
    "the model has learned nothing that this score shows; give it more epochs, or "
    "another learning rate"
)


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

    def differences(self) -> list[paired.PairedDifference]:
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
                found = paired.compare(name, base, each, name in lower)
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
