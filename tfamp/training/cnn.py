"""Image classification with a convolutional network."""

import functools

import keras

from tfamp.training import (
    augmentation,
    cnn_config,
    data,
    efficientnet,
    losses,
    resnet,
    tasks,
)


def create(config, data_dir=None, manual_dir=None) -> tasks.Task:
    """Loads the images and describes the network.

    Args:
      config: `config.data.name` is "digits" or a TFDS name; `config.model` is that of
        `build_network`, `config.data.augment` one of `augmentation.NAMES`, and
        `config.label_smoothing` counts in training.
      data_dir: Folder of data prepared by TFDS.
      manual_dir: Folder with the data set's original files.

    Returns:
      A `tasks.Task`.

    Raises:
      DataError: If the data are missing or malformed.
      ValueError: If a setting makes no sense.
    """
    check(config)
    name = config.data.name
    if name == "digits":
        classes = 10
        train, test = data.load_digits(config.data.image_size)
    else:
        train, test, classes = data.load_tfds(name, data_dir, manual_dir)
    train = data.limit(train, config.limit_examples)
    test = data.limit(test, config.limit_examples)
    train, validation = _hold_out(train, config.validation_fraction)
    shape = tuple(train.element_spec[0].shape)
    sizes = [
        int(part.cardinality()) if part else 0 for part in (train, validation, test)
    ]
    return tasks.Task(
        train=train,
        validation=validation,
        test=test,
        build_model=lambda: build_network(shape, classes, config.model),
        loss=make_loss(config),
        augment=augmentation.create(config.data.augment),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description=(
            f"{name}: images {shape}, {classes} classes (chance {1 / classes:.2f}); "
            "{} training, {} validation, {} test examples".format(*sizes)
        ),
    )


def _hold_out(train, fraction):
    """Splits off what selects the checkpoint; nothing for 0."""
    return data.hold_out(train, fraction) if fraction else (train, None)


def check(config) -> None:
    """Raises ValueError unless `config.model` is that of a network here."""
    model = config.model
    if model.name not in NETWORKS:
        raise ValueError(
            f"Unknown network. Received: config.model.name={model.name!r}. Expected "
            f"one of {', '.join(map(repr, NETWORKS))}."
        )
    missing = set(cnn_config.MODELS[model.name]) - set(model)
    if missing:
        raise ValueError(
            f"The network {model.name!r} needs config.model."
            f"{', config.model.'.join(sorted(missing))}. Received: {sorted(model)}. "
            "Start from a configuration of that network."
        )
    if model.name == "resnet":
        resnet.check(model)
    augmentation.create(config.data.augment)


def make_loss(config) -> keras.losses.Loss:
    """Returns the loss of training: cross-entropy, smoothed where asked for."""
    if config.label_smoothing:
        return losses.SmoothedCrossEntropy(config.label_smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_network(shape, classes: int, model) -> keras.Model:
    """Builds a network under the dtype policy in force.

    Args:
      shape: Shape of an image, (height, width, channels); values in 0..255.
      classes: Number of classes.
      model: Config with `name`, one of `NETWORKS`, and what that network reads.

    Returns:
      A functional model: [batch, *shape] to float32 logits [batch, classes].
    """
    inputs = keras.Input(shape, name="image")
    x = NETWORKS[model.name](inputs, model)
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=model.name)


def plain_features(inputs, model):
    """A plain network up to its last layer.

    Blocks of 3x3 convolutions with ReLU, each ending in 2x2 pooling; then one dense
    layer, unless it has 0 units, and dropout. With batch normalization the convolutions
    carry no bias.

    Args:
      inputs: Symbolic images, [batch, height, width, channels]; values in 0..255.
      model: Config with `blocks` (tuple of tuples of channels), `batch_norm`,
        `dense` (units) and `dropout`.

    Returns:
      Symbolic [batch, features].
    """
    # Pinned to float32: 8-bit steps do not survive bfloat16's 8 bits of precision.
    scale = keras.layers.Rescaling(1 / 127.5, -1.0, dtype="float32", name="rescaling")
    x = scale(inputs)
    # Named, as Keras' own numbers go on from one run of a process to the next.
    for i, block in enumerate(model.blocks, 1):
        for j, channels in enumerate(block, 1):
            x = _convolution(x, channels, model.batch_norm, f"conv{i}_{j}")
        x = keras.layers.MaxPooling2D(name=f"pool{i}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    if model.dense:
        x = keras.layers.Dense(model.dense, activation="relu", name="dense")(x)
    return keras.layers.Dropout(model.dropout, name="dropout")(x)


def _convolution(x, channels, batch_norm, name):
    layer = functools.partial(keras.layers.Conv2D, channels, 3, padding="same")
    if not batch_norm:
        return layer(activation="relu", name=name)(x)
    x = layer(use_bias=False, name=name)(x)
    x = keras.layers.BatchNormalization(name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)


# Network -> its function of symbolic images and `config.model`; what each reads of it
# is in `cnn_config.MODELS`.
NETWORKS = {
    "cnn": plain_features,
    "resnet": resnet.features,
    "efficientnet": efficientnet.features,
}
