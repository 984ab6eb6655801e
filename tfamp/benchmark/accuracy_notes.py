"""What a reader must know of a row of the time to accuracy, in sentences."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from tfamp.benchmark import records

BASE = "float32"  # What every mode is compared with.
_Runs = Mapping[int, records.AccuracyRun]  # By seed.
_Pairs = Sequence[tuple[records.AccuracyRun, records.AccuracyRun]]


def write(mode: str, own: _Runs, base: _Runs, pairs: _Pairs, compared: bool) -> str:
    """Returns the note of a mode.

    Args:
      mode: The mode.
      own: Its runs, {seed: run}.
      base: The same of float32; empty if it was not run.
      pairs: (run of float32, run of the mode) of the seeds that reached the target in
        both.
      compared: Whether there is a ratio.
    """
    lines = [*_failures(own), *_reached(mode, own, base)]
    if mode != BASE:
        seeds = len(own.keys() | base.keys())
        lines += _left_out(pairs, seeds) if compared else [_why_not(base, pairs, seeds)]
        lines += _epochs(mode, pairs)
    return " ".join([*lines, *_resolution(own)])


def _failures(own):
    failed = [each for each in own.values() if each.failed]
    if failed:
        names = ", ".join(str(each.seed) for each in failed)
        yield f"Failed with seed {names}: {failed[0].failed.rstrip('.')}."
    if any(each.test_score is None and not each.failed for each in own.values()):
        yield "No mean test score: one of them is not finite."


def _reached(mode, own, base) -> Iterator[str]:
    """Tells of seeds that never got there."""
    told = []
    for name, runs in {mode: own, BASE: base}.items():
        count = sum(each.reached_epoch is not None for each in runs.values())
        if count < len(runs):
            told.append(f"{count} of {len(runs)} seeds in {name}")
    if told:
        yield f"The target was reached by {' and '.join(told)}."


def _why_not(base, pairs, seeds):
    if not base:
        return "No ratio: float32 was not run."
    return f"No ratio: {len(pairs)} of {seeds} seeds reached the target in both modes."


def _left_out(pairs, seeds):
    if len(pairs) < seeds:
        yield (
            f"The ratio is of the {len(pairs)} that reached it in both modes; to leave "
            "out the others flatters a mode that did not get there."
        )
    if len(pairs) == 1:
        yield "One seed shows no noise."


def _epochs(mode, pairs):
    """Tells that a mode needs more or fewer epochs; the ratio has that in it."""
    base, own = (sum(pair[i].reached_epoch for pair in pairs) for i in (0, 1))
    if base != own:
        count = len(pairs)
        yield (
            f"The epochs to the target differ: {own / count:.3g} in {mode}, "
            f"{base / count:.3g} in {BASE} (means)."
        )


def _resolution(own):
    """Tells how fine the clock is: the later epochs' time, without the tracing."""
    spans = []
    for each in own.values():
        times = [seconds for seconds, _ in each.points]
        spans += [after - before for before, after in itertools.pairwise(times)]
    if spans:
        epoch = statistics.median(spans)
        yield f"The clock's resolution is one epoch, {epoch:.2g} s."
