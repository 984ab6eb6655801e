"""What users reported of Keras' quantized layers and mixed precision, each thread."""

import helpers
import keras
import numpy as np
import pytest
from keras import layers

import tfamp

pytestmark = [
    pytest.mark.usefixtures("disabled"),
    pytest.mark.filterwarnings(
        "ignore:.*(no speed-up|quantize` method|model.quantize)"
    ),
]

X = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")


def network():
    hidden = layers.Dense(256, "relu"), layers.LayerNormalization()
    return keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(8)])


def fit(model):
    few = {"batch_size": 16, "epochs": 3, "jit_compile": False}
    return helpers.fit(model, X, X[:, :8], "adam", **few)


def policies(model):
    return [layer.dtype_policy.name for layer in model.layers]


@pytest.mark.issue("keras#23479", "keras#19671")
def test_a_model_trains_and_predicts_in_float8_by_one_call():
    tfamp.enable("float8")
    model = network()
    losses = fit(model)
    assert losses == sorted(losses, reverse=True)
    low, norm, head = policies(model)
    assert low == "float8_from_mixed_bfloat16" and "float8" not in norm
    assert head == "float32"  # An output, and small.
    before = [v.numpy() for v in model.variables]
    predicted = model.predict(X, verbose=0)
    assert predicted.dtype == "float32" and np.isfinite(predicted).all()
    helpers.assert_equal(model.variables, before)  # Scales are those of the training.


@pytest.mark.issue("keras#19356", "keras-hub#1537")
@pytest.mark.parametrize("kind", helpers.names_of(["int8", "int4"], ["int8"]))
def test_lora_on_integers_trains_in_a_mixed_mode(kind, tmp_path):
    model = network()
    model.quantize(kind)
    tfamp.enable("mixed_bfloat16")
    tfamp.set_precision(model, "mixed_bfloat16")
    saved = tmp_path / "model.keras"
    model.save(saved)
    loaded = tfamp.load_model(saved)
    assert policies(loaded) == policies(model)
    np.testing.assert_array_equal(loaded(X), model(X))
    model.layers[0].enable_lora(4)
    kept = model.layers[0]._kernel.numpy()
    losses = fit(model)
    assert losses == sorted(losses, reverse=True)
    np.testing.assert_array_equal(kept, model.layers[0]._kernel)
    assert policies(model)[0].startswith(kind)
    assert policies(model)[0].endswith("_from_mixed_bfloat16")


@pytest.mark.issue("keras#19263")
def test_int8_layers_stay_in_float32_where_others_are_float16():
    model = network()
    model.quantize("int8")
    with pytest.raises(ValueError, match="compute_dtype='float16'"):  # Keras' own.
        keras.dtype_policies.get("int8_from_mixed_float16")
    tfamp.set_precision(model, "mixed_float16")
    assert policies(model)[0] == "int8_from_float32"
    assert np.isfinite(model(1e3 * X)).all()
