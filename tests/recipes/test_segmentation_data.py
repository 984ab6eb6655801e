"""Images and masks: paired, checked, split and resized before anything is trained."""

import helpers
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfamp import errors
from tfamp.recipes import segmentation, segmentation_data

SIDE = 12


def load(folder, **fields):
    """Returns the arrays of the splits: (images, masks) of each.

    Read with these fields of the configuration; `__` for a dot.
    """
    config = helpers.configured(segmentation, data_dir=str(folder), **fields)
    splits = segmentation_data.load(config)[:2]
    return [tuple(map(np.stack, zip(*split, strict=True))) for split in splits]


def write(path, array, **keywords):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.asarray(array)
    array = array[..., 0] if array.shape[-1] == 1 else array
    Image.fromarray(array).save(path, **keywords)


def write_pair(folder, name, mask=None, side=SIDE):
    """Writes an image of one gray level, its name's number, and its mask."""
    image = np.full((side, side, 3), int(name), "uint8")
    if mask is None:
        mask = np.zeros((side, side, 1), "uint8")
        mask[: int(name)] = 255
    write(folder / f"images/{name}.png", image)
    write(folder / f"masks/{name}.png", mask)


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        write_pair(tmp_path, f"{number}")
    (tmp_path / "images/.DS_Store").write_bytes(b"hidden")
    return tmp_path


def names(examples):
    """Which images these are."""
    return [int(image.flat[0]) for image in examples[0]]


def test_fifth_is_held_out_the_same_in_every_run(folder):
    train, test = load(folder)
    assert sorted(names(train) + names(test)) == list(range(10))
    assert len(names(test)) == 2 and names(train) != sorted(names(train))
    again = load(folder)
    assert [names(part) for part in again] == [names(train), names(test)]
    for images, masks in (train, test):
        assert (images.dtype, masks.dtype) == ("uint8", "uint8")
        assert masks.shape[1:] == (SIDE, SIDE, 1) and masks.max() == 1
        assert list(masks.sum(axis=(1, 2, 3)) // SIDE) == names([images])
    first = load(folder, limit_examples=2)
    assert [names(part) for part in first] == [names(train)[:2], names(test)]


def test_folders_of_splits_are_taken_as_they_are(tmp_path):
    for split, numbers in (("train", range(5)), ("test", range(5, 8))):
        for number in numbers:
            write_pair(tmp_path / split, f"{number}")
    train, test = load(tmp_path)
    assert sorted(names(train)) == list(range(5))
    assert sorted(names(test)) == [5, 6, 7]


def square(*values):
    mask = np.zeros((SIDE, SIDE, 1), "uint8")
    mask[0, : len(values), 0] = values
    return mask


def one_bit(path):
    Image.fromarray(square(255, 0, 255)[..., 0]).convert("1").save(path)


def palette(*colors, values):
    """Returns a function that writes a mask with gray levels as a palette's colors."""

    def save(path):
        mask = Image.fromarray(square(*values)[..., 0]).convert("P")
        mask.putpalette([level for color in colors for level in [color] * 3])
        mask.save(path)

    return save


@pytest.mark.parametrize(
    ("classes", "first", "mask", "expected"),
    [
        (2, 0, square(1, 0, 1), [1, 0, 1]),
        (2, 0, square(255, 0, 255), [1, 0, 1]),
        (2, 0, np.repeat(square(255, 0, 255), 3, -1), [1, 0, 1]),
        (2, 0, one_bit, [1, 0, 1]),
        # What a viewer shows: white is 0.
        (2, 0, palette(255, 0, values=(0, 1, 0)), [1, 0, 1]),
        (4, 0, square(3, 1, 2), [3, 1, 2]),
        (4, 1, 1 + square(0, 1, 2), [0, 1, 2]),
        (4, 0, palette(9, 9, 9, 9, values=(3, 1, 2)), [3, 1, 2]),  # Its numbers.
    ],
    ids=["0 and 1", "0 and 255", "color", "bit", "palette of 2", "classes", "from 1"]
    + ["palette"],
)
def test_mask_becomes_classes(folder, classes, first, mask, expected):
    for number in range(10):
        if callable(mask):
            mask(folder / f"masks/{number}.png")
        else:
            write_pair(folder, f"{number}", mask)
    fields = {"data__classes": classes, "data__first_class": first}
    (_, masks), _ = load(folder, **fields)
    np.testing.assert_array_equal(masks[:, 0, :3, 0], [expected] * 8)


def remove(folder, *files):
    for name in files:
        (folder / name).unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


COLORS = np.repeat(square(1, 2), 3, -1)
# What is done to a folder of two classes, and what the error names.
BAD = {
    "no mask": (
        lambda f: remove(f, "masks/1.png", "masks/2.png"),
        "10 images and 8 masks; without a partner: 1, 2. Expected images/NAME",
    ),
    "no image": (lambda f: remove(f, "images/3.png"), "a partner: 3. Expected"),
    "no folder": (lambda f: (f / "masks").rename(f / "other"), "10 images and 0 masks"),
    "sizes": (
        lambda f: write(f / "masks/1.png", np.zeros((6, 8, 1), "uint8")),
        r"masks/1.png is \(8, 6\), its image \(12, 12\)",
    ),
    "values": (
        lambda f: write(f / "masks/4.png", square(7, 255)),
        r"masks/4.png has the values \[0, 7, 255\]. Expected {0, 1} or {0, 255}",
    ),
    "image": (lambda f: truncate(f / "images/5.png"), "images/5.png is not an image"),
    "mask": (
        lambda f: (f / "masks/5.png").write_bytes(b""),
        "masks/5.png is not an ima",
    ),
    "several sizes": (lambda f: write_pair(f, "6", side=24), "of 2 sizes: .*24.*=256"),
    "one example": (
        lambda f: [remove(f, f"images/{n}.png", f"masks/{n}.png") for n in range(9)],
        "too few images",
    ),
    "16-bit image": (
        lambda f: write(f / "images/1.png", np.ones((SIDE, SIDE), "uint16")),
        "images/1.png has 16 bits",
    ),
    "16-bit mask": (
        lambda f: write(f / "masks/1.png", np.ones((SIDE, SIDE), "uint16")),
        "masks/1.png is not a mask. Received: mode I;16",
    ),
    "alpha": (
        lambda f: write(f / "masks/1.png", np.ones((SIDE, SIDE, 4), "uint8")),
        "masks/1.png is not a mask. Received: mode RGBA",
    ),
    "of 3 classes, values": (lambda f: None, r"255\]. Expected {0, 1, 2}"),
    "of 3 classes, color": (  # The mean of colors is no class.
        lambda f: [write_pair(f, name, COLORS) for name in "0123456789"],
        "not a mask. Received: mode RGB ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(folder, case):
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(errors.DataError, match=message):
        load(folder, data__classes=3 if case.startswith("of 3 classes") else 2)


def test_pictures_are_turned_as_their_exif_data_say(folder):
    exif = Image.Exif()
    exif[0x0112] = 3  # Upside down.
    pixels = np.zeros((SIDE, SIDE, 3), "uint8")
    pixels[: SIDE // 2] = 200
    for number in range(10):
        remove(folder, f"images/{number}.png")
        write(folder / f"images/{number}.jpg", pixels, exif=exif, quality=95)
    (images, _), _ = load(folder)
    assert images[0, 0].max() < 20 and images[0, -1].min() > 180


@pytest.mark.parametrize("folder", ["", "/absent"])
def test_folder_must_be_there(folder):
    with pytest.raises(errors.DataError, match=f"--data_dir.*{folder}"):
        load(folder)


def test_images_of_several_sizes_are_resized_and_no_classes_mixed(folder):
    rng = np.random.default_rng(0)
    for number in range(10):
        side = 24 if number == 6 else SIDE
        mask = rng.choice(np.array([0, 5], "uint8"), (side, side, 1))
        write_pair(folder, f"{number}", mask, side)
        write(folder / f"images/{number}.png", np.repeat(mask * 51, 3, -1))
    (images, masks), test = load(folder, data__image_size=8, data__classes=6)
    assert (images.shape, test[1].shape) == ((8, 8, 8, 3), (2, 8, 8, 1))
    assert set(np.unique(masks)) == {0, 5}
    assert len(np.unique(images)) > 9 and images.dtype == masks.dtype == "uint8"


def load_digits(size=32, classes=2):
    fields = {"data__image_size": size, "data__classes": classes}
    return load("", data__name="digits", limit_examples=50, **fields)


def test_digits_are_where_their_masks_are():
    (images, masks), test = load_digits()
    assert images.shape == (50, 32, 32, 3) and test[1].shape == (50, 32, 32, 1)
    np.testing.assert_array_equal(images, load_digits()[0][0])
    for image, mask in zip(images, masks, strict=True):
        ink = image[mask[..., 0] == 1].astype(float)
        # Half ink at least, on a patch of the other half of the levels.
        assert 0.02 < mask.mean() < 0.25
        assert abs(ink.mean() - image[mask[..., 0] == 0].mean()) > 40
    (_, numbered), _ = load_digits(classes=11)
    np.testing.assert_array_equal(numbered > 0, masks > 0)
    assert set(np.unique(numbered)) == set(range(11))
    for size, classes in ((None, 2), (256, 2), (64, 3)):
        with pytest.raises(ValueError, match="2 or 11 classes and a side of 8 to 128"):
            load_digits(size, classes)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A TFDS data set of photographs with masks of the classes 1, 2, 3."""
    import tensorflow_datasets as tfds
    from sklearn import datasets

    photograph = datasets.load_sample_image("china.jpg")
    mask = np.random.default_rng(0).integers(1, 4, (*photograph.shape[:2], 1), "uint8")
    examples = [
        {"image": photograph[:h, :60], "trimap": mask[:h, :60]} for h in range(40, 52)
    ]
    folder = str(tmp_path_factory.mktemp("tfds"))
    tfds.dataset_builders.store_as_tfds_dataset(
        name="trimaps",
        version="1.0.0",
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(None, None, 3)),
                "trimap": tfds.features.Image(shape=(None, None, 1)),
            }
        ),
        data_dir=folder,
        split_datasets={"train": enumerate(examples[:8]), "test": enumerate(examples)},
    )
    return folder


TRIMAPS = {
    **{"data__name": "trimaps", "data__mask_feature": "trimap"},
    **{"data__classes": 3, "data__first_class": 1, "data__image_size": 16},
}


def test_tfds_masks_start_at_the_first_class(tfds_folder):
    (images, masks), test = load(tfds_folder, **TRIMAPS)
    assert (images.shape, images.dtype) == ((8, 16, 16, 3), "uint8")
    assert (masks.shape, masks.dtype) == ((8, 16, 16, 1), "uint8")
    assert set(np.unique(masks)) == {0, 1, 2} and len(test[0]) == 12


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data__classes": 2}, tf.errors.InvalidArgumentError, "config.data.classes"),
        ({"data__first_class": 2}, tf.errors.InvalidArgumentError, "config.data.cl"),
        ({"data__mask_feature": "mask"}, errors.DataError, "mask_feature"),
        ({"data__image_size": None}, ValueError, "image_size"),
    ],
)
def test_tfds_data_of_other_features_are_errors(tfds_folder, changes, error, message):
    with pytest.raises(error, match=message):
        load(tfds_folder, **{**TRIMAPS, **changes})


def test_original_files_of_a_tfds_data_set_are_read_from_folders(tmp_path):
    for split in ("train", "test"):
        for number in range(1, 4):
            mask = np.full((SIDE, SIDE), number, "B")
            write_pair(tmp_path / split, f"{number}", mask)
    pets = {**TRIMAPS, "data__name": "oxford_iiit_pet", "manual_dir": str(tmp_path)}
    (images, masks), _ = load("", **pets)
    found = {
        (int(x[0, 0, 0]), int(y[0, 0, 0])) for x, y in zip(images, masks, strict=True)
    }
    assert found == {(1, 0), (2, 1), (3, 2)} and images.shape == (3, 16, 16, 3)
    nothing = {
        "data__name": "no_such_set",
        "manual_dir": str(tmp_path / "train/images"),
    }
    with pytest.raises(errors.DataError, match="--manual_dir may also have images/NA"):
        load("", **{**pets, **nothing})
