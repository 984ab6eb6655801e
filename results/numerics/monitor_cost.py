"""What `NumericsMonitor(every=100)` costs: `fit` with it and without, in turn.

    python results/numerics/monitor_cost.py

Epochs of 100 steps, the first of each run (which traces) left out; the ratio is of the
medians of a pair of runs, and the median of five pairs is told.
"""

import itertools
import statistics
import time

import keras
import numpy as np

import tfamp

STEPS, EPOCHS, PAIRS = 100, 4, 5


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


def seconds(build, size, callbacks):
    """Returns the median seconds of an epoch after the first."""
    keras.utils.set_random_seed(0)
    model, shape = build(size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    random = np.random.default_rng(0)
    x = random.normal(size=(32 * STEPS, *shape)).astype("float32")
    y, times = random.integers(0, 10, len(x)), []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: times.append(time.perf_counter())
    )
    model.fit(x, y, 32, EPOCHS, verbose=0, callbacks=[*callbacks, clock])
    return statistics.median(b - a for a, b in itertools.pairwise(times))


tfamp.enable("mixed_bfloat16")
for build, size in ((dense, 1024), (convolutions, 48)):
    ratios = []
    for _ in range(PAIRS):
        monitor = tfamp.NumericsMonitor(every=100, log_dir=None)
        with_it = seconds(build, size, [monitor])
        ratios.append(with_it / seconds(build, size, []))
    found = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"{build.__name__}: {statistics.median(ratios):.3f} (all: {found})")
