"""Ways to train, over all tasks and batch sizes: what the advice chooses from."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tfamp.benchmark import parity, records

WORTH_IT = 1.05  # Less is not worth a change of precision.
_ENOUGH = 3  # Repeats; an interval of two is twelve times as wide as they differ.


class Choice(NamedTuple):
    """A way to train, over all tasks and batch sizes.

    Attributes:
      mode: A key of `records.VARIANTS`.
      xla: Whether with XLA.
      rows: Its rows.
      speed_up: Geometric mean of their speed-ups over float32.
      safe: Whether every loss is float32's up to noise and what is explained.
    """

    mode: str
    xla: bool
    rows: tuple[records.Row, ...]
    speed_up: float
    safe: bool

    @property
    def name(self) -> str:
        """Mode and XLA."""
        return f"{self.mode} with XLA" if self.xla else self.mode

    @property
    def within_noise(self) -> bool:
        """Whether no loss differs by more than noise."""
        return all(row.parity.verdict in ("equal", "noise") for row in self.rows)

    @property
    def repeated(self) -> bool:
        """Whether there are repeats enough to know the noise."""
        return all(row.repeats >= _ENOUGH for row in self.rows)

    @property
    def range(self) -> str:
        """How far the repeats reach, over all workloads."""
        low = min(row.speed_up.low for row in self.rows)
        high = max(row.speed_up.high for row in self.rows)
        count = len(self.rows)
        return f"{low:.2f} to {high:.2f} in the repeats of {count} workload" + (
            "" if count == 1 else "s"
        )

    @property
    def worth_it(self) -> bool:
        """Whether it is faster by 5 %, nowhere slower, and in slow repeats, too."""
        slowest = statistics.geometric_mean(row.speed_up.low for row in self.rows)
        nowhere_slower = all(row.speed_up.median >= 1 for row in self.rows)
        return self.speed_up >= WORTH_IT and nowhere_slower and slowest > 1


def find(rows: Sequence[records.Row]) -> list[Choice]:
    """Returns tfamp's ways to train other than float32 without XLA, as they come.

    Args:
      rows: The cells' rows; those that failed have no part in it.
    """
    ours = [r for r in rows if r.framework == "tfamp" and not r.failed and r.speed_up]
    keys = dict.fromkeys((row.mode, row.xla) for row in ours)
    grouped = {key: [r for r in ours if (r.mode, r.xla) == key] for key in keys}
    return [
        Choice(
            *key,
            tuple(group),
            statistics.geometric_mean(row.speed_up.median for row in group),
            all(map(parity.is_safe, group)),
        )
        for key, group in grouped.items()
        if key != ("float32", False)
    ]


def on_most(found: Sequence[Choice]) -> list[Choice]:
    """Returns those that were measured on most tasks and batch sizes."""
    most = max(len(choice.rows) for choice in found)
    return [choice for choice in found if len(choice.rows) == most]


def is_late(mode: str, accuracy_rows: Sequence[records.AccuracyRow]) -> bool:
    """Whether a mode missed a target that float32 reached, or was clearly later.

    Args:
      mode: A key of `records.VARIANTS`.
      accuracy_rows: Time to accuracy; may be empty.
    """
    reached = {row.task: row.reached for row in accuracy_rows if row.mode == "float32"}
    return any(
        row.reached < reached.get(row.task, 0)
        or (row.ratio is not None and row.ratio[2] is not None and row.ratio[2] < 1)
        for row in accuracy_rows
        if row.mode == mode
    )


def is_base(row: records.Row) -> bool:
    """Whether a row is what others are compared with, and has figures."""
    return (row.framework, row.mode, row.xla, row.failed) == (
        *("tfamp", "float32", False),
        "",
    )
