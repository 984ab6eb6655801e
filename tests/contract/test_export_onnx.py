"""Export as ONNX: typed as the plan says, and run by onnxruntime."""

import importlib.util
import logging
import os

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfamp

REASON = 'ONNX needs pip install "tfamp[onnx]"'
onnx = pytest.importorskip("onnx", reason=REASON)
onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)
pytest.importorskip("tf2onnx", reason=REASON)

F32, F16 = "float32", "mixed_float16"
FLOAT, FLOAT16, INT32 = (
    getattr(onnx.TensorProto, x) for x in ("FLOAT", "FLOAT16", "INT32")
)
EPSILON = tfamp.float_format("float16").epsilon


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.onnx"


def built(build, mode=F32):
    with tfamp.policy_scope(mode):
        return build()


def dense():
    body = [L.Dense(5, "gelu", name="body"), L.Dense(2, name="head")]
    return keras.Sequential([keras.Input((4,)), *body], name="stack")


def bert():
    hub = pytest.importorskip("keras_hub")
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "max_sequence_length": 16}
    backbone = hub.models.BertBackbone(64, 2, 2, name="backbone", **sizes)
    pooled = backbone(backbone.input)["pooled_output"]
    return keras.Model(backbone.input, L.Dense(3, name="head")(pooled))


def attention():
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = L.Embedding(7, 4, name="table")(ids)
    x = L.LayerNormalization()(L.MultiHeadAttention(2, 2)(x, x))
    return keras.Model(ids, L.Dense(2, name="head")(x))


def recurrent():
    x = keras.Input((None, 4), name="x")
    y = L.Bidirectional(L.GRU(3), name="both")(L.LSTM(5, return_sequences=True)(x))
    return keras.Model(x, L.Dense(2, name="head")(y))


def grouped():
    """Keras normalizes groups in float32, by scales that it reshapes."""
    x = keras.Input((8, 8, 3), name="x")
    norm = L.GroupNormalization(2, name="norm")
    y = L.Flatten()(norm(L.Conv2D(4, 3, use_bias=False)(x)))
    norm.gamma.assign([1.0, 2.0, 3.0, 4.0])
    norm.beta.assign([4.0, 3.0, 2.0, 1.5])
    return keras.Model(x, L.Dense(2, name="head")(y))


def normalized():
    """By constants too large for TensorFlow to write them into the graph."""
    scale = L.Normalization(mean=np.arange(300.0), variance=np.arange(300.0) + 1)
    x = keras.Input((300,), name="x")
    return keras.Model(x, L.Dense(2, name="head")(L.Dense(8)(scale(x))))


@tf.function(jit_compile=True)
def doubled(x):
    return x * 2 + tf.reduce_mean(x, axis=-1, keepdims=True)


def compiled():
    """By a function that XLA compiles, which TensorFlow does not inline."""
    x = keras.Input((8,), name="x")
    y = L.Lambda(doubled, output_shape=(16,))(L.Dense(16)(x))
    return keras.Model(x, L.Dense(2, name="head")(y))


def several():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="inputs")
    both = L.Dense(8)(a) + L.Dense(8)(b)
    outputs = {"y": L.Dense(2, name="head")(both), "z": L.Dense(3, name="other")(a)}
    return keras.Model({"a": a, "inputs": b}, outputs)


HEAD, NORM = ("head/kernel",), ("norm/beta", "norm/gamma")
KINDS = {  # A model; which weights stay in float32 if it was made in float32, or mixed.
    "dense": (dense, ("stack/head/kernel",), ()),
    "convolutions": (models.convolutions, HEAD, ()),
    "KerasHub": (bert, HEAD, ()),
    "attention": (attention, HEAD, ()),
    "recurrent": (recurrent, HEAD, ()),
    "groups": (grouped, (*HEAD, *NORM), NORM),
    "constants": (normalized, HEAD, ()),
    "compiled": (compiled, HEAD, ()),
    "subclassed": (models.MODELS["subclassed"], ("model/head/kernel",), ()),
    "several": (several, (*HEAD, "other/kernel"), ()),
}


ALL = [(kind, F32, precision) for kind in KINDS for precision in (F32, F16)]
ALL += [(kind, F16, F16) for kind in ("dense", "KerasHub", "recurrent", "groups")]
LARGE = [x for x in ALL if x[0] in ("KerasHub", "recurrent") and x[1:] != (F32, F32)]
CASES = [case for case in ALL if case not in LARGE] + helpers.whole_runs(LARGE)


def stored(graph):
    """Initializers of an ONNX graph and of those in it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from stored(attribute.g)


def served(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


@pytest.mark.issue("onnx/tensorflow-onnx#2337", "keras#20710")
@pytest.mark.parametrize(("kind", "mode", "precision"), CASES)
def test_file_runs_and_has_the_types_of_the_plan(kind, mode, precision, target):
    build, *kept = KINDS[kind]
    model = built(build, mode)
    before = models.described(model)
    report = tfamp.export(model, target, precision, format="onnx")
    assert models.described(model) == before
    assert os.listdir(target.parent) == [target.name]
    proto = onnx.load(target)
    ends = (*proto.graph.input, *proto.graph.output)
    assert {x.type.tensor_type.elem_type for x in ends} <= {FLOAT, INT32}
    large = [x for x in stored(proto.graph) if sum(size > 1 for size in x.dims) > 1]
    wide, low = ([x for x in large if x.data_type == t] for t in (FLOAT, FLOAT16))
    if precision == F32:
        assert wide and not low and set(report.products) == {"float32"}
        assert report.float32_weights == ()
    else:
        assert low and report.products["float16"]
        assert report.float32_weights == kept[mode == F16]
        assert len(wide) == len(report.float32_weights)
    bound = 1e-5 if precision == F32 else 16 * EPSILON
    assert max(row.relative for row in report.parity) < bound
    twin = built(build)
    models.give_weights(model, twin)
    x = models.batch(model, rows=3)  # Another size than that of the samples.
    named = x if isinstance(x, dict) else {report.inputs[0].name: x}
    found, expected = served(target, named), twin(x)
    if not isinstance(expected, dict):
        expected = {"output_0": expected}
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) < bound * np.linalg.norm(value)


def test_layer_that_an_override_keeps_is_named(target):
    stack = [L.Dense(8, name="a"), L.Dense(8, name="b"), L.Dense(8, name="c")]
    model = keras.Sequential([keras.Input((4,)), *stack], name="stack")
    tfamp.set_precision(model, F16, {"stack/a": "float32", "stack/c": F16})
    report = tfamp.export(model, target, F16, format="onnx")
    assert report.float32_weights == ("stack/a/kernel",)
    assert report.products == {"float32": 1, "float16": 2}
    assert "weights in float32: stack/a/kernel" in str(report)
    assert report.weight_bytes["float16"] >= 2 * 2 * 64


def test_constants_of_ones_own_are_named(target):
    x = keras.Input((4,))
    table = np.arange(48, dtype="float32").reshape(8, 6)
    y = L.Dense(6, name="body")(x)[:, None, :] + table
    model = keras.Model(x, L.Dense(2, name="head")(y))
    report = tfamp.export(model, target, F16, format="onnx")
    (constant, head) = report.float32_weights
    assert constant.startswith("constant '") and head == "head/kernel"


@pytest.mark.filterwarnings("ignore:.*`quantize` method")
def test_integers_stay_or_are_asked_to_be_floats(target):
    def network(kind):
        stack = [L.Dense(64, "relu", name="body"), L.Dense(8, name="head")]
        model = keras.Sequential([keras.Input((64,)), *stack])
        model.quantize(kind)
        return model

    report = tfamp.export(network("int8"), target, format="onnx")
    assert report.weight_bytes["int8"] >= 64 * 64 + 64 * 8
    assert "kept, int8 in 2 layers" in str(report)
    floats = target.with_name("floats.onnx")
    report = tfamp.export(network("int8"), floats, F16, format="onnx", dequantize=True)
    assert report.weight_bytes["float16"] >= 2 * 64 * 64
    if not hasattr(L.Dense, "_int4_build"):  # In Keras 3.10.
        return
    with pytest.raises(tfamp.ExportError, match="hold floats .*body.*dequantize=True"):
        tfamp.export(network("int4"), target.with_name("int4.onnx"), format="onnx")


# ---- What is refused ----


def words():
    text = keras.Input((3,), dtype="string", name="text")
    ids = L.StringLookup(vocabulary=["a", "b"])(text)
    return keras.Model(text, L.Dense(2)(L.Flatten()(L.Embedding(5, 4)(ids))))


def same_names():
    x = keras.Input((4,), name="x")
    return keras.Model({"x": x}, {"x": L.Dense(2)(x)})


WORDS = {"sample_inputs": np.array([["a", "b", "c"]])}
REFUSED = {
    "bfloat16": (
        *(models.sequential, {"precision": "mixed_bfloat16"}, ValueError),
        "onnxruntime cannot multiply bfloat16",
    ),
    "suffix": (models.sequential, {"path": "model"}, ValueError, "ends in .onnx"),
    "half weights": (
        *(models.sequential, {"half_weights": True}, ValueError),
        'precision="mixed_float16"',
    ),
    "strings": (words, WORDS, tfamp.ExportError, "lacks operations.*LookupTableFind"),
    "names": (same_names, {}, tfamp.ExportError, "one name for each tensor.*: x"),
    "state": (models.stateful_rnn, {}, tfamp.ExportError, "no state.*AssignVariableOp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_one_sentence_and_nothing_is_left(case, target):
    build, options, error, message = REFUSED[case]
    model = built(build)
    before, handlers = models.described(model), list(logging.root.handlers)
    level = os.environ["TF_CPP_MIN_LOG_LEVEL"]
    path = target.with_name(options.get("path", target.name))
    with pytest.raises(error, match=message):
        tfamp.export(model, **{**options, "path": path, "format": "onnx"})
    assert os.listdir(target.parent) == [] and models.described(model) == before
    assert logging.root.handlers == handlers
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == level


def test_missing_package_is_one_line(target, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x: None if x == "tf2onnx" else find(x)
    )
    message = r'`format="onnx"` needs tf2onnx: pip install "tfamp\[onnx\]"\.'
    with pytest.raises(tfamp.ExportError, match=message):
        tfamp.export(models.sequential(), target, format="onnx")
    assert os.listdir(target.parent) == []


def test_file_is_replaced_only_if_asked(target):
    model = models.sequential()
    target.write_bytes(b"before")
    with pytest.raises(tfamp.ExportError, match="overwrite=True"):
        tfamp.export(model, target, format="onnx")
    assert target.read_bytes() == b"before"
    tfamp.export(model, target, format="onnx", overwrite=True)
    assert onnx.load(target).graph.node
    assert os.listdir(target.parent) == [target.name]
