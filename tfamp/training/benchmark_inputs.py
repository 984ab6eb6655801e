"""Synthetic batches and the model of a configuration, for timing; no data needed."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.training import cnn, tasks

_IMAGE_TASK = "image_classification"
_TEXTS = ("question_answering", "text_classification")
_TASKS = (*_TEXTS, "language_model")  # Whose `synthetic` checks, too.
# Shape and classes of the data sets that are not read here.
_IMAGES = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
}


def unit(task: str) -> str:
    """Returns what a batch of a task holds: "sequences", "images", "rows"."""
    if task in _TASKS:
        return "sequences"
    return "images" if task == _IMAGE_TASK else tasks.import_task(task).UNIT


def is_text(task: str) -> bool:
    """Returns whether a task's examples have a sequence length."""
    return task in _TEXTS


def check(config) -> None:
    """Raises what `create` would, without making batches.

    Args:
      config: As for `create`.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If the task, or the shape of its images, is not known, or texts are
        longer than the preset's positions.
    """
    if config.task in _TASKS:
        tasks.import_task(config.task).synthetic(config)
    elif config.task == _IMAGE_TASK:
        cnn.check(config)
        _image_shape(config)
    else:
        tasks.import_task(config.task).check_synthetic(config)


def create(config) -> tasks.Synthetic:
    """Describes a configuration's model and makes batches for it.

    Texts are random token ids of full length, without padding; no corpus is read and
    no tokenizer trained. A new encoder has as many positions as they need. The content
    depends on `config.seed` alone, so every mode sees the same.

    Args:
      config: `config.task`, `config.model`, `config.batch_size` and, for texts,
        `config.data.sequence_length`.

    Returns:
      A `tasks.Synthetic`.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: As `check` does.
    """
    if config.task == _IMAGE_TASK:
        return _images(config)
    return tasks.import_task(config.task).synthetic(config)


def classification() -> dict[str, Any]:
    """Returns a classifier's loss and metrics, as a `Synthetic` has them."""
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    }


def _image_shape(config):
    """Returns the shape and the classes of the images."""
    name = config.data.name
    known = dict(_IMAGES)
    if name == "digits":
        known[name] = ((config.data.image_size, config.data.image_size, 1), 10)
    if config.data.get("image_shape"):
        known[name] = (tuple(config.data.image_shape), config.data.classes)
    if name not in known:
        raise ValueError(
            f"The images' shape is not known without reading them. Received: "
            f"config.data.name={name!r}. Expected 'digits' or one of "
            f"{', '.join(map(repr, _IMAGES))}; or set config.data.image_shape="
            "(height, width, channels) and config.data.classes."
        )
    return known[name]


def _images(config):
    shape, classes = _image_shape(config)
    draw = np.random.default_rng(config.seed).integers
    count = (8, config.batch_size)  # Eight batches, again and again.
    return tasks.Synthetic(
        lambda: cnn.build_network(shape, classes, config.model),
        repeat(
            draw(256, size=(*count, *shape), dtype="uint8"),
            draw(classes, size=count, dtype="int64"),
        ),
        f"{config.model.name}: images {shape}, {classes} classes; random pixels",
        unit="images",
        **classification() | {"loss": cnn.make_loss(config)},
    )


def repeat(features, labels) -> tf.data.Dataset:
    """Returns an endless dataset of batches.

    Args:
      features: Arrays [batches, batch, ...], or a dict of such.
      labels: The same.
    """
    batches = tf.data.Dataset.from_tensor_slices((features, labels))
    return batches.repeat().prefetch(tf.data.AUTOTUNE)
