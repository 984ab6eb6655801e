"""Random crops and flips: what they keep, and that the seed alone decides."""

import numpy as np
import pytest
import tensorflow as tf

from tfamp.training import augmentation, pipeline

SIZE = 8


def make_image():
    """Every pixel another value, none of them black."""
    values = 1 + np.arange(SIZE * SIZE * 3) % 255
    return values.reshape(SIZE, SIZE, 3).astype("uint8")


@pytest.fixture(scope="module")
def augmented():
    """An image under many seeds, in a graph as the trainer has it."""
    image = make_image()
    seeds = tf.data.Dataset.range(400).map(
        lambda i: augmentation.crop_and_flip(image, i, seed=[7, i])
    )
    return list(seeds.as_numpy_iterator())


def find_shift(found, image):
    """Returns (rows, columns, mirrored) that turn one image into the other."""
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    for row in range(9):
        for column in range(9):
            crop = padded[row : row + SIZE, column : column + SIZE]
            for mirrored, each in ((False, crop), (True, crop[:, ::-1])):
                if (found == each).all():
                    return row - 4, column - 4, mirrored
    raise AssertionError("no crop of the padded image")


def test_each_result_is_a_crop_of_the_padded_image_flipped_or_not(augmented):
    image = make_image()
    shifts = [find_shift(found, image) for found, _ in augmented]
    assert {image.dtype for image, _ in augmented} == {np.dtype("uint8")}
    rows, columns, mirrored = map(np.array, zip(*shifts, strict=True))
    for shift in (rows, columns):
        assert set(shift) == set(range(-4, 5))
        # The mean of 400 uniform shifts, within four standard errors.
        assert abs(shift.mean()) < 4 * np.sqrt(60 / 9 / 400)
    assert abs(mirrored.mean() - 0.5) < 4 * np.sqrt(0.25 / 400)
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 4 / np.sqrt(400)
    assert abs(np.corrcoef(rows, mirrored)[0, 1]) < 4 / np.sqrt(400)


def test_label_stays(augmented):
    assert [label for _, label in augmented] == list(range(400))


def test_seed_alone_decides():
    image = make_image()
    first, again, other = (
        augmentation.crop_and_flip(image, 0, seed=seed)[0].numpy()
        for seed in ([1, 2], [1, 2], [2, 2])
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_epochs_differ_and_a_resumed_one_repeats():
    image = make_image()
    data = tf.data.Dataset.from_tensors((image, 0)).repeat(16)
    data = data.apply(tf.data.experimental.assert_cardinality(16))

    def images(first, last):
        batches = pipeline.training_batches(
            *(data,),
            batch_size=16,
            seed=0,
            first_epoch=first,
            last_epoch=last,
            augment=augmentation.crop_and_flip,
        )
        return [images for images, _ in batches.as_numpy_iterator()]

    whole = images(0, 2)
    (resumed,) = images(1, 2)
    np.testing.assert_array_equal(whole[1], resumed)
    assert (whole[0] != whole[1]).any()


def test_names():
    assert augmentation.create("none") is None
    assert augmentation.create("crop_flip") is augmentation.crop_and_flip
    with pytest.raises(ValueError, match="'mixup'.*'crop_flip'"):
        augmentation.create("mixup")
