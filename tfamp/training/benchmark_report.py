"""A benchmark as JSON and as Markdown tables in the layout of the published ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfamp.training import benchmark_cell, benchmark_figures

SCHEMA_VERSION = 1
_GIB = 2**30


class Report(NamedTuple):
    """A benchmark as plain data.

    Attributes:
      name: Name of the configuration.
      job: "train" or "inference".
      unit: What a batch holds: "sequences" or "images".
      settings: Steps, warm-up, repeats and seed.
      rows: The cells' figures, in the order they were asked for.
      notes: Lines on the model and on what was in force.
      machine: What `diagnostics.doctor` says of this host.
    """

    name: str
    job: str
    unit: str
    settings: dict[str, Any]
    rows: list[benchmark_figures.Figures]
    notes: list[str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `benchmark.json` holds."""
        rows = [row._asdict() for row in self.rows]
        return {"schema_version": SCHEMA_VERSION, **self._asdict(), "rows": rows}

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        job = "training" if self.job == "train" else "inference"
        device = self.machine["device"]
        lines = [f"# {self.name}: {job} benchmark on {device}", ""]
        for table in self.tables():
            lines += [*aligned(table), ""]
        lines += [f"- {note}" for note in [*self.notes, *self._failures()]]
        return "\n".join([*lines, ""])

    def tables(self) -> list[list[list[str]]]:
        """Returns the tables' cells, heads first; the first is laid out as NVIDIA's."""
        measured = [row for row in self.rows if not row.failed]
        if self.job == "train":
            first = [self._pair(row) for row in measured if row.mode != "float32"]
        else:
            first = [self._inference(row) for row in measured]
        rest = [self._detail(row) for row in measured]
        return [_table(rows) for rows in (first, rest) if rows]

    def _pair(self, row):
        """Training in a mode beside float32 and, where measured, TF32.

        Of the same batch size or, as the published pairs often are, of the largest
        that fits each: see `benchmark_figures.twin`.
        """
        base = self._base(row)
        tf32 = benchmark_figures.twin(self.rows, row, "tf32")
        tf32 = None if row.mode == "tf32" else tf32
        return {
            "GPU/CPU": self.machine["device"],
            "sequence length": _text(row.sequence_length, "d"),
            "batch size (mode, FP32)": f"{row.batch_size}, "
            + ("-" if base is None else f"{base.batch_size}"),
            "mode": row.mode,
            "XLA": _on(row.xla),
            f"throughput mode ({self.unit}/s)": _text(row.throughput, ".2f"),
            f"throughput FP32 ({self.unit}/s)": _text(base and base.throughput, ".2f"),
            f"throughput TF32 ({self.unit}/s)": _text(tf32 and tf32.throughput, ".2f"),
            **_speed_ups(row),
            "loss minus FP32's": self._error(row, "+.2g"),
        }

    def _inference(self, row):
        return {
            **_place(row),
            f"throughput avg ({self.unit}/s)": _text(row.throughput_average, ".2f"),
            **_latencies(row, ["average", *benchmark_figures.PERCENTILES[:-1]]),
            **_speed_ups(row),
            "output error": self._error(row, ".2g"),
        }

    def _detail(self, row):
        """What the published tables leave out."""
        training = self.job == "train"
        percentiles = ["average", *benchmark_figures.PERCENTILES] if training else [100]
        low, high = (f"{value:.2f}" for value in row.throughput_range)
        return {
            **_place(row),
            f"median ({self.unit}/s)": _text(row.throughput, ".2f"),
            "of repeats": f"{low} to {high}",
            f"avg ({self.unit}/s)": _text(row.throughput_average, ".2f"),
            **_latencies(row, percentiles),
            "first step (s)": _text(row.first_step_seconds, ".1f"),
            "host memory (GiB)": _text(row.host_bytes, ".2f", _GIB),
            "device memory (GiB)": _text(row.device_bytes, ".2f", _GIB),
            "mean loss": _finite(row.loss, ".4f") if training else "-",
            "skipped steps": _text(row.skipped_steps, "d"),
            "loss scale": _text(row.loss_scale, ".0f"),
            "TF32 allowed": _on(row.tensor_float_32),
        }

    def _base(self, row):
        return benchmark_figures.twin(self.rows, row, "float32")

    def _error(self, row, form):
        """The error; never nothing where a speed-up may be read."""
        base = self._base(row)
        if base is None:
            return "no FP32"
        if base.batch_size != row.batch_size:
            return "not compared"
        return _finite(row.error, form)

    def _failures(self):
        for row in self.rows:
            if row.failed:
                yield f"failed: {self._cell(row).label}: {row.failed}"

    def _cell(self, row):
        return benchmark_cell.Cell(self.job, *row[:4])


def _place(row):
    return {
        "sequence length": _text(row.sequence_length, "d"),
        "batch size": f"{row.batch_size}",
        "precision": row.mode,
        "XLA": _on(row.xla),
    }


def _latencies(row, points):
    names = {p: "avg" if p == "average" else f"{p} %" for p in points}
    return {f"latency {names[p]} (ms)": f"{row.latency_ms[str(p)]:.1f}" for p in points}


def _speed_ups(row):
    return {
        "speed-up": _text(row.speed_up, ".2f"),
        "speed-up over TF32": _text(row.speed_up_over_tf32, ".2f"),
    }


def _on(value):
    return "on" if value else "off"


def _finite(value, form):
    return "not finite" if value is None else format(value, form)


def _text(value, form, scale=None):
    if value is None:
        return "-"
    return format(value if scale is None else value / scale, form)


def _table(rows):
    """Returns dicts as lines of cells, without the columns that say nothing."""
    names = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return [names, *([row[name] for name in names] for row in rows)]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table as lines of Markdown that can be read as they are.

    Args:
      table: Lines of cells, the head first.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *body = table
    lines = [head, ["-" * width for width in widths], *body]
    return [
        "| "
        + " | ".join(c.ljust(width) for c, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
