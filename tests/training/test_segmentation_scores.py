"""Dice, IoU and the loss, against scikit-learn and float64."""

import keras
import numpy as np
import pytest
from sklearn import metrics

from tfamp.training import segmentation_loss, segmentation_scores


def draw(classes, count=6, side=9):
    """Random masks, and probabilities that are right more often than not."""
    rng = np.random.default_rng(classes)
    truth = rng.integers(classes, size=(count, side, side, 1)).astype("uint8")
    truth[0] = 0  # An image without foreground.
    scores = (
        rng.normal(size=(count, side, side, classes)) + np.eye(classes)[truth[..., 0]]
    )
    odds = np.exp(scores)
    probabilities = (odds / odds.sum(-1, keepdims=True)).astype("float32")
    return truth, probabilities[..., 1:] if classes == 2 else probabilities


def score(metric, truth, probabilities):
    for half in (slice(0, 2), slice(2, None)):
        metric.update_state(truth[half], probabilities[half])
    return float(metric.result())


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_scores_are_those_of_scikit_learn(classes):
    truth, probabilities = draw(classes)
    if classes == 2:
        found, average = probabilities[..., 0] > 0.5, "binary"
    else:
        found, average = probabilities.argmax(-1), "macro"
    pair = truth.ravel(), found.ravel()
    dice = segmentation_scores.Dice(classes)
    iou = segmentation_scores.IoU(classes)
    expected = metrics.f1_score(*pair, average=average)
    assert score(dice, truth, probabilities) == pytest.approx(expected, rel=1e-6)
    expected = metrics.jaccard_score(*pair, average=average)
    assert score(iou, truth, probabilities) == pytest.approx(expected, rel=1e-6)
    dice.reset_state()
    assert score(dice, truth[:2], probabilities[:2]) != pytest.approx(expected)
    each = segmentation_scores.image_dice(truth, probabilities)
    expected = [
        metrics.f1_score(t.ravel(), f.ravel(), average=average)
        for t, f in zip(truth, found, strict=True)
    ]
    np.testing.assert_allclose(each, expected, rtol=1e-6)


def test_class_that_does_not_occur_is_left_out():
    truth = np.array([0, 0, 2, 2]).reshape(1, 2, 2, 1)
    found = np.eye(4, dtype="float32")[[[[0, 2], [2, 2]]]]
    pair = truth.ravel(), found.argmax(-1).ravel()
    expected = metrics.f1_score(*pair, labels=[0, 2], average="macro")
    dice = segmentation_scores.Dice(4)
    assert score(dice, truth, found) == pytest.approx(expected)


def test_nothing_to_find_and_nothing_found_is_right():
    empty = np.zeros((2, 3, 3, 1), "float32")
    for metric in segmentation_scores.create(2):
        assert score(metric, empty, empty) == 1.0
    for metric in segmentation_scores.create(2):
        assert score(metric, empty, empty + 1) == 0.0


def test_pixels_are_counted_beyond_float32():
    dice = segmentation_scores.Dice(2)
    dice.both.assign([2**24])
    dice.update_state(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1), "float32"))
    assert int(dice.both.numpy()[0]) == 2**24 + 1


@pytest.mark.parametrize("kind", [segmentation_scores.Dice, segmentation_scores.IoU])
def test_metric_round_trips(kind):
    metric = kind(5, name="other")
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert type(again) is kind
    assert again.get_config() == metric.get_config() and again.classes == 5
    with pytest.raises(ValueError, match="sample_weight"):
        metric.update_state(np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 1, 5)), [1.0])


@pytest.mark.parametrize("classes", [2, 4])
def test_loss_is_cross_entropy_and_soft_dice(classes):
    truth, probabilities = draw(classes)
    weight, smooth = 0.5, 2.0
    loss = segmentation_loss.CrossEntropyAndDice(weight, smooth)
    p, labels = probabilities.astype("float64"), truth[..., 0]
    if classes == 2:
        p, t = p[..., 0], labels
        entropy = -np.log(np.where(t, p, 1 - p))
        p, t = p[..., None], t[..., None]
    else:
        t = np.eye(classes)[labels]
        entropy = -np.log(np.sum(p * t, -1))
    both, either = (p * t).sum((1, 2)), p.sum((1, 2)) + t.sum((1, 2))
    dice = 1 - np.mean((2 * both + smooth) / (either + smooth), -1)
    expected = np.mean(entropy.mean((1, 2)) + weight * dice)
    assert float(loss(truth, probabilities)) == pytest.approx(expected, rel=1e-5)


def test_loss_round_trips_and_refuses_what_makes_no_sense():
    loss = segmentation_loss.CrossEntropyAndDice(0.25, 3.0, "other")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.get_config() == loss.get_config()
    assert (again.dice_weight, again.smooth, again.name) == (0.25, 3.0, "other")
    with pytest.raises(ValueError, match="smooth=0"):
        segmentation_loss.CrossEntropyAndDice(smooth=0)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("classes", [2, 3])
def test_loss_does_not_saturate(classes, eager):
    """A probability of exactly 1 for the wrong class still has a gradient of 1."""
    channels, activation = (1, "sigmoid") if classes == 2 else (3, "softmax")
    logits = keras.layers.Conv2D(channels, 1, dtype="float32", name="logits")
    head = keras.layers.Activation(activation, dtype="float32")
    model = keras.Sequential([keras.Input((2, 2, 1)), logits, head])
    bias = np.full(1, 200.0) if classes == 2 else np.array([0.0, 200.0, 0.0])
    logits.set_weights([np.zeros((1, 1, 1, channels)), bias])
    x, y = np.zeros((1, 2, 2, 1), "float32"), np.zeros((1, 2, 2, 1), "uint8")
    assert model.predict(x, verbose=0).max() == 1.0
    model.compile(
        keras.optimizers.SGD(1.0),
        segmentation_loss.CrossEntropyAndDice(),
        run_eagerly=eager,
    )
    model.fit(x, y, verbose=0)
    change = bias - keras.ops.convert_to_numpy(logits.bias)
    expected = [1.0] if classes == 2 else [-1.0, 1.0, 0.0]
    np.testing.assert_allclose(change, expected, atol=1e-4)
