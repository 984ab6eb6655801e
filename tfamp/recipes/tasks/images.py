"""Image classification: a plain network, a ResNet and EfficientNet, by name."""

import functools
import json

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import extras
from tfamp.recipes import data, images_data
from tfamp.runs import default_config, pipeline, tasks

_PADDING = 4  # Pixels by which `crop_and_flip` shifts.


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.images.create` says."""
    _check(config)
    *parts, names, decode = images_data.load(config)
    classes = len(names)
    train, test = (part.take(config.limit_examples or -1) for part in parts)
    chance = images_data.chance(test, classes, decode)
    train, validation = data.hold_out(train, config.validation_fraction)
    crops, late = config.data.augment == "crop_flip", not config.data.cache

    def prepare(image, label):
        return _smoothed(config, classes, decode(image), label)

    def augment(image, label, seed):
        image, label = prepare(image, label) if late else (image, label)
        return crop_and_flip(image, label, seed) if crops else (image, label)

    validation, test = (
        part and part.map(prepare, tf.data.AUTOTUNE) for part in (validation, test)
    )
    if not late:  # Else names are shuffled, and no images kept for it.
        train = train.map(prepare, tf.data.AUTOTUNE)
    shape = tuple(test.element_spec[0].shape)
    return tasks.Task(
        train=train,
        validation=validation,
        test=test,
        build_model=lambda: build_network(shape, classes, config.model),
        augment=augment if crops or late else None,
        description=f"{config.data.name}: images {shape}, {classes} classes (chance "
        f"{chance:.2f}); {data.describe_sizes(train, validation, test)}",
        chance=chance,
        predict=functools.partial(_predict, config, shape, names),
        assets={"labels.json": json.dumps(names) + "\n"},
        **_objective(config),
    )


def _predict(config, shape, names, model, rows, folder):
    """Returns the classes of the images in the column "file"; see `tasks.Task`."""
    pandas = extras.require("pandas")
    files = data.slices(data.pick(rows, ["file"]).file.tolist())
    images = files.map(lambda path: images_data.decode(path, shape))
    batches = pipeline.evaluation_batches(images, config.eval_batch_size)
    return pandas.DataFrame(data.answers(model.predict(batches, verbose=0), names))


def synthetic(config) -> tasks.Synthetic:
    """As `tfamp.recipes.images.synthetic` says."""
    _check(config)
    settings, side = config.data, config.data.get("image_size", images_data.SIDE)
    shapes = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "digits": (side, side, 1)}
    shape = tuple(settings.image_shape or shapes.get(settings.name, ()))
    classes = settings.classes
    if not shape:
        raise ValueError(
            "The images' shape is not known without reading them. Received: "
            f"config.data.name={settings.name!r}. Expected one of {', '.join(shapes)}; "
            "or set config.data.image_shape=(height, width, channels) and "
            "config.data.classes."
        )
    draw = np.random.default_rng(config.seed).integers
    count = (tasks.BATCHES, config.batch_size)
    pixels = draw(256, size=(*count, *shape), dtype="uint8")
    batches = data.repeat(pixels, draw(classes, size=count, dtype="int64"))
    return tasks.Synthetic(
        lambda: build_network(shape, classes, config.model),
        batches.map(functools.partial(_smoothed, config, classes)),
        f"{config.model.name}: images {shape}, {classes} classes; random pixels",
        unit="images",
        **_objective(config),
    )


def _check(config):
    """Refuses settings that make no sense, before any data are read."""
    one_of = default_config.one_of
    rules = {
        "model.name": one_of(tuple(_NETWORKS)),
        "data.augment": one_of(("none", "crop_flip")),
    }
    default_config.check(config, rules)
    model = config.model
    if model.name == "resnet" and len(model.widths) != len(model.blocks_per_stage):
        raise ValueError(
            "config.model.widths and config.model.blocks_per_stage must have one "
            f"number each for every stage. Received: {model.widths} and "
            f"{model.blocks_per_stage}."
        )


def _smoothed(config, classes, image, label):
    """Keras smooths one-hot labels alone."""
    return image, tf.one_hot(label, classes) if config.label_smoothing else label


def _objective(config):
    """Returns a task's loss and metrics; smoothed labels are one-hot."""
    if config.label_smoothing:
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing
        )
        kind = keras.metrics.CategoricalAccuracy
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        kind = keras.metrics.SparseCategoricalAccuracy
    return {"loss": loss, "metrics": lambda: [kind(name="accuracy")]}


def crop_and_flip(image, label, seed):
    """Shifts an image by up to 4 pixels and mirrors every second one.

    A random crop, as large as the image, out of the image with 4 black pixels on each
    side; then a horizontal flip with probability 1/2. Runs in tf.data, on 8 bits.

    Args:
      image: [height, width, channels], any dtype.
      label: Returned as it is.
      seed: int64 [2]; the outcome depends on nothing else.

    Returns:
      (image, label); shape and dtype as they were.

    References:
      He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2,
      https://arxiv.org/abs/1512.03385.
    """
    crop, flip = tf.unstack(tf.random.split(tf.convert_to_tensor(seed), 2))
    sides = ((_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0))
    image = tf.image.stateless_random_crop(tf.pad(image, sides), image.shape, crop)
    return tf.image.stateless_random_flip_left_right(image, flip), label


def build_network(shape, classes: int, model) -> keras.Model:
    """Builds a network under the dtype policy in force.

    Args:
      shape: Shape of an image, (height, width, channels); values in 0..255.
      classes: Number of classes.
      model: Config with `name` and what that network reads. "cnn": `blocks` (tuple of
        tuples of channels), `batch_norm`, `dense` (units) and `dropout`. "resnet":
        `widths` (channels of each stage) and `blocks_per_stage`. "efficientnet":
        `dropout`.

    Returns:
      A functional model: [batch, *shape] to float32 logits [batch, classes].
    """
    inputs = keras.Input(shape, name="image")
    x = _NETWORKS[model.name](inputs, model)
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=model.name)


# The layers are named, as Keras' own numbers go on from one run of a process to the
# next.


def _scaled(inputs):
    """Pixels as -1..1; in float32: 8-bit steps do not survive bfloat16's 8 bits."""
    layer = keras.layers.Rescaling(1 / 127.5, -1.0, dtype="float32", name="rescaling")
    return layer(inputs)


def _plain_features(inputs, model):
    """A plain network up to its last layer.

    Blocks of 3x3 convolutions with ReLU, each ending in 2x2 pooling; then one dense
    layer, unless it has 0 units, and dropout. With batch normalization the convolutions
    carry no bias.
    """
    layers, x, norm = keras.layers, _scaled(inputs), model.batch_norm
    settings = {"use_bias": False} if norm else {"activation": "relu"}
    for i, block in enumerate(model.blocks, 1):
        for j, channels in enumerate(block, 1):
            name = f"conv{i}_{j}"
            x = layers.Conv2D(channels, 3, padding="same", name=name, **settings)(x)
            if norm:
                x = layers.BatchNormalization(name=f"{name}_norm")(x)
                x = layers.ReLU(name=f"{name}_relu")(x)
        x = layers.MaxPooling2D(name=f"pool{i}")(x)
    x = layers.Flatten(name="flatten")(x)
    if model.dense:
        x = layers.Dense(model.dense, activation="relu", name="dense")(x)
    return layers.Dropout(model.dropout, name="dropout")(x)


def _resnet_features(inputs, model):
    """Stages of basic blocks; each stage but the first halves the image.

    A 3x3 stem without pooling, since the images are small; blocks of two 3x3
    convolutions with batch normalization around an identity, or around a 1x1
    convolution where the shape changes; the mean over the pixels. With the default
    widths and blocks this is the ResNet-18 of CIFAR-10: 11.2 million parameters.

    References:
      He et al., "Deep Residual Learning for Image Recognition", 2016,
      https://arxiv.org/abs/1512.03385; the shape for 32x32 images:
      https://github.com/kuangliu/pytorch-cifar.
    """
    x = _normalized(_scaled(inputs), model.widths[0], 3, 1, "stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    stages = zip(model.widths, model.blocks_per_stage, strict=True)
    for i, (width, count) in enumerate(stages, 1):
        for j in range(1, count + 1):
            stride = 2 if i > 1 and j == 1 else 1
            x = _block(x, width, stride, f"stage{i}_block{j}")
    return keras.layers.GlobalAveragePooling2D(name="pool")(x)


def _block(x, width, stride, name):
    """Two convolutions around a shortcut."""
    shortcut = x
    if stride != 1 or x.shape[-1] != width:
        shortcut = _normalized(x, width, 1, stride, f"{name}_shortcut")
    x = _normalized(x, width, 3, stride, f"{name}_conv1")
    x = keras.layers.ReLU(name=f"{name}_relu1")(x)
    x = _normalized(x, width, 3, 1, f"{name}_conv2")
    x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return keras.layers.ReLU(name=f"{name}_relu2")(x)


def _normalized(x, channels, size, stride, name):
    """A convolution without bias, and batch normalization."""
    settings = {"kernel_initializer": "he_normal", "use_bias": False, "name": name}
    x = keras.layers.Conv2D(channels, size, stride, padding="same", **settings)(x)
    # Of the recipe's implementations; Keras' own defaults (0.99, 1e-3) are slower to
    # follow in runs of few steps. PyTorch counts momentum the other way round: 0.1.
    settings = {"momentum": 0.9, "epsilon": 1e-5, "name": f"{name}_norm"}
    return keras.layers.BatchNormalization(**settings)(x)


def _efficientnet_features(inputs, model):
    """EfficientNet-B0 of `keras.applications`, from scratch, without its last layer.

    Keras' network scales the pixels itself; those layers are pinned to float32.

    References:
      Tan and Le, "EfficientNet", 2019, https://arxiv.org/abs/1905.11946.
    """
    layers = keras.layers
    pinned = {layers.Rescaling: "rescaling", layers.Normalization: "scaling"}

    def copy(layer):
        settings, name = layer.get_config(), pinned.get(type(layer))
        settings |= {"dtype": "float32", "name": name} if name else {}
        return type(layer).from_config(settings)

    network = keras.applications.EfficientNetB0(
        include_top=False, weights=None, input_tensor=inputs, pooling="avg"
    )
    network = keras.models.clone_model(network, [inputs], clone_function=copy)
    return layers.Dropout(model.dropout, name="dropout")(network.outputs[0])


_NETWORKS = {
    "cnn": _plain_features,
    "resnet": _resnet_features,
    "efficientnet": _efficientnet_features,
}
