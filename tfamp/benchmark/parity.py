"""The error column: what a cell learned beside float32, and why it differs.

Repeats have seeds of their own, the same in every cell, so that cells are compared seed
by seed: differences that one seed has and another has not are noise.

| found                                             | verdict       |
| ------------------------------------------------- | ------------- |
| tfamp's float32 without XLA                       | "base"        |
| float32 was not measured                          | ""            |
| a loss that is not finite                         | "broken"      |
| no difference in any seed                         | "equal"       |
| the interval of the mean difference contains 0    | "noise"       |
| no more than other dropout masks do: see `pool`   | "noise"       |
| there is one seed                                 | "one seed"    |
| a cause is known that is large enough             | "explained"   |
| else                                              | "unexplained" |

An interval of three seeds misses one difference in twenty, and there are many cells; so
what dropout masks do is estimated from the other cells of a task, too.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tfamp import formats
from tfamp.benchmark import records, words
from tfamp.training import verdict as paired

Figures = Mapping[int, Mapping[str, Any]]
_EQUAL = 1e-6  # Losses are float32, rounded by up to 6e-8; as `verdict` has it.
# Roundings of float32 in another order, grown over some tens of steps.
_GROWN = 1e-3
_WIDEST = 0.1  # An interval that reaches further tells nothing of a mode.


class Masks(NamedTuple):
    """What other dropout masks do to the loss: noise that every seed has.

    Attributes:
      deviation: Standard deviation of the relative differences between single seeds'
        losses, pooled over the cells of a task and batch size.
      freedom: Its degrees of freedom.
    """

    deviation: float
    freedom: int

    def reach(self, seeds: int) -> float:
        """Returns how far a mean over so many seeds goes by chance, in 95 of 100."""
        from scipy import stats

        factor = float(stats.t.ppf((1 + paired.CONFIDENCE) / 2, self.freedom))
        return factor * self.deviation / math.sqrt(seeds)


def mask_stream(cell: records.Cell) -> str:
    """Returns which dropout masks a cell draws: those of one name are the same.

    float32's are drawn for tf32 and the rewrites, too, and by plain Keras; the fused
    kernels of tfamp's mixed modes, each mixed mode of plain Keras, XLA and PyTorch draw
    others.
    """
    if cell.framework == "torch":
        return "torch"
    if cell.xla:
        return "XLA"
    if records.format_of(cell.mode) in ("float32", "tf32") or cell.mode.startswith(
        "rewrite_"
    ):
        return "float32"
    return "fused" if cell.framework == "tfamp" else f"keras {cell.mode}"


def pool(base: Figures, cells: Iterable[Figures]) -> Masks | None:
    """Returns what the masks do, from how other cells' seeds differ among themselves.

    The mean of each cell is left out, so that what a mode does to every seed alike does
    not count. The cells share float32's seeds, so the degrees of freedom are fewer than
    those counted here: the reach is a lower bound of the noise.

    Args:
      base: {seed: figures} of tfamp's float32.
      cells: The same of one cell for each other stream of masks, that of the cell in
        question left out.

    Returns:
      None if there are less than two seeds in each.
    """
    squares, freedom = 0.0, 0
    for found in cells:
        differences = list(_differences(base, found).values())
        if len(differences) > 1:
            mean = statistics.fmean(differences)
            squares += sum((each - mean) ** 2 for each in differences)
            freedom += len(differences) - 1
    return Masks(math.sqrt(squares / freedom), freedom) if freedom else None


def _differences(base, found):
    """{seed: relative difference} of the finite losses."""
    pairs = {
        seed: (_mean_loss(base[seed]), _mean_loss(found[seed]))
        for seed in base.keys() & found.keys()
    }
    return {
        seed: after / before - 1
        for seed, (before, after) in pairs.items()
        if before and after is not None
    }


def compare(
    cell: records.Cell, base: Figures, found: Figures, masks: Masks | None = None
) -> records.Parity:
    """Compares the losses and the metric of the timed steps with float32's.

    Args:
      cell: The cell.
      base: {seed: figures} of tfamp's float32, see `cell_figures.measure`; or empty.
      found: The same of the cell.
      masks: What other dropout masks do, if the model has dropout.
    """
    losses = {seed: _mean_loss(figures) for seed, figures in found.items()}
    broken = [seed for seed, loss in sorted(losses.items()) if loss is None]
    known = [loss for loss in losses.values() if loss is not None]
    metric_name, metrics = _metrics(found)
    mean = statistics.fmean(known) if known and not broken else None
    metric = statistics.fmean(metrics.values()) if metrics and not broken else None
    nothing = records.Parity(mean, None, None, metric_name, metric, None, None, "", "")
    is_base = (cell.framework, cell.mode, cell.xla) == ("tfamp", "float32", False)
    if broken:
        return nothing._replace(verdict="broken", explanation=_say_broken(cell, found))
    if is_base:
        text = "What the others are compared with."
        return nothing._replace(loss_difference=0.0, verdict="base", explanation=text)
    both = sorted(base.keys() & found.keys())
    before = {seed: _mean_loss(base[seed]) for seed in both}
    if not both or None in before.values():
        text = "There is no finite loss of tfamp's float32 with this batch size."
        return nothing._replace(explanation=text)
    after = {seed: losses[seed] for seed in both}
    lost = paired.compare("loss", ("float32", before), (cell.mode, after), True)
    metered = _metric_difference(cell, base, found, both, metric_name)
    verdict, text = _judge(cell, lost, found, masks)
    return nothing._replace(
        loss_difference=lost.mean,
        loss_interval=lost.interval,
        metric_difference=metered and metered.mean,
        metric_interval=metered and metered.interval,
        verdict=verdict,
        explanation=text,
    )


def _mean_loss(figures):
    """Over the timed steps; None if one is not finite."""
    losses = figures["losses"][-len(figures["seconds"]) :]
    return None if None in losses else statistics.fmean(losses)


def _metrics(found):
    """(name, {seed: metric}); without a name if there is none."""
    names = {figures["metric_name"] for figures in found.values()}
    name = names.pop() if len(names) == 1 else ""
    values = {seed: f["metric"] for seed, f in found.items()} if name else {}
    return ("", {}) if None in values.values() else (name, values)


def _metric_difference(cell, base, found, both, name):
    base_name, before = _metrics({seed: base[seed] for seed in both})
    if not name or name != base_name:
        return None
    after = _metrics(found)[1]
    return paired.compare(
        name, ("float32", before), (cell.mode, {seed: after[seed] for seed in both})
    )


def _say_broken(cell, found):
    """Where the loss was lost, and the usual reason."""
    steps = [f["losses"].index(None) + 1 for f in found.values() if None in f["losses"]]
    text = f"The loss is not finite from step {min(steps)} on."
    scaled = any(figures["loss_scales"] for figures in found.values())
    if records.format_of(cell.mode) == "float16":
        limit = words.number(formats.float_format("float16").max)
        text += (
            f" float16 ends at {limit}: a layer's output or the loss itself passed it"
            f"{', which no loss scale can mend' if scaled else ''}. Use "
            "mixed_bfloat16, or keep that layer in float32 (overrides)."
        )
    return text


def _judge(cell, lost, found, masks) -> tuple[str, str]:
    """Returns (verdict, explanation)."""
    if max(map(abs, lost.differences)) < _EQUAL:
        return "equal", "The same losses as float32's, seed by seed."
    size, seeds = abs(lost.mean), len(lost.seeds)
    if lost.interval and lost.interval[0] <= 0 <= lost.interval[1]:
        ends = words.difference(lost.mean, lost.interval)
        return "noise", f"Within seed noise: {ends}; the interval contains 0."
    if masks is not None and size <= masks.reach(seeds):
        return "noise", (
            f"Within the noise of dropout masks, which are others here: {seeds} seeds "
            f"move by up to {words.percent(masks.reach(seeds))}, going by this task's "
            "other cells."
        )
    side = "higher" if lost.mean > 0 else "lower"
    text = f"the loss is {words.difference(size)[1:]} {side}."
    if seeds == 1:
        return "one seed", f"One seed shows no noise, take three: {text}"
    text = f"Above the noise of the seeds: {text}"
    causes = list(_causes(cell, size, found))
    if causes:
        return "explained", " ".join([text, *causes])
    return "unexplained", " ".join([text, *_hints(cell)])


def _causes(cell, size, found) -> Iterator[str]:
    """What is known to make a difference, and large enough for it."""
    name = records.format_of(cell.mode)
    rounding = formats.float_format(name).epsilon / 2
    skipped = max(found.values(), key=lambda figures: figures["skipped_steps"] or 0)
    if skipped["skipped_steps"] and size <= _share_skipped(skipped):
        yield (
            f"Up to {skipped['skipped_steps']} steps were skipped while the loss scale "
            "found its level, so there were fewer updates than in float32."
        )
    if name in ("float32", "tf32") and size <= max(_GROWN, rounding):
        yield (
            "The same sums in another order: roundings grow over the steps, to "
            f"{words.percent(_GROWN)} and less here."
        )
    elif name not in ("float32", "tf32") and size <= rounding:
        yield f"One rounding of {name} is up to {words.percent(rounding)}."
    elif cell.mode.startswith("rewrite_") and size <= 4 * rounding:
        yield (
            "The graph rewrite computes the mean of the loss in the narrow format, "
            f"too: each rounding is up to {words.percent(rounding)}."
        )


def _share_skipped(figures):
    """What the skipped steps can have cost: their share of all that was learned."""
    losses = [loss for loss in figures["losses"] if loss is not None]
    learned = (max(losses) - min(losses)) / statistics.fmean(losses)
    return learned * figures["skipped_steps"] / len(losses)


def _hints(cell) -> Iterator[str]:
    """What a reader can do about a difference that is not explained."""
    if cell.framework == "keras" and records.format_of(cell.mode) == "bfloat16":
        yield (
            "Plain Keras sums bias gradients in bfloat16 on a CPU, which loses terms "
            "(`tfamp.enable()` mends that); whether that is all is not known."
        )
    else:
        yield (
            "No known cause is as large: see the loss curves, measure more repeats, "
            "and compare whole runs (time to accuracy, or a training script)."
        )


def reach(found: records.Parity) -> float:
    """Returns how far from float32's the loss may be: the interval's larger end."""
    return max(map(abs, found.loss_interval or (found.loss_difference or 0.0,)))


def is_safe(row: records.Row) -> bool:
    """Whether a row's loss is float32's up to what is explained, and noise of 10 %.

    Args:
      row: A row; one that failed is not safe.
    """
    if row.parity is None:
        return False
    verdicts = ("base", "equal", "noise", "explained")
    return row.parity.verdict in verdicts and reach(row.parity) <= _WIDEST
