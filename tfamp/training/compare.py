"""The same run in float32 and in a mixed mode, side by side."""

import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from absl import logging

from tfamp import export, hardware, mode_choice
from tfamp.training import (
    base_config,
    distribution,
    figures,
    run_files,
    seed_statistics,
    tasks,
    trainer,
)

SCHEMA_VERSION = 2


class Comparison(NamedTuple):
    """Runs of two modes over the same seeds, as plain data.

    Attributes:
      name: Name of the configuration.
      results: The runs' `RunResult`s.
      note: What a reader must know of the choice of modes; may be empty.
      export: `ExportReport` of the first mixed run's model as a dict.
      environment: Versions and devices, as in `environment.json`.
    """

    name: str
    results: list[trainer.RunResult]
    note: str
    export: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `comparison.json` holds."""
        fields = self._asdict()
        fields["results"] = [result._asdict() for result in self.results]
        found = [each.to_dict() for each in self.differences()]
        return {"schema_version": SCHEMA_VERSION, **fields, "statistics": found}

    def by_mode(self) -> dict[str, list[trainer.RunResult]]:
        """Returns the runs of each mode, in order of seeds."""
        return {
            mode: [r for r in self.results if r.mode == mode]
            for mode in dict.fromkeys(r.mode for r in self.results)
        }

    def score_names(self) -> list[str]:
        """Returns the scores that every run has, the task's own first."""
        scores = [_scores(run) for run in self.results]
        return [name for name in scores[0] if all(name in each for each in scores)]

    def differences(self) -> list[seed_statistics.PairedDifference]:
        """Returns the paired difference of the modes for each score."""
        found = []
        for name in self.score_names():
            base, other = (
                (mode, {run.seed: _scores(run)[name] for run in runs})
                for mode, runs in self.by_mode().items()
            )
            found.append(seed_statistics.compare(name, base, other))
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
        figure = "![Training loss and loss scale](comparison.png)"
        title = f"# {self.name}: float32 and mixed precision side by side"
        return "\n".join([title, "", *lines, "", *notes, "", figure, ""])

    def notes(self) -> list[str]:
        """Returns the lines below the table."""
        packages = self.environment["packages"]
        lines = [
            self.results[0].description,
            self.note,
            *dict.fromkeys(r.graph_rewrite for r in self.results if r.graph_rewrite),
            *_differences(self.differences()),
            f"device: {self.environment['precision']['device']}; "
            f"tensorflow {packages['tensorflow']}, keras {packages['keras']}",
            "speed-up: runs one after the other on a machine that may be busy; "
            "no benchmark",
        ]
        return [line for line in lines if line]


def _row(runs, base, names):
    """The cells of one mode by their column."""
    pairs = list(zip(runs, base, strict=True))
    ratios = [_ratio(r.steps_per_second, b.steps_per_second) for r, b in pairs]
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
    first, *others = found
    rest = (f"{each.to_text()}: {each.verdict}" for each in others)
    return [first.to_text(), first.to_verdict(), *rest]


def _ratio(speed, base):
    return speed / base if speed and base else None


def _scores(run):
    """Every score of a run; those of runs before there were several have just one."""
    return run.scores or {run.score_name: run.score}


def _mean(values, form):
    """Mean, and with several values the standard deviation; "-" where there is none."""
    if any(value is None for value in values):
        return "-"
    text = format(statistics.fmean(values), form)
    if len(values) > 1:
        text += " ± " + format(statistics.stdev(values), form)
    return text


def mixed_mode(requested: str, rewrite: bool = False) -> tuple[str, str]:
    """Returns the mode to set beside float32, and a note on the choice.

    Args:
      requested: A mode or "auto"; where that comes to float32, mixed_bfloat16.
      rewrite: Whether the mode names the format of a graph rewrite.

    Returns:
      (mode, note).

    Raises:
      ValueError: If the mode is unknown or not supported on this host.
    """
    if rewrite:
        dtype = requested.removeprefix("mixed_")
        dtype, reason = mode_choice.resolve_rewrite(dtype)
        return f"mixed_{dtype}", f"mode mixed_{dtype}, by graph rewrite: {reason}"
    chosen, reason = mode_choice.resolve_mode(requested)
    mode = chosen.name
    if mode != "float32":
        return mode, f"mode {mode}: {reason}"
    devices = hardware.read_devices()
    support = hardware.format_support("bfloat16", devices)
    speed = "fast" if support.fast else "slow"
    why = "the mode for this host" if requested == "auto" else "the mode asked for"
    return "mixed_bfloat16", (
        f"float32 is {why}; mixed_bfloat16 is shown for comparison and is {speed} "
        f"here: {support.reason}"
    )


def compare(
    config,
    workdir,
    seeds: int = 1,
    report: Callable[[str], object] = logging.info,
) -> Comparison:
    """Trains in float32 and in the mixed mode, and exports the mixed model.

    Both modes have the same seeds, data order and epochs. Finished runs in the
    folder are not repeated. Writes `comparison.json`, `report.md`,
    `comparison.png` and the SavedModel `export/`.

    Args:
      config: The configuration; `config.precision.mode` is the mixed mode.
      workdir: Folder; the runs go to `MODE/seedN` inside.
      seeds: How many seeds, from `config.seed` on.
      report: Function that is told of each run before it starts.

    Returns:
      A `Comparison`.

    Raises:
      ValueError: If `seeds` is below 1; else as `train_and_evaluate`.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1. Received: seeds={seeds}.")
    base_config.validate(config)
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    config = base_config.settle_rewrite(config)
    mixed, note = mixed_mode(config.precision.mode, config.precision.graph_rewrite)
    folder = pathlib.Path(workdir)
    folders = {
        (mode, seed): folder / mode / f"seed{seed}"
        for seed in range(config.seed, config.seed + seeds)
        for mode in ("float32", mixed)
    }
    configs = {key: config_of(config, *key) for key in folders}
    for key, run in folders.items():
        run_files.open_folder(configs[key], run)  # Refuses other settings at once.
    stored = _read(folder, folders)
    if stored is not None:
        return stored
    task = tasks.from_config(config)  # Once: reading a corpus can take a while.
    results = []
    for (mode, seed), run in folders.items():
        done = " (finished before)" if (run / "result.json").exists() else ""
        report(f"run {len(results) + 1} of {len(folders)}: {mode}, seed {seed}{done}")
        result = trainer.train_and_evaluate(configs[mode, seed], run, task)
        results.append(result)
    if distribution.is_chief(strategy):
        report("exporting the mixed model in float32")
        last = folders[mixed, config.seed]
        exported = _export(task, last, folder / "export")
        environment = json.loads((last / "environment.json").read_text())
        comparison = Comparison(config.name, results, note, exported, environment)
        _write(comparison, folder, folders)
    distribution.wait(strategy)  # The others read what the chief has written.
    return _read(folder, folders)


def config_of(config, mode: str, seed: int):
    """Returns the configuration of one run: a copy with this mode and seed.

    Args:
      config: The configuration that is compared.
      mode: The run's mode. "float32" and "tf32" have neither overrides nor a rewrite.
      seed: The run's seed.
    """
    one = config.copy_and_resolve_references()
    one.precision.mode, one.seed = mode, seed
    if mode in ("float32", "tf32"):  # The twin is float32 in every layer and graph.
        one.precision.graph_rewrite, one.precision.overrides = False, ()
    return one


def _export(task, run, path):
    """Exports a run's best model, verified on the task's own test examples."""
    sample = next(iter(task.test.batch(8)))[0]
    model = keras.models.load_model(run / "model.keras", compile=False)
    report = export.export_float32(model, path, sample_inputs=sample, overwrite=True)
    return {**report.to_dict(), "path": path.name}  # Relative: folders get moved.


def _read(folder, folders):
    """Returns the comparison of just these runs if the folder holds it whole."""
    written = [run / "result.json" for run in folders.values()]
    written += [folder / name for name in ("comparison.json", "report.md", "export")]
    if not all(path.exists() for path in written):
        return None
    fields = json.loads((folder / "comparison.json").read_text())
    if fields.pop("schema_version", None) != SCHEMA_VERSION:
        return None  # Of an earlier version: made anew from the runs, which are kept.
    del fields["statistics"]  # They follow from the results.
    fields["results"] = [trainer.RunResult(**row) for row in fields["results"]]
    stored = Comparison(**fields)
    same = [(row.mode, row.seed) for row in stored.results] == list(folders)
    return stored if same else None


def _write(comparison, folder, folders):
    text = json.dumps(comparison.to_dict(), indent=2)
    run_files.write_text(folder / "comparison.json", text)
    run_files.write_text(folder / "report.md", comparison.to_markdown())
    figures.write_comparison(folder, comparison.name, folders)
