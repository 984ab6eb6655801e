"""Label smoothing of integer classes, against Keras' of one-hot labels."""

import keras
import numpy as np
import pytest

from tfamp.training import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (6, 4)).astype("float32")
LABELS = np.array([0, 3, 2, 2, 1, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(6,), (6, 1)], ids=str)
def test_loss_is_keras_own_of_one_hot_labels(smoothing, shape):
    found = losses.SmoothedCrossEntropy(smoothing)(LABELS.reshape(shape), LOGITS)
    expected = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing
    )(np.eye(4)[LABELS], LOGITS)
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo("float32").eps)


def test_loss_is_the_formula_in_float64():
    shifted = LOGITS.astype("float64")
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    expected = -(0.9 * logs[range(6), LABELS] + 0.1 * logs.mean(1))
    found = losses.SmoothedCrossEntropy(0.1, reduction=None)(LABELS, LOGITS)
    np.testing.assert_allclose(found, expected, rtol=16 * np.finfo("float32").eps)


def test_examples_can_be_weighted():
    weights = np.array([1, 0, 0, 0, 0, 0], "float32")
    loss = losses.SmoothedCrossEntropy(0.1, reduction="sum")
    alone = loss(LABELS[:1], LOGITS[:1])
    np.testing.assert_allclose(loss(LABELS, LOGITS, weights), alone, rtol=1e-6)


def test_logits_in_16_bits_are_computed_in_float32():
    low = keras.ops.cast(LOGITS, "float16")
    found = losses.SmoothedCrossEntropy(0.1)(LABELS, low)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"


def test_loss_goes_through_a_file_and_back(tmp_path):
    loss = losses.SmoothedCrossEntropy(0.2, name="smooth", reduction="sum")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is losses.SmoothedCrossEntropy
    assert again.get_config() == loss.get_config()
    assert loss.get_config() == {
        "label_smoothing": 0.2,
        "name": "smooth",
        "reduction": "sum",
    }
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", loss)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.loss.get_config() == loss.get_config()


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_share_outside_the_range_is_refused(value):
    with pytest.raises(ValueError, match=f"label_smoothing={value}"):
        losses.SmoothedCrossEntropy(value)
