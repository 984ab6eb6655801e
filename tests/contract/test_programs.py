"""What runs as few programs on a GPU: the same training, here on a CPU as if on one."""

import contextlib

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import hardware

L, OPT = keras.layers, keras.optimizers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)).astype("float32"), np.ones((24, 2), "float32")
IDS = np.asarray([[1, 2, 1, 3], [3, 3, 0, 1]] * 12, "int32")


@contextlib.contextmanager
def as_if_on_a_gpu(mode, **keywords):
    """Scopes `tfamp.enable` for an H100; XLA compiles the programs for this CPU."""
    with (
        helpers.enabled(mode, **keywords) as status,
        hardware.simulated(hardware.DEVICES["h100"]),
    ):
        yield status


def dense():
    inputs = keras.Input((6,))
    x = L.LayerNormalization()(L.Dense(8, "gelu")(L.BatchNormalization()(inputs)))
    return keras.Model(inputs, L.Dense(2)(x))


def trained(optimizer, build=dense, x=X, y=Y, batch=8, steps=6):
    """Weights, the optimizer's state and the logs of a fit of batches of one size."""
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.batch(batch, drop_remainder=True).repeat()
    logs = model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False).history
    state = [np.asarray(v.value, "float64") for v in model.optimizer.variables]
    return [np.asarray(w, "float64") for w in model.get_weights()], state, logs


def check_same(found, expected, rtol=2e-5):
    for got, want in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        scale = np.abs(want).max() if want.size else 0
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(scale, 1e-6))
    for name, values in expected[2].items():
        np.testing.assert_allclose(found[2][name], values, rtol=rtol)


def embedding():
    inputs = keras.Input((4,), dtype="int32")
    x = L.GlobalAveragePooling1D()(L.Embedding(5, 8)(inputs))
    return keras.Model(inputs, L.Dense(2)(x))


SCHEDULE = OPT.schedules.CosineDecay(0.05, 10)
OPTIMIZERS = {
    "SGD": lambda: OPT.SGD(0.05),
    "Nesterov": lambda: OPT.SGD(0.05, momentum=0.9, nesterov=True, clipvalue=0.1),
    "Adam": lambda: OPT.Adam(0.01, amsgrad=True, epsilon=1e-3, clipnorm=0.3),
    "AdamW": lambda: OPT.AdamW(SCHEDULE, epsilon=1e-3, global_clipnorm=0.5),
    "Adamax": lambda: OPT.Adamax(0.01, epsilon=1e-3),
    "Nadam": lambda: OPT.Nadam(0.01, epsilon=1e-3),
    "Lamb": lambda: OPT.Lamb(0.01, epsilon=1e-3),
    "Lion": lambda: OPT.Lion(1e-4),
    "RMSprop": lambda: OPT.RMSprop(0.01, centered=True, momentum=0.9, epsilon=1e-2),
    "Adagrad": lambda: OPT.Adagrad(0.05),
    "Adadelta": lambda: OPT.Adadelta(0.5, epsilon=1e-3),
    "Adafactor": lambda: OPT.Adafactor(0.01),
    "Ftrl": lambda: OPT.Ftrl(0.05),
    "averages": lambda: OPT.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: OPT.SGD(0.05, gradient_accumulation_steps=2, clipnorm=0.5),
    "averaged": lambda: OPT.SGD(0.05, gradient_accumulation_steps=3, use_ema=True),
}
if hasattr(OPT, "Muon"):
    OPTIMIZERS["Muon"] = lambda: OPT.Muon(0.01)
if hasattr(OPT, "ScheduleFreeAdamW"):
    OPTIMIZERS["ScheduleFreeAdamW"] = lambda: OPT.ScheduleFreeAdamW(0.01, epsilon=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("build", [dense, embedding])
def test_every_stock_optimizer_trains_as_keras_has_it(name, build):
    x = IDS if build is embedding else X
    expected = trained(OPTIMIZERS[name](), build, x)
    with as_if_on_a_gpu("float32", fused_kernels=True):
        found = trained(OPTIMIZERS[name](), build, x)
        assert "the last update" not in tfamp.status().fused_kernels
    check_same(found, expected, 2e-4 if name == "Muon" else 2e-5)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "accumulation", "averages"])
@pytest.mark.parametrize("build", [dense, embedding])
def test_a_scaled_update_is_the_same_and_a_skipped_one_changes_nothing(name, build):
    x = IDS if build is embedding else X
    y = Y.copy()
    y[8:16] = np.inf  # The second batch of three.

    def scaled():
        return tfamp.LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=2.0**10)

    expected = trained(scaled(), build, x, y, steps=8)
    with as_if_on_a_gpu("float32", fused_kernels=True):
        found = trained(scaled(), build, x, y, steps=8)
    check_same(found, expected)
    assert 3.0 in found[1]  # Steps that were skipped.
