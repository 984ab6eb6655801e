"""What to use on this machine, and why, for a reader without experience."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfamp.benchmark import parity, records, words

# Less than this is not worth a change of precision.
_WORTH_IT = 1.05


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
        return self.speed_up >= _WORTH_IT and nowhere_slower and slowest > 1


def make(
    rows: Sequence[records.Row],
    accuracy_rows: Sequence[records.AccuracyRow],
    machine: Mapping[str, Any],
) -> records.Advice:
    """Returns the advice of a report.

    The fastest of tfamp's ways to train whose loss nowhere differs from float32's
    beyond noise and what is explained, if it is 5 % faster or more and its slowest
    repeats are faster, too; of those that were measured on most tasks and batch sizes.

    Args:
      rows: The cells' rows.
      accuracy_rows: Time to accuracy; may be empty.
      machine: What `diagnostics.machine` says of this host, as a dict.
    """
    device = machine["device"]
    found = choices(rows)
    reason = _reason_against(rows, found)
    if reason:
        return records.Advice(
            f"No advice for this machine ({device}): {reason}.",
            tuple(_on_failures(rows)),
            tuple(_on_others(found, None, machine)),
        )
    best = _best(found, accuracy_rows)
    reasons = [
        *(_on_best(best, rows, accuracy_rows, machine) if best else ()),
        *_on_failures(rows),
    ]
    others = *_on_others(found, best, machine), *_on_lateness(found, accuracy_rows)
    return records.Advice(_headline(best, found, device), tuple(reasons), others)


def _reason_against(rows, found):
    """Why nothing can be said; "" if something can."""
    if not any(map(_is_base, rows)):
        return "float32 has no figures to compare with"
    if not found:
        return "no other mode has figures beside float32's"
    if max(row.repeats for choice in found for row in choice.rows) < 2:
        return "one repeat shows no noise, take three (--config.repeats=3)"
    return ""


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


def _on_lateness(found, accuracy_rows) -> Iterator[str]:
    for mode in dict.fromkeys(choice.mode for choice in found):
        if is_late(mode, accuracy_rows):
            yield (
                f"{mode} is not advised: it missed the target of the time to accuracy "
                "with more seeds than float32 did, or reached it later."
            )


def choices(rows: Sequence[records.Row]) -> list[Choice]:
    """Returns the ways to train other than float32 without XLA, as they come."""
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


def _best(found, accuracy_rows):
    """The fastest that is safe and worth it, of those measured on most workloads.

    XLA must earn its compilation: without it, unless that is slower by more than noise.
    """
    good = [
        choice
        for choice in _on_most(found)
        if choice.safe and choice.worth_it and not is_late(choice.mode, accuracy_rows)
    ]
    return max(
        good,
        key=lambda choice: choice.speed_up / (_WORTH_IT if choice.xla else 1),
        default=None,
    )


def _on_most(found):
    """Those measured on most tasks and batch sizes."""
    most = max(len(choice.rows) for choice in found)
    return [choice for choice in found if len(choice.rows) == most]


def _headline(best, found, device):
    if best is None:
        fastest = max(_on_most(found), key=lambda choice: choice.speed_up)
        return (
            f"Stay with float32 on this machine ({device}): no other mode was reliably "
            f"{_WORTH_IT:.2f} times as fast with float32's loss and time to accuracy "
            f"({fastest.name}: {fastest.speed_up:.2f} times, {fastest.range})."
        )
    return (
        f"Train in {best.name} on this machine ({device}): {best.speed_up:.2f} times "
        f"as fast as float32 ({best.range}), with no difference of the loss beyond "
        f"{'noise' if best.within_noise else 'what is explained'}."
    )


def _on_best(best, rows, accuracy_rows, machine) -> Iterator[str]:
    yield f"How: {_how(best)}."
    reason = _format_reason(best.mode, machine)
    if reason:
        yield f"Why it is fast here: {reason}."
    yield from _on_loss(best)
    yield from _on_memory(best, rows)
    yield from _on_accuracy(best, accuracy_rows)
    yield from _on_peers(best, rows)
    yield from _on_distance(best)


def _how(best):
    mode, rewrite = records.VARIANTS[best.mode]
    extra = ", graph_rewrite=True" if rewrite else ""
    text = f'one line, `tfamp.enable("{mode}"{extra})`, before the model is built'
    return f"{text}, and `jit_compile=True` in `compile`" if best.xla else text


def _format_reason(mode, machine):
    name = records.format_of(mode)
    for row in machine.get("formats", ()):
        if row["format"] == name and row["device"] in machine["device"]:
            return f"{name}: {row['reason']}"
    return ""


def _on_loss(best) -> Iterator[str]:
    for row in best.rows:
        found = words.difference(row.parity.loss_difference, row.parity.loss_interval)
        steps = len(next(iter(row.losses.values())))
        yield (
            f"{_workload(row)}: the mean loss is {found} from float32's, over "
            f"{row.repeats} seeds of {steps} steps ({words.verdict(row.parity)[1]}). "
            "Smaller differences than that interval cannot be told apart here."
        )


def _workload(row):
    return f"{row.task}, batch {row.batch_size}"


def _on_memory(best, rows) -> Iterator[str]:
    bases = {(r.task, r.batch_size): r for r in rows if _is_base(r)}
    ratios = [
        row.memory / bases[row.task, row.batch_size].memory
        for row in best.rows
        if row.memory and bases[row.task, row.batch_size].memory
    ]
    if ratios:
        of = "the GPU's" if best.rows[0].device_bytes is not None else "the process'"
        yield (
            f"Peak memory ({of}) is {statistics.geometric_mean(ratios):.2f} times "
            "float32's; what does not depend on the batch is in both."
        )


def _is_base(row):
    return (row.framework, row.mode, row.xla, row.failed) == (
        *("tfamp", "float32", False),
        "",
    )


def _on_accuracy(best, accuracy_rows) -> Iterator[str]:
    for row in accuracy_rows:
        if row.mode != best.mode or not row.ratio:
            continue
        ratio, low, high = row.ratio
        what = f"{words.percent(row.target)} {row.metric}"
        if low is None or low <= 1 <= high:
            text = f"no clear difference in the time to {what}, float32's over its own"
        else:
            text = f"{'sooner' if ratio > 1 else 'later'} than float32 at {what}"
        yield f"{row.task}: {text}: {words.ratio(row.ratio)}."


def _on_peers(best, rows) -> Iterator[str]:
    """The same mode in plain Keras and in PyTorch, each workload for itself."""
    by_cell = {row.cell: row for row in rows if not row.failed}
    for framework, name in words.PEERS.items():
        ratios = []
        for row in best.rows:
            peer = by_cell.get(row.cell._replace(framework=framework))
            ratio = peer and row.times_as_fast_as(peer)
            if ratio:
                ratios.append(f"{words.speed_up(ratio)} on {_workload(row)}")
        if ratios:
            yield f"tfamp's speed over that of {name} in the same mode: " + (
                "; ".join(ratios) + "."
            )


def _on_distance(best) -> Iterator[str]:
    shares = [
        (row.distance.peak_share, row)
        for row in best.rows
        if row.distance and row.distance.peak_share is not None
    ]
    if not shares:
        return
    share, row = max(shares, key=lambda pair: pair[0])
    text = (
        f"At best ({row.task}, batch {row.batch_size}) it reaches "
        f"{words.percent(share)} of what this machine's {row.distance.format} matrix "
        "products give"
    )
    if row.distance.matrix_share is not None:
        rest = 1 - row.distance.matrix_share
        text += f"; {words.percent(rest)} of the kernels' time is no matrix work"
    yield f"{text}."


def _on_others(found, best, machine) -> Iterator[str]:
    for choice in sorted(found, key=lambda choice: -choice.speed_up):
        if choice is best:
            continue
        text = f"{choice.name}: {choice.speed_up:.2f}x ({choice.range})"
        if not choice.safe:
            text += ", with a loss that is not float32's"
        elif choice.speed_up < 1:
            reason = "" if choice.xla else _format_reason(choice.mode, machine)
            text += f", slower than float32{f' ({reason})' if reason else ''}"
        yield f"{text}."


def _on_failures(rows) -> Iterator[str]:
    failed = sum(bool(row.failed) for row in rows)
    if failed:
        verb = "has" if failed == 1 else "have"
        yield (
            f"{failed} of {len(rows)} cells {verb} no figures; each is a row with its "
            "reason."
        )
