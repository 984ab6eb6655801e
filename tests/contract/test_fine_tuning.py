"""LoRA, integers and float8 follow the plan: cells of docs/fine_tuning.md's table."""

import re

import fine_tuning
import helpers
import keras
import numpy as np
import pytest

import tfamp

# Keras has no integers for them, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(a `quantize` method|`model.quantize)"),
    pytest.mark.usefixtures("disabled"),
]
CASES = [
    ("BERT", "int8", True, "mixed_bfloat16"),
    pytest.param("GPT-2", "int4", True, "mixed_float16", marks=pytest.mark.slow),
    ("MLP", "int8", False, "mixed_float16"),
    ("MLP", "float8", False, "mixed_bfloat16"),
]


@pytest.mark.parametrize("name, base, lora, mode", CASES)
def test_a_cell_of_the_table(name, base, lora, mode, tmp_path):
    model, batch, labels = fine_tuning.prepare(name, base, lora, mode)
    described = {row.policy for row in tfamp.describe_layers(model)}
    computes = "float32" if (base, mode) == ("int8", "mixed_float16") else mode
    wanted = re.compile(rf"{base}(/\d+)?_from_{computes}")  # int4's group: Keras 3.15.
    assert any(map(wanted.fullmatch, described))
    stored = [v for v in model.variables if v.dtype in ("int8", "uint8")]
    integers = [v.numpy() for v in stored]
    before, after = fine_tuning.train(model, batch, labels, jit_compile=False)
    assert after < before
    assert all(map(np.array_equal, integers, stored))
    factors = [v for v in model.trainable_variables if "lora" in v.path]
    assert bool(factors) == lora and {v.dtype for v in factors} <= {"float32"}

    expected = model.predict(batch, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = fine_tuning.load(tmp_path / "model.keras", mode)
    # LoRA is merged into the integers of a file, which rounds.
    bound = 0.15 if lora else 1e-6
    difference = np.abs(loaded.predict(batch, verbose=0) - expected).max()
    assert difference <= bound * np.abs(expected).max()
    report = tfamp.export(model, tmp_path / "served", dequantize=True)
    assert report.source_parity[0].relative < 0.05
    assert tfamp.compare_precision(model, batch).rows[-1].accumulated_error < 0.05


def test_large_factors_of_lora_have_slots_of_8_bits():
    tfamp.enable("mixed_bfloat16", optimizer_state="8bit")
    layer = keras.layers.Dense(1024, name="body")
    model = keras.Sequential([keras.Input((32,)), layer, keras.layers.Dense(1)])
    layer.quantize("int4")
    layer.enable_lora(8)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(16, 32)).astype("float32")
    first, *_, last = model.fit(x, x[:, :1], epochs=8, verbose=0).history["loss"]
    assert last < first
    slots = {v.path: v.dtype for v in model.optimizer.variables if "lora" in v.path}
    assert len(slots) == 4
    stored = tfamp.memory(model, (x, x[:, :1])).optimizer
    assert stored < 8 * sum(v.shape.num_elements() for v in model.trainable_variables)


@pytest.mark.parametrize(
    "name, base",
    [*helpers.whole_runs([("BERT", "int8")], pytest.mark.slow), ("MLP", "int4")],
)
def test_a_run_of_lora_that_stopped_resumes_exactly(name, base, tmp_path):
    def fit(epochs, folder, seed):
        tfamp.disable()
        keras.utils.set_random_seed(seed)
        model, batch, labels = fine_tuning.build(name, base, lora=True)
        tfamp.enable("mixed_bfloat16")
        tfamp.set_precision(model, "mixed_bfloat16")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        callbacks = [tfamp.BackupAndRestore(folder, delete_checkpoint=False)]
        # Few rows: Keras' product of int8 takes seconds for a batch of 16 on a CPU.
        few = keras.tree.map_structure(lambda x: x[:12], batch)
        model.fit(few, labels[:12], 4, epochs, verbose=0, callbacks=callbacks)
        return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    whole = fit(3, tmp_path / "whole", 0)
    fit(1, tmp_path / "parts", 0)
    helpers.assert_equal(fit(3, tmp_path / "parts", 1), whole)


@pytest.mark.slow
def test_quantized_blocks_are_recomputed(monkeypatch):
    monkeypatch.setattr(fine_tuning, "STEPS", 12)
    losses = []
    for patterns in (None, ["bert_backbone/transformer_layer_.*|transformer_layer_.*"]):
        model, batch, labels = fine_tuning.prepare(
            "BERT", "int8", True, "mixed_bfloat16"
        )
        tfamp.set_remat(model, patterns)
        losses.append(fine_tuning.train(model, batch, labels, jit_compile=False))
    assert losses[0] == losses[1]
    assert any(repr(patterns[0]) in x.reason for x in tfamp.describe_layers(model))


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_weights_that_were_integers_are_exported_in_16_bits(base, tmp_path):
    model, batch, _ = fine_tuning.prepare("MLP", base, True, "mixed_bfloat16")
    held = [id(v) for v in model.weights]
    asked = {"dequantize": True, "half_weights": True, "sample_inputs": batch}
    report = tfamp.export(model, tmp_path / "served", **asked)
    kernels, biases = (32 + 64 + 4) * 64, 64 + 64 + 4
    assert report.weight_bytes == {"float16": 2 * kernels, "float32": 4 * biases}
    assert report.parameters == kernels + biases
    assert [id(v) for v in model.weights] == held


def test_litert_says_what_to_do_about_int8(tmp_path):
    model, batch, _ = fine_tuning.prepare("MLP", "int8", False, "mixed_bfloat16")
    asked = {"format": "litert", "sample_inputs": batch}
    with pytest.raises(tfamp.ExportError, match="dequantize=True|needs Keras"):
        tfamp.export(model, tmp_path / "served.tflite", **asked)


class TestFloat8:
    def model(self):
        inputs = keras.Input((256,))
        hidden = keras.layers.Dense(256, "relu", name="wide")(inputs)
        hidden = keras.layers.LayerNormalization(name="norm")(hidden)
        return keras.Model(inputs, keras.layers.Dense(1, name="head")(hidden))

    def test_training_without_a_graph_is_refused_before_it_begins(self):
        tfamp.enable("float8")
        model = self.model()
        model.compile("sgd", "mse", run_eagerly=True)
        weights = [w.copy() for w in model.get_weights()]
        with pytest.raises(tfamp.UnsupportedModeError, match="run_eagerly=False"):
            model.fit(np.ones((8, 256)), np.ones((8, 1)), verbose=0)
        helpers.assert_equal(model.get_weights(), weights)

    def test_a_model_that_runs_eagerly_is_not_converted(self):
        model = self.model()
        model.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(tfamp.UnsupportedModeError, match="run_eagerly=False"):
            tfamp.set_precision(model, "float8")
        assert {row.policy for row in tfamp.describe_layers(model)} == {"float32"}

    def test_an_override_of_layers_that_have_none_is_refused(self):
        model = self.model()
        with pytest.raises(tfamp.OverrideError, match="'norm'.*Dense and EinsumDense"):
            tfamp.set_precision(model, "mixed_bfloat16", {"norm": "float8"})
        tfamp.set_precision(model, "mixed_bfloat16", {"norm|wide": "float8"})


def test_integers_in_another_mode_or_without_data_are_keras_own_errors():
    tfamp.enable("mixed_bfloat16")
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32, name="body")])
    with pytest.raises(ValueError, match="GPTQConfig|Invalid quantization mode"):
        model.quantize("gptq")
    model.get_layer("body").quantize("int8")
    with pytest.raises(ValueError, match="already quantized"):
        model.get_layer("body").quantize("int8")
    assert [row.policy for row in tfamp.describe_layers(model)][-1:] == [
        "int8_from_mixed_bfloat16"
    ]
