"""What the trainer needs to know of a task: its data, model, loss and scores."""

import inspect
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from ml_collections import config_dict

from tfamp import functions
from tfamp.runs import pipeline

BATCHES = 8  # Different ones of a `Synthetic`, again and again.


class Task(NamedTuple):
    """Data, model and scores of one task.

    Attributes:
      train: Unbatched dataset of (features, label) in a fixed order, of known
        cardinality. The trainer shuffles, batches and prefetches.
      validation: The same, split off the training data; selects the checkpoint. None:
        no selection, and the weights after the last epoch are used.
      test: The same; scored once, at the end.
      build_model: Function without arguments that returns an uncompiled, built model
        under the dtype policy in force. Its outputs are float32.
      loss: A Keras loss.
      metrics: Function without arguments that returns new Keras metrics. The first is
        the task's score; higher is better unless it is one of `errors`.
      description: One line for the report: sizes, classes, chance level.
      score: Function of the best model and the run's folder, for scores that Keras
        metrics cannot compute; it may write into the folder. It returns scores by name,
        the task's first, as fractions of which higher is better, except those in
        `errors`. None: the first of the metrics is the score.
      errors: Names of metrics and scores that are errors, in any unit: lower is better.
      augment: Function of a training example's features, its label and a seed, int64
        [2], that differs for every example and epoch. It returns features and label,
        and depends on nothing else. It may also decode: if `train` holds file names, no
        image is kept in memory to be shuffled. None: examples stay as they are.
      chance: What the best constant answer scores on the test split, by the task's
        score: of an accuracy the share of the largest class. A run that is no better
        says so, and so does a comparison. None: not known.
      predict: Function that answers new rows. It takes the best model, a
        `pandas.DataFrame` of text ("" for missing values), and a folder for files that
        the answers name. It returns a table of the columns that it adds, one row for
        each. None: the task has no `--job=predict`.
      assets: Texts of files by name that turn raw input into features, and outputs into
        answers, such as a tokenizer and class names. They are written beside each run
        and into the folder `assets.extra` of an export.
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
    chance: float | None = None
    predict: Callable[[keras.Model, Any, pathlib.Path], Any] | None = None
    assets: Mapping[str, str] = types.MappingProxyType({})


# What the fields of a task must be: in words, as a class, and which fields.
_KINDS = (
    ("a tf.data.Dataset", tf.data.Dataset, ("train", "test")),
    ("a tf.data.Dataset or None", tf.data.Dataset | None, ("validation",)),
    ("a function", Callable, ("build_model", "metrics")),
    ("a function or None", Callable | None, ("score", "augment", "predict")),
)


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


def from_config(config: config_dict.ConfigDict) -> Task:
    """Loads a task's data and describes its model.

    Args:
      config: The resolved configuration; `config.task` names the task's function,
        `config.data_dir` and `config.manual_dir` say where its data are.

    Returns:
      A `Task`; nothing in it depends on the precision, the seed or the optimizer.

    Raises:
      ValueError: If there is no such function.
      TypeError: If it returns anything else.
      DataError: If the data are missing or malformed.
    """
    return _create(functions.find(name_of(config)), config)


def synthetic(config: config_dict.ConfigDict) -> Synthetic:
    """Describes a task's model and makes batches for it, which are timed.

    Where a function `synthetic(config) -> Synthetic` stands beside the task's, as in
    each recipe, it does so without data. Of others the first batches of the training
    data are taken, again and again.

    Args:
      config: As for `from_config`.

    Raises:
      As `from_config`.
    """
    function = functions.find(name_of(config))
    beside = getattr(function, "__globals__", {}).get("synthetic")
    returned = getattr(beside, "__annotations__", {}).get("return")
    # It may be a text; and a user may have another function of that name.
    if getattr(returned, "__name__", f"{returned}").endswith("Synthetic"):
        return beside(config)
    task = _create(function, config)
    # Repeated: a search for the largest batch may ask for more than there is.
    examples = pipeline.augmented(task.train, task.augment).repeat()
    batches = examples.batch(config.batch_size).take(BATCHES)
    return Synthetic(
        task.build_model,
        batches.cache().repeat().prefetch(tf.data.AUTOTUNE),
        task.description,
        task.loss,
        task.metrics,
        unit="examples",
    )


def name_of(config: config_dict.ConfigDict) -> str:
    """Returns `config.task` as `functions.name_of` does.

    Raises:
      ValueError: If it names no function.
    """
    try:
        return functions.name_of(config.task)
    except ValueError as error:
        raise ValueError(
            f"config.task: {error} A recipe's is 'tfamp.recipes.images:create', say."
        ) from error


def _create(function, config):
    try:
        inspect.signature(function).bind(config)
    except TypeError as error:
        raise TypeError(
            f"{config.task} must take one argument, the configuration: {error}."
        ) from error
    task = function(config)
    if not isinstance(task, Task):
        raise TypeError(
            f"{config.task} must return a tfamp.training.Task. Received: "
            f"{type(task).__name__}."
        )
    for words, kind, fields in _KINDS:
        for name in fields:
            value = getattr(task, name)
            if not isinstance(value, kind):
                raise TypeError(
                    f"Task.{name} must be {words}. Received: "
                    f"{type(value).__name__} from {config.task}."
                )
    return task
