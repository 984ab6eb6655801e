"""Why, and what of the other modes: the sentences of the advice."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfamp.benchmark import choices, parity, records, words


def on_best(
    best: choices.Choice,
    rows: Sequence[records.Row],
    accuracy_rows: Sequence[records.AccuracyRow],
    machine: Mapping[str, Any],
) -> Iterator[str]:
    """Yields how to have what is advised, and why it is.

    Args:
      best: What is advised.
      rows, accuracy_rows, machine: As for `advice.make`.
    """
    yield f"How: {_how(best)}."
    reason = _format_reason(best.mode, machine)
    if reason:
        yield f"Why it is fast here: {reason}."
    yield from _on_format_alone(best, rows)
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
    bases = {(r.task, r.batch_size): r for r in rows if choices.is_base(r)}
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


def _on_accuracy(best, accuracy_rows) -> Iterator[str]:
    for row in accuracy_rows:
        if row.mode != best.mode or not row.ratio:
            continue
        ratio, low, high = row.ratio
        what = words.target(row)
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


def _on_format_alone(best, rows) -> Iterator[str]:
    """How much of the gain is not tfamp's own: plain Keras in the same mode."""
    by_cell = {row.cell: row for row in rows if not row.failed}
    peers = [by_cell.get(row.cell._replace(framework="keras")) for row in best.rows]
    ratios = [
        f"{words.speed_up(peer.speed_up)} on {_workload(peer)}"
        for peer in peers
        if peer and peer.speed_up
    ]
    if ratios:
        yield (
            f"Of that speed-up, plain Keras has in the same mode {'; '.join(ratios)}; "
            "what goes beyond it is tfamp's, such as fused kernels."
        )


def _on_distance(best) -> Iterator[str]:
    shares = [
        (row.distance.peak_share, row)
        for row in best.rows
        if row.distance and 0 < (row.distance.peak_share or 0) <= 1
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


def on_others(
    found: Sequence[choices.Choice],
    best: choices.Choice | None,
    machine: Mapping[str, Any],
) -> Iterator[str]:
    """Yields what became of the others, the fastest first.

    Args:
      found: All of them.
      best: What is advised, if anything.
      machine: As for `advice.make`.
    """
    for choice in sorted(found, key=lambda choice: -choice.speed_up):
        if choice is best:
            continue
        text = f"{choice.name}: {choice.speed_up:.2f}x ({choice.range})"
        if choice.speed_up < 1:
            reason = "" if choice.xla else _slow_reason(choice.mode, machine)
            text += f", slower than float32{f' ({reason})' if reason else ''}"
        yield f"{text}{_doubt(choice)}."


def _slow_reason(mode, machine):
    """Why a format is slow on this machine; "" if it is not the format."""
    fast = any(
        row["format"] == records.format_of(mode) and row["speed"] == "fast"
        for row in machine.get("formats", ())
    )
    return "" if fast else _format_reason(mode, machine)


def _doubt(choice):
    """What is wrong with a choice's loss, or not known of it."""
    verdicts = {row.parity.verdict for row in choice.rows}
    if verdicts & {"broken", "unexplained"}:
        return ", with a loss that is not float32's"
    if "" in verdicts:
        return ", its loss not compared"
    if not choice.repeated:
        return ", too few repeats to tell its loss"
    if not choice.safe:
        reach = max(parity.reach(row.parity) for row in choice.rows)
        return f", its loss too noisy to tell (up to {words.percent(reach)})"
    return ""


def on_lateness(
    found: Sequence[choices.Choice], accuracy_rows: Sequence[records.AccuracyRow]
) -> Iterator[str]:
    """Yields which modes took longer to their accuracy, if any."""
    for mode in dict.fromkeys(choice.mode for choice in found):
        if choices.is_late(mode, accuracy_rows):
            yield (
                f"{mode} is not advised: it missed the target of the time to accuracy "
                "with more seeds than float32 did, or reached it later."
            )


def on_failures(rows: Sequence[records.Row]) -> Iterator[str]:
    """Yields how many cells failed, if any."""
    failed = sum(bool(row.failed) for row in rows)
    if failed:
        verb = "has" if failed == 1 else "have"
        yield (
            f"{failed} of {len(rows)} cells {verb} no figures; each is a row with its "
            "reason."
        )
