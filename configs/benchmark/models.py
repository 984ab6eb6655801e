"""Workloads of the configurations here: functions that build a model and its batches.

Each returns a compiled Keras model and a `tf.data.Dataset` of batches, as a workload of
your own does: `python scripts/benchmark.py --workload=my_script.py:build`.
"""

import keras
import numpy as np
import tensorflow as tf

import tfamp

layers = keras.layers
_WIDTH, _LAYERS = 512, 8
# Of a transformer's layer: attention, the two dense layers, normalizations.
_SHAPES = [
    *[(_WIDTH, _WIDTH), (_WIDTH,)] * 4,
    *[(_WIDTH, 4 * _WIDTH), (4 * _WIDTH,), (4 * _WIDTH, _WIDTH), (_WIDTH,)],
    *[(_WIDTH,), (_WIDTH,)] * 2,
]
_SQUARE = {"kernel_size": 3, "padding": "same"}
# Name -> class, keywords, shape of a batch.
LAYERS = {
    "depthwise": (layers.DepthwiseConv2D, _SQUARE, (16, 56, 56, 64)),
    "depthwise_strided": (
        layers.DepthwiseConv2D,
        {**_SQUARE, "strides": 2},
        (16, 56, 56, 64),
    ),
    "depthwise_wide": (
        layers.DepthwiseConv2D,
        {**_SQUARE, "kernel_size": 5},
        (16, 28, 28, 128),
    ),
    "separable_strided": (
        layers.SeparableConv2D,
        {**_SQUARE, "strides": 2, "filters": 128},
        (16, 28, 28, 128),
    ),
    "convolution": (layers.Conv2D, {**_SQUARE, "filters": 64}, (16, 28, 28, 64)),
    "gru_32": (layers.GRU, {"units": 32}, (32, 50, 32)),
    "gru_256": (layers.GRU, {"units": 256}, (32, 50, 256)),
    "lstm_32": (layers.LSTM, {"units": 32}, (32, 50, 32)),
    "upsampling": (
        layers.UpSampling2D,
        {"size": 2, "interpolation": "bilinear"},
        (16, 28, 28, 64),
    ),
    "dense": (layers.Dense, {"units": 768}, (512, 768)),
}


def mlp():
    """Three dense layers of 1024 units, batch 512."""
    body = [layers.Dense(1024, "relu") for _ in range(3)]
    return _classifier(keras.Sequential([keras.Input((1024,)), *body, _head()]), 512)


def conv():
    """Three 3x3 convolutions of 64 channels with normalization, batch 64."""
    x = inputs = keras.Input((32, 32, 64))
    for _ in range(3):
        x = layers.Conv2D(64, 3, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    outputs = _head()(layers.GlobalAveragePooling2D()(x))
    return _classifier(keras.Model(inputs, outputs), 64)


def transformer():
    """Four transformer layers of width 512, 128 tokens, batch 16."""
    inputs = x = keras.Input((128, _WIDTH))
    for _ in range(4):
        attended = layers.MultiHeadAttention(8, 64)(x, x)
        x = layers.LayerNormalization()(x + attended)
        inner = layers.Dense(_WIDTH)(layers.Dense(4 * _WIDTH, "gelu")(x))
        x = layers.LayerNormalization()(x + inner)
    outputs = _head()(layers.GlobalAveragePooling1D()(x))
    return _classifier(keras.Model(inputs, outputs), 16)


def blocks(remat, batch_size=16):
    """Twelve transformer layers of width 256, 128 tokens, each a model of its own."""
    x = keras.Input((128, 256))
    outputs = inputs = x
    for number in range(12):
        attended = layers.MultiHeadAttention(4, 64, dropout=0.1)(x, x)
        y = layers.LayerNormalization()(x + attended)
        inner = layers.Dense(256)(layers.Dense(1024, "gelu")(y))
        y = layers.LayerNormalization()(y + layers.Dropout(0.1)(inner))
        outputs = keras.Model(x, y, name=f"block_{number}")(outputs)
    outputs = _head()(layers.GlobalAveragePooling1D()(outputs))
    model = keras.Model(inputs, outputs)
    tfamp.set_remat(model, [r"block_\d+"] if remat else None)
    return _classifier(model, batch_size)


def _head():
    return layers.Dense(10, dtype="float32")


def _classifier(model, batch_size):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(batch_size, *model.input_shape[1:])).astype("float32")
    labels = rng.integers(10, size=batch_size)
    data = tf.data.Dataset.from_tensor_slices((features, labels))
    return model, data.batch(batch_size).cache()


def layer(name):
    """One layer of `LAYERS`: a step of `fit` by plain gradient descent."""
    kind, keywords, shape = LAYERS[name]
    model = keras.Sequential([keras.Input(shape[1:]), kind(**keywords)])
    model.compile(keras.optimizers.SGD(1e-3), "mean_squared_error")
    rng = np.random.default_rng(0)
    made = [rng.normal(size=s) for s in (shape, (shape[0], *model.output_shape[1:]))]
    data = tuple(each.astype("float32") for each in made)
    return model, tf.data.Dataset.from_tensor_slices(data).batch(shape[0]).cache()


def attention(causal, dtype, sequence_length=1024, batch_size=1):
    """Attention of 8 heads of 64 alone, on random queries, keys and values."""
    shape = sequence_length, 8, 64
    given = [keras.Input(shape, dtype=dtype) for _ in range(3)]
    outputs = _Attention(causal, dtype=dtype)(given)
    model = keras.Model(given, outputs)
    model.compile(keras.optimizers.SGD(1e-3), "mean_squared_error")
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(batch_size, *shape)).astype("float32") for _ in range(4)]
    data = tf.data.Dataset.from_tensors((tuple(made[:3]), made[3]))
    return model, data.cache()


class _Attention(layers.Layer):
    """Scales what it is given by weights, so that all have gradients."""

    def __init__(self, causal, **more):
        super().__init__(**more)
        self.causal = causal
        self.scales = [self.add_weight((64,), "ones", name=n) for n in "qkv"]

    def call(self, given):
        scaled = [x * scale for x, scale in zip(given, self.scales, strict=True)]
        return keras.ops.dot_product_attention(*scaled, is_causal=self.causal)


class _GivenGradients(keras.Model):
    """Applies constant gradients to 25 million parameters: the optimizer alone."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.gradients = []
        for number, shape in enumerate(_SHAPES * _LAYERS):
            self.add_weight(shape=shape, initializer="normal", name=f"w{number}")
            self.gradients.append(tf.constant(rng.standard_normal(shape, "float32")))
        self.built = True

    def train_step(self, data):
        self.optimizer.apply(self.gradients, self.trainable_variables)
        return {"loss": tf.ones(())}


def update(optimizer, scaling):
    """An optimizer's update, without loss scaling ("none"), Keras', or tfamp's."""
    model = _GivenGradients()
    model.compile(_scaled(optimizer, scaling))
    return model, tf.data.Dataset.from_tensors(tf.zeros((1, 1)))


def step(optimizer, scaling):
    """A training step of 16 dense layers, 2048 and 512 wide in turn."""
    body = [layers.Dense(n, "relu") for n in [4 * _WIDTH, _WIDTH] * _LAYERS]
    model = keras.Sequential([keras.Input((_WIDTH,)), *body])
    model.compile(_scaled(optimizer, scaling), "mean_squared_error")
    x = np.random.default_rng(0).normal(size=(32, _WIDTH)).astype("float32")
    return model, tf.data.Dataset.from_tensor_slices((x, x)).batch(32).cache()


def _scaled(name, scaling):
    kinds = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
    made = kinds[name](1e-3)
    wrappers = {
        "none": lambda optimizer: optimizer,
        "keras": keras.optimizers.LossScaleOptimizer,
        "tfamp": tfamp.LossScaleOptimizer,
    }
    return wrappers[scaling](made)
