"""Export to a float32 SavedModel: what is rebuilt, verified, refused and restored."""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

import tfamp

MOST = 1e-5  # Relative; the bound that `export_float32` verifies.


# --- models: each row builds its layers in the mode under test --------------------


def conv_net():
    image = keras.Input((8, 8, 3), name="image")
    shared = layers.Conv2D(4, 3, padding="same", name="shared")
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(layers.Dropout(0.5)(shared(shared(x)) + x))
    return keras.Model(image, layers.Dense(2, dtype="float32", name="head")(x))


def sequential():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.Dense(2)])


def sequential_without_input():
    model = keras.Sequential([layers.Dense(5), layers.Dense(2)])
    model(np.ones((2, 4), np.float32))
    return model


def nested():
    """The dense layer is shared between the outer model and both inner ones."""
    shared = layers.Dense(4, name="shared")
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, layers.ReLU()(shared(inner_input)), name="inner")
    stack = keras.Sequential([layers.Dense(4), shared], name="stack")
    outer = keras.Input((4,))
    return keras.Model(outer, [stack(shared(inner(outer))), inner(outer)])


def token_dict():
    ids = keras.Input((None,), dtype="int32", name="ids")
    mask = keras.Input((None,), dtype="bool", name="mask")
    weight = keras.Input((1,), name="weight")
    x = layers.Embedding(7, 4)(ids)
    x = layers.MultiHeadAttention(2, 2)(
        x, x, attention_mask=keras.ops.expand_dims(mask, 1)
    )
    x = layers.LayerNormalization()(x)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    x = layers.EinsumDense("bti,io->bto", (None, 2), bias_axes="o")(x)
    return keras.Model(
        {"ids": ids, "mask": mask, "weight": weight},
        {"steps": x, "mean": keras.ops.multiply(keras.ops.mean(x, axis=1), weight)},
    )


def masked_rnn():
    ids = keras.Input((5,), dtype="int32", name="ids")
    return keras.Model(ids, layers.GRU(3)(layers.Embedding(7, 4, mask_zero=True)(ids)))


def tied_embedding():
    ids = keras.Input((6,), dtype="int64", name="ids")
    table = layers.ReversibleEmbedding(9, 4)
    return keras.Model(ids, table(table(ids), reverse=True))


def casts_and_constants():
    x = keras.Input((4,), dtype="float16")
    low: Any = keras.ops.cast(layers.Dense(4)(x), "bfloat16")
    low = low + tf.constant([[1.0, 2.0, 3.0, 4.0]], tf.bfloat16)
    half: Any = keras.ops.cast(low, "float16")
    return keras.Model(x, half * np.float16(0.5))


def per_layer_dtypes():
    x = keras.Input((4,))
    y = layers.Dense(4, dtype="mixed_bfloat16")(x)
    y = layers.Dense(4, dtype="mixed_float16")(y)
    y = layers.Dense(4, dtype="bfloat16")(y)  # 16-bit weights, too.
    return keras.Model(x, layers.Dense(2, dtype="float32")(y))


def policy_map():
    policies = keras.dtype_policies.DTypePolicyMap(
        policy_map={".*/head": keras.DTypePolicy("mixed_float16")}
    )
    x = keras.Input((4,))
    body = layers.Dense(4, dtype=policies)
    return keras.Model(x, layers.Dense(2, dtype=policies, name="head")(body(x)))


def stateful_rnn():
    step = keras.Input((3, 2), batch_size=2)
    model = keras.Model(step, layers.GRU(3, stateful=True)(step))
    model(np.ones((2, 3, 2), np.float32))
    return model


def random_in_inference():
    x = keras.Input((4,))
    return keras.Model(x, layers.GaussianNoise(1.0)(layers.Dense(3)(x), training=True))


def normalization():
    scale = layers.Normalization()
    scale.adapt(np.arange(12, dtype=np.float32).reshape(3, 4))
    return keras.Sequential([keras.Input((4,)), scale, layers.Dense(2)])


def frozen():
    model = conv_net()
    model.get_layer("shared").trainable = False
    return model


class Block(layers.Layer):
    """Makes one layer in `__init__`, one in `build`, and takes no dtype."""

    def __init__(self, units, name=None):
        super().__init__(name=name)
        self.units = units
        self.first = layers.Dense(units)

    def build(self, input_shape):
        self.second = layers.Dense(self.units)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.second(self.first(x)) * self.scale


class Subclassed(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block(units), layers.TimeDistributed(Block(units))]
        inner = keras.Input((units,))
        self.inner = keras.Model(inner, layers.Dense(units)(inner))

    def call(self, x, training=False):
        x = self.blocks[0](x)
        return self.inner(self.blocks[1](x[:, None, :])[:, 0])


class Doubled(keras.Model):
    """A functional model with a `call` that its graph does not show."""

    def __init__(self, units, **kwargs):
        x = keras.Input((4,))
        super().__init__(x, layers.Dense(units)(x), **kwargs)

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)


def functional_with_its_own_call():
    return Doubled(3)


def subclassed():
    model = Subclassed()
    model(np.ones((5, 4), np.float32))
    return model


def layer_in_graph():
    x = keras.Input((4,))
    return keras.Model(x, Block(3)(x))


def with_layer(layer):
    x = keras.Input((4,))
    return keras.Model(x, layer(x))


def called(model):
    model(np.ones((2, 4), np.float32))
    return model


class NoConfig(keras.Model):
    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return self.dense(x)


class FixedDtype(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float16"})

    def call(self, x):
        return x * 2


class FixedWeight(layers.Layer):
    def build(self, input_shape):
        self.w = self.add_weight(shape=(), dtype="bfloat16", name="w")

    def call(self, x):
        return x * keras.ops.cast(self.w, x.dtype)


class Traced(layers.Layer):
    """Its `call` is a function of TensorFlow's that keeps what it traced."""

    @tf.function(reduce_retracing=True)
    def call(self, x):
        return keras.ops.matmul(x, keras.ops.ones((4, 2), x.dtype))


def low_rank():
    model = sequential()
    model.layers[0].enable_lora(1)
    return model


# Models that no configuration can make, or whose layers fix a dtype.
ODD = {
    "lambda": lambda: with_layer(layers.Lambda(lambda x: x * 2, name="twice")),
    "no get_config": lambda: called(NoConfig(layers.Dense(2))),
    "fixed compute dtype": lambda: with_layer(FixedDtype(name="low")),
    "fixed weight dtype": lambda: with_layer(FixedWeight(name="low")),
    "tf.function": lambda: called(keras.Sequential([layers.Dense(4), Traced()])),
    "LoRA": low_rank,
}


NAMED = [casts_and_constants, conv_net, frozen, functional_with_its_own_call]
NAMED += [layer_in_graph, masked_rnn, nested, normalization, per_layer_dtypes]
NAMED += [policy_map, random_in_inference, sequential, sequential_without_input]
NAMED += [stateful_rnn, subclassed, tied_embedding, token_dict]
MODELS = {**ODD, **{build.__name__: build for build in NAMED}}
ALSO_IN_FLOAT16 = ["conv_net", "nested", "policy_map", "subclassed", "token_dict"]
CASES = [(name, "mixed_bfloat16") for name in MODELS]
CASES += [(name, "mixed_float16") for name in ALSO_IN_FLOAT16]


def built(build, mode="mixed_bfloat16"):
    with tfamp.policy_scope(mode):
        return build()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "exported"


def low_types(path):
    """Names of 16-bit dtypes anywhere in a SavedModel's graph."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((path / "saved_model.pb").read_bytes())
    meta = saved.meta_graphs[0]
    text = f"{meta.graph_def} {meta.object_graph_def}"
    return set(re.findall("DT_(?:HALF|BFLOAT16)", text))


def batch_for(report):
    """A batch that fits a report's inputs, by name."""
    random = np.random.default_rng(0)
    found = {}
    for name, dtype, shape in report.inputs:
        sizes = [known or 3 for known in shape]
        dtype = tf.as_dtype(dtype)
        values = random.normal(size=sizes) if dtype.is_floating else np.ones(sizes)
        found[name] = tf.cast(values, dtype)
    return found


def difference(actual, expected):
    """Largest difference relative to the largest value, the worst of the outputs."""
    assert set(actual) == set(expected)
    return max(
        float(np.max(np.abs(actual[k] - expected[k])) / np.max(np.abs(expected[k])))
        for k in expected
    )


def named(outputs):
    if isinstance(outputs, dict):
        return outputs
    flat = keras.tree.flatten(outputs)
    return {f"output_{index}": value for index, value in enumerate(flat)}


def served(path, **inputs):
    return tf.saved_model.load(str(path)).signatures["serving_default"](**inputs)


def state_of(model):
    """Everything of a model that an export could disturb, as plain values."""
    return {
        "values": [(v.path, v.dtype, v.numpy().tobytes()) for v in model.variables],
        "policies": [
            (layer.name, layer.dtype_policy.name, layer.trainable)
            for layer in model._flatten_layers()
        ],
        "nodes": [len(layer._inbound_nodes) for layer in model._flatten_layers()],
        "states": [
            state.numpy().tolist()
            for layer in model._flatten_layers()
            for state in keras.tree.flatten(getattr(layer, "states", None) or ())
        ],
        "compiled": (model.compiled, getattr(model, "optimizer", None)),
    }


# --- what is exported -------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_model_is_exported_in_float32_and_stays_as_it_was(name, mode, target):
    model = built(MODELS[name], mode)
    before = state_of(model)
    report = tfamp.export_float32(model, target)
    assert state_of(model) == before
    assert report.reloaded.relative <= MOST
    assert low_types(target) == set()
    assert report.nodes_checked > 10
    assert report.parameters == model.count_params()
    dtypes = {tensor.dtype for tensor in report.inputs + report.outputs}
    assert not dtypes & {"float16", "bfloat16", "float64"}
    assert os.listdir(target.parent) == ["exported"]
    if name != "random_in_inference":
        # A few roundings of bfloat16 deep; lost or swapped weights are off by 1.
        assert report.original.relative < 32 * tfamp.float_format("bfloat16").epsilon


@pytest.mark.parametrize(
    "build",
    [conv_net, functional_with_its_own_call, layer_in_graph, masked_rnn, nested]
    + [normalization, stateful_rnn, subclassed, tied_embedding, token_dict],
)
def test_export_computes_what_the_same_code_computes_in_float32(build, target):
    model = built(build)
    twin = built(build, "float32")
    for ours, theirs in zip(twin.weights, model.weights, strict=True):
        ours.assign(theirs)
    if build is stateful_rnn:
        twin.layers[-1].states[0].assign(model.layers[-1].states[0])
    report = tfamp.export_float32(twin, target)
    tfamp.export_float32(model, target, overwrite=True)
    inputs = batch_for(report)
    given = inputs if build is token_dict else next(iter(inputs.values()))
    expected = named(twin(given, training=False))
    assert difference(served(target, **inputs), expected) <= MOST
    assert report.original == (0.0, 0.0)


def test_weights_stored_in_16_bits_are_widened_exactly_and_put_back(target):
    model = built(per_layer_dtypes)
    report = tfamp.export_float32(model, target)
    assert {w.dtype for w in model.weights} == {"float32", "bfloat16"}
    x = np.ones((1, 4), np.float32)
    for layer in model.layers[1:]:
        kernel, bias = (np.float32(w) for w in layer.get_weights())
        x = x @ kernel + bias
    found = served(target, **{report.inputs[0].name: tf.ones((1, 4))})["output_0"]
    np.testing.assert_allclose(found, x, rtol=1e-5)


def test_signature_keeps_names_and_ids_and_makes_floats_float32(target):
    report = tfamp.export_float32(built(token_dict), target)
    assert report.inputs == (
        ("ids", "int32", (None, None)),
        ("mask", "bool", (None, None)),
        ("weight", "float32", (None, 1)),
    )
    assert report.outputs == (
        ("mean", "float32", (None, 2)),
        ("steps", "float32", (None, None, 2)),
    )


@pytest.mark.parametrize("build", [sequential_without_input, subclassed, conv_net])
def test_any_batch_size_can_be_served(build, target):
    report = tfamp.export_float32(built(build), target)
    (tensor,) = report.inputs
    for batch in (1, 5):
        x = tf.ones((batch, *(tensor.shape or ())[1:]))
        assert served(target, **{tensor.name: x})["output_0"].shape[0] == batch


def test_unnamed_inputs_get_a_name_that_does_not_depend_on_the_process(target):
    x, y = keras.Input((2,)), keras.Input((2,))
    report = tfamp.export_float32(keras.Model([x, y], [x + y]), target)
    assert [tensor.name for tensor in report.inputs] == ["inputs", "inputs_1"]


def test_sequential_embedding_takes_integers_and_exact_ids(target):
    # Keras gives it a bfloat16 input, in which 257 is 256.
    with tfamp.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([layers.Embedding(300, 2), layers.Flatten()])
    ids = np.array([[0, 257]])
    model(ids)
    report = tfamp.export_float32(model, target, sample_inputs=ids)
    assert [tensor.dtype for tensor in report.inputs] == ["int32"]
    output = served(target, inputs=tf.constant(ids, tf.int32))["output_0"]
    table = model.layers[0].get_weights()[0]
    np.testing.assert_array_equal(output, [[*table[0], *table[257]]])


class IdsAndScale(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(9, 3)

    def call(self, inputs):
        return {"vectors": self.table(inputs["ids"]) * inputs["the scale"]}


def test_subclassed_model_with_ids_takes_its_signature_from_the_sample(target):
    batch = {"ids": np.array([[1, 2, 8]]), "the scale": np.ones((1, 1, 1))}
    with tfamp.policy_scope("mixed_float16"):
        model = IdsAndScale()
    model(batch)
    with pytest.raises(tfamp.ExportError, match="reads integers. Pass `sample_inp"):
        tfamp.export_float32(model, target)
    report = tfamp.export_float32(model, target, sample_inputs=batch)
    assert [tuple(tensor) for tensor in report.inputs] == [
        ("ids", "int64", (None, 3)),
        ("the_scale", "float32", (None, 1, 1)),
    ]
    assert [tensor.name for tensor in report.outputs] == ["vectors"]


def test_string_input_needs_a_sample_and_takes_its_vocabulary_along(target):
    words = layers.StringLookup()
    words.adapt(np.array(["red", "blue"]))
    text = keras.Input((1,), dtype="string", name="text")
    model = keras.Model(text, layers.Embedding(4, 2)(words(text)))
    with pytest.raises(tfamp.ExportError, match="dtype string"):
        tfamp.export_float32(model, target)
    batch = np.array([["red"], ["other"]])
    tfamp.export_float32(model, target, sample_inputs=batch)
    output = served(target, text=tf.constant(batch))["output_0"]
    np.testing.assert_array_equal(output, model(tf.constant(batch)))


def test_trained_model_with_a_loss_scale_is_exported_without_it_or_xla(target):
    with tfamp.policy_scope("mixed_float16"):
        model = sequential()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    compile_options: dict[str, Any] = {"loss": "mse", "jit_compile": True}
    fit_options: dict[str, Any] = {"y": np.ones((4, 2)), "verbose": 0}
    model.compile(optimizer, metrics=["mae"], **compile_options)
    model.fit(np.ones((4, 4)), **fit_options)
    before = state_of(model)
    tfamp.export_float32(model, target)
    assert state_of(model) == before and model.optimizer is optimizer
    assert (
        b"_XlaMustCompile\x12\x02(\x01" not in (target / "saved_model.pb").read_bytes()
    )
    model.fit(np.ones((4, 4)), **fit_options)


def test_policies_of_a_map_without_a_default_keep_their_names(target):
    policies = keras.dtype_policies.DTypePolicyMap(
        policy_map={"body": keras.DTypePolicy("mixed_float16")}
    )
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, dtype=policies)])
    tfamp.export_float32(model, target)
    assert policies["body"].name == "mixed_float16"


def test_saved_model_needs_neither_tfamp_nor_keras(target):
    model = built(conv_net)
    tfamp.export_float32(model, target)
    x = np.linspace(0, 1, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
    np.save(target.parent / "x.npy", x)
    code = """
import sys
sys.modules["keras"] = sys.modules["tfamp"] = None  # Importing either now fails.
import numpy, tensorflow
serve = tensorflow.saved_model.load("exported").signatures["serving_default"]
y = serve(image=tensorflow.constant(numpy.load("x.npy")))["output_0"]
numpy.save("y.npy", y.numpy())
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=target.parent, check=True, timeout=300
    )
    with tfamp.policy_scope("float32"):
        twin = conv_net()
    twin.set_weights(model.get_weights())
    found = {"y": np.load(target.parent / "y.npy")}
    assert difference(found, {"y": twin(x, training=False).numpy()}) <= MOST


# --- what is refused --------------------------------------------------------------


class FixedCast(layers.Layer):
    def call(self, x):
        return keras.ops.cast(keras.ops.cast(x, "bfloat16"), x.dtype)


class OtherInGraph(layers.Layer):
    def call(self, x):
        return x if tf.executing_eagerly() else x + 1.0


def quantized():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="body")])
    model.layers[0].dtype_policy = "int8_from_float32"
    return model


REFUSED = {
    "fixed cast": (
        lambda: with_layer(FixedCast(name="low")),
        r"not float32 throughout.*/low\w*/Cast.*bfloat16",
    ),
    "quantized": (
        quantized,
        r"quantized layers: body|quantized layers: .*body \(Dense\)",
    ),
    "other result in a graph": (
        lambda: with_layer(OtherInGraph()),
        r"computes something else than the float32 model.*1\.0e\+00 absolute",
    ),
    "not built": (lambda: Subclassed(), r"not built.*Call it on a batch"),
    "sparse input": (
        lambda: keras.Model(
            x := keras.Input((4,), sparse=True, name="rows"), layers.Dense(2)(x)
        ),
        r"Only dense inputs.*'rows'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_failure_names_the_cause_and_leaves_no_trace(case, target):
    build, message = REFUSED[case]
    model = built(build)
    occupy(target)
    with tfamp.policy_scope("mixed_float16"):
        before = keras.config.dtype_policy()
        state = state_of(model)
        with pytest.raises(tfamp.ExportError, match=message):
            tfamp.export_float32(model, target.parent / "new" / "deep")
        with pytest.raises(tfamp.ExportError, match=message):
            tfamp.export_float32(model, target, overwrite=True)
        assert keras.config.dtype_policy() is before
    assert state_of(model) == state
    assert os.listdir(target.parent) == ["exported"]
    assert (target / "saved_model.pb").read_text() == "before"


def test_keras_time_distributed_over_dynamic_time_is_caught(target):
    # Keras 3.15 takes the batch size for the number of steps in a graph.
    x = keras.Input((None, 4))
    model = keras.Model(x, layers.TimeDistributed(layers.Dense(3))(x))
    with pytest.raises(tfamp.ExportError, match=r"\(2, 2, 3\).*\(2, 16, 3\)"):
        tfamp.export_float32(model, target)


def test_existing_target_is_refused_before_any_work(target, monkeypatch):
    target.write_text("a file")
    monkeypatch.setattr(tf.saved_model, "load", None)
    with pytest.raises(tfamp.ExportError, match="pass `overwrite=True`"):
        tfamp.export_float32(built(sequential), target)
    assert target.read_text() == "a file"


@pytest.mark.parametrize("kind", ["file", "exported", "link"])
def test_overwrite_spares_what_is_no_saved_model(target, tmp_path, kind):
    mine = target if kind == "file" else tmp_path / kind / "thesis.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    if kind == "link":
        target.symlink_to(mine.parent)
    with pytest.raises(tfamp.ExportError, match="a SavedModel or an empty folder"):
        tfamp.export_float32(built(sequential), target, overwrite=True)
    assert mine.read_text() == "mine" and target.exists()


def test_sequential_models_keep_the_dtype_of_their_input(tmp_path):
    """Strings and 64-bit ids stay; a nested model's token ids are integers, too."""
    texts = keras.layers.TextVectorization(vocabulary=["a", "b"])
    ids = keras.layers.Embedding(5, 2)
    nested = keras.Sequential([keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    models = {
        "string": (
            keras.Sequential([keras.Input((), dtype="string"), texts]),
            np.array(["a b", "b c"], dtype=object),
        ),
        "int64": (keras.Sequential([keras.Input((3,), dtype="int64"), ids]), None),
        "int32": (keras.Sequential([nested, keras.layers.Dense(1)]), None),
    }
    models["int32"][0](np.zeros((2, 3), "int32"))
    for dtype, (model, sample) in models.items():
        report = tfamp.export_float32(model, tmp_path / dtype, sample_inputs=sample)
        assert [tensor.dtype for tensor in report.inputs] == [dtype]


def occupy(target):
    """Puts a SavedModel there, as far as an export looks."""
    target.mkdir()
    (target / "old").write_text("old")
    (target / "saved_model.pb").write_text("before")


def test_overwrite_replaces_the_target(target):
    occupy(target)
    tfamp.export_float32(built(sequential), target, overwrite=True)
    assert not (target / "old").exists()
    assert (target / "saved_model.pb").exists()
    assert os.listdir(target.parent) == ["exported"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_old_target_comes_back_if_it_cannot_be_replaced(target, monkeypatch, error):
    """Also after an interrupt between the two renames."""
    occupy(target)
    replace = os.replace

    def fail_on_new(source, destination):
        if pathlib.Path(source).name == "new":
            raise error
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_on_new)
    with pytest.raises(type(error)):
        tfamp.export_float32(built(sequential), target, overwrite=True)
    assert (target / "saved_model.pb").read_text() == "before"
    assert os.listdir(target.parent) == ["exported"]


def test_missing_parents_are_made_and_the_folder_is_readable(target):
    path = target / "models" / "1"
    report = tfamp.export_float32(built(sequential), str(path))
    assert report.path == str(path)
    assert os.listdir(target) == ["models"]
    assert path.stat().st_mode & 0o777 == target.stat().st_mode & 0o777


@pytest.mark.parametrize("parent", ["/proc", __file__], ids=["system", "file"])
def test_a_path_that_cannot_be_written_is_an_export_error(parent):
    with pytest.raises(tfamp.ExportError, match=f"cannot be written.*{parent}/x"):
        tfamp.export_float32(built(sequential), f"{parent}/x")


def test_an_export_in_fit_retraces_no_training_step(target):
    model = built(sequential)
    traces = []

    class Counts(layers.Layer):
        def call(self, x, training=False):
            if training:
                traces.append(x.dtype)
            return x

    with tfamp.policy_scope("mixed_bfloat16"):
        model.add(Counts())
    model.compile("sgd", "mse")

    def export(epoch, logs):
        tfamp.export_float32(model, target / str(epoch))

    exporting = keras.callbacks.LambdaCallback(on_epoch_end=export)
    data: dict[str, Any] = {"x": np.ones((4, 4)), "y": np.ones((4, 2)), "verbose": 0}
    model.fit(**data, epochs=1)
    before = len(traces)
    model.fit(**data, epochs=3, callbacks=[exporting])
    assert len(traces) == before and set(traces) == {tf.bfloat16}
    assert len(os.listdir(target)) == 3


def test_exports_of_one_model_by_several_threads_wait_for_each_other(tmp_path):
    model = built(sequential)
    before = state_of(model)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        paths = [tmp_path / str(index) for index in range(3)]
        list(pool.map(lambda path: tfamp.export_float32(model, path), paths))
    assert state_of(model) == before


def test_wrong_arguments_are_refused(target):
    with pytest.raises(TypeError, match="must be a `keras.Model`. Received: Dense"):
        tfamp.export_float32(layers.Dense(2), target)
    with pytest.raises(ValueError, match="local folder. Received: path='gs://b/m'"):
        tfamp.export_float32(built(sequential), "gs://b/m")


def test_samples_of_another_structure_are_refused(target):
    batch = {"ids": np.ones((2, 3), np.int32)}
    with pytest.raises(tfamp.ExportError, match="structured as the model's inputs"):
        tfamp.export_float32(built(token_dict), target, sample_inputs=batch)
    wrong = np.ones((2, 3), np.float32)
    with pytest.raises(tfamp.ExportError, match="cannot be called on the sample"):
        tfamp.export_float32(built(sequential), target, sample_inputs=wrong)
    assert not os.listdir(target.parent)


def test_graph_rewrite_is_refused_while_it_is_on(target, monkeypatch):
    options = {"auto_mixed_precision": True}
    monkeypatch.setattr(
        tf.config.optimizer, "get_experimental_options", lambda: options
    )
    with pytest.raises(tfamp.ExportError, match="auto_mixed_precision"):
        tfamp.export_float32(built(sequential), target)


# --- the report ---


def test_report_is_plain_data_and_readable(target):
    report = tfamp.export_float32(built(sequential), target)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == 1
    assert data["inputs"] == [
        {"name": "inputs", "dtype": "float32", "shape": [None, 4]}
    ]
    assert data["reloaded"]["relative"] <= MOST
    text = str(report)
    assert "parameters: 37" in text
    assert "original (mixed_bfloat16) against the float32 model" in text
