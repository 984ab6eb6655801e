"""Modes of single layers under `enable`, in models that are compiled or first built."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp


@pytest.fixture(autouse=True)
def off_at_the_end():
    yield
    tfamp.disable()


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.body(x))


def functional():
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, name="body")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


X, Y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")


def dtypes(model):
    return {
        layer.name: layer.compute_dtype
        for layer in model.layers
        if isinstance(layer, keras.layers.Dense)
    }


def test_functional_model_trains_with_its_own_modes():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    model = functional()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert dtypes(model) == {"body": "bfloat16", "head": "float32"}


@pytest.mark.parametrize("built", [False, True])
def test_subclassed_model_trains_with_its_own_modes(built):
    tfamp.enable("mixed_bfloat16", overrides={"net/head": "float32"})
    model = Subclassed(name="net")
    if built:
        model(X)
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert dtypes(model) == {"body": "bfloat16", "head": "float32"}


def test_unmatched_patterns_raise_when_a_built_model_is_compiled():
    tfamp.enable("mixed_bfloat16", overrides={"hed": "float32", "net/head": "float32"})
    model = functional()
    with pytest.raises(tfamp.OverrideError, match="'hed', 'net/head'") as caught:
        model.compile("sgd", "mse")
    assert "Known paths" in str(caught.value) and "'head'" in str(caught.value)
    assert not model.compiled


def test_unmatched_patterns_raise_when_a_model_is_first_built():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    model = Subclassed(name="net")
    model.compile("sgd", "mse")
    with pytest.raises(tfamp.OverrideError, match="use 'net/head' instead of 'head'"):
        model.fit(X, Y, verbose=0)


def test_a_pattern_may_match_in_another_model():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32", "g/.*": "float32"})
    generator = Subclassed(name="g")
    generator(X)
    functional().compile("sgd", "mse")
    generator.compile("sgd", "mse")


def test_float16_layers_alone_get_loss_scaling():
    tfamp.enable("float32", overrides={"body": "mixed_float16"})
    model = functional()
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    assert dtypes(model) == {"body": "float16", "head": "float32"}


def test_the_callers_dict_is_copied():
    given = {"head": "float32"}
    tfamp.enable("mixed_bfloat16", overrides=given)
    given["nothing"] = "float32"
    functional().compile("sgd", "mse")


def test_status_names_overrides_and_the_mode():
    status = tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    assert status.effective == "mixed_bfloat16"
    assert status.overrides == "'head': float32"
    keras.config.set_dtype_policy("float32")
    assert "was changed" in tfamp.status().reason
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert "map_mixed_bfloat16 to mixed_bfloat16" in tfamp.status().reason


def test_saved_model_is_plain_keras_and_keeps_its_modes(tmp_path):
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    model = functional()
    model.save(tmp_path / "m.keras")
    tfamp.disable()
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert dtypes(loaded) == {"body": "bfloat16", "head": "float32"}
    np.testing.assert_array_equal(loaded(X), model(X))


def test_layers_outside_are_not_watched_after_disable():
    tfamp.enable("mixed_bfloat16", overrides={"dense.*": "float32"})
    tfamp.disable()
    assert keras.layers.Dense(1, dtype="bfloat16")(tf.ones((1, 1))).dtype == tf.bfloat16
