"""Export to a float32 SavedModel: what is rebuilt, verified, refused and restored."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

from tfamp import errors, formats
from tfamp.precision import (
    float32_config,
    model_inputs,
    model_structure,
    policy,
    rebuild,
)
from tfamp.serving import export, export_report, saved_graph

FLOAT32 = formats.float_format("float32")


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

    def get_config(self):
        return {"name": self.name, "units": self.units}


class Subclassed(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.blocks = [Block(units), layers.TimeDistributed(Block(units))]
        inner = keras.Input((units,))
        self.inner = keras.Model(inner, layers.Dense(units)(inner))

    def call(self, x, training=False):
        x = self.blocks[0](x)
        return self.inner(self.blocks[1](x[:, None, :])[:, 0])

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("test_export")
class Doubled(keras.Model):
    """A functional model with a `call` that its graph does not show."""

    def __init__(self, units, **kwargs):
        x = keras.Input((4,))
        super().__init__(x, layers.Dense(units)(x), **kwargs)
        self.units = units

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)

    def get_config(self):
        return {"units": self.units, "name": self.name}


def functional_with_its_own_call():
    return Doubled(3)


def subclassed():
    model = Subclassed()
    model(np.ones((5, 4), np.float32))
    return model


def layer_in_graph():
    x = keras.Input((4,))
    return keras.Model(x, Block(3)(x))


MODELS = [
    casts_and_constants,
    conv_net,
    frozen,
    functional_with_its_own_call,
    layer_in_graph,
    masked_rnn,
    nested,
    normalization,
    per_layer_dtypes,
    policy_map,
    random_in_inference,
    sequential,
    sequential_without_input,
    stateful_rnn,
    subclassed,
    tied_embedding,
    token_dict,
]
ALSO_IN_FLOAT16 = [conv_net, nested, policy_map, subclassed, token_dict]
CASES = [
    pytest.param(build, mode, id=f"{build.__name__}-{mode}")
    for mode, builds in (
        ("mixed_bfloat16", MODELS),
        ("mixed_float16", ALSO_IN_FLOAT16),
    )
    for build in builds
]


def built(build, mode="mixed_bfloat16"):
    with policy.policy_scope(mode):
        return build()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "exported"


def served(path, **inputs):
    return tf.saved_model.load(str(path)).signatures["serving_default"](**inputs)


def state_of(model):
    """Everything of a model that an export could disturb, as plain values."""
    return {
        "values": [(v.path, v.dtype, v.numpy().tobytes()) for v in model.variables],
        "policies": [
            (layer.name, layer.dtype_policy.name, layer.trainable)
            for layer in model_structure.flatten_layers(model)
        ],
        "nodes": [
            len(layer._inbound_nodes) for layer in model_structure.flatten_layers(model)
        ],
        "states": [
            state.numpy().tolist()
            for layer in model_structure.flatten_layers(model)
            for state in model_structure.recurrent_states(layer)
        ],
        "compiled": (model.compiled, getattr(model, "optimizer", None)),
    }


# --- what is exported -------------------------------------------------------------


@pytest.mark.parametrize(("build", "mode"), CASES)
def test_every_model_is_exported_in_float32_and_stays_as_it_was(build, mode, target):
    model = built(build, mode)
    before = state_of(model)
    report = export.export_float32(model, target)
    assert state_of(model) == before
    assert report.reloaded.relative <= export.MAX_RELATIVE_DIFFERENCE
    assert saved_graph.read(target).low_precision == ()
    assert report.nodes_checked > 10
    dtypes = {tensor.dtype for tensor in report.inputs + report.outputs}
    assert not dtypes & {"float16", "bfloat16", "float64"}
    assert os.listdir(target.parent) == ["exported"]
    if build is not random_in_inference:
        # A few roundings of bfloat16 deep; lost or swapped weights are off by 1.
        assert report.original.relative < 32 * formats.float_format("bfloat16").epsilon


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
    report = export.export_float32(twin, target)
    export.export_float32(model, target, overwrite=True)
    specs, samples = model_inputs.describe(model)
    names = [spec.name for spec in keras.tree.flatten(specs)]
    outputs = served(
        target, **dict(zip(names, keras.tree.flatten(samples), strict=True))
    )
    expected = twin(samples, training=False)
    if not isinstance(expected, dict):
        flat = keras.tree.flatten(expected)
        expected = {f"output_{index}": value for index, value in enumerate(flat)}
    found = export_report.difference(outputs, expected)
    assert found.relative <= export.MAX_RELATIVE_DIFFERENCE
    assert report.original == export_report.Difference(0.0, 0.0)


@pytest.mark.parametrize("build", [conv_net, nested, subclassed, tied_embedding])
def test_rebuilt_weights_are_the_same_bits_in_the_same_order(build):
    model = built(build)
    copy = rebuild.rebuild_float32(model, model_inputs.describe(model)[1])
    assert [w.numpy().tobytes() for w in copy.weights] == [
        w.numpy().tobytes() for w in model.weights
    ]
    assert [w.shape for w in copy.trainable_weights] == [
        w.shape for w in model.trainable_weights
    ]
    assert not copy.compiled


def test_weights_stored_in_16_bits_are_widened_exactly():
    model = built(per_layer_dtypes)
    copy = rebuild.rebuild_float32(model, np.ones((2, 4), np.float32))
    pairs = list(zip(model.weights, copy.weights, strict=True))
    assert {w.dtype for w in model.weights} == {"float32", "bfloat16"}
    assert all(np.array_equal(np.float32(old), new.numpy()) for old, new in pairs)
    assert {w.dtype for w in copy.weights} == {"float32"}


def test_layers_shared_with_nested_models_stay_shared(target):
    model = built(nested)
    report = export.export_float32(model, target)
    assert report.parameters == model.count_params() == 2 * (4 * 4 + 4)


def test_frozen_layers_stay_frozen():
    copy = rebuild.rebuild_float32(built(frozen), np.ones((2, 8, 8, 3), np.float32))
    assert not copy.get_layer("shared").trainable
    assert copy.get_layer("head").trainable


def test_signature_keeps_names_and_ids_and_makes_floats_float32(target):
    report = export.export_float32(built(token_dict), target)
    described = saved_graph.TensorDescription
    assert report.inputs == (
        described("ids", "int32", (None, None)),
        described("mask", "bool", (None, None)),
        described("weight", "float32", (None, 1)),
    )
    assert report.outputs == (
        described("mean", "float32", (None, 2)),
        described("steps", "float32", (None, None, 2)),
    )


@pytest.mark.parametrize("build", [sequential_without_input, subclassed, conv_net])
def test_any_batch_size_can_be_served(build, target):
    report = export.export_float32(built(build), target)
    (tensor,) = report.inputs
    for batch in (1, 5):
        x = tf.ones((batch, *(tensor.shape or ())[1:]))
        assert served(target, **{tensor.name: x})["output_0"].shape[0] == batch


def test_unnamed_inputs_get_a_name_that_does_not_depend_on_the_process(target):
    x, y = keras.Input((2,)), keras.Input((2,))
    report = export.export_float32(keras.Model([x, y], [x + y]), target)
    assert [tensor.name for tensor in report.inputs] == ["inputs", "inputs_1"]


def test_sequential_embedding_takes_integers_and_exact_ids(target):
    # Keras gives it a bfloat16 input, in which 257 is 256.
    with policy.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([layers.Embedding(300, 2), layers.Flatten()])
    ids = np.array([[0, 257]])
    model(ids)
    report = export.export_float32(model, target, sample_inputs=ids)
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

    def get_config(self):
        return {"name": self.name}


def test_subclassed_model_with_ids_takes_its_signature_from_the_sample(target):
    batch = {"ids": np.array([[1, 2, 8]]), "the scale": np.ones((1, 1, 1))}
    with policy.policy_scope("mixed_float16"):
        model = IdsAndScale()
    model(batch)
    with pytest.raises(errors.ExportError, match="reads integers. Pass `sample_inp"):
        export.export_float32(model, target)
    report = export.export_float32(model, target, sample_inputs=batch)
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
    with pytest.raises(errors.ExportError, match="dtype string"):
        export.export_float32(model, target)
    batch = np.array([["red"], ["other"]])
    export.export_float32(model, target, sample_inputs=batch)
    output = served(target, text=tf.constant(batch))["output_0"]
    np.testing.assert_array_equal(output, model(tf.constant(batch)))


def test_trained_model_with_a_loss_scale_is_exported_without_it_or_xla(target):
    with policy.policy_scope("mixed_float16"):
        model = sequential()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    compile_options: dict[str, Any] = {"loss": "mse", "jit_compile": True}
    fit_options: dict[str, Any] = {"y": np.ones((4, 2)), "verbose": 0}
    model.compile(optimizer, metrics=["mae"], **compile_options)
    model.fit(np.ones((4, 4)), **fit_options)
    before = state_of(model)
    export.export_float32(model, target)
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
    export.export_float32(model, target)
    assert policies["body"].name == "mixed_float16"


def test_saved_model_needs_neither_tfamp_nor_keras(target):
    model = built(conv_net)
    export.export_float32(model, target)
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
    copy = rebuild.rebuild_float32(model, x)
    found = export_report.difference(
        {"y": np.load(target.parent / "y.npy")}, {"y": copy(x, training=False)}
    )
    assert found.relative <= export.MAX_RELATIVE_DIFFERENCE


# --- what is refused --------------------------------------------------------------


class NoConfig(keras.Model):
    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return self.dense(x)


class TakesNoConfig(NoConfig):
    def __init__(self):
        super().__init__(layers.Dense(2))

    def get_config(self):
        return {"units": 2}


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


class FixedCast(layers.Layer):
    def call(self, x):
        return keras.ops.cast(keras.ops.cast(x, "bfloat16"), x.dtype)


class Forgetful(layers.Layer):
    """Its configuration forgets the number of units."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config()


class OtherInGraph(layers.Layer):
    def call(self, x):
        return x if tf.executing_eagerly() else x + 1.0


def with_layer(layer):
    x = keras.Input((4,))
    return keras.Model(x, layer(x))


def called(model):
    model(np.ones((2, 4), np.float32))
    return model


def quantized():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="body")])
    model.layers[0].dtype_policy = "int8_from_float32"
    return model


REFUSED = {
    "lambda": (
        lambda: with_layer(layers.Lambda(lambda x: x * 2, name="twice")),
        r"Layer 'twice' \(Lambda\) cannot be rebuilt",
    ),
    "wrapped lambda": (
        lambda: keras.Model(
            x := keras.Input((2, 4)),
            layers.TimeDistributed(layers.Lambda(lambda x: x * 2), name="each")(x),
        ),
        r"Layer 'each' \(TimeDistributed\) cannot be rebuilt",
    ),
    "no get_config": (
        lambda: called(NoConfig(layers.Dense(2))),
        r"Model 'no_config\w*' \(NoConfig\) cannot be rebuilt.*get_config",
    ),
    "config that __init__ refuses": (
        lambda: called(TakesNoConfig()),
        r"\(TakesNoConfig\) cannot be rebuilt.*TypeError",
    ),
    "config that forgets": (
        lambda: with_layer(Forgetful(5, name="five")),
        r"Layer 'five' \(Forgetful\) does not take its weights",
    ),
    "fixed compute dtype": (
        lambda: with_layer(FixedDtype(name="low")),
        r"stay in another format.*low \(float16\)\.",
    ),
    "fixed weight dtype": (
        lambda: with_layer(FixedWeight(name="low")),
        r"stay in another format.*low \(bfloat16\)\.",
    ),
    "fixed cast": (
        lambda: with_layer(FixedCast(name="low")),
        r"not float32 throughout.*/low\w*/Cast.*bfloat16",
    ),
    "quantized": (quantized, r"quantized layers: body \(Dense\)"),
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
    target.mkdir()
    (target / "saved_model.pb").write_text("before")
    with policy.policy_scope("mixed_float16"):
        before = policy.read()
        with pytest.raises(errors.ExportError, match=message):
            export.export_float32(model, target.parent / "new" / "deep")
        with pytest.raises(errors.ExportError, match=message):
            export.export_float32(model, target, overwrite=True)
        assert policy.read() == before
    assert os.listdir(target.parent) == ["exported"]
    assert (target / "saved_model.pb").read_text() == "before"


def test_keras_time_distributed_over_dynamic_time_is_caught(target):
    # Keras 3.15 takes the batch size for the number of steps in a graph.
    x = keras.Input((None, 4))
    model = keras.Model(x, layers.TimeDistributed(layers.Dense(3))(x))
    with pytest.raises(errors.ExportError, match=r"\(2, 2, 3\).*\(2, 16, 3\)"):
        export.export_float32(model, target)


def test_existing_target_is_refused_before_any_work(target, monkeypatch):
    target.write_text("a file")
    monkeypatch.setattr(rebuild, "rebuild_float32", None)
    with pytest.raises(errors.ExportError, match="pass `overwrite=True`"):
        export.export_float32(built(sequential), target)
    assert target.read_text() == "a file"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_overwrite_spares_what_is_no_saved_model(target, tmp_path, kind):
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.ExportError, match="a SavedModel or an empty folder"):
        export.export_float32(built(sequential), target, overwrite=True)
    assert target.exists()
    if kind == "folder":
        assert (target / "thesis.txt").read_text() == "mine"


def test_path_below_a_file_is_an_export_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.ExportError, match="below a file"):
        export.export_float32(built(sequential), tmp_path / "file" / "exported")


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
        report = export.export_float32(model, tmp_path / dtype, sample_inputs=sample)
        assert [tensor.dtype for tensor in report.inputs] == [dtype]


def test_overwrite_replaces_the_target(target):
    target.mkdir()
    (target / "old").write_text("old")
    (target / "saved_model.pb").write_text("an old SavedModel")
    export.export_float32(built(sequential), target, overwrite=True)
    assert not (target / "old").exists()
    assert (target / "saved_model.pb").exists()
    assert os.listdir(target.parent) == ["exported"]


def test_old_target_comes_back_if_it_cannot_be_replaced(target, monkeypatch):
    target.mkdir()
    (target / "old").write_text("old")
    (target / "saved_model.pb").write_text("an old SavedModel")
    replace = os.replace

    def fail_on_new(source, destination):
        if pathlib.Path(source).name == "new":
            raise OSError("disk full")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_on_new)
    with pytest.raises(OSError, match="disk full"):
        export.export_float32(built(sequential), target, overwrite=True)
    assert (target / "old").read_text() == "old"
    assert os.listdir(target.parent) == ["exported"]


def test_missing_parents_are_made_and_the_folder_is_readable(target):
    path = target / "models" / "1"
    report = export.export_float32(built(sequential), str(path))
    assert report.path == str(path)
    assert os.listdir(target) == ["models"]
    assert path.stat().st_mode & 0o777 == target.stat().st_mode & 0o777


def test_wrong_arguments_are_refused(target):
    with pytest.raises(TypeError, match="must be a `keras.Model`. Received: Dense"):
        export.export_float32(layers.Dense(2), target)
    with pytest.raises(ValueError, match="local folder. Received: path='gs://b/m'"):
        export.export_float32(built(sequential), "gs://b/m")


def test_samples_of_another_structure_are_refused(target):
    batch = {"ids": np.ones((2, 3), np.int32)}
    with pytest.raises(errors.ExportError, match="structured as the model's inputs"):
        export.export_float32(built(token_dict), target, sample_inputs=batch)
    wrong = np.ones((2, 3), np.float32)
    with pytest.raises(errors.ExportError, match="cannot be called on the sample"):
        export.export_float32(built(sequential), target, sample_inputs=wrong)
    assert not os.listdir(target.parent)


def test_graph_rewrite_is_refused_while_it_is_on(target, monkeypatch):
    options = {"auto_mixed_precision": True}
    monkeypatch.setattr(
        tf.config.optimizer, "get_experimental_options", lambda: options
    )
    with pytest.raises(errors.ExportError, match="auto_mixed_precision"):
        export.export_float32(built(sequential), target)


# --- reading the graph ------------------------------------------------------------


class Low(tf.Module):
    """Computes in bfloat16 two functions deep, behind a condition."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    @tf.function
    def inner(self, x):
        return tf.cast(tf.cast(x, self.dtype) * 2, tf.float32)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32)])
    def outer(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.inner(x), lambda: x)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_low_precision_is_found_in_nested_functions(name, tmp_path):
    module = Low(tf.as_dtype(name))
    tf.saved_model.save(module, str(tmp_path), signatures=module.outer)
    graph = saved_graph.read(tmp_path)
    found = [line for line in graph.low_precision if line.startswith("Mul ")]
    if name == "float64":
        assert not graph.low_precision
    else:
        assert found and all("inner" in line and name in line for line in found)


def edit_constant(meta):
    node = meta.graph_def.node.add(name="c", op="Const")
    node.attr["value"].tensor.dtype = tf.float16.as_datatype_enum


def edit_list(meta):
    node = meta.graph_def.node.add(name="c", op="IdentityN")
    node.attr["T"].list.type.append(tf.bfloat16.as_datatype_enum)


def edit_nested_attribute(meta):
    node = meta.graph_def.node.add(name="c", op="PartitionedCall")
    inner = node.attr["f"].func.attr["T"]
    inner.type = tf.float16.as_datatype_enum


def edit_reference(meta):
    node = meta.graph_def.node.add(name="c", op="VariableV2")
    node.attr["T"].type = tf.float16.as_datatype_enum + 100


def edit_argument(meta):
    function = meta.graph_def.library.function.add()
    function.signature.name = "c"
    function.signature.output_arg.add(type=tf.bfloat16.as_datatype_enum)


def edit_variable(meta):
    node = meta.object_graph_def.nodes.add()
    node.variable.name = "c"
    node.variable.dtype = tf.float16.as_datatype_enum


@pytest.mark.parametrize(
    "edit",
    [
        edit_argument,
        edit_constant,
        edit_list,
        edit_nested_attribute,
        edit_reference,
        edit_variable,
    ],
)
def test_low_precision_is_found_wherever_it_is_written(edit, tmp_path):
    saved = saved_model_pb2.SavedModel()
    meta = saved.meta_graphs.add()
    meta.signature_def["serving_default"].SetInParent()
    path = tmp_path / "saved_model.pb"
    path.write_bytes(saved.SerializeToString())
    assert saved_graph.read(tmp_path).low_precision == ()
    edit(meta)
    path.write_bytes(saved.SerializeToString())
    (line,) = saved_graph.read(tmp_path).low_precision
    assert "'c'" in line and "float16" in line


def test_missing_signature_is_named(tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path))
    with pytest.raises(KeyError, match="no signature 'serving_default'"):
        saved_graph.read(tmp_path)


# --- pure parts -------------------------------------------------------------------

POLICY = {"module": "keras", "class_name": "DTypePolicy", "registered_name": None}
FLOAT32_POLICY = {**POLICY, "config": {"name": "float32"}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "mixed_bfloat16"}, {"dtype": "float32"}),
        (
            {"dtype": "int32", "name": "bfloat16"},
            {"dtype": "int32", "name": "bfloat16"},
        ),
        ({"a": [({"out_dtype": "float16"},)]}, {"a": [({"out_dtype": "float32"},)]}),
        (
            {"dtype": {**POLICY, "config": {"name": "bfloat16"}}},
            {"dtype": FLOAT32_POLICY},
        ),
        ({"x": {**POLICY, "config": {"name": None}}}, {"x": FLOAT32_POLICY}),
        (
            {**POLICY, "class_name": "DTypePolicyMap", "config": {"policy_map": {}}},
            FLOAT32_POLICY,
        ),
        (
            {**POLICY, "config": {"name": "int64"}},
            {**POLICY, "config": {"name": "int64"}},
        ),
        ({"dtype": None, "units": 3}, {"dtype": None, "units": 3}),
    ],
)
def test_configuration_becomes_float32_and_nothing_else_changes(config, expected):
    before = json.dumps(config)
    assert float32_config.convert(config) == expected
    assert json.dumps(config) == before


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0, 0)),
        ([1.0, 2.5], [1.0, -2.0], (4.5 / 2, 4.5)),
        ([0.0], [0.0], (0, 0)),
        ([FLOAT32.smallest_normal], [0.0], (1, FLOAT32.smallest_normal)),
        ([NAN, INF, 1.0], [NAN, INF, 2.0], (0.5, 1)),
        ([NAN], [1.0], (INF, INF)),
        ([-INF], [INF], (INF, INF)),
        ([1.0], [INF], (INF, INF)),
        ([], [], (0, 0)),
        ([True, False], [True, True], (1, 1)),
        (["a"], ["a"], (0, 0)),
        (["a"], ["b"], (INF, INF)),
        ([1.0], [[1.0]], (INF, INF)),
    ],
)
def test_difference(actual, expected, difference):
    assert export_report.difference({"y": actual}, {"y": expected}) == difference


def test_difference_is_the_worst_output_and_infinite_if_one_is_missing():
    a, b = {"x": [1.0], "y": [2.0]}, {"x": [1.0], "y": [4.0]}
    assert export_report.difference(a, b) == (0.5, 2.0)
    assert export_report.difference(a, {"x": [1.0]}) == (INF, INF)


def test_report_is_plain_data_and_readable(target):
    report = export.export_float32(built(sequential), target)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == 1
    assert data["inputs"] == [
        {"name": "inputs", "dtype": "float32", "shape": [None, 4]}
    ]
    assert data["reloaded"]["relative"] <= export.MAX_RELATIVE_DIFFERENCE
    text = str(report)
    assert "parameters: 37" in text
    assert "original (mixed_bfloat16) against the float32 model" in text


# --- private names ----------------------------------------------------------------


def test_keras_still_has_the_private_names_that_the_export_uses():
    x = keras.Input((2,))
    dense = layers.Dense(3)
    model = keras.Model(x, dense(x))
    assert model_structure.is_plain_functional(model)
    assert model_structure.flatten_layers(model)[0] is model
    assert dense in model_structure.flatten_layers(model)
    seen = []
    y = model_structure.run_graph(
        model,
        keras.Input((2,)),
        replace=lambda operation: seen.append(operation) or operation,
        call=lambda operation, *args, **kwargs: operation(*args, **kwargs),
    )
    assert seen == [dense] and y.shape == (None, 3)
