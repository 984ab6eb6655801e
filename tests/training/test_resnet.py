"""The residual network: its shape, its gradients, XLA, and the recipe's decay."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.precision import control
from tfamp.training import cnn, cnn_config

SHAPE = (16, 16, 3)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 32)
    # Two classes that differ in brightness.
    images = rng.integers(0, 128, (32, *SHAPE)) + 100 * labels[:, None, None, None]
    return images.astype("uint8"), labels


def build(**sizes):
    model = cnn_config.get_cnn_config("resnet").model
    model.update(sizes)
    return cnn.build_network(SHAPE, 2, model)


def test_default_is_the_resnet_18_of_small_images():
    config = cnn_config.get_cnn_config("resnet")
    model = cnn.build_network((32, 32, 3), 10, config.model)
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert trainable == 11_173_962  # Of https://github.com/kuangliu/pytorch-cifar.
    strided = {x.name for x in model.layers if getattr(x, "strides", None) == (2, 2)}
    assert strided == {
        f"stage{stage}_block1_{part}"
        for stage in (2, 3, 4)
        for part in ("conv1", "shortcut")
    }


def test_block_of_the_same_shape_has_an_identity_around_it():
    model = build(widths=(8, 8), blocks_per_stage=(2, 1))
    shortcuts = {x.name for x in model.layers if x.name.endswith("_shortcut")}
    assert shortcuts == {"stage2_block1_shortcut"}
    add = model.get_layer("stage1_block2_add")
    sources = {x._keras_history.operation.name for x in add.input}
    assert sources == {"stage1_block2_conv2_norm", "stage1_block1_relu2"}


@pytest.mark.parametrize(
    ("mode", "jit"),
    [
        pytest.param("float32", True, marks=pytest.mark.slow),
        ("mixed_bfloat16", False),
        ("mixed_float16", True),
    ],
)
def test_steps_lower_the_loss_in_every_mode_and_under_xla(mode, jit, batch):
    with control.enabled(mode):
        keras.utils.set_random_seed(0)
        model = build(widths=(4, 8), blocks_per_stage=(1, 1))
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit)
        images, labels = batch
        found = [float(model.train_on_batch(images, labels)) for _ in range(8)]
    assert np.isfinite(found).all() and found[-1] < 0.5 * found[0]


def test_decoupled_decay_of_the_recipe_is_its_l2_under_momentum():
    rate, l2, momentum, steps = 0.1, 5e-4, 0.9, 300
    coupled, apart = (keras.Variable([1.0]) for _ in range(2))
    first = keras.optimizers.SGD(rate, momentum=momentum, nesterov=True)
    decay = l2 / (1 - momentum)
    second = keras.optimizers.SGD(
        rate, momentum=momentum, nesterov=True, weight_decay=decay
    )

    @tf.function
    def train():
        for _ in tf.range(steps):
            first.apply([l2 * coupled], [coupled])
            second.apply([tf.zeros(1)], [apart])

    first.build([coupled])
    second.build([apart])
    train()
    expected = np.exp(-rate * decay * steps)
    # Momentum lags by its 10 steps, of 5e-4 each.
    assert float(apart[0]) == pytest.approx(expected, rel=1e-3)
    assert float(coupled[0]) == pytest.approx(expected, rel=1e-2)
