"""Images and masks: paired, checked, split and resized before anything is trained."""

import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf

from tfamp import errors
from tfamp.training import segmentation_data, segmentation_folder, unet_config

SIDE = 12


@pytest.fixture
def settings():
    config = unet_config.get_unet_config()
    config.data.name = "folder"
    return config.data


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = tf.io.encode_jpeg if path.suffix == ".jpg" else tf.io.encode_png
    path.write_bytes(encode(np.asarray(array, "uint8")).numpy())


def write_pair(folder, name, mask=None, side=SIDE):
    """Writes an image of one gray level, its name's number, and its mask."""
    image = np.full((side, side, 3), int(name))
    if mask is None:
        mask = np.zeros((side, side, 1))
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
    return [int(image.flat[0]) for image in examples.images]


def test_fifth_is_held_out_the_same_in_every_run(folder, settings):
    train, test = segmentation_folder.read(settings, str(folder))
    assert sorted(names(train) + names(test)) == list(range(10))
    assert len(names(test)) == 2 and names(train) != sorted(names(train))
    again = segmentation_folder.read(settings, str(folder))
    assert [names(part) for part in again] == [names(train), names(test)]
    first = segmentation_folder.read(settings, str(folder), limit=2)
    assert [names(part) for part in first] == [names(train)[:2], names(test)]
    for part in (train, test):
        assert (part.images.dtype, part.masks.dtype) == ("uint8", "uint8")
        assert part.masks.shape[1:] == (SIDE, SIDE, 1) and part.masks.max() == 1
        assert list(part.masks.sum(axis=(1, 2, 3)) // SIDE) == names(part)


def test_folders_of_splits_are_taken_as_they_are(tmp_path, settings):
    for split, numbers in (("train", range(5)), ("test", range(5, 8))):
        for number in numbers:
            write_pair(tmp_path / split, f"{number}")
    train, test = segmentation_folder.read(settings, str(tmp_path))
    assert sorted(names(train)) == list(range(5))
    assert sorted(names(test)) == [5, 6, 7]


def square(*values):
    mask = np.zeros((SIDE, SIDE, 1))
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
    train, _ = segmentation_folder.read(settings, str(folder))
    np.testing.assert_array_equal(train.masks[:, 0, :3, 0], [expected] * 8)


def remove(folder, *files):
    for name in files:
        (folder / name).unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


# What is done to a folder of two classes, and what the error names.
BAD = {
    "no mask": (
        lambda f: remove(f, "masks/1.png", "masks/2.png"),
        r"2 problem\(s\).*images/1.png has no mask; images/2.png has no mask",
    ),
    "no image": (lambda f: remove(f, "images/3.png"), "masks/3.png has no image"),
    "two of a name": (lambda f: write(f / "images/1.jpg", [[[1]]]), "images/1.png"),
    "other file": (lambda f: (f / "images/a.tif").touch(), r"images/a.tif: not .*png"),
    "no folder": (lambda f: (f / "masks").rename(f / "other"), "no folder .*masks"),
    "sizes": (
        lambda f: write(f / "masks/1.png", np.zeros((6, 8, 1))),
        "masks/1.png is 6x8, its image 12x12",
    ),
    "values": (
        lambda f: write(f / "masks/4.png", square(7, 255)),
        "masks/4.png has the values 0, 7, 255, expected 0 and 255",
    ),
    "image": (lambda f: truncate(f / "images/5.png"), "images/5.png: not an image"),
    "mask": (lambda f: (f / "masks/5.png").write_bytes(b""), "masks/5.png: not an im"),
    "several sizes": (lambda f: write_pair(f, "6", side=24), "6.png: 24x24.*=256"),
    "one example": (
        lambda f: [remove(f, f"images/{n}.png", f"masks/{n}.png") for n in range(9)],
        "1 image",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(folder, settings, case):
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(errors.DataError, match=message):
        segmentation_folder.read(settings, str(folder))


def encode_palette(levels):
    """Returns a PNG file of bytes [height, width] that number black and white."""
    height, width = levels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in levels)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": b"\0\0\0\xff\xff\xff",
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )


def encode_turned(orientation, order=">", level=0):
    """Returns a JPEG file of one gray level with an Exif orientation."""
    mark = b"MM" if order == ">" else b"II"
    entries = [(0x0100, 3, 1, SIDE, 0), (0x0112, 3, 1, orientation, 0)]
    tiff = mark + struct.pack(f"{order}HIH", 42, 8, len(entries))
    tiff += b"".join(struct.pack(f"{order}HHIHH", *entry) for entry in entries)
    exif = b"Exif\0\0" + tiff + bytes(4)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    gray = np.full((SIDE, SIDE, 3), level, "uint8")
    jpeg = tf.io.encode_jpeg(gray).numpy()
    assert jpeg[2:4] == b"\xff\xe0"  # What other programs write before Exif.
    end = 4 + struct.unpack_from(">H", jpeg, 4)[0]
    return jpeg[:end] + segment + jpeg[end:]


def encode_png(channels, dtype="uint8"):
    return tf.io.encode_png(np.ones((SIDE, SIDE, channels), dtype)).numpy()


# A file of which decoding alone would make other pixels than a viewer shows.
UNLIKE = {
    "16-bit mask": ("masks/1.png", encode_png(1, "uint16"), "16 bits a channel"),
    "16-bit image": ("images/1.png", encode_png(3, "uint16"), "16 bits.*expected 8"),
    "gray and alpha": ("masks/1.png", encode_png(2), "has an alpha channel; save"),
    "color and alpha": ("masks/1.png", encode_png(4), "has an alpha channel; save"),
    "palette": (
        "masks/1.png",
        encode_palette(np.eye(SIDE, dtype="uint8")),
        "has a palette; save the mask as gray levels",
    ),
    "turned": ("images/1.jpg", encode_turned(6), "EXIF orientation 6: save the image"),
    "turned, II": ("images/1.jpg", encode_turned(3, "<"), "EXIF orientation 3"),
    "turned mask": ("masks/1.jpg", encode_turned(8), "EXIF orientation 8"),
}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("case", UNLIKE)
def test_files_decoded_to_other_pixels_are_named(folder, settings, case, classes):
    settings.classes = classes
    for number in range(10):
        write_pair(folder, f"{number}", square(1))
    name, contents, message = UNLIKE[case]
    if classes > 2 and name == "masks/1.jpg":
        message = "no PNG of 8-bit gray levels"
    remove(folder, name.replace(".jpg", ".png"))
    (folder / name).write_bytes(contents)
    with pytest.raises(errors.DataError, match=rf"^1 problem.*{name}: {message}"):
        segmentation_folder.read(settings, str(folder))


def test_harmless_headers_are_read(folder, settings):
    remove(folder, "images/1.png", "images/2.png", "images/3.png")
    (folder / "images/1.jpg").write_bytes(encode_turned(1, level=1))
    (folder / "images/2.jpg").write_bytes(encode_turned(0, level=2))  # No such value.
    alpha = np.concatenate([np.full((SIDE, SIDE, 3), 3), np.zeros((SIDE, SIDE, 1))], -1)
    write(folder / "images/3.png", alpha)
    train, test = segmentation_folder.read(settings, str(folder))
    assert sorted(names(train) + names(test)) == list(range(10))


def test_folder_must_be_there(settings, tmp_path):
    with pytest.raises(errors.DataError, match="--data_dir"):
        segmentation_folder.read(settings, None)
    with pytest.raises(errors.DataError, match="absent"):
        segmentation_folder.read(settings, str(tmp_path / "absent"))


def test_masks_of_several_classes_are_numbers(folder, settings):
    settings.classes = 3
    with pytest.raises(errors.DataError, match="class 255, expected 0 to 2"):
        segmentation_folder.read(settings, str(folder))
    colors = np.repeat(square(1, 2), 3, -1)  # The mean of colors is no class.
    for number in range(10):
        write_pair(folder, f"{number}", colors)
    with pytest.raises(errors.DataError, match="no PNG of 8-bit gray levels"):
        segmentation_folder.read(settings, str(folder))


def test_images_of_several_sizes_are_resized(folder, settings):
    settings.image_size = 8
    write_pair(folder, "6", side=24)
    train, test = segmentation_folder.read(settings, str(folder))
    assert train.images.shape == (8, 8, 8, 3) and test.masks.shape == (2, 8, 8, 1)
    assert sorted(names(train) + names(test)) == list(range(10))
    assert set(np.unique(train.masks)) == {0, 1}


def test_resizing_mixes_no_classes():
    mask = np.random.default_rng(0).choice([0, 5], (40, 30, 1)).astype("uint8")
    image = np.repeat(mask * 51, 3, -1)
    image, mask = segmentation_folder.resize(image, mask, 16)
    assert (image.shape, mask.shape) == ((16, 16, 3), (16, 16, 1))
    assert set(np.unique(mask)) == {0, 5}
    assert len(np.unique(image)) > 2 and image.dtype == mask.dtype == tf.uint8


def test_digits_are_where_their_masks_are():
    train, test = segmentation_data.load_digits(32, 2, limit=50)
    assert train.images.shape == (50, 32, 32, 3) and test.masks.shape == (50, 32, 32, 1)
    again, _ = segmentation_data.load_digits(32, 2, limit=50)
    np.testing.assert_array_equal(train.images, again.images)
    for image, mask in zip(train.images, train.masks, strict=True):
        ink = image[mask[..., 0] == 1].astype(float)
        # Half ink at least, on a patch of the other half of the levels.
        assert 0.02 < mask.mean() < 0.25
        assert abs(ink.mean() - image[mask[..., 0] == 0].mean()) > 40
    numbered, _ = segmentation_data.load_digits(32, 11, limit=50)
    np.testing.assert_array_equal(numbered.masks > 0, train.masks > 0)
    assert set(np.unique(numbered.masks)) == set(range(11))


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
    config = unet_config.get_unet_config()
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
