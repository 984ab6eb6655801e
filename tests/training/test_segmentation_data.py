"""Images and masks: paired, checked, split and resized before anything is trained."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfamp import errors
from tfamp.training.tasks import segmentation, segmentation_data

SIDE = 12


@pytest.fixture
def settings():
    return segmentation.get_config().data


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


def test_fifth_is_held_out_the_same_in_every_run(folder, settings):
    train, test = segmentation_data.read_folder(settings, str(folder))
    assert sorted(names(train) + names(test)) == list(range(10))
    assert len(names(test)) == 2 and names(train) != sorted(names(train))
    again = segmentation_data.read_folder(settings, str(folder))
    assert [names(part) for part in again] == [names(train), names(test)]
    first = segmentation_data.read_folder(settings, str(folder), limit=2)
    assert [names(part) for part in first] == [names(train)[:2], names(test)]
    for part in (train, test):
        images, masks = part
        assert (images.dtype, masks.dtype) == ("uint8", "uint8")
        assert masks.shape[1:] == (SIDE, SIDE, 1) and masks.max() == 1
        assert list(masks.sum(axis=(1, 2, 3)) // SIDE) == names(part)


def test_folders_of_splits_are_taken_as_they_are(tmp_path, settings):
    for split, numbers in (("train", range(5)), ("test", range(5, 8))):
        for number in numbers:
            write_pair(tmp_path / split, f"{number}")
    train, test = segmentation_data.read_folder(settings, str(tmp_path))
    assert sorted(names(train)) == list(range(5))
    assert sorted(names(test)) == [5, 6, 7]


def square(*values):
    mask = np.zeros((SIDE, SIDE, 1), "uint8")
    mask[0, : len(values), 0] = values
    return mask


@pytest.mark.parametrize(
    ("classes", "mask", "expected"),
    [
        (2, square(1, 0, 1), [1, 0, 1]),
        (2, square(255, 0, 255), [1, 0, 1]),
        (2, np.repeat(square(255, 0, 255), 3, -1), [1, 0, 1]),
        (4, square(3, 1, 2), [3, 1, 2]),
    ],
    ids=["0 and 1", "0 and 255", "color", "classes"],
)
def test_mask_becomes_classes(folder, settings, classes, mask, expected):
    settings.classes = classes
    for number in range(10):
        write_pair(folder, f"{number}", mask)
    train, _ = segmentation_data.read_folder(settings, str(folder))
    np.testing.assert_array_equal(train[1][:, 0, :3, 0], [expected] * 8)


def test_masks_of_one_bit_and_of_a_palette_are_what_a_viewer_shows(folder, settings):
    for number in range(10):
        bits = Image.fromarray(square(255, 0, 255)[..., 0]).convert("1")
        if number % 2:
            bits = Image.fromarray(square(0, 1, 0)[..., 0]).convert("P")
            bits.putpalette([255] * 3 + [0] * 3)  # White is 0.
            bits = bits.crop((0, 0, 3, 1)).resize((SIDE, SIDE), 0)
        bits.save(folder / f"masks/{number}.png")
    train, test = segmentation_data.read_folder(settings, str(folder))
    for mask in (*train[1], *test[1]):
        assert list(mask[0, :2, 0]) in ([1, 0], [1, 1])
    settings.classes, settings.first_class = 3, 1  # The palette's numbers themselves.
    for number in range(10):
        mask = Image.fromarray(square(*([1, 2, 3] * 4))[..., 0] + np.uint8(0))
        mask = mask.crop((0, 0, SIDE, 1)).resize((SIDE, SIDE), 0).convert("P")
        mask.putpalette([9, 9, 9] * 4)
        mask.save(folder / f"masks/{number}.png")
    train, _ = segmentation_data.read_folder(settings, str(folder))
    np.testing.assert_array_equal(train[1][0, 0, :3, 0], [0, 1, 2])


def remove(folder, *files):
    for name in files:
        (folder / name).unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


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
    "image": (lambda f: truncate(f / "images/5.png"), "images/5.png is no image"),
    "mask": (lambda f: (f / "masks/5.png").write_bytes(b""), "masks/5.png is no ima"),
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
        "masks/1.png is no mask. Received: mode I;16",
    ),
    "alpha": (
        lambda f: write(f / "masks/1.png", np.ones((SIDE, SIDE, 4), "uint8")),
        "masks/1.png is no mask. Received: mode RGBA",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(folder, settings, case):
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(errors.DataError, match=message):
        segmentation_data.read_folder(settings, str(folder))


def test_pictures_are_turned_as_their_exif_data_say(folder, settings):
    exif = Image.Exif()
    exif[0x0112] = 3  # Upside down.
    pixels = np.zeros((SIDE, SIDE, 3), "uint8")
    pixels[: SIDE // 2] = 200
    for number in range(10):
        remove(folder, f"images/{number}.png")
        write(folder / f"images/{number}.jpg", pixels, exif=exif, quality=95)
    (images, _), _ = segmentation_data.read_folder(settings, str(folder))
    assert images[0, 0].max() < 20 and images[0, -1].min() > 180


def test_folder_must_be_there(settings, tmp_path):
    for folder in (None, str(tmp_path / "absent")):
        with pytest.raises(errors.DataError, match=f"--data_dir.*{folder}"):
            segmentation_data.read_folder(settings, folder)


def test_masks_of_several_classes_are_numbers(folder, settings):
    settings.classes = 3
    with pytest.raises(errors.DataError, match=r"255\]. Expected {0, 1, 2}"):
        segmentation_data.read_folder(settings, str(folder))
    colors = np.repeat(square(1, 2), 3, -1)  # The mean of colors is no class.
    for number in range(10):
        write_pair(folder, f"{number}", colors)
    with pytest.raises(errors.DataError, match="no mask. Received: mode RGB"):
        segmentation_data.read_folder(settings, str(folder))


def test_images_of_several_sizes_are_resized(folder, settings):
    settings.image_size = 8
    write_pair(folder, "6", side=24)
    train, test = segmentation_data.read_folder(settings, str(folder))
    assert train[0].shape == (8, 8, 8, 3) and test[1].shape == (2, 8, 8, 1)
    assert sorted(names(train) + names(test)) == list(range(10))
    assert set(np.unique(train[1])) == {0, 1}


def test_resizing_mixes_no_classes():
    mask = np.random.default_rng(0).choice([0, 5], (40, 30, 1)).astype("uint8")
    image = np.repeat(mask * 51, 3, -1)
    image, mask = segmentation_data.resize(image, mask, 16)
    assert (image.shape, mask.shape) == ((16, 16, 3), (16, 16, 1))
    assert set(np.unique(mask)) == {0, 5}
    assert len(np.unique(image)) > 2 and image.dtype == mask.dtype == tf.uint8


def test_digits_are_where_their_masks_are():
    (images, masks), test = segmentation_data.load_digits(32, 2, limit=50)
    assert images.shape == (50, 32, 32, 3) and test[1].shape == (50, 32, 32, 1)
    again, _ = segmentation_data.load_digits(32, 2, limit=50)
    np.testing.assert_array_equal(images, again[0])
    for image, mask in zip(images, masks, strict=True):
        ink = image[mask[..., 0] == 1].astype(float)
        # Half ink at least, on a patch of the other half of the levels.
        assert 0.02 < mask.mean() < 0.25
        assert abs(ink.mean() - image[mask[..., 0] == 0].mean()) > 40
    (_, numbered), _ = segmentation_data.load_digits(32, 11, limit=50)
    np.testing.assert_array_equal(numbered > 0, masks > 0)
    assert set(np.unique(numbered)) == set(range(11))


@pytest.mark.parametrize(("size", "classes"), [(None, 2), (256, 2), (64, 3)])
def test_digits_have_few_sizes_and_classes(size, classes):
    with pytest.raises(ValueError, match="2 or 11 classes and a side of 8 to 128"):
        segmentation_data.load_digits(size, classes)


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


@pytest.fixture
def trimaps():
    config = segmentation.get_config()
    config.data.name, config.data.mask_feature = "trimaps", "trimap"
    config.data.classes, config.data.first_class = 3, 1
    config.data.image_size = 16
    return config


def test_tfds_masks_start_at_the_first_class(tfds_folder, trimaps):
    splits = segmentation_data.load(trimaps, tfds_folder, None)
    assert [int(part.cardinality()) for part in splits[:2]] == [8, 12]
    image, mask = splits.train.element_spec
    assert (image.shape, image.dtype) == ((16, 16, 3), tf.uint8)
    assert (mask.shape, mask.dtype) == ((16, 16, 1), tf.uint8)
    found = {value for _, mask in splits.train for value in np.unique(mask)}
    assert found == {0, 1, 2}


def test_tfds_masks_of_other_classes_are_an_error(tfds_folder, trimaps):
    trimaps.data.classes = 2
    splits = segmentation_data.load(trimaps, tfds_folder, None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="config.data.classes"):
        list(splits.train)
    trimaps.data.mask_feature = "mask"
    with pytest.raises(errors.DataError, match="mask_feature"):
        segmentation_data.load(trimaps, tfds_folder, None)
    trimaps.data.image_size = None
    with pytest.raises(ValueError, match="image_size"):
        segmentation_data.load(trimaps, tfds_folder, None)


def test_original_files_of_a_tfds_data_set_are_read_from_folders(trimaps, tmp_path):
    trimaps.data.name = "oxford_iiit_pet"
    for split in ("train", "test"):
        for number in range(1, 4):
            write_pair(
                tmp_path / split, f"{number}", np.full((SIDE, SIDE), number, "B")
            )
    splits = segmentation_data.load(trimaps, None, str(tmp_path))
    found = {(int(x[0, 0, 0]), int(y[0, 0, 0])) for x, y in splits.train}
    assert found == {(1, 0), (2, 1), (3, 2)}
    assert splits.train.element_spec[0].shape == (16, 16, 3)
    trimaps.data.name = "no_such_set"
    with pytest.raises(errors.DataError, match="--manual_dir may also have images/NA"):
        segmentation_data.load(trimaps, None, str(tmp_path / "train/images"))
