"""Training: one trainer over Keras `fit`, tasks, comparison of precision modes."""

from tfamp.training.trainer import RunResult, train_and_evaluate

__all__ = ["RunResult", "train_and_evaluate"]
