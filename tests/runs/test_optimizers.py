import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.kernels import bias_gradient
from tfamp.runs import base_config, optimizers
from tfamp.updates import schedules

EPSILON = tfamp.float_format("float32").epsilon
CLIPPED = {"clip_global_norm": 1.0}


def create(batches=10, scale=None, **fields):
    """Returns the optimizer of these fields, with a loss scale if one is given."""
    config = base_config.get_config().optimizer
    config.update(fields)
    made = optimizers.create(config, batches)
    return tfamp.LossScaleOptimizer(made, scale) if scale else made


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("constant", 0, 0.5),  # First of two warm-up steps.
        ("constant", 1, 1.0),
        ("constant", 9, 1.0),
        ("linear", 2, 1.0),
        ("linear", 6, 0.5),
        ("linear", 10, 0.0),
        ("linear", 99, 0.0),
        ("cosine", 4, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 10, 0.0),
    ],
)
def test_schedule_follows_its_table(decay, step, expected):
    schedule = schedules.WarmupSchedule(1.0, 10, warmup_steps=2, decay=decay)
    assert float(schedule(step)) == pytest.approx(expected, abs=4 * EPSILON)


def test_schedule_survives_serialization():
    schedule = schedules.WarmupSchedule(0.5, 10, 2, "cosine", 3)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )
    assert again.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sgd", {"momentum": 0.5, "nesterov": True}),
        ("adam", {"epsilon": 1e-6}),
        ("adamw", {"epsilon": 1e-3, "weight_decay": 0.1}),
    ],
)
def test_each_optimizer_has_its_settings(name, given):
    made = create(name=name, clip_global_norm=1.0, **given)
    expected = {"global_clipnorm": 1.0, "weight_decay": None, **given}
    assert type(made).__name__.lower() == name
    assert {key: getattr(made, key) for key in expected} == expected


class BetaNet(keras.Model):
    """A model in whose paths the words of the rule stand for something else."""

    def __init__(self):
        super().__init__(name="beta_net")
        self.words = keras.layers.Embedding(3, 2, name="words")
        self.dense = keras.layers.Dense(2, name="bias_free")
        self.norm = keras.layers.LayerNormalization(name="norm")

    def call(self, x):
        return self.norm(self.dense(self.words(x)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_is_neither_bias_nor_normalization_decays(name):
    # With gradients of 0 there is nothing but decay: by learning_rate * 0.1.
    made, model = create(name=name, weight_decay=0.1, learning_rate=0.5), BetaNet()
    model(np.zeros((1, 1), "int32"))
    variables = model.trainable_variables
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    made.build(variables)
    made.apply([tf.zeros(v.shape) for v in variables], variables)
    decayed = {v.path for v in variables if np.all(np.asarray(v) == np.float32(0.95))}
    unchanged = {v.path for v in variables if np.all(np.asarray(v) == 1.0)}
    assert decayed == {"beta_net/bias_free/kernel", "beta_net/words/embeddings"}
    assert unchanged == {
        "beta_net/bias_free/bias",
        "beta_net/norm/gamma",
        "beta_net/norm/beta",
    }


plain_and_scaled = pytest.mark.parametrize(
    "scale", [None, 2.0**8], ids=["plain", "loss scale"]
)


@plain_and_scaled
def test_gradients_are_clipped_once_unscaled(scale):
    # SGD with a rate of 1: the update is the clipped gradient, (0.6, 0.8).
    made = create(scale=scale, name="sgd", learning_rate=1.0, **CLIPPED)
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    made.build(variables)
    scaled = made.scale_loss(tf.constant(1.0))
    made.apply([tf.reshape(size * scaled, [1]) for size in (3.0, 4.0)], variables)
    np.testing.assert_allclose(
        [float(v[0]) for v in variables], [-0.6, -0.8], rtol=4 * EPSILON
    )


# ---- Gradient accumulation ----


@pytest.mark.parametrize(
    ("batches", "accumulation", "expected"),
    [
        (6, 1, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (18, 3, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (19, 3, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),  # One batch is left over.
    ],
    ids=["none", "windows of 3", "left over"],
)
@plain_and_scaled
def test_learning_rate_follows_updates_and_not_batches(
    batches, accumulation, expected, scale
):
    fields = {"name": "sgd", "schedule": "linear", "warmup_fraction": 0.34}
    fields |= {"learning_rate": 1.0, "accumulation_steps": accumulation}
    made = create(batches, scale, **fields)
    variable = keras.Variable(0.0)
    made.build([variable])
    values = [0.0]
    for _ in range(batches):
        made.apply([made.scale_loss(tf.constant(1.0))], [variable])
        values.append(float(variable))
    # Keras' momentum: change = 0.9 * change before - rate * gradient.
    changes = [b - a for a, b in itertools.pairwise(values[::accumulation])]
    rates = [0.9 * a - b for a, b in itertools.pairwise([0.0, *changes])]
    np.testing.assert_allclose(rates, expected, atol=64 * EPSILON)
    assert int(made.iterations) == len(expected)


@pytest.fixture
def summed_rows():
    """As every run of the trainer has them."""
    bias_gradient.EMBEDDING_HOOKS.install()
    yield
    bias_gradient.EMBEDDING_HOOKS.remove()


@plain_and_scaled
def test_accumulated_batches_train_like_one_large_batch(scale, summed_rows):
    ids = np.random.default_rng(0).integers(0, 20, (16, 8))
    labels = ids[:, 0] % 2
    large, small = (classifier(scale, accumulation) for accumulation in (1, 4))
    parts = list(zip(np.split(ids, 4), np.split(labels, 4), strict=True))
    expected = [train_on(large, ids, labels) for _ in range(4)]
    means = [np.mean([train_on(small, *part) for part in parts]) for _ in range(4)]
    assert expected[-1] < expected[0] - 0.01
    # A mean of 4 means rounds differently, and Adam divides by a small root.
    np.testing.assert_allclose(means, expected, rtol=64 * EPSILON)


def classifier(scale, accumulation):
    """A model of sparse gradients whose updates are clipped and decay the weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    body = [layers.Embedding(20, 4), layers.LayerNormalization(), layers.Flatten()]
    model = keras.Sequential([keras.Input((8,)), *body, layers.Dense(2)])
    fields = {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1, **CLIPPED}
    fields |= {
        "epsilon": 1e-6,
        "schedule": "linear",
        "accumulation_steps": accumulation,
    }
    made = create(5 * accumulation, scale, **fields)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(made, loss, jit_compile=False)
    return model


def train_on(model, ids, labels):
    """Trains on a batch; returns its loss."""
    model.reset_metrics()
    return float(model.train_on_batch(ids, labels))


def test_accumulation_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="Received: 4, batches: 3"):
        create(3, accumulation_steps=4)
