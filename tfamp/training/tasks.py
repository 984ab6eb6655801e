"""What the trainer needs to know of a task, and the registry of tasks."""

import importlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf
from ml_collections import config_dict


class Task(NamedTuple):
    """Data, model and scores of one task.

    Attributes:
      train: Unbatched dataset of (features, label) in a fixed order, of known
        cardinality. The trainer shuffles, batches and prefetches.
      validation: The same, split off the training data; selects the checkpoint. None:
        no selection, the weights after the last epoch count.
      test: The same; scored once, at the end.
      build_model: Function of no argument; returns an uncompiled, built model under
        the dtype policy in force. Its outputs are float32.
      loss: A Keras loss.
      metrics: Function of no argument; returns new Keras metrics. The first is the
        task's score, higher is better.
      description: One line for the report: sizes, classes, chance level.
      score: Scores the test split where Keras metrics cannot: called with the best
        model and the run's folder, into which it may write predictions. Returns
        fractions by name, higher is better; the first is the task's score. None: the
        first of the metrics is.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset
    build_model: Callable[[], keras.Model]
    loss: keras.losses.Loss
    metrics: Callable[[], list[keras.metrics.Metric]]
    description: str
    score: Callable[[keras.Model, pathlib.Path], dict[str, float]] | None = None


# Task name -> module with `create(config, data_dir, manual_dir) -> Task`. Imported
# on use, since each needs its own optional dependencies.
TASKS = {
    "image_classification": "tfamp.training.cnn",
    "question_answering": "tfamp.training.question_answering",
    "text_classification": "tfamp.training.bert",
}


def from_config(config: config_dict.ConfigDict) -> Task:
    """Loads a task's data and describes its model.

    Args:
      config: The resolved configuration; `config.task` names the task,
        `config.data_dir` and `config.manual_dir` say where its data are.

    Returns:
      A `Task`; nothing in it depends on the precision, the seed or the optimizer.

    Raises:
      ValueError: If there is no such task.
      DataError: If the data are missing or malformed.
    """
    if config.task not in TASKS:
        raise ValueError(
            f"Unknown task. Received: config.task={config.task!r}. "
            f"Expected one of {', '.join(map(repr, TASKS))}."
        )
    module = importlib.import_module(TASKS[config.task])
    return module.create(config, config.data_dir or None, config.manual_dir or None)
