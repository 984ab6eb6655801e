"""A plain custom loop in a `tf.function`: nothing of tfamp is converted or printed."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from tensorflow.python.autograph.impl import api

import tfamp

LOOP = """
import keras
import numpy as np
import tensorflow as tf

import tfamp

tfamp.enable()
model = keras.Sequential([
    keras.Input((8,)),
    keras.layers.Dense(16, "gelu"),
    keras.layers.LayerNormalization(),
    keras.layers.Dropout(0.1),
    keras.layers.Dense(4),
])
optimizer = tfamp.wrap_optimizer(keras.optimizers.Adam())
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, np.arange(64) % 4)).batch(16)


@tf.function
def train(data):
    total = 0.0
    for features, labels in data:
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(features, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if optimizer.skipped_steps > 100:
            tf.print("too many steps were skipped")
        total += loss
    return total


for _ in range(2):
    assert np.isfinite(float(train(data)))
"""


@pytest.fixture
def converted(monkeypatch):
    """Returns a list of the functions that AutoGraph converts from now on."""
    found, transform = [], api._TRANSPILER.transform

    def note(function, context):
        found.append(f"{function.__module__}.{function.__qualname__}")
        return transform(function, context)

    monkeypatch.setattr(api._TRANSPILER, "transform", note)
    return found


@pytest.mark.filterwarnings("ignore:.*no speed-up is expected")
@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_autograph_converts_the_users_code_alone(mode, converted, disabled):
    tfamp.enable(mode, on_unsupported="warn")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.AdamW(weight_decay=0.1, global_clipnorm=1.0),
        growth_interval=tfamp.GeometricGrowthInterval(),
    )

    @tf.function
    def step(features):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(features, training=True) ** 2)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if optimizer.check_finite(gradients):  # AutoGraph's part.
            loss = 2 * loss
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss / optimizer.usable_scale()

    step(np.ones((2, 8), "float32"))
    assert any("step" in name for name in converted)
    assert [name for name in converted if name.startswith("tfamp")] == []


@pytest.mark.training
def test_a_plain_loop_prints_nothing(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    done = workers.run_python(script, TF_CPP_MIN_LOG_LEVEL="3")
    # TensorFlow's C++ libraries write of their own start, XLA's too, at any level.
    noise = re.compile(r"\w\.(cc|h):\d+\]|All log messages before absl")
    lines = [line for line in done.stderr.splitlines() if not noise.search(line)]
    assert (done.stdout, lines) == ("", [])
