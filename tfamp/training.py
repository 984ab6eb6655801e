"""Training: one trainer over Keras `fit`, tasks, comparison of precision modes."""

from tfamp.runs import base_config as base_config
from tfamp.runs import distribution as distribution
from tfamp.runs.base_config import get_config
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
