"""Training: one trainer over Keras `fit`, tasks, comparison of precision modes."""

from tfamp.training.batch_size import find_batch_size
from tfamp.training.run_files import RunResult
from tfamp.training.trainer import train_and_evaluate

__all__ = ["RunResult", "find_batch_size", "train_and_evaluate"]
