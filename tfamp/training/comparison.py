"""A comparison of modes as plain data, as a table and as a verdict."""

import statistics
from typing import Any, NamedTuple

from tfamp.training import callbacks, run_result, seed_statistics

SCHEMA_VERSION = 2


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
    results: list[run_result.RunResult]
    note: str
    export: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `comparison.json` holds."""
        fields = self._asdict()
        fields["results"] = [result._asdict() for result in self.results]
        found = [each.to_dict() for each in self.differences()]
        return {"schema_version": SCHEMA_VERSION, **fields, "statistics": found}

    def by_mode(self) -> dict[str, list[run_result.RunResult]]:
        """Returns the runs of each mode, in order of seeds.

        Those without the loss scaling that the mode needs are apart.
        """
        return {
            name: [r for r in self.results if r.variant == name]
            for name in dict.fromkeys(r.variant for r in self.results)
        }

    def score_names(self) -> list[str]:
        """Returns the scores that every run has, the task's own first."""
        scores = [_scores(run) for run in self.results]
        return [name for name in scores[0] if all(name in each for each in scores)]

    def differences(self) -> list[seed_statistics.PairedDifference]:
        """Returns the paired differences from float32, score by score."""
        errors = {name for run in self.results for name in run.errors}
        found = []
        for name in self.score_names():
            base, *others = (
                (mode, {run.seed: _scores(run)[name] for run in runs})
                for mode, runs in self.by_mode().items()
            )
            found += [
                seed_statistics.compare(name, base, other, name in errors)
                for other in others
            ]
        return found

    def rows(self) -> list[list[str]]:
        """Returns the table's cells, the head first; mean and deviation over seeds."""
        groups, names = self.by_mode(), self.score_names()
        base = next(iter(groups.values()))
        rows = [_row(runs, base, names) for runs in groups.values()]
        cells = zip(groups, rows, strict=True)
        return [["mode", *rows[0]], *([mode, *row.values()] for mode, row in cells)]

    def to_text(self) -> str:
        """Returns the table for a terminal, with the notes below."""
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            )
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *self.notes()])

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        head, *body = self.rows()
        table = [head, ["---"] * len(head), *body]
        lines = ["| " + " | ".join(row) + " |" for row in table]
        notes = [f"- {note}" for note in self.notes()]
        figure = "![Training curves and loss scale](comparison.png)"
        title = f"# {self.name}: float32 and mixed precision side by side"
        return "\n".join([title, "", *lines, "", *notes, "", figure, ""])

    def notes(self) -> list[str]:
        """Returns the lines below the table."""
        packages = self.environment["packages"]
        lines = [
            self.results[0].description,
            self.note,
            *dict.fromkeys(r.graph_rewrite for r in self.results if r.graph_rewrite),
            *_batch_sizes(self.by_mode()),
            *_diverged(self.by_mode()),
            *_differences(self.differences()),
            f"device: {self.environment['precision']['device']}; "
            f"tensorflow {packages['tensorflow']}, keras {packages['keras']}",
            f"gradients of embeddings, in every run: "
            f"{self.environment['precision']['embedding_gradients']}",
            "speed-up: runs one after the other on a machine that may be busy; "
            "no benchmark",
        ]
        return [line for line in lines if line]


def _row(runs, base, names):
    """The cells of one mode by their column."""
    pairs = list(zip(runs, base, strict=True))
    ratios = [_speed_up(run, twin) for run, twin in pairs]
    return {
        "steps/s": _mean([run.steps_per_second for run in runs], ".2f"),
        "speed-up": _mean(ratios, ".2f"),
        "final loss": _mean([run.final_loss for run in runs], ".4f"),
        **{
            f"test {name}": _mean([_scores(run)[name] for run in runs], ".4f")
            for name in names
        },
        "skipped steps": _mean([run.skipped_steps for run in runs], ".0f"),
        "final loss scale": _mean([run.loss_scale for run in runs], ".0f"),
    }


def _differences(found):
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
        yield f"batch sizes: {listed}; the speed-up is of examples per second"


def _diverged(groups):
    """A note on each mode whose loss ended up as no number; its score may look well."""
    for mode, runs in groups.items():
        seeds = [str(r.seed) for r in runs if None in (r.final_loss, r.test_loss)]
        if seeds:
            yield f"the loss of {mode} is not finite with seed {', '.join(seeds)}"


def _speed_up(run, twin):
    """Ratio of examples per second; of steps where batches are of one size."""
    speed, base = run.steps_per_second, twin.steps_per_second
    if not speed or not base:
        return None
    return speed / base * ((run.batch_size or 1) / (twin.batch_size or 1))


def _scores(run):
    """Every score of a run; those of runs before there were several have just one."""
    scores = run.scores or {run.score_name: run.score}
    # Earlier versions wrote what is not finite as it is.
    return {name: callbacks.json_number(value) for name, value in scores.items()}


def _mean(values, form):
    """Mean, and with several values the standard deviation; "-" where there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    text = format(statistics.fmean(found), form)
    if len(found) > 1:
        text += " ± " + format(statistics.stdev(found), form)
    return text if len(found) == len(values) else f"{text} (of {len(found)} seeds)"
