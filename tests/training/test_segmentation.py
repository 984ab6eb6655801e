"""The U-Net, its scores and loss, and whole runs on tiny folders of images."""

import json
import logging
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib.image import imread
from sklearn import metrics

import tfamp
from tfamp.benchmark import cells, measure
from tfamp.training import compare, tasks
from tfamp.training.tasks import segmentation, segmentation_scores

SIDE = 16


def draw_folder(folder, classes, count=20):
    """Writes bright rectangles on a dark, noisy ground; the class is the color."""
    rng = np.random.default_rng(0)
    for number in range(count):
        image = rng.integers(60, size=(SIDE, SIDE, 3))
        mask = np.zeros((SIDE, SIDE, 1))
        for label in range(1, classes):
            row, column = rng.integers(SIDE - 6, size=2)
            place = slice(row, row + 6), slice(column, column + 6)
            image[place] = np.eye(3)[label - 1] * 200
            mask[place] = label if classes > 2 else 255
        for name, array in (("images", image), ("masks", mask)):
            path = folder / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(tf.io.encode_png(array.astype("uint8")).numpy())
    return str(folder)


def make_config(classes=2):
    config = segmentation.get_config()
    config.name = "rectangles"
    config.epochs, config.batch_size, config.eval_batch_size = 6, 4, 4
    config.optimizer.learning_rate = 0.01
    config.data.classes = classes
    config.data.crop_size = 8
    config.model.widths = (8, 8)
    config.precision.mode = "float32"
    return config


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison on two classes, and its folder."""
    config = make_config()
    config.data_dir = draw_folder(tmp_path_factory.mktemp("data"), 2)
    config.precision.mode = "mixed_bfloat16"
    folder = tmp_path_factory.mktemp("runs")
    return config, compare.compare(config, folder), folder


def test_run_learns_and_its_scores_are_those_of_scikit_learn(compared):
    config, found, folder = compared
    task, result = tasks.from_config(config), found.results[1]
    images, masks = (np.stack(part) for part in zip(*task.test, strict=True))
    run = folder / "mixed_bfloat16/seed0"
    model = keras.models.load_model(run / "model.keras")
    predicted = model.predict(images, verbose=0) > 0.5
    assert (result.score_name, len(images)) == ("dice", 4)
    assert list(result.scores) == ["dice", "image_dice", "iou"]
    # A pixel at 0.5 may fall on either side in batches of another size.
    pair = masks.ravel(), predicted.ravel()
    expected = metrics.f1_score(*pair)
    assert 0.6 < result.score == pytest.approx(expected, abs=0.01)
    expected = metrics.jaccard_score(*pair)
    assert result.scores["iou"] == pytest.approx(expected, abs=0.01)
    share = np.mean(masks)
    assert f"foreground {share:.3f} of the test pixels" in result.description
    assert "14 training, 2 validation, 4 test examples" in result.description
    picture = imread(run / "predictions.png")
    height, width, _ = picture.shape
    assert picture.std() > 0.05 and height > width  # Four rows of three.


@pytest.mark.parametrize("matplotlib", [True, False])
def test_grid_shows_several_classes_where_it_can_be_drawn(
    tmp_path, matplotlib, monkeypatch, caplog
):
    task = segmentation.create(make_config(4), draw_folder(tmp_path, 4, 10))
    assert "foreground" not in task.description
    if not matplotlib:
        monkeypatch.delitem(sys.modules, "tfamp.training.plots", raising=False)
        monkeypatch.delattr("tfamp.training.plots", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = tmp_path / "run"
    run.mkdir()
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert task.score(task.build_model(), run) == {}  # The metrics are the scores.
    if matplotlib:
        assert imread(run / "predictions.png").std() > 0.05
    else:
        assert "pip install" in caplog.text and list(run.iterdir()) == []


def test_comparison_exports_float32_and_goes_on(compared):
    config, found, folder = compared
    assert [r.mode for r in found.results] == ["float32", "mixed_bfloat16"]
    first, second = found.results
    # bfloat16 has 8 bits: losses near each other, not the same.
    assert first.final_loss != second.final_loss
    assert first.final_loss == pytest.approx(second.final_loss, rel=0.1)
    assert found.export["reloaded"]["absolute"] <= 1e-5
    exported = tf.saved_model.load(str(folder / "export"))
    images = np.zeros((1, 32, 48, 3), "uint8")  # Of another size.
    assert exported.serve(images).shape == (1, 32, 48, 1)
    stamp = (folder / "comparison.json").stat().st_mtime_ns
    compare.compare(config, folder)
    assert (folder / "comparison.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
def test_network_computes_in_16_bits_and_ends_in_float32(mode, classes):
    config = make_config(classes)
    config.model.widths = (4, 8, 16)
    with tfamp.policy_scope(mode):
        model = segmentation.build_network(classes, config.model)
    pinned = {"rescaling", "logits", "probabilities"}
    computed = {layer.name: layer.compute_dtype for layer in model.layers[1:]}
    assert {name for name, dtype in computed.items() if dtype == "float32"} == pinned
    assert set(computed.values()) == {"float32", mode.removeprefix("mixed_")}
    images = np.random.default_rng(0).integers(256, size=(2, 8, 12, 3), dtype="uint8")
    found = model(images)
    assert found.dtype == "float32"
    assert found.shape == (2, 8, 12, 1 if classes == 2 else classes)
    if classes > 2:
        np.testing.assert_allclose(np.sum(found, -1), 1.0, atol=1e-6)


def test_network_has_the_published_layers():
    config = make_config()
    config.model.widths, config.model.batch_norm = (64, 128, 256, 512, 1024), False
    model = segmentation.build_network(2, config.model)
    kinds = [type(layer).__name__ for layer in model.layers]
    # https://arxiv.org/abs/1505.04597: 23 convolutional layers, counting those up.
    assert kinds.count("Conv2D") + kinds.count("Conv2DTranspose") == 23
    assert kinds.count("MaxPooling2D") == kinds.count("Concatenate") == 4
    assert model.count_params() == 31_031_745 + 64 * 9 * 2 - 1152


def picture(height=8, width=8):
    """An image of which every pixel differs, and the mask that goes with it."""
    levels = np.arange(height * width, dtype="uint8").reshape(height, width, 1)
    return np.repeat(levels, 3, -1), levels


def augmented(image, mask, count=60, **keywords):
    found = []
    for index in range(count):
        pair = segmentation.augment(
            image, mask, tf.constant([3, index], "int64"), **keywords
        )
        np.testing.assert_array_equal(pair[0][..., :1], pair[1])  # Moved alike.
        found.append(pair[1].numpy()[..., 0])
    return found


def test_augmentation_has_the_symmetries_of_a_square():
    image, mask = picture()
    found = augmented(image, mask)
    turned = [np.rot90(mask[..., 0], k) for k in range(4)]
    expected = [*turned, *(each[:, ::-1] for each in turned)]
    assert {x.tobytes() for x in found} == {x.tobytes() for x in expected}
    again = augmented(image, mask)
    np.testing.assert_array_equal(found, again)  # By the seed alone.


def test_augmentation_keeps_the_shape_of_a_rectangle():
    image, mask = picture(4, 6)
    found = augmented(image, mask)
    assert len({x.tobytes() for x in found}) == 4
    assert {x.shape for x in found} == {(4, 6)}


def test_crops_are_parts_of_the_image_and_every_place_occurs():
    image, mask = picture()
    found = augmented(image, mask, count=200, crop_size=6, flips=False)
    corners = {x[0, 0] for x in found}
    for each in found:
        row, column = divmod(int(each[0, 0]), 8)
        expected = mask[row : row + 6, column : column + 6, 0]
        np.testing.assert_array_equal(each, expected)
    assert corners == {row * 8 + column for row in range(3) for column in range(3)}
    (whole, *_) = augmented(image, mask, count=1, flips=False)
    np.testing.assert_array_equal(whole, mask[..., 0])


BAD = {
    "crop": ({"data.crop_size": 7}, "multiples of 2. Received: 7. .*crop_size=6"),
    "large crop": ({"data.crop_size": 32}, "fit into the images.*16x16"),
    "poolings": (
        {"model.widths": (4,) * 6, "data.crop_size": None},
        "5 poolings .* multiples of 32. Received: 16. Set config.data.image_size=32",
    ),
    "widths": ({"model.widths": (4,)}, "config.model.widths must have 2 or more"),
    "classes": ({"data.classes": 1}, "classes be in 2..256. Received: .* 1"),
    "augment": ({"data.augment": "turns"}, "config.data.augment .*'turns'"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_make_no_sense_are_errors(case, tmp_path):
    changes, message = BAD[case]
    config = make_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        segmentation.create(config, draw_folder(tmp_path, 2, 2))


def test_synthetic_batches_are_of_the_size_trained_on():
    config = make_config(4)
    made = segmentation.synthetic(config)
    images, masks = next(iter(made.batches))
    assert (images.shape, masks.shape) == ((4, 8, 8, 3), (4, 8, 8, 1))
    assert images.dtype == masks.dtype == tf.uint8 and made.unit == "images"
    assert set(np.unique(masks)) == {0, 1, 2, 3}
    config.data.crop_size = None
    with pytest.raises(ValueError, match="size is not known"):
        segmentation.synthetic(config)
    config.data.image_size = 9
    with pytest.raises(ValueError, match="multiples of 2"):
        segmentation.synthetic(config)


@pytest.mark.parametrize("job", cells.JOBS)
def test_benchmark_times_its_steps(job):
    task = cells.get_task(make_config()).to_dict()
    cell = cells.Cell("unet", "tfamp", "mixed_bfloat16", 2, jit="off")
    figures = measure.measure(task, cell, job, seed=0, steps=2, warmup=1)
    assert len(figures["seconds"]) == 2 and "bfloat16" in figures["note"]
    assert "8x8" in figures["description"]
    json.dumps(figures)


def test_loss_of_a_whole_step_is_finite_in_float16():
    """Sums of 2**18 pixels leave float16's range; the loss is summed in float32."""
    config = make_config()
    with tfamp.policy_scope("mixed_float16"):
        model = segmentation.build_network(2, config.model)
    images = np.full((1, 512, 512, 3), 255, "uint8")
    masks = np.ones((1, 512, 512, 1), "uint8")
    loss = segmentation_scores.CrossEntropyAndDice()(masks, model(images))
    assert np.isfinite(float(loss)) and loss.dtype == "float32"


# ---- Scores and loss, against scikit-learn and float64 ----


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
    dice.counts.assign([[2**24], [0], [0]])
    dice.update_state(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1), "float32"))
    assert int(dice.counts.numpy()[0, 0]) == 2**24 + 1


def test_scores_are_those_of_keras():
    for classes in (2, 3):
        truth, probabilities = draw(classes)
        own = keras.metrics.MeanIoU(classes, sparse_y_pred=False)
        if classes == 2:
            own = keras.metrics.BinaryIoU([1])
        expected = score(own, truth, probabilities)
        found = score(segmentation_scores.IoU(classes), truth, probabilities)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [segmentation_scores.Dice, segmentation_scores.IoU])
def test_metric_round_trips(kind):
    metric = kind(5, name="other")
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert type(again) is kind
    assert again.get_config() == metric.get_config() and again.classes == 5


@pytest.mark.parametrize("classes", [2, 4])
def test_loss_is_cross_entropy_and_soft_dice(classes):
    truth, probabilities = draw(classes)
    weight, smooth = 0.5, 2.0
    loss = segmentation_scores.CrossEntropyAndDice(weight, smooth)
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
    loss = segmentation_scores.CrossEntropyAndDice(0.25, 3.0, "other")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.get_config() == loss.get_config()
    assert (again.dice_weight, again.smooth, again.name) == (0.25, 3.0, "other")
    with pytest.raises(ValueError, match="smooth=0"):
        segmentation_scores.CrossEntropyAndDice(smooth=0)


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
        segmentation_scores.CrossEntropyAndDice(),
        run_eagerly=eager,
    )
    model.fit(x, y, verbose=0)
    change = bias - keras.ops.convert_to_numpy(logits.bias)
    expected = [1.0] if classes == 2 else [-1.0, 1.0, 0.0]
    np.testing.assert_allclose(change, expected, atol=1e-4)
