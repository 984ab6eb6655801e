"""What the trainer needs to know of a task, and the registry of tasks."""

import importlib
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

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
        task's score, higher is better unless it is one of `errors`.
      description: One line for the report: sizes, classes, chance level.
      score: Scores the test split where Keras metrics cannot: called with the best
        model and the run's folder, into which it may write.
        Returns scores by name, the first of which is the task's; fractions, higher is
        better, but for those in `errors`. None: the first of the metrics is.
      errors: Names of metrics and scores that are errors, in any unit: lower is better.
      augment: Function of a training example's features, its label and a seed, int64
        [2], that differs for every example and epoch; returns features and label. It
        depends on nothing else. None: examples stay as they are.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset
    build_model: Callable[[], keras.Model]
    loss: keras.losses.Loss
    metrics: Callable[[], list[keras.metrics.Metric]]
    description: str
    score: Callable[[keras.Model, pathlib.Path], dict[str, float]] | None = None
    errors: frozenset[str] = frozenset()
    augment: Callable[..., tuple[Any, Any]] | None = None


class Synthetic(NamedTuple):
    """A task's model and batches of the right shapes, with random content.

    Attributes:
      build_model: Function of no argument; returns an uncompiled, built model under
        the dtype policy in force.
      batches: Endless dataset of batches of (features, label).
      description: One line: model and input.
      loss: A Keras loss.
      metrics: Function of no argument; returns what `fit` measures in each step.
      unit: What a batch holds: "images", "sequences", "rows".
    """

    build_model: Callable[[], keras.Model]
    batches: tf.data.Dataset
    description: str
    loss: keras.losses.Loss
    metrics: Callable[[], list[keras.metrics.Metric]]
    unit: str


# Task name -> module with `create(config) -> Task`; `get_config`, its defaults; and
# `synthetic(config) -> Synthetic`, for what is timed without data, which raises what is
# wrong with the settings. Imported on use, since each needs its own optional
# dependencies.
TASKS = {
    "image_classification": "tfamp.training.tasks.images",
    "language_model": "tfamp.training.tasks.language_model",
    "question_answering": "tfamp.training.tasks.question_answering",
    "segmentation": "tfamp.training.tasks.segmentation",
    "tabular_regression": "tfamp.training.tasks.tabular",
    "text_classification": "tfamp.training.tasks.text_classification",
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
    return import_task(config.task).create(config)


def import_task(name: str) -> types.ModuleType:
    """Returns a task's module.

    Raises:
      ValueError: If there is no such task.
    """
    if name not in TASKS:
        raise ValueError(
            f"Unknown task. Received: config.task={name!r}. "
            f"Expected one of {', '.join(map(repr, TASKS))}."
        )
    return importlib.import_module(TASKS[name])
