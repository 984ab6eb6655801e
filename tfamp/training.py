"""Training: one trainer over Keras `fit`, tasks, comparison of precision modes."""

import importlib
from typing import TYPE_CHECKING, Any

from tfamp import quiet
from tfamp.runs.default_config import get_config

if TYPE_CHECKING or not quiet.is_command():
    from tfamp.runs import base_config as base_config
    from tfamp.runs import distribution as distribution
    from tfamp.runs.own_models import compare_modes
    from tfamp.runs.results import Run, RunResult, read_run
    from tfamp.runs.tasks import Task
    from tfamp.runs.trainer import train_and_evaluate

__all__ = [
    "Run",
    "RunResult",
    "Task",
    "compare_modes",
    "get_config",
    "read_run",
    "train_and_evaluate",
]

_HOMES = {
    **{"Run": "results", "RunResult": "results", "read_run": "results"},
    **{"Task": "tasks", "compare_modes": "own_models", "train_and_evaluate": "trainer"},
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use in the command, where configurations need none."""
    if name not in (*_HOMES, "base_config", "distribution"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import tfamp.public  # noqa: F401  Releases are checked first.

    module = importlib.import_module(f"tfamp.runs.{_HOMES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module
