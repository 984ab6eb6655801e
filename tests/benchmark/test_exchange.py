"""What PyTorch's cells are given: configurations, weights, batches, learning rates."""

import json
import os
import stat
import sys

import keras
import numpy as np
import pytest

from tfamp.benchmark import exchange, twin_weights
from tfamp.training import base_config, benchmark_inputs, bert_config
from tfamp.training.tasks import images


def make_images():
    config = images.get_config()
    config.data.name, config.data.image_size = "digits", 8
    config.model.update(config.tiny.model)
    config.batch_size = 4
    return config


def make_texts():
    config = bert_config.get_bert_config()
    config.model.update(config.tiny.model)
    config.model.max_sequence_length, config.data.sequence_length = 8, 16
    config.batch_size = 4
    return config


def written(folder, config, steps=2):
    file = folder / "twin.npz"
    exchange.write(file, config, benchmark_inputs.create(config), steps)
    with np.load(file) as arrays:
        return json.loads((folder / "twin.json").read_text()), dict(arrays)


# ---- Which configurations have a twin ----


@pytest.mark.parametrize("make", [make_images, make_texts])
def test_plain_networks_have_a_twin(make):
    config = make()
    assert exchange.reason_without_twin(config) == ""
    config.optimizer.name, config.optimizer.nesterov = "sgd", True
    config.precision.loss_scale.initial_scale = 8.0
    config.precision.loss_scale.growth_interval = 3
    assert exchange.reason_without_twin(config) == ""
    config.precision.loss_scale.enabled = False
    assert exchange.reason_without_twin(config) == ""


@pytest.mark.parametrize(
    ("make", "field", "value", "words"),
    [
        (make_images, "model.name", "resnet", "not 'resnet'"),
        (make_images, "task", "segmentation", "'segmentation' has no twin"),
        (make_images, "label_smoothing", 0.1, "label smoothing"),
        (make_texts, "model.preset", "bert_base_en", "not the preset 'bert_base_en'"),
        (make_texts, "optimizer.accumulation_steps", 2, "gradient accumulation"),
        (make_texts, "precision.overrides", (("logits", "float32"),), "single layers"),
        (make_texts, "precision.finite_guard", True, "the finite guard"),
        (make_texts, "precision.loss_scale.dynamic", False, "loss scale's dynamic"),
        (make_texts, "precision.loss_scale.hysteresis", 2, "loss scale's hysteresis"),
        (make_texts, "precision.loss_scale.schedule.name", "geometric", "schedule"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_has_no_twin_is_told(tmp_path, make, field, value, words):
    config = make()
    config.update_from_flattened_dict({field: value})
    base_config.validate(config)
    reason = exchange.reason_without_twin(config)
    assert words in reason and reason.endswith(".") and "\n" not in reason
    with pytest.raises(ValueError, match="has no twin"):
        exchange.write(tmp_path / "twin.npz", config, source=None, steps=1)
    assert not list(tmp_path.iterdir())


# ---- Weights ----


def test_weights_are_those_that_the_seed_gives(tmp_path):
    config = make_images()
    config.seed, config.model.batch_norm = 3, True
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        described, arrays = written(tmp_path, config)
    finally:
        keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(3)
    model = benchmark_inputs.create(config).build_model()
    kernel = model.get_layer("conv2_1").kernel.numpy()
    found = arrays["weights/conv2_1.weight"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[5, 2], kernel[:, :, 2, 5])
    dense = model.get_layer("dense").kernel.numpy()
    np.testing.assert_array_equal(arrays["weights/dense.weight"], dense.T)
    assert arrays["weights/conv1_1_norm.running_var"].tolist() == [1.0] * 4
    sizes = [array.size for name, array in arrays.items() if "weights/" in name]
    assert sum(sizes) == model.count_params()
    assert described["network"]["image_shape"] == [8, 8, 1]
    assert described["seed"] == 3


def test_heads_of_an_attention_are_one_matrix_of_outputs_and_inputs():
    layer = keras.layers.MultiHeadAttention(2, 3, name="self_attention_layer")
    layer.build((None, 4, 6), (None, 4, 6))
    for kernel in (layer.query_dense.kernel, layer.output_dense.kernel):
        kernel.assign(np.arange(36.0).reshape(kernel.shape))
    x = np.linspace(-1, 1, 6, dtype="float32")
    by_name = {v.path.removeprefix("self_attention_layer/"): v for v in layer.variables}
    name, query = twin_weights.to_torch(_in_block(by_name["query/kernel"]))
    assert name == "encoder.encoder.layer.7.attention.self.query.weight"
    expected = np.einsum("i,ihd->hd", x, layer.query_dense.kernel).reshape(-1)
    np.testing.assert_allclose(query @ x, expected, rtol=1e-6)
    name, output = twin_weights.to_torch(_in_block(by_name["attention_output/kernel"]))
    assert name == "encoder.encoder.layer.7.attention.output.dense.weight"
    kernel = layer.output_dense.kernel
    expected = np.einsum("hd,hdo->o", x.reshape(2, 3), kernel)
    np.testing.assert_allclose(output @ x, expected, rtol=1e-6)


def _in_block(variable):
    variable._path = f"transformer_layer_7/{variable.path}"
    return variable


def test_texts_have_every_weight_and_the_sizes_of_the_model(tmp_path):
    described, arrays = written(tmp_path, make_texts())
    encoder = described["network"]["encoder"]
    assert encoder["max_position_embeddings"] == 16  # As many as the texts need.
    assert (encoder["vocab_size"], encoder["type_vocab_size"]) == (512, 2)
    assert arrays["weights/encoder.pooler.dense.weight"].shape == (32, 32)
    query = "weights/encoder.encoder.layer.0.attention.self.query"
    assert arrays[f"{query}.bias"].shape == (32,)
    assert described["features"] == ["token_ids", "segment_ids", "padding_mask"]
    assert arrays["batches/1/token_ids"].shape == (4, 16)
    assert arrays["batches/1/token_ids"].dtype == np.int64


# ---- Batches and numbers ----


def test_batches_are_the_first_of_the_source(tmp_path):
    config = make_images()
    _, arrays = written(tmp_path, config, steps=3)
    source = benchmark_inputs.create(config).batches.take(3).as_numpy_iterator()
    for number, (pixels, labels) in enumerate(source):
        np.testing.assert_array_equal(arrays[f"batches/{number}/image"], pixels)
        np.testing.assert_array_equal(arrays[f"batches/{number}/labels"], labels)
    assert "batches/3/labels" not in arrays
    source = benchmark_inputs.create(config)
    few = source._replace(batches=source.batches.take(2))
    with pytest.raises(ValueError, match="too few batches. Received: 2. Expected 3"):
        exchange.write(tmp_path / "few.npz", config, few, 3)


def test_numbers_of_optimizer_and_loss_scale_are_those_of_the_configuration(tmp_path):
    config = make_images()
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.5
    config.optimizer.schedule, config.optimizer.warmup_fraction = "linear", 0.5
    config.optimizer.weight_decay = 0.25
    config.precision.loss_scale.initial_scale = 64.0
    described, _ = written(tmp_path, config, steps=4)
    optimizer = described["optimizer"]
    assert optimizer["learning_rates"] == pytest.approx([0.25, 0.5, 0.5, 0.25])
    assert (optimizer["name"], optimizer["weight_decay"]) == ("sgd", 0.25)
    assert described["loss_scale"] == {
        "init_scale": 64.0,
        "growth_interval": 2000,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
    }
    config.optimizer.name = "adam"
    config.precision.loss_scale.enabled = False
    described, _ = written(tmp_path, config)
    assert described["optimizer"]["weight_decay"] == 0.0  # Keras' Adam has none.
    assert described["loss_scale"] is None


# ---- The interpreter ----


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('echo warning; echo \'{"torch": "2.0"}\'', ({"torch": "2.0"}, "")),
        ("echo first >&2; echo 'ImportError: no libc' >&2; exit 1", "no libc"),
        ("exit 3", "ended with 3"),
    ],
    ids=["has it", "has not", "says nothing"],
)
def test_interpreter_is_asked_for_pytorch(tmp_path, script, expected):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(python, os.stat(python).st_mode | stat.S_IXUSR)
    versions, reason = exchange.torch_versions(str(python))
    if isinstance(expected, tuple):
        assert (versions, reason) == expected
    else:
        assert versions == {} and expected in reason


def test_missing_interpreter_is_a_reason(tmp_path):
    versions, reason = exchange.torch_versions(str(tmp_path / "none"))
    assert versions == {} and "No such file" in reason


def test_command_hides_no_module_of_the_interpreter():
    python, flag, file = exchange.command(sys.executable)
    assert (python, flag) == (sys.executable, "-P")
    assert os.path.exists(file)
