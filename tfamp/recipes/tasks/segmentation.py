"""Segmentation with a U-Net: a float32 head, Dice and IoU, a grid of predictions."""

import functools
import pathlib

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import extras
from tfamp.recipes import data, figures, segmentation_data, segmentation_scores
from tfamp.runs import default_config, plots, tasks

_SHOWN = 6  # Test images in the grid.


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.segmentation.create` says."""
    _check(config)
    train, test, note = segmentation_data.load(config)
    shape = tuple(train.element_spec[0].shape)
    _check_sides(config, shape)
    train, validation = data.hold_out(train, config.validation_fraction)
    settings, parts = config.data, (train, validation, test)
    description = (
        f"{settings.name}: images {shape}, {settings.classes} classes",
        settings.crop_size and f"crops of {settings.crop_size}",
        data.describe_sizes(*parts),
        note,
        f"U-Net of widths {tuple(config.model.widths)}",
    )
    return tasks.Task(
        *parts,
        build_model=lambda: build_network(settings.classes, config.model),
        loss=segmentation_scores.CrossEntropyAndDice(),
        metrics=lambda: segmentation_scores.create(settings.classes),
        description="; ".join(filter(None, description)),
        score=functools.partial(_score, config, test),
        predict=functools.partial(_predict, config),
        augment=functools.partial(
            augment, crop_size=settings.crop_size, flips=settings.augment == "flips"
        ),
    )


def synthetic(config) -> tasks.Synthetic:
    """As `tfamp.recipes.segmentation.synthetic` says."""
    size, classes = config.data.crop_size or config.data.image_size, config.data.classes
    if size is None:
        raise ValueError(
            "The images' size is not known without reading them. Received: "
            "config.data.crop_size=None, config.data.image_size=None. Set one."
        )
    _check(config)
    _check_sides(config, (size, size))
    draw = np.random.default_rng(config.seed).integers
    shape = (tasks.BATCHES, config.batch_size, size, size)
    images = draw(256, size=(*shape, 3), dtype="uint8")
    return tasks.Synthetic(
        build_model=lambda: build_network(classes, config.model),
        batches=data.repeat(images, draw(classes, size=(*shape, 1), dtype="uint8")),
        description=f"U-Net of widths {tuple(config.model.widths)}: images of "
        f"{size}x{size}, {classes} classes; random pixels",
        loss=segmentation_scores.CrossEntropyAndDice(),
        metrics=lambda: segmentation_scores.create(classes),
        unit="images",
    )


def _check(config):
    """Refuses settings that make no sense, before any data are read."""
    rules = {
        "data.classes": ("in 2..256", lambda classes: 2 <= classes <= 256),
        "data.augment": ("'none' or 'flips'", lambda x: x in ("none", "flips")),
    }
    default_config.check(config, rules)


def _check_sides(config, shape):
    """Refuses sides that the poolings do not divide, and crops that do not fit in."""
    height, width, *_ = shape
    crop, poolings = config.data.crop_size, len(config.model.widths) - 1
    if crop and crop > min(height, width):
        raise ValueError(
            "config.data.crop_size must fit into the images. Received: "
            f"crop_size={crop}, images of {height}x{width}."
        )
    sides, factor = {crop or height, height, crop or width, width}, 2**poolings
    if any(side % factor for side in sides):
        raise ValueError(
            f"The {poolings} poolings of config.model.widths need sides that are "
            f"multiples of {factor}. Received: config.data.crop_size={crop}, images of "
            f"{height}x{width}. Set config.data.crop_size and config.data.image_size, "
            "or use fewer widths."
        )


def _predict(config, model, rows, folder):
    """Writes masks of the images in the column "file"; returns their files."""
    pandas = extras.require("pandas")
    Image = extras.require("PIL.Image")
    settings, masks = config.data, []
    for number, file in enumerate(data.pick(rows, ["file"]).file):
        image = segmentation_data.read_image(file, settings)
        mask = segmentation_scores.to_classes(model.predict(image[None], verbose=0))
        mask = keras.ops.convert_to_numpy(mask)[0]
        # As the masks that train: 0 and 255, or the numbers of the classes.
        levels = 255 * mask if settings.classes == 2 else mask + settings.first_class
        masks.append(folder / f"mask{number}_{pathlib.Path(file).stem}.png")
        Image.fromarray(levels.astype("uint8")).save(masks[-1])
    return pandas.DataFrame({"mask": [*map(str, masks)]})


def _score(config, test, model, folder: pathlib.Path):
    """Draws predictions for some test images; the metrics are the scores."""
    images, masks = next(iter(test.batch(_SHOWN)))
    size = min(config.eval_batch_size, _SHOWN)
    probabilities = model.predict(images, batch_size=size, verbose=0)
    plots.write(
        folder / figures.PREDICTIONS,
        figures.masks_figure,
        config.name,
        images.numpy(),
        masks.numpy()[..., 0],
        keras.ops.convert_to_numpy(segmentation_scores.to_classes(probabilities)),
        config.data.classes,
    )
    return {}


def build_network(classes: int, model) -> keras.Model:
    """Builds the network under the dtype policy in force.

    Down the levels two 3x3 convolutions with ReLU and 2x2 pooling; up again by 2x2
    transposed convolutions, each followed by the concatenation with what was there on
    the way down, and two convolutions. Convolutions are padded, so that the output has
    the image's size; the published network had no padding, nor batch normalization.

    Args:
      classes: Number of classes, the background among them.
      model: Config with `widths` (channels of each level, the first at the image's
        resolution), `batch_norm` and `dropout` (of the lowest level).

    Returns:
      A functional model: uint8 images [batch, height, width, 3], sides multiples of 2
      for each pooling, to float32 probabilities: [batch, height, width, 1] of the
      foreground for two classes, else [batch, height, width, classes].

    References:
      Ronneberger, Fischer and Brox, "U-Net", 2015, https://arxiv.org/abs/1505.04597;
      He et al., "Delving Deep into Rectifiers", 2015,
      https://arxiv.org/abs/1502.01852 (initial weights).
    """
    inputs = keras.Input((None, None, 3), name="image")
    # Pinned to float32: 8-bit steps do not survive bfloat16's 8 bits of precision.
    scale = keras.layers.Rescaling(1 / 127.5, -1.0, dtype="float32", name="rescaling")
    x, skips = scale(inputs), []
    *upper, lowest = model.widths
    for level, width in enumerate(upper, 1):
        x = _two_convolutions(x, width, model.batch_norm, f"down{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(name=f"pool{level}")(x)
    x = _two_convolutions(x, lowest, model.batch_norm, "bottom")
    x = keras.layers.Dropout(model.dropout, name="dropout")(x)
    for level, width in reversed([*enumerate(upper, 1)]):
        settings = {"activation": "relu", "kernel_initializer": "he_normal"}
        up = keras.layers.Conv2DTranspose(
            width, 2, strides=2, name=f"up{level}", **settings
        )
        x = keras.layers.Concatenate(name=f"skip{level}")([skips[level - 1], up(x)])
        x = _two_convolutions(x, width, model.batch_norm, f"up{level}")
    channels, activation = (1, "sigmoid") if classes == 2 else (classes, "softmax")
    logits = keras.layers.Conv2D(channels, 1, dtype="float32", name="logits")(x)
    head = keras.layers.Activation(activation, dtype="float32", name="probabilities")
    return keras.Model(inputs, head(logits), name="unet")


def _two_convolutions(x, width, batch_norm, name):
    """Twice a 3x3 convolution and ReLU; with batch normalization without bias."""
    settings = {"padding": "same", "kernel_initializer": "he_normal"}
    settings |= {"use_bias": False} if batch_norm else {"activation": "relu"}
    for one in (f"{name}_conv1", f"{name}_conv2"):
        x = keras.layers.Conv2D(width, 3, name=one, **settings)(x)
        if batch_norm:
            # Keras' momentum of 0.99 is too slow for runs of some hundred steps.
            norm = keras.layers.BatchNormalization(momentum=0.9, name=f"{one}_norm")
            x = keras.layers.ReLU(name=f"{one}_relu")(norm(x))
    return x


def augment(image, mask, seed, crop_size: int | None = None, flips: bool = True):
    """Cuts, flips and turns an image and its mask alike.

    Args:
      image: uint8 [height, width, channels].
      mask: uint8 [height, width, 1].
      seed: int64 [2]; what is done depends on nothing else.
      crop_size: Side of the random square that is cut out; None: the whole image.
      flips: Whether to flip and turn: one of the 8 symmetries of a square, or, where
        the image is none, of the 4 of a rectangle.

    Returns:
      (image, mask) of the same dtypes.
    """
    both = tf.concat([image, mask], axis=-1)
    height, width, channels = both.shape
    size = (crop_size or height, crop_size or width)
    draws = tf.random.stateless_uniform([4], seed, 0, 2**30, tf.int32)
    row, column = draws[0] % (height - size[0] + 1), draws[1] % (width - size[1] + 1)
    both = tf.image.crop_to_bounding_box(both, row, column, *size)
    if flips:
        both = tf.cond(draws[2] % 2 == 0, lambda: both, lambda: both[:, ::-1])
        quarters = draws[3] if size[0] == size[1] else 2 * (draws[3] % 2)
        both = tf.image.rot90(both, quarters % 4)
    both = tf.ensure_shape(both, (*size, channels))
    return both[..., :-1], both[..., -1:]
