"""The U-Net, its scores and loss, and a whole run on a tiny folder of images."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib.image import imread
from sklearn import metrics

import tfamp
from tfamp.recipes import segmentation, segmentation_scores
from tfamp.recipes.tasks import segmentation as segmenting
from tfamp.runs import tasks, trained
from tfamp.training import train_and_evaluate

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


FIELDS = {
    **{"name": "rectangles", "epochs": 6, "batch_size": 4, "eval_batch_size": 4},
    **{"optimizer__learning_rate": 0.01, "data__crop_size": 8},
    **{"model__widths": (8, 8), "precision__mode": "mixed_bfloat16"},
}


def make_config(classes=2, **fields):
    given = {**FIELDS, "data__classes": classes, **fields}
    return helpers.configured(segmentation, **given)


def test_run_learns_and_its_scores_are_those_of_scikit_learn(tmp_path):
    config, run = make_config(data_dir=draw_folder(tmp_path, 2)), tmp_path / "run"
    result = train_and_evaluate(config, run)
    task = tasks.from_config(config)
    images, masks = (np.stack(part) for part in zip(*task.test, strict=True))
    model = keras.models.load_model(run / "model.keras")
    predicted = model.predict(images, verbose=0) > 0.5
    assert (result.score_name, len(images)) == ("dice", 4)
    assert list(result.scores) == ["dice", "image_dice", "iou"]
    files = sorted((tmp_path / "images").iterdir())[:2]
    (tmp_path / "new.csv").write_text("\n".join(["file", *map(str, files)]))
    trained.predict(config, run, tmp_path / "new.csv", tmp_path / "found/new.csv")
    rows = (tmp_path / "found/new.csv").read_text().splitlines()[1:]
    for file, row in zip(files, rows, strict=True):
        mask = imread(row.split(",")[1])
        pixels = imread(file)[None] * 255
        expected = model.predict(pixels, verbose=0)[0, ..., 0]
        assert set(np.unique(mask)) <= {0.0, 1.0}
        sure = abs(expected - 0.5) > 0.02
        np.testing.assert_array_equal((mask > 0.5)[sure], (expected > 0.5)[sure])
    # A pixel at 0.5 may fall on either side in batches of another size.
    pair = masks.ravel(), predicted.ravel()
    dice, iou = metrics.f1_score(*pair), metrics.jaccard_score(*pair)
    assert 0.6 < result.score == pytest.approx(dice, abs=0.01)
    assert result.scores["iou"] == pytest.approx(iou, abs=0.01)
    assert f"foreground {np.mean(masks):.3f} of the test pixels" in result.description
    assert "14 training, 2 validation, 4 test examples" in result.description
    picture = imread(run / "predictions.png")
    height, width, _ = picture.shape
    assert picture.std() > 0.05 and height > width  # Four rows of three.


def test_run_of_several_classes_draws_them(tmp_path):
    task = segmentation.create(make_config(4, data_dir=draw_folder(tmp_path, 4, 10)))
    assert "foreground" not in task.description
    assert task.score(task.build_model(), tmp_path) == {}  # The metrics are the scores.
    assert imread(tmp_path / "predictions.png").std() > 0.05


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
def test_network_computes_in_16_bits_and_ends_in_float32(mode, classes):
    config = make_config(classes, model__widths=(4, 8, 16))
    with tfamp.policy_scope(mode):
        model = segmenting.build_network(classes, config.model)
    pinned = {"rescaling", "logits", "probabilities"}
    computed = {layer.name: layer.compute_dtype for layer in model.layers[1:]}
    assert {name for name, dtype in computed.items() if dtype == "float32"} == pinned
    assert set(computed.values()) == {"float32", mode.removeprefix("mixed_")}
    # A float16 sum of that many pixels is not finite; the loss is summed in float32.
    images = np.full((1, 512, 516, 3), 255, "uint8")
    found = model(images)
    assert found.dtype == "float32"
    assert found.shape == (1, 512, 516, 1 if classes == 2 else classes)
    if classes > 2:
        np.testing.assert_allclose(np.sum(found, -1), 1.0, atol=1e-6)
    loss = segmentation_scores.CrossEntropyAndDice()(np.ones((1, 512, 516, 1)), found)
    assert np.isfinite(float(loss)) and loss.dtype == "float32"


def test_network_has_the_published_layers():
    widths = (64, 128, 256, 512, 1024)
    config = make_config(model__widths=widths, model__batch_norm=False)
    model = segmenting.build_network(2, config.model)
    kinds = [type(layer).__name__ for layer in model.layers]
    # https://arxiv.org/abs/1505.04597: 23 convolutional layers, counting those up.
    assert kinds.count("Conv2D") + kinds.count("Conv2DTranspose") == 23
    assert kinds.count("MaxPooling2D") == kinds.count("Concatenate") == 4
    assert model.count_params() == 31_031_745 + 64 * 9 * 2 - 1152


def augmented(height, width, count, **keywords):
    """The mask of which every pixel differs, and what becomes of it."""
    mask = np.arange(height * width, dtype="uint8").reshape(height, width, 1)
    image, found = np.repeat(mask, 3, -1), []
    for index in range(count):
        pair = segmenting.augment(
            image, mask, tf.constant([3, index], "int64"), **keywords
        )
        np.testing.assert_array_equal(pair[0][..., :1], pair[1])  # Moved alike.
        found.append(pair[1].numpy()[..., 0])
    return mask[..., 0], found


def test_augmentation_has_the_symmetries_of_a_square_or_a_rectangle():
    mask, found = augmented(8, 8, 60)
    turned = [np.rot90(mask, k) for k in range(4)]
    expected = [*turned, *(each[:, ::-1] for each in turned)]
    assert {x.tobytes() for x in found} == {x.tobytes() for x in expected}
    # By the seed alone.
    np.testing.assert_array_equal(found[:9], augmented(8, 8, 9)[1])
    _, found = augmented(4, 6, 40)
    assert len({x.tobytes() for x in found}) == 4
    assert {x.shape for x in found} == {(4, 6)}


def test_crops_are_parts_of_the_image_and_every_place_occurs():
    mask, found = augmented(8, 8, 100, crop_size=6, flips=False)
    for each in found:
        row, column = divmod(int(each[0, 0]), 8)
        np.testing.assert_array_equal(each, mask[row : row + 6, column : column + 6])
    corners = {row * 8 + column for row in range(3) for column in range(3)}
    assert {x[0, 0] for x in found} == corners


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__crop_size": 7}, "multiples of 2. Received: .*crop_size=7.* 16x16"),
        ({"data__crop_size": 32}, "fit into the images.*16x16"),
        (
            {"model__widths": (4,) * 6, "data__crop_size": None},
            "5 poolings .* multiples of 32. Received: .* 16x16",
        ),
        ({"data__classes": 1}, "classes must be in 2..256. Received: 1"),
        ({"data__augment": "turns"}, "config.data.augment .*'turns'"),
    ],
    ids=["crop", "large crop", "poolings", "classes", "augment"],
)
def test_settings_that_make_no_sense_are_errors(changes, message, tmp_path):
    given = {**FIELDS, "data_dir": draw_folder(tmp_path, 2, 2), **changes}
    with pytest.raises(ValueError, match=message):
        segmentation.create(helpers.configured(segmentation, **given))


def test_synthetic_batches_are_of_the_size_trained_on():
    made = segmentation.synthetic(make_config(4))
    images, masks = next(iter(made.batches))
    assert (images.shape, masks.shape) == ((4, 8, 8, 3), (4, 8, 8, 1))
    assert images.dtype == masks.dtype == tf.uint8 and made.unit == "images"
    assert set(np.unique(masks)) == {0, 1, 2, 3}
    for size, words in ((None, "size is not known"), (9, "multiples of 2")):
        config = make_config(data__crop_size=None, data__image_size=size)
        with pytest.raises(ValueError, match=words):
            segmentation.synthetic(config)


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
    dice, iou = (
        function(*pair, average=average)
        for function in (metrics.f1_score, metrics.jaccard_score)
    )
    of_images = [
        metrics.f1_score(t.ravel(), f.ravel(), average=average)
        for t, f in zip(truth, found, strict=True)
    ]
    expected = (dice, iou, np.mean(of_images))
    made = segmentation_scores.create(classes)
    for metric, right in zip(made, expected, strict=True):
        assert score(metric, truth, probabilities) == pytest.approx(right, rel=1e-6)
        again = keras.metrics.deserialize(keras.metrics.serialize(metric))
        assert type(again) is type(metric) and again.name == metric.name
        metric.reset_state()
        new = score(again, truth[:3], probabilities[:3])
        assert score(metric, truth[:3], probabilities[:3]) == new


def test_classes_that_do_not_occur_are_left_out_and_nothing_found_is_right():
    truth = np.array([0, 0, 2, 2]).reshape(1, 2, 2, 1)
    found = np.eye(4, dtype="float32")[[[[0, 2], [2, 2]]]]
    pair = truth.ravel(), found.argmax(-1).ravel()
    expected = metrics.f1_score(*pair, labels=[0, 2], average="macro")
    dice = segmentation_scores.Dice(4)
    assert score(dice, truth, found) == pytest.approx(expected)
    empty = np.zeros((2, 3, 3, 1), "float32")
    for metric in segmentation_scores.create(2):
        assert score(metric, empty, empty) == 1.0
        metric.reset_state()
        assert score(metric, empty, empty + 1) == 0.0


def test_pixels_are_counted_beyond_float32():
    dice = segmentation_scores.Dice(2)
    dice.counts.assign([[2**24], [0], [0]])
    dice.update_state(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1), "float32"))
    assert int(dice.counts.numpy()[0, 0]) == 2**24 + 1


@pytest.mark.parametrize("classes", [2, 4])
def test_loss_is_cross_entropy_and_soft_dice(classes):
    truth, probabilities = draw(classes)
    loss = segmentation_scores.CrossEntropyAndDice()
    loss = keras.losses.deserialize(keras.losses.serialize(loss))
    p, labels = probabilities.astype("float64"), truth[..., 0]
    if classes == 2:
        p, t = p[..., 0], labels
        entropy = -np.log(np.where(t, p, 1 - p))
        p, t = p[..., None], t[..., None]
    else:
        t = np.eye(classes)[labels]
        entropy = -np.log(np.sum(p * t, -1))
    both, either = (p * t).sum((1, 2)), p.sum((1, 2)) + t.sum((1, 2))
    dice = 1 - np.mean((2 * both + 1) / (either + 1), -1)
    expected = np.mean(entropy.mean((1, 2)) + dice)
    assert float(loss(truth, probabilities)) == pytest.approx(expected, rel=1e-5)


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
    assert np.max(model(x)) == 1.0
    loss = segmentation_scores.CrossEntropyAndDice()
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=eager)
    model.train_on_batch(x, y)
    change = bias - keras.ops.convert_to_numpy(logits.bias)
    expected = [1.0] if classes == 2 else [-1.0, 1.0, 0.0]
    np.testing.assert_allclose(change, expected, atol=1e-4)
