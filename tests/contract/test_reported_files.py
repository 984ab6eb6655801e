"""What users reported of files and mixed precision in Keras, each with its thread."""

import json

import h5py
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

in_both = helpers.in_both


def network(units=2):
    body = layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()
    head = layers.GlobalAveragePooling2D(), layers.Dense(units)
    return keras.Sequential([keras.Input((8, 8, 3)), *body, *head])


IMAGES = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype("float32")


@pytest.mark.issue("keras#17275")
@in_both
@pytest.mark.parametrize("name", ["best.keras", "best.weights.h5", "best.h5"])
def test_checkpoints_of_fit_hold_weights_and_optimizer(mode, name, tmp_path):
    tfamp.enable(mode)
    model, path = network(), str(tmp_path / name)
    model.compile("adam", keras.losses.MeanSquaredError())
    weights = "weights" in name
    saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=weights)
    model.fit(IMAGES, np.ones((16, 2)), 4, verbose=0, callbacks=[saves])
    if weights:
        loaded = network()
        loaded.compile("adam", keras.losses.MeanSquaredError())
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
    else:
        loaded = tfamp.load_model(path)
    np.testing.assert_array_equal(loaded(IMAGES), model(IMAGES))
    before, after = model.optimizer, loaded.optimizer
    assert type(after) is type(before)
    if name == "best.h5":  # In which Keras 3 reads no optimizer's state.
        return
    assert int(after.iterations) == int(before.iterations) > 0
    helpers.assert_equal(after.variables, before.variables)


@pytest.mark.issue("GhostFaceNets#52")
@in_both
def test_files_of_keras_2_with_a_policy_in_them_load(mode, tmp_path):
    """Written by Keras 3, with what Keras 2 has in the place of the dtype policy."""
    model, path = network(), tmp_path / "old.h5"
    model.save(path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        for each in config["config"]["layers"][1:]:
            policy = {"class_name": "Policy", "config": {"name": mode}}
            each["config"]["dtype"] = policy
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(Exception, match="Policy|quantization_mode"):
        keras.models.load_model(path)
    loaded = tfamp.load_model(path)
    assert {each.dtype_policy.name for each in loaded.layers} == {mode}
    np.testing.assert_allclose(loaded(IMAGES), model(IMAGES), atol=0.02)


@pytest.mark.issue("hub#466")
@in_both
@pytest.mark.parametrize("how", ["enable", "set_precision"])
def test_a_savedmodel_inside_a_mixed_model_computes_as_it_was_saved(
    mode, how, tmp_path
):
    inner = network(4)
    inner.export(tmp_path / "saved", verbose=False)

    def build():
        inputs = keras.Input((8, 8, 3))
        saved = layers.TFSMLayer(
            tmp_path / "saved", call_endpoint="serve", name="saved"
        )
        x = layers.Conv2D(3, 3, padding="same", name="stem")(inputs)
        return keras.Model(inputs, layers.Dense(2, name="head")(saved(x)))

    if how == "enable":
        tfamp.enable(mode)
        model = build()
    else:
        model = tfamp.set_precision(build(), mode)
    low = mode.removeprefix("mixed_")
    assert model.get_layer("stem").compute_dtype == low
    saved = model.get_layer("saved")
    assert saved.compute_dtype == "float32"
    np.testing.assert_allclose(saved(IMAGES), inner(IMAGES), atol=1e-5)
    assert np.isfinite(helpers.fit(model, IMAGES, np.ones((16, 2)))).all()


@pytest.mark.issue("tensorflow#46380")
@in_both
@pytest.mark.filterwarnings("ignore:(?s).*tf.lite.Interpreter is deprecated")
def test_tflite_converts_what_is_exported_from_a_mixed_model(mode, tmp_path):
    tfamp.enable(mode)
    model = network()
    tfamp.export_float32(model, tmp_path / "exported")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "exported"))
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    interpreter.allocate_tensors()
    (given,), (found,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    assert given["dtype"] == found["dtype"] == np.float32
    interpreter.set_tensor(given["index"], IMAGES[:1])
    interpreter.invoke()
    outputs = interpreter.get_tensor(found["index"])
    tfamp.set_precision(model, "float32")
    np.testing.assert_allclose(outputs, model(IMAGES[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.issue("tensorflow#58781")
def test_a_savedmodel_of_float32_runs_in_bfloat16_under_the_rewrite(tmp_path):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.Dense(8)])
    model.export(tmp_path / "saved", verbose=False)
    saved = tf.saved_model.load(str(tmp_path / "saved"))
    x = tf.constant(IMAGES.reshape(48, 64))
    with tfamp.graph_rewrite_scope("bfloat16"):
        report = tfamp.graph_rewrite_report(saved.serve, x)
        found = saved.serve(x)
    assert report.effective == "bfloat16" and "bfloat16" in report.after["MatMul"]
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, model(x), atol=0.05)
