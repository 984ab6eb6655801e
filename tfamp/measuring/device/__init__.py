"""What a GPU shows in a quarter of an hour: `tfamp gpu-report`, scripts/gpu_plan.py."""

from collections.abc import Iterable

from tfamp import checks

# What is measured, in order, most wanted first. Here, where nothing imports TensorFlow,
# the command tells a mistyped name at once.
PARTS = (
    *("time", "numerics", "memory", "compiled", "tests", "accuracy", "float8"),
    *("rewrite", "fit_memory", "stock_xla"),
)


def check_parts(names: Iterable[str]) -> None:
    """Raises ValueError for names that are not in `PARTS`."""
    if unknown := sorted(set(names) - set(PARTS)):
        raise ValueError(
            f"Unknown parts. Received: {', '.join(unknown)}. Expected some of "
            f"{', '.join(PARTS)}.{checks.nearest(unknown[0], PARTS)}"
        )
