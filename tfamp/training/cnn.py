"""Image classification with a plain convolutional network."""

import functools

import keras

from tfamp.training import data, tasks


def create(config, data_dir=None, manual_dir=None) -> tasks.Task:
    """Loads the images and describes the network.

    Args:
      config: `config.data.name` is "digits" or a TFDS name; `config.model` has the
        fields of `build_network`.
      data_dir: Folder of data prepared by TFDS.
      manual_dir: Folder with the data set's original files.

    Returns:
      A `tasks.Task`.

    Raises:
      DataError: If the data are missing or malformed.
    """
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
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description=(
            f"{name}: images {shape}, {classes} classes (chance {1 / classes:.2f}); "
            "{} training, {} validation, {} test examples".format(*sizes)
        ),
    )


def _hold_out(train, fraction):
    """Splits off what selects the checkpoint; nothing for 0."""
    return data.hold_out(train, fraction) if fraction else (train, None)


def build_network(shape, classes: int, model) -> keras.Model:
    """Builds the network under the dtype policy in force.

    Blocks of 3x3 convolutions with ReLU, each ending in 2x2 pooling; then one dense
    layer, dropout and float32 logits. With batch normalization the convolutions
    carry no bias.

    Args:
      shape: Shape of an image, (height, width, channels); values in 0..255.
      classes: Number of classes.
      model: Config with `blocks` (tuple of tuples of channels), `batch_norm`,
        `dense` (units) and `dropout`.

    Returns:
      A functional model: [batch, *shape] to float32 logits [batch, classes].
    """
    inputs = keras.Input(shape, name="image")
    # Pinned to float32: 8-bit steps do not survive bfloat16's 8 bits of precision.
    scale = keras.layers.Rescaling(1 / 127.5, -1.0, dtype="float32", name="rescaling")
    x = scale(inputs)
    # Named, as Keras' own numbers go on from one run of a process to the next.
    for i, block in enumerate(model.blocks, 1):
        for j, channels in enumerate(block, 1):
            x = _convolution(x, channels, model.batch_norm, f"conv{i}_{j}")
        x = keras.layers.MaxPooling2D(name=f"pool{i}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(model.dense, activation="relu", name="dense")(x)
    x = keras.layers.Dropout(model.dropout, name="dropout")(x)
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="cnn")


def _convolution(x, channels, batch_norm, name):
    layer = functools.partial(keras.layers.Conv2D, channels, 3, padding="same")
    if not batch_norm:
        return layer(activation="relu", name=name)(x)
    x = layer(use_bias=False, name=name)(x)
    x = keras.layers.BatchNormalization(name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)
