"""Networks by name: their pixels in float32, their settings, their steps."""

import keras
import numpy as np
import pytest

from tfamp.precision import control
from tfamp.training import benchmark_inputs, cnn, cnn_config, losses

SHAPE, CLASSES = (32, 32, 3), 10


def make_model(network):
    """The sizes of a run of seconds."""
    config = cnn_config.get_cnn_config(network)
    config.model.update(config.tiny.model)
    return config.model


@pytest.fixture(scope="module")
def mixed():
    """Each network, built under mixed_bfloat16."""
    with control.enabled("mixed_bfloat16"):
        return {
            network: cnn.build_network(SHAPE, CLASSES, make_model(network))
            for network in cnn.NETWORKS
        }


@pytest.mark.parametrize("network", cnn.NETWORKS)
def test_no_two_pixel_values_become_one(network, mixed):
    model = mixed[network]
    first = next(x for x in model.layers if isinstance(x, keras.layers.Conv2D))
    assert first.compute_dtype == "bfloat16"
    before = model.layers[1 : model.layers.index(first)]
    scales = [x for x in before if not isinstance(x, keras.layers.ZeroPadding2D)]
    assert scales and {x.compute_dtype for x in scales} == {"float32"}
    ramp = np.arange(256, dtype="uint8").reshape(1, 16, 16, 1)
    pixels = keras.ops.convert_to_tensor(np.broadcast_to(ramp, (1, 16, 16, 3)))
    for layer in scales:
        pixels = layer(pixels)
    assert keras.backend.standardize_dtype(pixels.dtype) == "float32"
    assert len(np.unique(keras.ops.convert_to_numpy(pixels)[..., 0])) == 256


@pytest.mark.parametrize("network", cnn.NETWORKS)
def test_body_is_in_16_bits_and_logits_are_not(network, mixed):
    model = mixed[network]
    assert (model.name, model.output_shape) == (network, (None, CLASSES))
    assert model.layers[-1].name == "logits"
    assert model.layers[-1].compute_dtype == "float32"
    weighted = [x for x in model.layers[:-1] if x.trainable_variables]
    assert {x.compute_dtype for x in weighted} == {"bfloat16"}


def test_efficientnet_is_b0_and_named_apart_from_the_process(mixed):
    model = mixed["efficientnet"]
    # 5,330,571 of the ImageNet model of keras.applications, which has 1000 classes and
    # 7 numbers of a Normalization; https://keras.io/api/applications/.
    body = model.count_params() - 1281 * CLASSES
    assert body == 5_330_571 - 1281 * 1000
    assert {"rescaling", "scaling"} <= {layer.name for layer in model.layers}


def test_network_without_a_dense_layer_has_one_for_the_logits():
    model = make_model("cnn")
    assert model.dense > 0
    names = [x.name for x in cnn.build_network(SHAPE, CLASSES, model).layers]
    assert "dense" in names
    model.dense = 0
    built = cnn.build_network(SHAPE, CLASSES, model)
    assert "dense" not in [layer.name for layer in built.layers]
    assert [x.name for x in built.layers if isinstance(x, keras.layers.Dense)] == [
        "logits"
    ]


@pytest.mark.parametrize(
    ("network", "changes", "message"),
    [
        ("cnn", {"model.name": "vgg"}, "'vgg'.*'efficientnet'"),
        ("cnn", {"model.name": "resnet"}, "config.model.blocks_per_stage"),
        ("resnet", {"model.widths": (8, 16, 32)}, "one number each"),
        ("cnn", {"data.augment": "cutmix"}, "'cutmix'.*'crop_flip'"),
    ],
    ids=["network", "another network's", "stages", "augmentation"],
)
def test_settings_that_make_no_sense_are_refused(network, changes, message):
    config = cnn_config.get_cnn_config(network)
    config.data.name = "cifar10"
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        cnn.create(config, "/nowhere")  # Before it looks for data.
    with pytest.raises(ValueError, match=message):
        benchmark_inputs.check(config)


def test_benchmark_times_the_configured_network_and_loss():
    config = cnn_config.get_cnn_config("resnet")
    config.data.name, config.batch_size, config.label_smoothing = "cifar10", 2, 0.1
    config.model.update(config.tiny.model)
    synthetic = benchmark_inputs.create(config)
    assert synthetic.build_model().name == "resnet"
    assert isinstance(synthetic.loss, losses.SmoothedCrossEntropy)
    assert synthetic.loss.label_smoothing == 0.1
    images, labels = next(iter(synthetic.batches))
    assert images.shape == (2, *SHAPE) and labels.shape == (2,)
    config.label_smoothing = 0.0
    plain = benchmark_inputs.create(config).loss
    assert isinstance(plain, keras.losses.SparseCategoricalCrossentropy)


def test_task_augments_and_smooths_as_configured():
    config = cnn_config.get_cnn_config()
    config.data.name, config.data.image_size = "digits", 8
    task = cnn.create(config)
    assert task.augment is None
    config.data.augment, config.label_smoothing = "crop_flip", 0.1
    task = cnn.create(config)
    image, label = next(iter(task.train))
    changed, same = task.augment(image, label, seed=[3, 5])
    assert changed.shape == image.shape and changed.dtype == image.dtype
    assert int(same) == int(label)
    assert isinstance(task.loss, losses.SmoothedCrossEntropy)


@pytest.mark.slow
def test_efficientnet_computes_what_the_one_of_keras_does():
    ours = cnn.build_network(SHAPE, CLASSES, make_model("efficientnet"))
    keras_own = keras.applications.EfficientNetB0(
        weights=None,
        input_shape=SHAPE,
        classes=CLASSES,
        classifier_activation=None,
    )
    keras_own.set_weights(ours.get_weights())
    images = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype("float32")
    np.testing.assert_array_equal(
        ours.predict(images, verbose=0), keras_own.predict(images, verbose=0)
    )
    rates = [
        [
            (layer.rate, layer.noise_shape)
            for layer in model.layers
            if isinstance(layer, keras.layers.Dropout)
        ]
        for model in (ours, keras_own)
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 10


def test_images_of_any_set_can_be_timed_where_their_shape_is_given():
    config = cnn_config.get_cnn_config()
    config.data.name, config.batch_size = "my_photos", 2
    with pytest.raises(ValueError, match="config.data.image_shape"):
        benchmark_inputs.check(config)
    config.data.image_shape, config.data.classes = (8, 12, 3), 5
    images, labels = next(iter(benchmark_inputs.create(config).batches))
    assert images.shape == (2, 8, 12, 3) and int(np.max(labels)) < 5
