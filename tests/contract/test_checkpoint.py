"""Saved state moves between optimizers with and without loss scaling, whole.

The files in tests/data/ were written by `tests/data/make_golden.py`, whose docstring
tells what they hold.
"""

import json
import pathlib

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())["kinds"]
KINDS = list(GOLDEN)
# float16 losses; another processor may round another way.
TOLERANCE = 8 * float(np.finfo("float16").eps)


golden = helpers.load_module(DATA / "make_golden.py")


def check_state(optimizer, kind):
    """Moments, iterations, scale and counters are those that were saved."""
    expected = GOLDEN[kind]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    assert int(inner.iterations) == expected["iterations"]
    moments = sum(np.abs(v).sum() for v in inner.variables[2:])
    assert moments == pytest.approx(expected["moments"], rel=1e-6)
    if optimizer is not inner and kind != "bare":
        assert float(optimizer.loss_scale) == expected["scale"]
        assert int(optimizer.growth_tracker) == expected["tracker"]
        assert int(optimizer.skipped_steps) == expected["skipped_steps"]


def check_goes_on(model, kind):
    losses = golden.train(model, [6, 7])
    np.testing.assert_allclose(losses, GOLDEN[kind]["next_loss"], rtol=TOLERANCE)


@pytest.fixture(params=["float32", "mixed_bfloat16"])
def policy(request):
    """Sets the global dtype policy for one test."""
    with tfamp.policy_scope(request.param):
        yield request.param


# ---- `.keras` ----


@pytest.mark.issue("OpenSeq2Seq#233")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_load_model_brings_every_layout_to_ours_and_to_a_bare_one(kind, scaled, policy):
    keywords = {} if scaled else {"loss_scale": False}
    model = tfamp.load_model(DATA / f"{kind}.keras", **keywords)
    expected = tfamp.LossScaleOptimizer if scaled else keras.optimizers.Adam
    assert type(model.optimizer) is expected
    check_state(model.optimizer, kind)
    check_goes_on(model, kind)
    assert keras.config.dtype_policy().name == policy


def test_settings_of_the_saved_optimizer_come_along():
    ours = tfamp.load_model(DATA / "tfamp.keras").optimizer
    assert (ours.initial_scale, ours.growth_interval) == (golden.SCALE, golden.INTERVAL)
    assert ours.get_config()["hysteresis"] == 2
    stock = tfamp.load_model(DATA / "stock.keras").optimizer
    assert (stock.initial_scale, stock.growth_interval) == (64.0, 4)
    asked = tfamp.load_model(DATA / "tfamp.keras", loss_scale={"growth_interval": 3})
    assert asked.optimizer.growth_interval == 3
    assert asked.optimizer.get_config()["hysteresis"] == 2
    auto = tfamp.load_model(DATA / "auto.keras", loss_scale={"growth_interval": 3})
    assert auto.optimizer.growth_interval == 3
    check_state(auto.optimizer, "auto")


@pytest.mark.parametrize("enabled", [False, True])
def test_plain_keras_loads_our_file_whole(enabled, policy):
    if enabled:
        tfamp.enable("float32")
    try:
        model = keras.models.load_model(DATA / "tfamp.keras")
    finally:
        tfamp.disable()
    assert type(model.optimizer) is tfamp.LossScaleOptimizer
    check_state(model.optimizer, "tfamp")
    check_goes_on(model, "tfamp")


def test_plain_keras_loses_what_load_model_keeps():
    """The reason for `load_model`; fails when Keras mends it."""
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model = keras.models.load_model(DATA / "auto.keras")
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("enabled", [False, True])
def test_model_saved_mid_training_goes_on_as_if_it_had_not_been(enabled, tmp_path):
    tfamp.enable("mixed_float16")
    model = golden.build("auto")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    golden.train(model, range(5))
    model.save(tmp_path / "model.keras")
    expected = golden.train(model, [5, 6, 7])
    tfamp.disable()
    if enabled:
        tfamp.enable("float32")
    load = tfamp.load_model if enabled else keras.models.load_model
    loaded = load(tmp_path / "model.keras")
    tfamp.disable()
    assert golden.train(loaded, [5, 6, 7]) == expected
    assert loaded.get_layer("first").compute_dtype == "float16"


def test_float32_model_stays_without_loss_scaling_unless_asked(tmp_path):
    model = golden.build("bare")
    golden.train(model, [0, 1])
    model.save(tmp_path / "model.keras")
    expected = golden.train(model, [3, 4])
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert golden.train(loaded, [3, 4]) == expected
    asked = tfamp.load_model(
        tmp_path / "model.keras", loss_scale={"initial_scale": 2.0}
    )
    assert float(asked.optimizer.loss_scale) == 2.0
    # Up to rounding: Adam's update behind the check is one kernel.
    assert golden.train(asked, [3, 4]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_model_that_was_never_trained_loads_in_silence(kind, tmp_path):
    golden.build(kind).save(tmp_path / "model.keras")
    model = tfamp.load_model(tmp_path / "model.keras")
    assert int(model.optimizer.iterations) == 0
    assert np.isfinite(golden.train(model, [0])).all()


@pytest.mark.issue("tf-keras#376")
@pytest.mark.parametrize("scaled", [False, True])
def test_several_optimizers_are_told_from_one_with_loss_scaling(scaled, tmp_path):
    members = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1), {".*first.*": keras.optimizers.Adam(0.1)}
    )
    made = keras.optimizers.MultiOptimizer(members)
    model = golden.build("bare")
    model.compile(tfamp.wrap_optimizer(made) if scaled else made, "mse")
    golden.train(model, [0, 1])
    model.save(tmp_path / "model.keras")
    expected = golden.train(model, [3, 4])
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, tfamp.LossScaleOptimizer) is scaled
    assert golden.train(loaded, [3, 4]) == expected


@keras.saving.register_keras_serializable(package="test_checkpoint")
class OwnCompile(keras.Sequential):
    def compile(self, optimizer):
        super().compile(optimizer, "mse")


def test_model_that_loading_cannot_compile_is_an_error_with_the_way_out(tmp_path):
    layers = [keras.Input((2,)), keras.layers.Dense(1, name="only")]
    model = OwnCompile(layers)
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
    golden.train(model, [0, 1])
    path = tmp_path / "model.keras"
    model.save(path)
    expected = golden.train(model, [3, 4])
    with pytest.warns(UserWarning, match="custom"):
        with pytest.raises(ValueError, match="compile_from_config"):
            tfamp.load_model(path)
    loaded = tfamp.load_model(path, compile=False)
    loaded.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
    loaded.load_weights(path)
    assert golden.train(loaded, [3, 4]) == expected


@pytest.mark.parametrize("loss_scale", [True, None, 3])
def test_other_kinds_of_loss_scale_are_refused(loss_scale):
    with pytest.raises(TypeError, match="'auto', a dict"):
        tfamp.load_model(DATA / "auto.keras", loss_scale=loss_scale)
    with pytest.raises(TypeError, match="growth_intervall"):
        tfamp.load_model(DATA / "auto.keras", loss_scale={"growth_intervall": 3})


# ---- `.weights.h5` and legacy `.h5` ----


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_layout_load_into_ours(kind, built):
    with tfamp.policy_scope("mixed_float16"):
        model = golden.build("tfamp")
    if built:
        golden.train(model, [8])
    model.load_weights(DATA / f"{kind}.weights.h5")
    check_goes_on(model, kind)


def test_legacy_file_keeps_the_moments_that_stock_keras_drops(tmp_path):
    with tfamp.policy_scope("mixed_float16"):
        model = golden.build("tfamp")
    # Keras 3.15 cannot load a loss by its name from such a file.
    model.compile(model.optimizer, keras.losses.MeanSquaredError())
    golden.train(model, range(6))
    model.save(tmp_path / "model.h5")
    expected = golden.train(model, [6, 7])
    loaded = tfamp.load_model(tmp_path / "model.h5")
    assert golden.train(loaded, [6, 7]) == expected


# ---- tf.train.Checkpoint ----


def itself(optimizer):
    return optimizer


# Whose checkpoint, who restores it, and into what of his; whether all is found.
RESTORED = [
    ("tfamp", "tfamp", itself, True),
    # The counters that stock Keras does not have keep their first values.
    *(("stock", "tfamp", itself, False), ("auto", "tfamp", itself, False)),
    ("bare", "tfamp", lambda ours: ours.inner_optimizer, False),
    ("tfamp", "bare", lambda bare: tf.train.Checkpoint(inner_optimizer=bare), True),
]


@pytest.mark.issue("keras#15709")
@pytest.mark.parametrize(("kind", "into", "part", "whole"), RESTORED)
def test_checkpoints_restore_into_ours_and_ours_into_a_bare_one(
    kind, into, part, whole
):
    with tfamp.policy_scope("mixed_float16"):
        model = golden.build(into)
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=part(model.optimizer))
    status = checkpoint.read(str(DATA / f"{kind}.checkpoint")).expect_partial()
    if whole:
        status.assert_existing_objects_matched()
    check_state(model.optimizer, kind)
    check_goes_on(model, kind)
