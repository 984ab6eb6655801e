"""What a benchmark found: plain data, and as text, Markdown and one page of HTML."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfamp import errors, extras, tables
from tfamp.measuring.benchmark import accuracy, cells, plots, rows, statistics
from tfamp.runs import run_files

SCHEMA_VERSION = 4
_GIB = 2**30
_NONE = "-"


class Report(NamedTuple):
    """The results of a benchmark as plain data; `print` it.

    Attributes:
      name: Name of the benchmark.
      settings: Job, seed, repeats, steps and warm-up.
      tasks: Name -> unit and description.
      rows: The cells, in the order in which they were requested.
      accuracy: Times to accuracy.
      machine: Date, command, commit, device and versions.
      notes: Lines on the settings in force.
    """

    name: str
    settings: dict[str, Any]
    tasks: dict[str, dict[str, str]]
    rows: list[rows.Row]
    accuracy: list[accuracy.Row]
    machine: dict[str, Any]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `benchmark.json` holds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "answers": self.answers(),
            **self._asdict(),
            "rows": [{**row.cell._asdict(), **_plain(row)} for row in self.rows],
            "accuracy": [_plain(row) for row in self.accuracy],
        }

    @property
    def base(self) -> str:
        """The mode that others are compared with: TF32 where the device has it."""
        modes = [
            *(row.base.mode for row in self.rows if row.base),
            *(row.base for row in self.accuracy if row.base),
        ]
        return " or ".join(dict.fromkeys(modes)) or "float32"

    def answers(self) -> dict[str, str]:
        """Returns for each task which mode, how much faster, memory and loss."""
        return {task: _answer(task, self.rows) for task in self.tasks}

    def tables(self) -> dict[str, list[dict[str, str]]]:
        """Returns for each task its rows as texts by column."""
        return {
            task: told(
                [_cells_of(r, self.tasks[task]["unit"], self.base) for r in rows]
            )
            for task in self.tasks
            if (rows := [r for r in self.rows if r.cell.task == task and not r.failed])
        }

    def accuracy_table(self) -> list[dict[str, str]]:
        """Returns the times to accuracy as texts by column."""
        return told([_accuracy_cells(row, self.base) for row in self.accuracy])

    def failures(self) -> list[str]:
        """Returns a line for each cell without figures."""
        failed = [f"{r.cell.label}: {r.failed}" for r in self.rows if r.failed]
        runs = [f"{r.task}: {r.mode}: {r.failed}" for r in self.accuracy if r.failed]
        return failed + runs

    def explanations(self) -> list[str]:
        """Returns what the columns mean, in sentences."""
        settings = self.settings
        step = "`fit`" if settings["job"] == "train" else "`predict`"
        return [
            f"{settings['steps']} timed steps of {step} after {settings['warmup']}, "
            f"each of {settings['repeats']} interleaved repeats in a fresh process "
            "with its own seed; fewer than three repeats have no interval",
            f"speed-up: examples a second over {self.base}'s, paired by repeat: "
            "geometric mean and its 95 % interval; loss: mean over the timed steps, "
            f"relative to {self.base}'s from the same weights and batches, paired by "
            "seed, with its 95 % interval",
            "memory: peak memory of a process, minus its memory before the model was "
            "built; step: median and quartiles; first: the first step, with "
            "compilation",
        ]

    def check(self, folder: str | os.PathLike | None) -> None:
        """Raises RunError if every cell failed.

        Args:
          folder: Where the report is; None: nowhere.
        """
        if self.rows and all(row.failed for row in self.rows):
            where = f", see {folder}/report.md" if folder else ""
            raise errors.RunError(
                f"Every cell of the benchmark failed{where}. The first failure: "
                f"{self.rows[0].failed}"
            )

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        answers = (f"- **{task}**: {text}" for task, text in self.answers().items())
        lines = [f"# {self.name}", "", *answers]
        for task, table in self.tables().items():
            lines += ["", f"## {task}", "", self.tasks[task]["description"], ""]
            lines.append(tables.of_dicts(table))
        if self.accuracy:
            table = tables.of_dicts(self.accuracy_table())
            lines += ["", "## Time to accuracy", "", table]
        if self.failures():
            lines += ["", "## Failed", "", *(f"- {line}" for line in self.failures())]
        facts = (f"{name}: {value}" for name, value in self.facts().items())
        notes = (f"- {line}" for line in (*self.explanations(), *self.notes, *facts))
        return "\n".join([*lines, "", "## Notes", "", *notes, ""])

    def facts(self) -> dict[str, str]:
        """Returns date, command, commit, hardware and versions, as texts."""
        versions = self.machine["versions"].items()
        joined = ", ".join(f"{name} {version}" for name, version in versions)
        facts = {**self.machine, "versions": joined}.items()
        return {name: f"{value}" for name, value in facts if value}

    __str__ = to_markdown

    def to_html(self) -> str:
        """Returns `report.html`: one page without scripts, figures within."""
        jinja2 = extras.require("jinja2")
        loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
        pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
        return pages.get_template("page.html.j2").render(
            report=self, figures=plots.draw(self)
        )

    def write(self, folder: pathlib.Path) -> None:
        """Writes `report.md`, `report.html` and, last of all, `benchmark.json`.

        Args:
          folder: The benchmark's folder.
        """
        run_files.write_text(folder / "report.md", self.to_markdown())
        run_files.write_text(folder / "report.html", self.to_html())
        run_files.write_json(folder / "benchmark.json", self.to_dict(), indent=1)


# ---- Figures of the cells ----


def make(
    config,
    measured: Mapping[cells.Cell, Mapping[int, Mapping[str, Any]]],
    failures: Mapping[cells.Cell, str],
    times: Sequence[accuracy.Row],
    machine: dict[str, Any],
    notes: Sequence[str],
) -> Report:
    """Returns the report.

    Args:
      config: The configuration of the benchmark.
      measured: {cell: {repeat: figures}}, as `measure.measure` returns them.
      failures: {cell: why it failed}; one that has figures of some repeats keeps them.
      times: Of `accuracy.summarize`.
      machine: Date, command, commit, device and versions.
      notes: Lines for the end.
    """
    results = {cell: figures for cell, figures in measured.items() if figures}
    tasks = {cell.task: {"unit": "examples", "description": ""} for cell in measured}
    for cell, figures in results.items():
        one = next(iter(figures.values()))
        if cell.framework == "tfamp" and not tasks[cell.task]["description"]:
            text = f"{one['description']}; {one['parameters']:,} parameters"
            tasks[cell.task] = {"unit": one["unit"], "description": text}
    fewer = [
        f"{cell.label}: {len(results[cell])} of {config.repeats} repeats, then: {why}"
        for cell, why in failures.items()
        if cell in results
    ]
    remarks = dict.fromkeys(
        f"{cell.column}: {figures['note']}"
        for cell, each in results.items()
        for figures in each.values()
        if figures["note"]
    )
    return Report(
        name=config.name,
        settings={
            name: config[name] for name in ("job", "seed", "repeats", "steps", "warmup")
        },
        tasks=tasks,
        rows=[
            rows.make(cell, results, config)
            if cell in results
            else rows.Row(cell, failures[cell])
            for cell in measured
        ],
        accuracy=list(times),
        machine=machine,
        notes=[*notes, *fewer, *remarks],
    )


# ---- Words ----


def _answer(task, every) -> str:
    """Which mode, how much faster, how much memory, and whether the loss moves."""
    rows = [row for row in every if row.cell.task == task and not row.failed]
    base_cell = next((row.base for row in rows if row.base), None)
    base = next((row for row in every if row.cell == base_cell), None)
    if base_cell is None or base is None:
        return "float32 has no figures here, so there is nothing to compare with."
    ours = [r for r in rows if r.cell.framework == "tfamp" and r.base == base_cell]
    ours = sorted((r for r in ours if r != base), key=lambda r: -r.speed_up.mean)
    if base_cell.task != task:  # Another way to do the same, not another mode.
        return "; ".join(f"{r.cell.column} is {_compared(r, base)}" for r in ours) + "."
    faster = (row for row in ours if (row.speed_up.low or row.speed_up.mean) > 1)
    best = next(filter(_is_safe, faster), None)
    if best is None:
        rest = "no other mode has figures."
        if ours:
            rest = (
                f"the fastest other mode is {ours[0].cell.column}, "
                f"{_compared(ours[0], base)}."
            )
        if any(row.speed_up.repeats < statistics.ENOUGH for row in ours):
            return f"not decided: fewer than {statistics.ENOUGH} repeats; {rest}"
        return (
            f"stay in {base.cell.mode}: no mode is significantly faster at the same "
            f"loss; {rest}"
        )
    where = f" (batch {best.cell.batch_size})" if best.cell.batch_size else ""
    return f"{best.cell.column}{where} is {_compared(best, base)}."


def _is_safe(row):
    finite = row.loss is not None or row.output_error is not None
    if not finite or row.speed_up.repeats < statistics.ENOUGH:
        return False
    if row.loss_difference is None:
        return True  # Of inference, or of other batches: the error column says it.
    kind = statistics.judge(row.loss_difference)
    # Above the noise, and still less than a rounding of bfloat16.
    return kind != "higher" or row.loss_difference.mean < 2**-8


def _compared(row, base):
    name = base.cell.task if base.cell.task != row.cell.task else base.cell.column
    parts = [f"{statistics.times(row.speed_up)} as fast as {name}"]
    if row.memory and base.memory:
        parts.append(
            f"peak memory {row.memory / _GIB:.2f} GiB instead of "
            f"{base.memory / _GIB:.2f}"
        )
    name = "outputs differ by" if row.output_error is not None else "loss"
    return ", ".join([*parts, f"{name} {row.error}"])


def _cells_of(row, unit, base):
    low, middle, high = row.step_ms
    return {
        "mode": row.cell.column,
        "sizes": row.cell.shape or f"batch {row.examples}",
        "speed-up": statistics.times(row.speed_up),
        f"loss - {base}'s": row.error,
        "step": f"{_digits(middle)} ms ({_digits(low)} to {_digits(high)})",
        "rate": f"{row.rate:,.4g} {unit}/s",
        "memory": _text(row.memory and row.memory / _GIB, "{:.2f} GiB"),
        "first": f"{_digits(row.first_step_seconds)} s",
        "loss scale": _text(row.loss_scale, "{:,.0f}"),
        "skipped": _text(row.skipped_steps, "{}"),
    }


def _text(value, form):
    return _NONE if value is None else form.format(value)


def _digits(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _accuracy_cells(row, base):
    return {
        "task": row.task,
        "mode": row.mode,
        "target": f"{row.target:g}",
        "reached": f"{row.reached} of {row.seeds}",
        "seconds": _text(row.seconds, "{:.3g}"),
        f"{base}'s time over it": statistics.times(row.ratio),
        "test score": _text(row.test_score, "{:.4g}"),
    }


def _plain(row):
    """A row as dicts; its cell stands apart."""
    return {k: v for k, v in tables.plain(row).items() if k not in ("cell", "points")}


def told(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns rows without the columns that say nothing in any of them.

    Args:
      rows: Texts by column, the same columns in each.
    """
    names = {name: None for row in rows for name in row if row[name] != _NONE}
    return [{name: row[name] for name in row if name in names} for row in rows]
