"""The two models whose steps are timed, of Keras' own layers: no download, no extra."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


class Sizes(NamedTuple):
    """Sizes of both models; the defaults are those of published figures.

    Attributes:
      batch, length, width, depth, heads, vocabulary: Of BERT-Base.
      images, side, classes: Of ResNet-50: images in a batch, pixels of a side.
    """

    batch: int = 32
    length: int = 384
    width: int = 768
    depth: int = 12
    heads: int = 12
    vocabulary: int = 30522
    images: int = 128
    side: int = 224
    classes: int = 1000


TINY = Sizes(2, 16, 32, 1, 2, 100, 2, 32, 10)
NAMES = "bert_base", "resnet50"


def build(name: str, sizes: Sizes) -> tuple[keras.Model, tf.data.Dataset]:
    """Returns a model that is not compiled, and an endless dataset of one batch.

    Args:
      name: Of `NAMES`.
      sizes: See `Sizes`.
    """
    draw = np.random.default_rng(0)
    if name == "bert_base":
        shape, top = (sizes.batch, sizes.length), sizes.vocabulary
        model, x = _bert(sizes), draw.integers(0, top, shape, "int32")
    else:
        shape = sizes.images, sizes.side, sizes.side, 3
        # Bytes, as images are: to copy them to a GPU takes little of a step.
        inputs = keras.Input(shape[1:], dtype="uint8")
        model = keras.applications.ResNet50(
            weights=None,
            classes=sizes.classes,
            classifier_activation=None,
            input_tensor=layers.Rescaling(1 / 127.5, -1.0, dtype="float32")(inputs),
        )
        x = draw.integers(0, 256, shape, "uint8")
    batch = x, np.zeros(len(x), "int32")
    return model, tf.data.Dataset.from_tensors(batch).cache().repeat()


def optimizer(name: str) -> keras.optimizers.Optimizer:
    """Returns what the model is trained with: AdamW with clipping, or SGD."""
    if name == "bert_base":
        return keras.optimizers.AdamW(2e-5, weight_decay=0.01, global_clipnorm=1.0)
    return keras.optimizers.SGD(0.1, momentum=0.9)


class _Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="normal")

    def call(self, x):
        return x + keras.ops.cast(self.table, x.dtype)


def _bert(sizes):
    """An encoder of BERT's shape and a classifier of two."""
    normalize = lambda x: layers.LayerNormalization(epsilon=1e-12)(x)  # noqa: E731
    drop = lambda x: layers.Dropout(0.1)(x)  # noqa: E731
    ids = keras.Input((sizes.length,), dtype="int32")
    x = layers.Embedding(sizes.vocabulary, sizes.width)(ids)
    x = drop(normalize(_Positions()(x)))
    size = sizes.width // sizes.heads
    for _ in range(sizes.depth):
        heads = layers.MultiHeadAttention(sizes.heads, size, dropout=0.1)
        x = normalize(x + drop(heads(x, x)))
        inner = layers.Dense(4 * sizes.width, activation="gelu")(x)
        x = normalize(x + drop(layers.Dense(sizes.width)(inner)))
    pooled = layers.Dense(sizes.width, activation="tanh")(x[:, 0])
    return keras.Model(ids, layers.Dense(2, dtype="float32")(drop(pooled)))
