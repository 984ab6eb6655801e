"""What a `NumericsMonitor` prints at the end of `fit`: a table, and its words."""

import math
from collections.abc import Mapping

from tfamp import tables
from tfamp.numerics import statistics

_MOST = 8  # Layers that are shown.


def describe(
    lost: Mapping[statistics.LayerNumerics, float], max_lost: float, scale: str
) -> str:
    """Returns a line where little is lost; else a table of what is, and its words.

    Args:
      lost: Rows of the last monitored step -> share of the layer's gradients lost.
      max_lost: The share that may be lost.
      scale: A line on the loss scale; "" for none.
    """
    much = [row for row, share in lost.items() if share > max_lost]
    wrong = [row for row in lost if row in much or row.outputs.overflow]
    if not wrong:
        most = max(lost.values(), default=0.0)
        what = f"more than {most:.1%} of its gradients" if most else "a gradient"
        return f"no layer loses {what} in 16 bits"
    shown = sorted(wrong, key=lost.__getitem__, reverse=True)[:_MOST]
    table = tables.table(
        ["layer", "format", "outputs", "gradients", "updates"],
        [
            [
                *(row.path, row.format, statistics.describe(row.outputs)),
                statistics.describe(row.gradients, row.weight_gradients),
                "" if math.isnan(row.updates_lost) else f"{row.updates_lost:.0%}",
            ]
            for row in shown
        ],
    )
    lines = [
        f"{len(wrong)} of {len(lost)} layers lose outputs, or more than {max_lost:.0%} "
        f"of their gradients{', of which the worst are' * (len(shown) < len(wrong))}:",
        table,
        "outputs, gradients: what becomes 0 or infinite in that format",
        "updates: what weights stored in that format would round away; harmless, as "
        "mixed modes store weights in float32",
        scale,
    ]
    return "\n".join(filter(None, lines))
