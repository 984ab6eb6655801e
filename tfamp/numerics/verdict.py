"""What a comparison of a mode with float32 comes to: one sentence."""

from typing import Any

from tfamp import tables

# A call diverges that makes an error above the second out of one below the first.
SOUND, DIVERGED = 0.1, 0.5
_RANGE = "; mixed_bfloat16 has float32's range"


def describe(comparison: Any) -> str:
    """Returns where a mode goes wrong first and what helps, or how accurate it is.

    Args:
      comparison: A `results.PrecisionComparison`.
    """
    mode, rows = comparison.mode, comparison.rows
    wide = "mixed_bfloat16" if mode == "float8" else "float32"
    search = f"tfamp.search_precision finds the layers that must stay in {wide}"
    if row := comparison.first_overflow:
        more = _RANGE * (row.format == "float16")
        return (
            f"{mode}: overflows first in {row.name}, which returns inf or NaN where "
            f"float32 is finite. {search}{more}"
        )
    if row := comparison.first_diverging:
        before, after = map(tables.number, (row.input_error, row.accumulated_error))
        return (
            f"{mode}: diverges first in {row.name}, which makes an error of {after} "
            f"out of one of {before}. {search}"
        )
    # The backward pass begins with the last call.
    for row in reversed(rows):
        if (error := row.gradient_error or 0.0) > DIVERGED:
            return (
                f"{mode}: no output diverges, but gradients do, first those of "
                f"{row.name}: error {tables.number(error)}. {_cure(comparison, search)}"
            )
    errors = {x: max(x.accumulated_error, x.gradient_error or 0.0) for x in rows}
    if not errors:
        return f"{mode}: no layer computes anything"
    worst = max(errors, key=errors.__getitem__)
    largest = f"{tables.number(errors[worst])} ({worst.name})"
    if errors[worst] > SOUND:
        return f"{mode}: no layer diverges, but errors add up to {largest}. {search}"
    return (
        f"{mode}: accurate everywhere, the largest error is {largest}: no layer needs "
        f"to stay in {wide}"
    )


def _cure(comparison, search):
    scale, advice = comparison.loss_scale, comparison.recommended_loss_scale
    if not advice or advice == scale:
        return search
    return f"A loss scale of {advice:g} (it is {scale:g}) would keep the largest finite"
