"""What `NumericsMonitor(every=100)` costs: training steps with it and without, in turn.

    python results/numerics/monitor_cost.py

Two equal models take a step each, in turn, so that both meet the same load. A ratio is
of the seconds of 100 steps, one of them monitored; told are the median of 12, and their
range.
"""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tfamp

STEPS, ROUNDS = 100, 12


def dense(units):
    """Four dense layers."""
    inputs = keras.Input((units,))
    x = inputs
    for _ in range(4):
        x = keras.layers.Dense(units, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), (units,)


def convolutions(side):
    """Six convolutions with batch normalization."""
    inputs = x = keras.Input((side, side, 3))
    for filters in (16, 16, 32, 32, 64, 64):
        x = keras.layers.Conv2D(filters, 3, 1 + (filters > x.shape[-1] > 3))(x)
        x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), (side, side, 3)


def steps(build, size, callbacks):
    """Yields the seconds of one training step after the other."""
    keras.utils.set_random_seed(0)
    model, shape = build(size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    random = np.random.default_rng(0)
    x = random.normal(size=(32, *shape)).astype("float32")
    y = random.integers(0, 10, 32)
    batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    model.make_train_function()
    callbacks = keras.callbacks.CallbackList(callbacks, model=model)
    callbacks.on_train_begin()
    while True:
        start = time.perf_counter()
        callbacks.on_train_batch_begin(0)
        logs = model.train_function(batches)
        callbacks.on_train_batch_end(0, {"loss": float(logs["loss"])})
        yield time.perf_counter() - start


tfamp.enable("mixed_bfloat16")
for build, size in ((dense, 1024), (convolutions, 48)):
    monitor = tfamp.NumericsMonitor(every=STEPS, log_dir=None)
    pair = steps(build, size, [monitor]), steps(build, size, [])
    rounds = [
        np.sum([[next(each) for each in pair] for _ in range(STEPS)], axis=0)
        for _ in range(1 + ROUNDS)
    ]
    ratios = [with_it / without for with_it, without in rounds[1:]]  # The first traces.
    print(
        f"{build.__name__}: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), "
        f"{10 * rounds[-1][1]:.1f} ms a step without it"
    )
