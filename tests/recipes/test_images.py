"""Image classification: networks by name, data by name or folder, augmentation."""

import json
import shutil

import helpers
import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

import tfamp
from tfamp.recipes import images, images_data
from tfamp.recipes.tasks import images as classifying
from tfamp.runs import pipeline, tasks

SHAPE, CLASSES = (32, 32, 3), 10
NETWORKS = ("cnn", "resnet", "efficientnet")


def make_config(**fields):
    """The sizes of a run of seconds; `__` stands for a dot."""
    config = images.get_config()
    tiny = {f"model__{name}": size for name, size in config.tiny.model.items()}
    given = {"data__name": "cifar10", "batch_size": 2, "model__name": "cnn", **tiny}
    return helpers.configured(images, **{**given, **fields})


# ---- Networks ----


@pytest.fixture(scope="module")
def mixed():
    """Each network, built under mixed_bfloat16."""
    with tfamp.policy_scope("mixed_bfloat16"):
        return {
            network: classifying.build_network(
                SHAPE, CLASSES, make_config(model__name=network).model
            )
            for network in NETWORKS
        }


@pytest.mark.parametrize("network", NETWORKS)
def test_body_is_in_16_bits_and_pixels_and_logits_are_not(network, mixed):
    model = mixed[network]
    assert (model.name, model.output_shape) == (network, (None, CLASSES))
    assert model.get_layer("logits").compute_dtype == "float32"
    weighted = [x for x in model.layers[:-1] if x.trainable_variables]
    assert {x.compute_dtype for x in weighted} == {"bfloat16"}
    # No two of the 256 values of a pixel become one before the first convolution.
    first = next(x for x in model.layers if isinstance(x, keras.layers.Conv2D))
    before = model.layers[1 : model.layers.index(first)]
    scales = [x for x in before if not isinstance(x, keras.layers.ZeroPadding2D)]
    ramp = np.arange(256, dtype="uint8").reshape(1, 16, 16, 1)
    pixels = keras.ops.convert_to_tensor(np.broadcast_to(ramp, (1, 16, 16, 3)))
    for layer in scales:
        pixels = layer(pixels)
    assert scales and keras.backend.standardize_dtype(pixels.dtype) == "float32"
    assert len(np.unique(keras.ops.convert_to_numpy(pixels)[..., 0])) == 256


def test_default_resnet_is_the_resnet_18_of_small_images():
    config = helpers.configured(images, model__name="resnet")
    model = classifying.build_network(SHAPE, CLASSES, config.model)
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert trainable == 11_173_962  # Of https://github.com/kuangliu/pytorch-cifar.
    strided = {x.name for x in model.layers if getattr(x, "strides", None) == (2, 2)}
    assert strided == {
        f"stage{stage}_block1_{part}"
        for stage in (2, 3, 4)
        for part in ("conv1", "shortcut")
    }
    add = model.get_layer("stage1_block2_add")  # An identity around the block.
    sources = {x._keras_history.operation.name for x in add.input}
    assert sources == {"stage1_block2_conv2_norm", "stage1_block1_relu2"}


def test_resnet_learns_in_16_bits():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 32)  # Two classes that differ in brightness.
    pixels = rng.integers(0, 128, (32, 8, 8, 3)) + 100 * labels[:, None, None, None]
    with tfamp.policy_scope("mixed_bfloat16"):
        settings = make_config(model__name="resnet", model__widths=(4, 8)).model
        model = classifying.build_network((8, 8, 3), 2, settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), loss)
    found = [float(model.train_on_batch(pixels, labels)) for _ in range(8)]
    assert np.isfinite(found).all() and found[-1] < 0.5 * found[0]


def test_efficientnet_computes_what_the_one_of_keras_does(mixed):
    model = mixed["efficientnet"]
    own = keras.applications.EfficientNetB0(
        weights=None, input_shape=SHAPE, classes=CLASSES, classifier_activation=None
    )
    # 5,330,571 of the ImageNet model of keras.applications, which has 1000 classes and
    # 7 numbers of a Normalization; https://keras.io/api/applications/.
    assert model.count_params() - 1281 * CLASSES == 5_330_571 - 1281 * 1000
    own.set_weights(model.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, *SHAPE)).astype("float32")
    ours = tfamp.set_precision(model, "float32")
    np.testing.assert_array_equal(ours(pixels), own(pixels))


# ---- Settings ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "vgg"}, "'efficientnet'.*'vgg'"),
        ({"model__name": "resnet", "model__widths": (8, 16, 32)}, "one number each"),
        ({"data__augment": "cutmix"}, "'crop_flip'.*'cutmix'"),
    ],
    ids=["network", "stages", "augmentation"],
)
def test_settings_that_make_no_sense_are_refused_before_data_are_read(changes, message):
    config = make_config(data_dir="/nowhere", **changes)
    for make in (images.create, images.synthetic):
        with pytest.raises(ValueError, match=message):
            make(config)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_cross_entropy_smoothed_as_configured(smoothing):
    digits = {"data__name": "digits", "data__image_size": 8}
    config = make_config(label_smoothing=smoothing, **digits)
    task, made = images.create(config), images.synthetic(config)
    _, labels = next(iter(task.test.batch(6)))
    logits = np.random.default_rng(0).normal(0, 3, (6, 10)).astype("float32")
    logs = keras.ops.convert_to_numpy(keras.ops.log_softmax(logits))
    classes = np.argmax(labels, -1) if smoothing else labels.numpy()
    right = logs[range(6), classes]
    loss = -np.mean((1 - smoothing) * right + smoothing * logs.mean(1))
    for objective in (task, made):
        assert float(objective.loss(labels, logits)) == pytest.approx(loss, rel=1e-5)
        (accuracy,) = objective.metrics()
        accuracy.update_state(labels, logits)
        right = np.mean(logits.argmax(1) == classes)
        assert float(accuracy.result()) == pytest.approx(right)
    pixels, labels = next(iter(made.batches))
    assert pixels.shape == (2, 8, 8, 1) and made.build_model().name == "cnn"
    assert labels.shape == ((2, 10) if smoothing else (2,))


def test_images_of_any_set_can_be_timed_where_their_shape_is_given():
    config = make_config()
    assert next(iter(images.synthetic(config).batches))[0].shape == (2, *SHAPE)
    own = {"data__name": "my_photos", "model__name": "resnet"}
    with pytest.raises(ValueError, match=r"config.data.image_shape"):
        images.synthetic(make_config(**own))
    sizes = {"data__image_shape": (8, 12, 3), "data__classes": 5}
    made = images.synthetic(make_config(**own, **sizes))
    pixels, labels = next(iter(made.batches))
    assert pixels.shape == (2, 8, 12, 3) and int(np.max(labels)) < 5
    assert made.build_model().output_shape == (None, 5) and made.unit == "images"


# ---- Data ----


def test_digits_are_the_real_ones_split_the_same_each_time():
    train, test, classes = images_data.load_digits(16)
    assert (len(train), len(test), len(classes)) == (1437, 360, 10)
    pixels, labels = next(test.batch(360).as_numpy_iterator())
    assert pixels.shape == (360, 16, 16, 1) and pixels.dtype == np.uint8
    assert pixels.max() > 200
    assert np.bincount(labels).min() >= 34  # Stratified: about 36 of each digit.
    again, _ = next(images_data.load_digits(16)[1].batch(360).as_numpy_iterator())
    np.testing.assert_array_equal(pixels, again)


def test_digits_are_as_they_are_where_no_size_is_set():
    config = make_config(data__name="digits")
    train, *_ = images_data.load(config)
    pixels, _ = next(iter(images.synthetic(config).batches))
    assert pixels.shape[1:] == train.element_spec[0].shape == (8, 8, 1)


def load_folder(folder):
    config = make_config(data__name="mine", manual_dir=str(folder))
    *parts, names, decode = images_data.load(config)
    train, test = (
        part.map(lambda file, label: (decode(file), label)) for part in parts
    )
    return train, test, names


def write(path, value=0, shape=(4, 6, 1)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full(shape, value, "uint8")
    path.write_bytes(tf.io.encode_png(pixels).numpy())


def write_classes(folder, counts, first=0, suffix="png"):
    """Writes images of ten gray levels a class, so many of each class."""
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            path = folder / name / f"{number}.{suffix}"
            write(path, first + 10 * label + number)


def pairs(dataset):
    return sorted((int(image[0, 0, 0]), int(label)) for image, label in dataset)


def test_folders_of_splits_and_classes_are_read_whatever_the_name(tmp_path):
    for split, first in (("train", 0), ("test", 100)):
        counts = {"cat": 3, "dog": 3, "eel": 3}
        write_classes(tmp_path / split, counts, first, "PNG")
    write(tmp_path / "train" / ".hidden" / "1.png")
    (tmp_path / "train" / "notes.txt").write_text("no class")
    config = make_config(data__name="my_pets", manual_dir=str(tmp_path))
    task = tasks.from_config(config)
    assert "images (4, 6, 1), 3 classes" in task.description
    found = [*pairs(task.train), *pairs(task.validation), *pairs(task.test)]
    expected = [(f + 10 * c + n, c) for f in (0, 100) for c in range(3) for n in (0, 1)]
    expected += [(f + 10 * c + 2, c) for f in (0, 100) for c in range(3)]
    assert sorted(found) == sorted(expected)
    files = [tmp_path / "test" / name / "0.PNG" for name in ("dog", "cat")]
    model, rows = task.build_model(), pandas.DataFrame({"file": map(str, files)})
    answers = task.predict(model, rows, tmp_path)
    for row, (_, answer) in zip([100 + 10, 100], answers.iterrows(), strict=True):
        logits = model.predict(np.full((1, 4, 6, 1), row), verbose=0)[0]
        chances = tf.nn.softmax(logits).numpy()
        assert answer.prediction == ("cat", "dog", "eel")[chances.argmax()]
        assert answer.probability == pytest.approx(chances.max(), abs=1e-3)
    assert json.loads(task.assets["labels.json"]) == ["cat", "dog", "eel"]
    (tmp_path / "test" / "eel").rename(tmp_path / "test" / "fox")
    with pytest.raises(tfamp.DataError, match="other classes in train than in test"):
        tasks.from_config(config)


def test_images_that_are_not_kept_are_decoded_after_their_names_are_shuffled(tmp_path):
    write_classes(tmp_path, {"a": 10, "b": 15})
    given = {"manual_dir": str(tmp_path), "data__augment": "crop_flip"}
    found = []
    for kept in (True, False):
        config = make_config(data__name="mine", data__cache=kept, **given)
        task = images.create(config)
        epochs = {"batch_size": 4, "seed": 0, "first_epoch": 0, "last_epoch": 2}
        batches = pipeline.training_batches(task.train, **epochs, augment=task.augment)
        found.append((task.train.element_spec[0].dtype, [*batches]))
    (held, kept), (shuffled, decoded) = found
    assert (held, shuffled) == (tf.uint8, tf.string) and len(kept) == 8
    assert task.chance == pytest.approx(3 / 5)  # Of 2 and 3 images that are tested.
    tf.nest.map_structure(np.testing.assert_array_equal, kept, decoded)


def test_fifth_of_each_class_is_held_out_the_same_in_every_run(tmp_path):
    write_classes(tmp_path, {"a": 10, "b": 10})
    write(tmp_path / "a" / "0.png", 0, (4, 6, 3))  # In color if one is.
    train, test, _ = load_folder(tmp_path)
    assert train.element_spec[0].shape == (4, 6, 3)
    assert [label for _, label in pairs(test)] == [0, 0, 1, 1]
    assert sorted(pairs(train) + pairs(test)) == [(n, n // 10) for n in range(20)]
    labels = [int(label) for _, label in train]
    assert labels != sorted(labels)  # So that what is split off has all classes.
    again = load_folder(tmp_path)
    assert pairs(again[1]) == pairs(test)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: write(f / "b/1.png", 0, (8, 8, 1)), "2 sizes: .*6x4.*b/1.png: 8x8"),
        (lambda f: (f / "a/0.png").write_bytes(b"x"), "a/0.png is not an image"),
        (lambda f: (f / "c").mkdir(), "'c': .*0.* images. Expected images in train/CL"),
        (shutil.rmtree, "'mine'.*images in train/CLASS"),
    ],
    ids=["sizes", "no image", "empty class", "nothing"],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path, spoil, message):
    write_classes(tmp_path, {"a": 3, "b": 3})
    spoil(tmp_path)
    with pytest.raises(tfamp.DataError, match=message):
        load_folder(tmp_path)


# ---- Augmentation ----


def test_augmentation_is_every_crop_of_the_padded_image_flipped_or_not():
    image = np.arange(1, 193, dtype="uint8").reshape(8, 8, 3)
    changed = tf.data.Dataset.range(1500).map(
        lambda i: classifying.crop_and_flip(image, i, seed=[7, i])
    )
    found = list(changed.as_numpy_iterator())
    assert [label for _, label in found] == list(range(1500))
    assert {pixels.dtype for pixels, _ in found} == {np.dtype("uint8")}
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crops = [padded[r : r + 8, c : c + 8] for r, c in np.ndindex(9, 9)]
    expected = {x.tobytes() for crop in crops for x in (crop, crop[:, ::-1])}
    assert {pixels.tobytes() for pixels, _ in found} == expected
    again, _ = next(changed.take(1).as_numpy_iterator())  # By the seed alone.
    np.testing.assert_array_equal(again, found[0][0])
