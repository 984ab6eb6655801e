"""Training: one trainer over Keras `fit`, tasks, comparison of precision modes."""

from tfamp.training.base_config import get_config
from tfamp.training.batch_size import find_batch_size
from tfamp.training.own_models import compare_modes
from tfamp.training.results import Run, RunResult, read_run
from tfamp.training.tasks import Task
from tfamp.training.trainer import train_and_evaluate

__all__ = [
    "Run",
    "RunResult",
    "Task",
    "compare_modes",
    "find_batch_size",
    "get_config",
    "read_run",
    "train_and_evaluate",
]
