"""A residual network for small images, after the ResNets of the CIFAR-10 literature."""

import functools

import keras

# Of the recipe's implementations; Keras' own defaults (0.99, 1e-3) are slower to
# follow in runs of few steps. PyTorch counts momentum the other way round: 0.1.
_NORM_MOMENTUM = 0.9
_NORM_EPSILON = 1e-5


def check(model) -> None:
    """Raises ValueError unless each stage has a width and a number of blocks."""
    if not model.widths or len(model.widths) != len(model.blocks_per_stage):
        raise ValueError(
            "`config.model.widths` and `config.model.blocks_per_stage` must have one "
            f"number each for every stage. Received: {model.widths} and "
            f"{model.blocks_per_stage}."
        )


def features(inputs, model):
    """Stages of basic blocks; each stage but the first halves the image.

    A 3x3 stem without pooling, since the images are small; blocks of two 3x3
    convolutions with batch normalization around an identity, or around a 1x1
    convolution where the shape changes; the mean over the pixels. With the default
    widths and blocks this is the ResNet-18 of CIFAR-10: 11.2 million parameters.

    Args:
      inputs: Symbolic images, [batch, height, width, channels]; values in 0..255.
      model: Config with `widths`, the channels of each stage, and `blocks_per_stage`.

    Returns:
      Symbolic [batch, widths[-1]].

    References:
      He et al., "Deep Residual Learning for Image Recognition", 2016,
      https://arxiv.org/abs/1512.03385; the shape for 32x32 images:
      https://github.com/kuangliu/pytorch-cifar.
    """
    # Pinned to float32: 8-bit steps do not survive bfloat16's 8 bits of precision.
    scale = keras.layers.Rescaling(1 / 127.5, -1.0, dtype="float32", name="rescaling")
    x = _normalized(scale(inputs), model.widths[0], 3, 1, "stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    stages = zip(model.widths, model.blocks_per_stage, strict=True)
    for i, (width, count) in enumerate(stages, 1):
        for j in range(1, count + 1):
            stride = 2 if i > 1 and j == 1 else 1
            x = _block(x, width, stride, f"stage{i}_block{j}")
    return keras.layers.GlobalAveragePooling2D(name="pool")(x)


def _block(x, width, stride, name):
    """Two convolutions around a shortcut."""
    layers = keras.layers
    shortcut = x
    if stride != 1 or x.shape[-1] != width:
        shortcut = _normalized(x, width, 1, stride, f"{name}_shortcut")
    x = _normalized(x, width, 3, stride, f"{name}_conv1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _normalized(x, width, 3, 1, f"{name}_conv2")
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu2")(x)


def _normalized(x, channels, size, stride, name):
    """A convolution without bias, and batch normalization."""
    convolution = functools.partial(
        keras.layers.Conv2D, kernel_initializer="he_normal", use_bias=False
    )
    x = convolution(channels, size, stride, padding="same", name=name)(x)
    return keras.layers.BatchNormalization(
        momentum=_NORM_MOMENTUM, epsilon=_NORM_EPSILON, name=f"{name}_norm"
    )(x)
