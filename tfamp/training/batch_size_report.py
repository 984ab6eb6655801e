"""What a search for batch sizes found, as plain data, text and Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfamp.training import batch_size_search, benchmark_report, memory_limit

SCHEMA_VERSION = 1
# Peaks that grow by less say nothing of an example: runs differ by some percent.
_LEAST_GROWTH = 1.2
_MOST_BY_WIDTH = 2.1  # As the line is no better than to some percent.


class Trial(NamedTuple):
    """One process that took training steps of one batch size.

    Attributes:
      batch_size: Examples in a batch.
      peak_bytes: Its peak memory, on the GPU if there is one; None if it was ended.
      reason: How it ran out of memory; "" if it fits.
    """

    batch_size: int
    peak_bytes: int | None
    reason: str = ""


class Size(NamedTuple):
    """What was found for one mode.

    Attributes:
      mode: The precision mode.
      batch_size: Largest batch size that fits.
      failing: Smallest that was found not to fit; None if the largest allowed fits.
      ratio: `batch_size` over that of float32; None without, or where the largest
        allowed fits.
      bytes_per_example, fixed_bytes: Of the line through the peaks of the trials that
        fit; None where these differ by less than `_LEAST_GROWTH`.
      trials: In the order they were made.
    """

    mode: str
    batch_size: int
    failing: int | None
    ratio: float | None
    bytes_per_example: float | None
    fixed_bytes: float | None
    trials: tuple[Trial, ...]

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the largest batch that fits."""
        return next(
            t.peak_bytes for t in self.trials if t.batch_size == self.batch_size
        )

    @property
    def reason(self) -> str:
        """How the smallest batch that does not fit ran out of memory."""
        found = (t.reason for t in self.trials if t.batch_size == self.failing)
        return next(found, "")


class BatchSizes(NamedTuple):
    """The largest batch sizes as plain data.

    Attributes:
      name: Name of the configuration.
      unit: What a batch holds: "sequences", "images", "rows".
      limit: The memory that the batch is to fit into, in words.
      limit_bytes: The same as a number; None for all of a GPU.
      max_batch_size: Largest batch size that was allowed.
      tolerance: Width of the final bracket, as a share of the batch size.
      steps: Training steps of a trial.
      sizes: What was found, float32 first if it was searched.
      notes: Lines on the model and on what was in force.
      machine: What `diagnostics.doctor` says of this host.
    """

    name: str
    unit: str
    limit: str
    limit_bytes: int | None
    max_batch_size: int
    tolerance: float
    steps: int
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `batch_sizes.json` holds."""
        sizes = [
            {
                **size._asdict(),
                "peak_bytes": size.peak_bytes,
                "reason": size.reason,
                "trials": [trial._asdict() for trial in size.trials],
            }
            for size in self.sizes
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            **self._asdict(),
            "sizes": sizes,
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """Returns the table and the notes."""
        notes = [f"- {note}" for note in [*self._explanations(), *self.notes]]
        return "\n".join([*benchmark_report.aligned(self._rows()), "", *notes])

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        device = self.machine["device"]
        return f"# {self.name}: largest batch size on {device}\n\n{self.to_text()}\n"

    def _rows(self):
        head = ["mode", f"largest batch ({self.unit})", "does not fit", "over float32"]
        rows = [
            [
                *(size.mode, f"{size.batch_size}", f"{size.failing or '-'}"),
                f"{size.ratio:.2f}" if size.ratio else "-",
                *map(_mib, (size.peak_bytes, size.bytes_per_example, size.fixed_bytes)),
                f"{len(size.trials)}",
            ]
            for size in self.sizes
        ]
        memory = ["peak memory", "per example", "fixed part", "trials"]
        return [head + memory, *rows]

    def _explanations(self):
        yield self.limit
        yield (
            f"a batch fits if a process of its own takes {self.steps} training steps "
            f"on synthetic batches, the step of `fit`, within the limit; multiples of "
            f"8 (Tensor Cores), doubled from 8, then bisected to 8 or "
            f"{self.tolerance:.0%}; a run holds its data set beside, so leave a margin"
        )
        if any(size.failing is None for size in self.sizes):
            yield (
                f"where nothing is said not to fit, {self.max_batch_size} was the "
                "largest batch allowed (--max_batch_size)"
            )
        base = next((s for s in self.sizes if s.mode == "float32"), None)
        for size in self.sizes:
            if base and size.ratio and size is not base:
                yield from _expectation(base, size)


def _expectation(base, size):
    """Why a ratio is near 2, or why it is not."""
    text = (
        f"{size.mode}: twice the batch of float32 is expected where activations, which "
        f"take half the bytes, are all there is; {size.ratio:.2f} times found"
    )
    if not (base.bytes_per_example and size.bytes_per_example):
        yield text
        return
    slope = base.bytes_per_example / size.bytes_per_example
    beyond = (
        " (above 2 is more than half the width gives: something else differs, too)"
        if slope > _MOST_BY_WIDTH
        else ""
    )
    yield (
        f"{text}. An example takes {_mib(base.bytes_per_example)} in float32 and "
        f"{_mib(size.bytes_per_example)} here: with more memory the ratio tends to "
        f"{slope:.2f}{beyond}. Beside that, {_mib(base.fixed_bytes)} and "
        f"{_mib(size.fixed_bytes)} do not depend on the batch: the program, and "
        "weights, gradients and the optimizer's state, which stay float32"
    )


def _mib(count):
    if count is None:
        return "-"
    return f"{count / memory_limit.MIB:,.{0 if abs(count) >= 2**24 else 2}f} MiB"


def summarize(
    mode: str,
    bracket: batch_size_search.Bracket,
    trials: Sequence[Trial],
    base: Size | None,
) -> Size:
    """Returns the figures of a mode.

    Args:
      mode: The mode.
      bracket: What its search found.
      trials: Its trials.
      base: The figures of float32; None if it is float32, or was not searched.
    """
    fitting = [t for t in trials if not t.reason]
    peaks = {t.batch_size: t.peak_bytes for t in fitting if t.peak_bytes}
    slope = fixed = None
    if max(peaks.values(), default=0) > _LEAST_GROWTH * min(peaks.values(), default=0):
        slope, fixed = statistics.linear_regression(list(peaks), list(peaks.values()))
    ratio = None
    if bracket.failing and base and base.failing:
        ratio = bracket.largest / base.batch_size
    return Size(
        mode=mode,
        batch_size=bracket.largest,
        failing=bracket.failing,
        ratio=ratio,
        bytes_per_example=slope,
        fixed_bytes=fixed,
        trials=tuple(trials),
    )
