"""Models of every kind, as tests convert, export and serve them; and batches for them.

Each is made in the dtype policy in force; those of `FIXED` fix dtypes of their own.
"""

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L


def functional():
    x = keras.Input((4, 4), name="x")
    y = L.MultiHeadAttention(2, 2, dropout=0.1, name="mha")(x, x)
    lstm = L.LSTM(3, return_sequences=True, name="lstm")
    y = L.Bidirectional(lstm, name="both")(y)
    y = L.TimeDistributed(L.Dense(3, name="dense"), name="each")(y)
    y = L.Dense(4, activation="softmax", name="gate")(y)
    y = L.Dense(2, name="head")(L.Flatten(name="flat")(y))
    y = L.Dropout(0.5, name="drop")(L.Activation("sigmoid", name="act")(y))
    return keras.Model(x, y, name="outer")


def convolutions():
    image = keras.Input((8, 8, 3), name="image")
    twice = L.Conv2D(4, 3, padding="same", name="twice")
    x = L.Conv2D(4, 3, padding="same", use_bias=False)(image)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.GlobalAveragePooling2D()(L.Dropout(0.5)(twice(twice(x)) + x))
    return keras.Model(image, L.Dense(2, name="head")(x))


def shared():
    """A layer is shared between a model and two nested ones."""
    both = L.Dense(4, name="both")
    a, b, x = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    left = keras.Model(a, L.ReLU(name="relu")(both(a)), name="left")
    right = keras.Sequential([b, L.Dense(4, name="own"), both], name="right")
    return keras.Model(x, [right(left(x)), both(x)])


class Block(L.Layer):
    """Takes no dtype, makes layers in `__init__` and in `build`, and pins one."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.first = L.Dense(3)
        self.norm = L.LayerNormalization(dtype="float32", name="norm")

    def build(self, shape):
        self.last = L.Dense(3, name="last")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block("block"), L.TimeDistributed(Block("each"))]
        inner = keras.Input((3,))
        self.inner = keras.Model(inner, L.Dense(3)(inner), name="inner")
        self.head = L.Dense(2, name="head")

    def call(self, x):
        x = self.blocks[1](self.blocks[0](x)[:, None, :])[:, 0]
        return {"y": keras.activations.tanh(self.head(self.inner(x)))}

    def get_config(self):
        return {"name": self.name}


@keras.saving.register_keras_serializable("tfamp_tests")
class OwnClass(keras.Model):
    """A functional model of a class of its own, with a `call` that no graph shows."""

    def __init__(self, units=3, **kwargs):
        x = keras.Input((4,), name="x")
        self.units, self.body = units, L.Dense(units, name="body")
        super().__init__(x, L.Dense(2, name="head")(self.body(x)), **kwargs)

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)

    def get_config(self):
        return {"units": self.units, "name": self.name}


class OwnStep(keras.Sequential):
    """Trains by a step of its own, on the mean of the squares."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), "float32") - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class TracedLayer(L.Layer):
    """Its `call` is a function of TensorFlow's that keeps what it traced."""

    @tf.function(reduce_retracing=True)
    def call(self, x):
        return keras.ops.matmul(x, keras.ops.ones((4, 2), x.dtype))


class OnHost(L.Layer):
    """What XLA does not compile."""

    def call(self, x):
        made = tf.numpy_function(lambda x: x, [x], x.dtype)
        return x + tf.stop_gradient(tf.ensure_shape(made, x.shape))


class Traced(keras.Model):
    """So is its own; it has no configuration, and a lambda."""

    def __init__(self, head):
        super().__init__(name="net")
        self.traced, self.head = TracedLayer(), head
        self.twice = L.Lambda(lambda x: x * 2)

    @tf.function
    def call(self, x):
        return self.head(self.twice(self.traced(x)))


def tokens():
    ids = keras.Input((None,), dtype="int32", name="ids")
    mask = keras.Input((None,), dtype="bool", name="mask")
    weight = keras.Input((1,), name="weight")
    x = L.Embedding(7, 4)(ids)
    x = L.MultiHeadAttention(2, 2)(x, x, attention_mask=keras.ops.expand_dims(mask, 1))
    x = L.LayerNormalization()(x)
    x = L.Bidirectional(L.LSTM(3, return_sequences=True))(x)
    x = L.EinsumDense("bti,io->bto", (None, 2), bias_axes="o")(x)
    return keras.Model(
        {"ids": ids, "mask": mask, "weight": weight},
        {"steps": x, "mean": keras.ops.multiply(keras.ops.mean(x, axis=1), weight)},
    )


def masked_rnn():
    ids = keras.Input((5,), dtype="int32", name="ids")
    return keras.Model(ids, L.GRU(3)(L.Embedding(7, 4, mask_zero=True)(ids)))


def tied_embedding():
    ids = keras.Input((6,), dtype="int64", name="ids")
    table = L.ReversibleEmbedding(9, 4, name="table")
    return keras.Model(ids, table(table(ids), reverse=True))


def stateful_rnn():
    step = keras.Input((3, 2), batch_size=2)
    return keras.Model(step, L.Dense(2)(L.GRU(3, stateful=True)(step)))


def normalized():
    scale = L.Normalization(name="scale")
    scale.adapt(np.float32([[1.001, 7.0], [2.002, 9.0], [3.003, 8.0]]))
    stack = [keras.Input((2,)), scale, L.Dense(3, name="body")]
    return keras.Sequential([*stack, L.Dense(2, name="head")])


def sequential():
    return keras.Sequential([keras.Input((4,)), L.Dense(5), L.Dense(2)])


def low_rank():
    model = sequential()
    model.layers[0].enable_lora(1)
    model.layers[0].lora_kernel_b.assign(np.ones((1, 5)))
    return model


def called(model):
    model(np.ones((2, 4), np.float32))
    return model


MODELS = {
    "functional": functional,
    "convolutions": convolutions,
    "shared": shared,
    "subclassed": lambda: called(Subclassed(name="model")),
    "own class": OwnClass,
    "tf.function": lambda: called(Traced(L.Dense(2, name="head"))),
    "tokens": tokens,
    "masked RNN": masked_rnn,
    "tied embedding": tied_embedding,
    "stateful RNN": stateful_rnn,
    "normalized": normalized,
    "without input": lambda: called(keras.Sequential([L.Dense(5), L.Dense(2)])),
    "layer in graph": lambda: with_layer(Block()),
    "LoRA": low_rank,
}


# ---- Models that fix dtypes themselves ----


def with_layer(layer):
    x = keras.Input((4,))
    return keras.Model(x, layer(x))


class FixedDtype(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float16"})

    def call(self, x):
        return x * 2


class FixedWeight(L.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(), dtype="bfloat16", name="w")

    def call(self, x):
        return x * keras.ops.cast(self.w, x.dtype)


def casts_and_constants():
    x = keras.Input((4,), dtype="float16")
    low: Any = keras.ops.cast(L.Dense(4)(x), "bfloat16")
    low = low + tf.constant([[1.0, 2.0, 3.0, 4.0]], tf.bfloat16)
    half: Any = keras.ops.cast(low, "float16")
    return keras.Model(x, half * np.float16(0.5))


def per_layer_dtypes():
    x = keras.Input((4,))
    y = L.Dense(4, dtype="mixed_bfloat16")(x)
    y = L.Dense(4, dtype="mixed_float16")(y)
    y = L.Dense(4, dtype="bfloat16")(y)  # 16-bit weights, too.
    return keras.Model(x, L.Dense(2, dtype="float32")(y))


def policy_map():
    """By a map without a default."""
    half = keras.DTypePolicy("mixed_float16")
    policies = keras.dtype_policies.DTypePolicyMap(policy_map={"body": half})
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(L.Dense(4, dtype=policies, name="body")(x)))


def random_in_inference():
    x = keras.Input((4,))
    return keras.Model(x, L.GaussianNoise(1.0)(L.Dense(3)(x), training=True))


FIXED = {
    "compute dtype": lambda: with_layer(FixedDtype()),
    "weight dtype": lambda: with_layer(FixedWeight()),
    "casts and constants": casts_and_constants,
    "per-layer dtypes": per_layer_dtypes,
    "policy map": policy_map,
    "random in inference": random_in_inference,
}


# ---- What tests ask of them ----


def batch(model, rows=5):
    """Inputs for a model of `MODELS`, with five rows where any number will do."""
    random = np.random.default_rng(3)

    def make(tensor):
        sizes = [size or rows for size in tensor.shape]
        if tf.as_dtype(tensor.dtype).is_floating:
            return random.normal(size=sizes).astype("float32")
        return np.ones(sizes, tensor.dtype)

    if hasattr(type(model), "operations"):  # A model made of a graph.
        return keras.tree.map_structure(make, model.input)
    known = getattr(model, "inputs", None)  # Classes of our own take four numbers.
    return make(known[0] if known else keras.KerasTensor((None, 4)))


def give_weights(model, twin):
    """Gives a twin the weights and states of a model."""
    for ours, theirs in zip(states(twin), states(model), strict=True):
        ours.assign(theirs)


def states(model):
    """Variables of a model, with the states of recurrent layers."""
    held = (getattr(each, "states", None) or () for each in model._flatten_layers())
    return [*model.weights, *keras.tree.flatten(list(held))]


@contextlib.contextmanager
def unchanged(model):
    """Asserts that what is within leaves a model as it was, attributes included."""
    parts = [model, *model._flatten_layers()]
    variables = [np.array(each) for each in model.variables]
    before = [dict(vars(each)) for each in parts]
    losses = [float(each) for each in model.losses]
    yield
    for each, old in zip(parts, before, strict=True):
        assert vars(each).keys() == old.keys()
        assert [name for name in old if vars(each)[name] is not old[name]] == []
    for variable, old in zip(model.variables, variables, strict=True):
        np.testing.assert_array_equal(variable, old)
    assert [float(each) for each in model.losses] == losses


def described(model):
    """All of a model that a conversion or an export could disturb, as plain values."""
    flat = model._flatten_layers()
    maps = [p for p in (x.dtype_policy for x in flat) if hasattr(p, "items")]
    return {
        "values": [(v.path, v.dtype, v.numpy().tobytes()) for v in model.variables],
        "states": [np.asarray(v).tolist() for v in states(model)],
        "policies": [(x.name, x.dtype_policy.name, x.trainable) for x in flat],
        "maps": [(name, each.name) for one in maps for name, each in one.items()],
        "nodes": [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in flat],
        "calls": ["call" in vars(x) for x in flat],
        "compiled": (model.compiled, getattr(model, "optimizer", None)),
    }
