"""`tfamp.audit`: what each rule finds in real models, and that nothing is changed."""

import json
import re
import warnings

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfamp
from tfamp import policy_scope

CPU, BF16, FP16, FP32 = "cpu-amx", "mixed_bfloat16", "mixed_float16", "float32"
WIDE = {"dtype": "float32"}


def build(shape, make, mode=BF16, dtype=None):
    """A sequential model of the layers that a function makes in a mode."""
    with policy_scope(mode):
        return keras.Sequential([keras.Input(shape, dtype=dtype), *make()], name="net")


def mlp(mode=BF16, units=1024, body=None, **head):
    def make():
        yield L.Dense(body or units, activation="relu", name="body")
        yield L.Dense(16, name="head", **{**WIDE, **head})

    return build((units,), make, mode)


def audit(model, device=CPU, stock=False, **keywords):
    """Audits where bias gradients are summed rightly and TF32 is on; stock: neither."""
    if "inputs" not in keywords:
        keywords.setdefault("batch_size", 256)
    try:
        with warnings.catch_warnings():  # Of the models that were built before.
            warnings.simplefilter("ignore")
            tfamp.enable(FP32 if stock else BF16)
        return tfamp.audit(model, device=device, **keywords)
    finally:
        tfamp.disable()


def check(report, found, phrase):
    """Checks which rules find something, in order, and what is said."""
    assert [x.rule for x in report.findings] == found.split(), str(report)
    said = [f"{x.what} {x.evidence} {x.advice}" for x in report.findings]
    assert not phrase or phrase in " ".join(said)


# ---- What the rules find ----


def end(sizes=0):
    """Pools what has so many axes, and multiplies little, in float32."""
    pools = (), (L.GlobalAveragePooling1D(),), (L.GlobalAveragePooling2D(),)
    return [*pools[sizes], L.Dense(8, **WIDE)]


def convolutions(*more):
    return [L.Conv2D(64, 3), *more, L.GlobalAveragePooling2D(), L.Dense(8, **WIDE)]


def images(order):
    conv = {"data_format": order}

    def make():
        yield L.Conv2D(64, 3, name="conv", **conv)
        yield L.GlobalAveragePooling2D(**conv)
        yield L.Dense(8, **WIDE)

    return make


def island():
    wide = L.Dense(1024, name="wide", **WIDE)
    return [L.Dense(1024), wide, L.Dense(16, **WIDE)]


def between():
    wide = L.Activation("relu", name="wide", **WIDE)
    return [L.Dense(1024), wide, L.Dense(1024, name="back"), *end()]


def attention():
    with policy_scope(BF16):
        ids = keras.Input((64,), dtype="int32")
        x = L.Embedding(1000, 256)(ids)
        x = L.MultiHeadAttention(4, 15, name="attention")(x, x)
        pool, head = end(1)
        return keras.Model(ids, head(pool(x)))


def cast_outputs(activation):
    """They were rounded before the cast."""
    with policy_scope(BF16):
        x = keras.Input((1024,))
        y = L.Dense(1024, activation=activation, name="head")(x)
        return keras.Model(x, keras.ops.cast(y, "float32"))


def compiled(mode, **keywords):
    model = mlp(mode)
    model.compile(keras.optimizers.SGD(), "mse", **keywords)
    return model


ROW, IMAGE = (1024,), (32, 32, 8)
# Shape, layers, and the mode they are made in.
STACKS = {
    "normal": (ROW, lambda: [L.Dense(1024), L.LayerNormalization(), *end()]),
    "conv": (IMAGE, convolutions),
    "depthwise": (IMAGE, lambda: convolutions(L.DepthwiseConv2D(3, name="x"))),
    "separable": (IMAGE, lambda: convolutions(L.SeparableConv2D(9, 3, name="x"))),
    "wide": (IMAGE, lambda: convolutions(L.DepthwiseConv2D(3, name="x", **WIDE))),
    "all wide": (IMAGE, lambda: convolutions(L.DepthwiseConv2D(3)), FP32),
    "batch norm": (IMAGE, lambda: convolutions(L.BatchNormalization(name="x"))),
    "island": (ROW, island),
    "no island": (ROW, lambda: [L.Dense(4096, **WIDE)]),
    "between": (ROW, between),
    "words": ((64, 256), lambda: [L.GRU(250, name="gru"), L.Dense(3003), *end()]),
    "photos": ((64, 64, 3), lambda: [L.Conv2D(60, 3), *end(2)]),
    "first": ((16, 32, 32), images("channels_first")),
    "last": ((32, 32, 16), images("channels_last")),
    "16-bit weights": (ROW, lambda: [L.Dense(1024, dtype="bfloat16")], FP32),
    "float64": (ROW, lambda: [L.Dense(1024), L.Dense(8, dtype="float64"), *end()]),
    "conv1d": ((512, 64), lambda: [L.Conv1D(64, 3, name="conv"), *end(1)]),
}
MODELS = {
    **{name: lambda each=each: build(*each) for name, each in STACKS.items()},
    **{mode: lambda mode=mode: mlp(mode) for mode in (BF16, FP16, FP32)},
    "1001": lambda: mlp(body=1001),
    "1001 in float16": lambda: mlp(FP16, body=1001),
    "1004 in float16": lambda: mlp(FP16, body=1004),
    "1001 in float32": lambda: mlp(FP32, body=1001),
    "1004 in float32": lambda: mlp(FP32, body=1004),
    "small": lambda: mlp(units=128),
    "smaller": lambda: mlp(units=64),
    "logits": lambda: mlp(dtype=None),
    "softmax": lambda: mlp(dtype=None, activation="softmax"),
    "float32 softmax": lambda: mlp(activation="softmax"),
    "attention": attention,
    "cast softmax": lambda: cast_outputs("softmax"),
    "cast logits": lambda: cast_outputs(None),
    "eager": lambda: compiled(BF16, run_eagerly=True),
    "compiled": lambda: compiled(FP16),
    "unscaled": lambda: compiled(FP16, auto_scale_loss=False),
}
STOCK, XLA, REWRITE = {"stock": True}, {"jit_compile": True}, {"rewrite": "float16"}
OFF = {"jit_compile": False}
SOME = {**STOCK, "batch_size": 64}  # Rows: bfloat16 sums them.
FOUND = [
    *((BF16, device, {}, "", "") for device in (CPU, "a100", "tpu")),
    (BF16, "v100", {}, "fast_unit", "tfamp.enable('mixed_float16')"),
    (BF16, "cpu-avx2", {}, "fast_unit", "tfamp.enable('float32')"),
    (FP16, "p100", {}, "fast_unit", "tfamp.enable('float32')"),
    (FP16, "tpu", {}, "fast_unit", "tfamp.enable('mixed_bfloat16')"),
    (FP16, "v100", {}, "", ""),  # Not compiled: no word on loss scaling.
    (FP32, "a100", {}, "fast_unit", "tfamp.enable('mixed_bfloat16')"),
    (FP32, "v100", STOCK, "fast_unit", "tfamp.enable('mixed_float16')"),
    *((FP32, device, {}, "", "") for device in ("p100", "gtx1660", "cpu-avx2")),
    (FP32, "a100", STOCK, "fast_unit tf32", "mode 'tf32'"),
    (FP32, "a100", REWRITE, "launch_bound", ""),
    (FP32, "a100", {**REWRITE, **XLA}, "xla", "bypasses the graph rewrite"),
    (BF16, CPU, XLA, "xla", "jit_compile=False"),
    (BF16, CPU, {"batch_size": 2}, "batch", "1 to 4 rows"),
    (BF16, "a100", {"batch_size": 2}, "batch alignment", "1 to 4 rows"),
    (BF16, CPU, STOCK, "bias_gradients", "net/body (256 rows)"),
    (BF16, CPU, {**STOCK, "batch_size": 64}, "", ""),
    (BF16, CPU, {**STOCK, **XLA}, "xla", ""),
    (BF16, "a100", {**STOCK, **XLA}, "", ""),
    ("1001", "a100", {}, "alignment", "net/body (units 1001 -> 1008)"),
    ("1001", CPU, {}, "", ""),
    ("1001 in float16", "v100", {}, "alignment", "net/body (units 1001 -> 1008)"),
    ("1004 in float16", "t4", {}, "alignment", "net/body (units 1004 -> 1008)"),
    ("1001 in float32", "a100", {}, "fast_unit alignment", "(units 1001 -> 1004)"),
    *(("1004 in float32", device, {}, "fast_unit", "") for device in ("a100", "v100")),
    ("small", CPU, {"batch_size": 32}, "batch float32_islands", "1.2 MFLOP"),
    ("smaller", CPU, {"batch_size": 8192}, "float32_islands", "casts its logits"),
    ("logits", CPU, SOME, "outputs", "head (linear in bfloat16)"),
    ("softmax", CPU, SOME, "outputs", "softmax in bfloat16"),
    *((name, CPU, {}, "", "") for name in ("logits", "softmax")),  # As `enable` has it.
    ("float32 softmax", CPU, {}, "", ""),
    ("cast softmax", CPU, SOME, "outputs", "softmax"),
    ("cast logits", CPU, {}, "", ""),
    ("normal", CPU, XLA, "xla", "jit_compile=False"),
    ("normal", "a100", OFF, "launch_bound xla", "jit_compile=True"),
    ("batch norm", CPU, {}, "batch_norm", "net/x (bfloat16)"),
    ("batch norm", "a100", {}, "", ""),
    ("normal", CPU, {}, "", ""),  # Casts into, in and out of a model are meant.
    ("normal", "a100", {}, "", ""),
    ("conv", "a100", {}, "", ""),
    ("depthwise", "a100", {}, "depthwise", "#41715): net/x (bfloat16)"),
    ("separable", "a100", {}, "depthwise", "net/x (bfloat16)"),
    ("wide", "a100", {}, "casts depthwise float32_islands", "x (float32)"),
    ("all wide", "a100", {}, "fast_unit", ""),
    ("island", CPU, {}, "float32_islands casts", "net/wide (50%)"),
    ("no island", CPU, {}, "fast_unit", ""),  # Without 16 bits it is none.
    ("between", CPU, {}, "casts", "net/wide (float32)"),
    ("words", "a100", {}, "launch_bound alignment", "gru (units 250 -> 256)"),
    ("words", "a100", {"batch_size": 30}, "launch_bound alignment", "size 30 -> 32"),
    ("photos", "a100", {}, "alignment", "image channels 3 -> 4, filters 60 -> 64"),
    *(("first", device, {}, "data_format", "net/conv") for device in (CPU, "a100")),
    ("last", "a100", {}, "", ""),
    ("last", CPU, STOCK, "", ""),  # oneDNN sums its bias gradient.
    ("conv1d", CPU, STOCK, "bias_gradients", "net/conv"),
    ("conv1d", CPU, {}, "", ""),
    ("float64", "a100", {}, "casts", "(float64)"),
    ("16-bit weights", "a100", {}, "narrow_variables outputs", "1,049,600 weights in"),
    ("attention", "a100", {}, "alignment", "attention (key_dim 15 -> 16)"),
    ("eager", "a100", {}, "eager", ""),
    ("unscaled", "v100", {}, "loss_scaling", "net/body"),
    ("compiled", "v100", {}, "", ""),
]


@pytest.mark.issue(
    "keras-cv#752",
    "tensorflow#38457",
    "tensorflow#37130",
    "tensorflow#40397",
    "google/automl#351",
    "tensorflow#55765",
    "tensorflow/docs#2140",
    "keras-convnext-conversion#3",
)
@pytest.mark.parametrize(("name", "device", "keywords", "found", "phrase"), FOUND)
def test_rules_find(name, device, keywords, found, phrase):
    check(audit(MODELS[name](), device, **keywords), found, phrase)


@pytest.mark.parametrize(
    ("mode", "keywords", "expected"),
    [
        (FP32, {}, "tf32"),
        (FP32, STOCK, "float32"),
        (FP32, REWRITE, "float16"),
        (BF16, STOCK, "bfloat16"),
    ],
)
def test_formats(mode, keywords, expected):
    report = audit(mlp(mode, dtype=None), "a100", **keywords)
    assert report.formats == {expected: 1.0}


def test_layers_and_share_of_a_finding():
    wide, _ = audit(MODELS["island"]()).findings
    assert wide.layers == ("net/wide",)
    assert wide.share == pytest.approx(1024 / (2 * 1024 + 16))
    (casts,) = audit(MODELS["between"]()).findings
    assert set(casts.layers) == {"net/wide", "net/back"}


def test_whether_xla_compiles_is_as_compiled_or_as_keras_decides():
    model = mlp()
    on = {device: audit(model, device).jit_compile for device in (CPU, "a100", "tpu")}
    assert on == {CPU: False, "a100": True, "tpu": True}
    assert not audit(mlp(FP32), "a100", rewrite="float16").jit_compile
    assert not audit(MODELS["eager"](), "a100").jit_compile
    model.compile("sgd", "mse", jit_compile=True)
    assert audit(model, CPU).jit_compile and audit(model, None).jit_compile
    assert not audit(model, None, jit_compile=False).jit_compile
    turned = build((8, 8, 3), lambda: [L.RandomRotation(0.1)], FP32)
    assert not audit(turned, "a100").jit_compile  # Keras has no XLA for it.


# ---- What tfamp chose itself ----


def lm(vocabulary):
    def make():
        yield L.Embedding(8192, 128)
        yield L.LSTM(128, return_sequences=True)
        yield L.Dense(vocabulary, name="logits")

    return (32,), make


def raw():
    return [L.Normalization(mean=0.0, variance=1.0), L.Dense(1024), L.Dense(1024)]


CHOSEN = {
    "a large output is in 16 bits": (*lm(8192), "int32"),
    "a small output is in float32": (*lm(2000), "int32"),
    "strides": (IMAGE, lambda: convolutions(L.DepthwiseConv2D(3, 2))),
    "kernels": (IMAGE, lambda: convolutions(L.DepthwiseConv2D(3), L.Conv2D(8, 1))),
    "softmax": (ROW, lambda: [L.Dense(1024), L.Softmax(), L.Dense(1024), L.Dense(8)]),
    "bilinear": (
        IMAGE,
        lambda: convolutions(L.UpSampling2D(interpolation="bilinear"), L.Conv2D(8, 3)),
    ),
    "raw values": (ROW, raw),
    "recurrent": ((50, 32), lambda: [L.GRU(32), L.Dense(4)]),
}


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_an_audit_advises_against_nothing_that_enable_chose(chosen, disabled):
    shape, make, *dtype = chosen
    if tfamp.enable().effective != BF16:
        pytest.skip("another mode is the fastest here, and advised")
    with warnings.catch_warnings():  # Of small recurrent layers: the next test.
        warnings.simplefilter("ignore")
        model = build(shape, make, BF16, *dtype)
        model.compile("adam", "mse")
    assert tfamp.audit(model, batch_size=256).findings == ()


def test_an_audit_and_enable_agree_on_who_is_faster_in_float32(disabled):
    shape, make = CHOSEN["recurrent"]
    if tfamp.enable().effective != BF16:
        pytest.skip("no layer is slower in bfloat16 here")
    with pytest.warns(UserWarning, match=r"Use tfamp.enable\('float32'\)"):
        build(shape, make).compile("adam", "mse")
    tfamp.enable(FP32)
    assert tfamp.audit(build(shape, make, FP32)).findings == ()


def test_a_large_layer_that_tfamp_keeps_in_float32_is_a_note(disabled):
    tfamp.enable(BF16)
    shape, make = lm(2000)
    model = keras.Sequential([keras.Input(shape, dtype="int32"), *make()], name="net")
    model.compile("adam", "mse")
    (note,) = tfamp.audit(model, device=CPU).notes
    assert note.startswith("Kept in float32 by tfamp: net/logits (66%: computes an out")


@pytest.mark.parametrize(
    ("mode", "device", "says"),
    [
        (FP32, "cpu-avx512", "Float32 is the fastest format here: no native bfloat16"),
        (BF16, CPU, "not timed: `tfamp.benchmark_model"),
        (BF16, "a100", "launches take longer than what they compute"),
    ],
)
def test_what_it_means_that_nothing_is_found(mode, device, says):
    def make():  # A part of a small U-Net.
        yield L.Conv2D(64, 3, activation="relu")
        yield L.Conv2DTranspose(32, 2, 2, activation="relu")
        yield L.Conv2D(1, 1, dtype="float32")

    report = audit(build((32, 32, 8), make, mode), device, batch_size=32)
    assert report.findings == () and says in report.verdict
    assert says in " ".join(str(report).split())
    assert audit(mlp(FP32), CPU).verdict == ""  # There is something to say.


def test_overrides_are_the_users_choice(disabled):
    tfamp.enable(BF16, overrides={"net/wide": FP32})
    model = build(ROW, lambda: [L.Dense(1024), L.Dense(1024, name="wide"), *end()])
    model.compile("adam", "mse")
    report = tfamp.audit(model, batch_size=256, device=CPU)
    check(report, "float32_islands casts", "net/wide (50%)")


def test_no_loss_scaling_where_it_was_switched_off(disabled):
    tfamp.enable(FP16, loss_scale=False)
    model = mlp(FP16)
    model.compile("adam", "mse")
    assert tfamp.audit(model, device="v100", batch_size=256).findings == ()
    tfamp.enable(FP16)
    found = tfamp.audit(model, device="v100", batch_size=256).findings
    assert [each.rule for each in found] == ["loss_scaling"]


# ---- Models of every kind ----


class Reader(keras.Model):
    """A subclassed model that reads integers, and calls a layer twice."""

    def __init__(self):
        super().__init__(name="reader")
        self.embedding = L.Embedding(100, 64)
        self.inner = L.Dense(64, name="inner")
        self.head = L.Dense(3001, name="head")

    def call(self, ids):
        x = self.embedding(ids)
        return self.head(self.inner(self.inner(x)))


def test_subclassed_model():
    with tfamp.policy_scope("mixed_float16"):
        model = Reader()
    with pytest.raises(ValueError, match="is not built"):
        tfamp.audit(model)
    ids = np.zeros((512, 64), "int32")
    model(ids[:2])
    with pytest.raises(ValueError, match="Pass `inputs`"):
        tfamp.audit(model)
    report = audit(model, "v100", stock=True, inputs=ids)
    assert report.batch_size == 512
    assert report.multiplications == 512 * 64 * (2 * 64 * 64 + 64 * 3001)
    check(report, "alignment outputs", "reader/head (units 3001 -> 3008)")


BATCH, FIRST = 4, "channels_first"
# Shape of the input, layer, multiplications of a forward pass for one example.
COUNTED = {
    "dense": ((20,), lambda: L.Dense(12), 20 * 12),
    "dense of sequences": ((7, 20), lambda: L.Dense(12), 7 * 20 * 12),
    "conv1d": ((9, 6), lambda: L.Conv1D(10, 3), 7 * 10 * 3 * 6),
    "strided": ((9, 9, 6), lambda: L.Conv2D(10, 3, 2), 16 * 10 * 9 * 6),
    "grouped": ((8, 8, 16), lambda: L.Conv2D(32, 3, groups=4), 36 * 32 * 9 * 4),
    "first": ((6, 9, 9), lambda: L.Conv2D(10, 3, data_format=FIRST), 49 * 10 * 9 * 6),
    "conv3d": ((5, 5, 5, 3), lambda: L.Conv3D(4, 2), 64 * 4 * 8 * 3),
    # Each position of the input meets the kernel once.
    "transposed": ((5, 5, 6), lambda: L.Conv2DTranspose(4, 3), 25 * 6 * 9 * 4),
    "depthwise": ((9, 9, 6), lambda: L.DepthwiseConv2D(3), 49 * 6 * 9),
    "separable": ((9, 9, 6), lambda: L.SeparableConv2D(8, 3), 49 * (6 * 9 + 6 * 8)),
    "einsum": ((7, 20), lambda: L.EinsumDense("abc,cde->abde", (None, 3, 4)), 1680),
    "lstm": ((9, 6), lambda: L.LSTM(8), 9 * 14 * 32),
    "cells": ((9, 6), lambda: L.RNN([L.GRUCell(8), L.GRUCell(5)]), 9 * 3 * (112 + 65)),
    "both ways": ((9, 6), lambda: L.Bidirectional(L.LSTM(8)), 2 * 9 * 14 * 32),
    "each step": ((5, 20), lambda: L.TimeDistributed(L.Dense(12)), 5 * 20 * 12),
    "nested": ((20,), lambda: keras.Sequential([L.Dense(12), L.Dense(5)]), 300),
}


@pytest.mark.parametrize(("shape", "make", "one"), COUNTED.values(), ids=COUNTED)
def test_multiplications(shape, make, one):
    model = keras.Sequential([keras.Input(shape), make()])
    assert tfamp.audit(model, batch_size=BATCH).multiplications == BATCH * one


def test_multiplications_of_attention():
    queries, keys = keras.Input((6, 16)), keras.Input((7, 16))
    outputs = L.MultiHeadAttention(2, 5)(queries, keys)
    model = keras.Model([queries, keys], outputs)
    projections = (6 + 7 + 7 + 6) * 16 * 10
    expected = BATCH * (projections + 2 * 2 * 6 * 7 * 5)
    assert tfamp.audit(model, batch_size=BATCH).multiplications == expected


def test_open_sizes_are_told():
    model = build((None, 8), lambda: [L.Dense(8)], FP32)
    assert "assumed to be 128" in tfamp.audit(model).notes[0]
    report = tfamp.audit(model, inputs=np.zeros((2, 5, 8)))
    assert report.notes == () and report.multiplications == 2 * 5 * 8 * 8


class Mixer(L.Layer):
    """A layer that multiplies by weights of its own."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[-2], shape[-2]))

    def call(self, x):
        return tf.einsum("bsd,st->btd", x, self.mixing)


def test_layers_whose_work_is_not_counted_are_named():
    make = lambda: [L.Embedding(9, 8), Mixer(name="mixer"), L.GRU(8)]  # noqa: E731
    model = build((6,), make, FP32, dtype="int32")
    (note,) = tfamp.audit(model, batch_size=2).notes
    assert note.endswith("not counted: net/mixer")


class Keeper(L.Layer):
    """A layer that keeps what it was called with, and adds a loss."""

    kept = None

    def call(self, x):
        self.kept = x
        self.add_loss(tf.reduce_sum(x))
        return x


def test_an_audit_changes_nothing():
    def make():
        yield from (Keeper(), L.Dense(4, activity_regularizer="l2"))
        yield from (L.BatchNormalization(), L.Dropout(0.5, seed=1))

    model = build((8,), make, FP32)
    model.compile("sgd", "mse")
    inputs = np.ones((4, 8), "float32")
    model(inputs)
    with models.unchanged(model):
        tfamp.audit(model)
        with pytest.raises(ValueError, match="(?s)cannot be traced .* Pass `inputs`"):
            tfamp.audit(model, inputs=np.ones((4, 9), "float32"))
    model.fit(inputs, np.ones((4, 4)), verbose=0)


def test_a_trace_leaves_no_loss_in_a_model_that_was_never_called():
    model = build((8,), lambda: [L.Dense(4, activity_regularizer="l2")], FP32)
    tfamp.audit(model)
    tfamp.set_precision(model, "mixed_bfloat16")
    assert model.losses == []


# ---- Arguments and the report ----


ARRAYS = {"batch_size": 3, "inputs": np.zeros((2, 1024))}


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device": "a1000"}, ValueError, "Did you mean 'a100'"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"device": 1}, ValueError, "device=1"),
        (ARRAYS, ValueError, "batch_size=3, inputs of 2"),
        ({"model": L.Dense(3)}, TypeError, "must be a `keras.Model`"),
    ],
    ids=["device", "batch size", "type", "two batch sizes", "no model"],
)
def test_bad_arguments(keywords, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tfamp.audit(**{"model": mlp(FP32), **keywords})


def test_report_as_data_and_text():
    report = tfamp.audit(mlp(FP32))
    assert isinstance(report, tfamp.AuditReport)
    assert not report.simulated and report.batch_size == 32
    model = mlp(body=1001, dtype=None)
    model.compile("sgd", "mse", run_eagerly=True)
    report = audit(model, "a100", stock=True)
    check(report, "eager alignment outputs", "")  # By share, accuracy at last.
    assert [x.share for x in report.findings] == [1.0, 1.0, None]
    content = json.loads(json.dumps(report.to_dict()))
    assert content["schema_version"] == 3
    assert content["formats"] == report.formats
    assert content["findings"][1]["rule"] == "alignment"
    assert content["findings"][-1]["layers"] == ["net/head"]
    text = str(report)
    assert text == repr(report) == report.to_markdown()
    assert "tfamp.compare_precision" in text
    assert text.startswith("# Audit of 'net'\n")
    assert "compute capability 8.0) (simulated), batch size 256, XLA" in text
    assert max(map(len, text.splitlines())) <= 88
    joined = " ".join(text.split())
    for finding in report.findings:
        assert f"{finding.what}.** {finding.evidence}. -> {finding.advice}" in joined
