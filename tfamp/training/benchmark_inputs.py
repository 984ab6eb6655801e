"""Synthetic batches and the model of a configuration, for timing; no data needed."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfamp.training import bert, data, encoder, question_answering, tasks

_BATCHES = data.BATCHES
_CLASSES = 2  # Of a text classifier; how many there are costs nothing.
_UNITS = {
    "image_classification": "images",
    "segmentation": "images",
    "tabular_regression": "rows",
}
repeat = data.repeat


def unit(task: str) -> str:
    """Returns what a batch of a task holds: "sequences", "images", "rows"."""
    return _UNITS.get(task, "sequences")


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
    if config.task in _TEXTS:
        encoder.find(_with_positions(config))
    else:
        module = tasks.import_task(config.task)
        getattr(module, "check_synthetic", module.synthetic)(config)


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
    if config.task in _TEXTS:
        return _texts(config)
    return tasks.import_task(config.task).synthetic(config)


def classification() -> dict[str, Any]:
    """Returns a classifier's loss and metrics, as a `Synthetic` has them."""
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    }


def _with_positions(config):
    """A copy with as many positions of a new encoder as the texts need."""
    config = config.copy_and_resolve_references()
    if not config.model.preset:
        positions = max(config.data.sequence_length, config.model.max_sequence_length)
        config.model.max_sequence_length = positions
    return config


def _texts(config):
    config = _with_positions(config)
    length, model = config.data.sequence_length, config.model
    preset = encoder.find(config)
    vocabulary = preset.tokenizer.get_vocab_size() if preset else model.vocabulary_size
    draw = np.random.default_rng(config.seed).integers
    shape = (_BATCHES, config.batch_size, length)
    features = {
        "token_ids": draw(vocabulary, size=shape, dtype="int32"),
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": np.ones(shape, "int32"),
    }
    build, label = _TEXTS[config.task]
    labels = label(draw, shape)
    return tasks.Synthetic(
        lambda: build(config, preset),
        repeat(features, labels),
        f"{encoder.describe(config)}; random token ids of full length, no padding",
        unit="sequences",
        **classification(),
    )


def _classifier(config, preset):
    return bert.build_model(config, _CLASSES, preset)


# Task -> how its model is built, and its labels drawn.
_TEXTS: dict[str, tuple[Callable, Callable[..., Any]]] = {
    "text_classification": (
        _classifier,
        lambda draw, shape: draw(_CLASSES, size=shape[:2], dtype="int32"),
    ),
    "question_answering": (
        question_answering.build_model,
        lambda draw, shape: draw(shape[2], size=(*shape[:2], 2), dtype="int32"),
    ),
}
