"""`tfamp.audit`: what each rule finds in real models, and that nothing is changed."""

import json
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
CPU = "cpu-amx"


def build(mode, shape, *parts, dtype=None, name="net"):
    """A sequential model of layers that are created in a mode."""
    with tfamp.policy_scope(mode):
        inner = [part() for part in parts]
        return keras.Sequential([keras.Input(shape, dtype=dtype), *inner], name=name)


def mlp(mode="mixed_bfloat16", units=1024, **head):
    return build(
        mode,
        (units,),
        lambda: layers.Dense(units, activation="relu", name="body"),
        lambda: layers.Dense(16, name="head", **{"dtype": "float32", **head}),
    )


def audit(model, device=CPU, **keywords):
    """Audits where tfamp is enabled: bias gradients are summed rightly, TF32 is on."""
    if "inputs" not in keywords:
        keywords.setdefault("batch_size", 256)
    try:
        with warnings.catch_warnings():  # Of the models that were built before.
            warnings.simplefilter("ignore")
            tfamp.enable("mixed_bfloat16")
        return tfamp.audit(model, device=device, **keywords)
    finally:
        tfamp.disable()


def audit_stock(model, device=CPU, **keywords):
    """Audits without tfamp, in a mode without TF32."""
    with tfamp.policy_scope("float32"):
        return tfamp.audit(model, device=device, **{"batch_size": 256, **keywords})


def rules(report):
    return [finding.rule for finding in report.findings]


def find(report, rule):
    """The findings of a rule, as one text."""
    found = [finding for finding in report.findings if finding.rule == rule]
    assert found, f"{rule} is not among {rules(report)}"
    return " ".join(" ".join((x.what, x.evidence, x.advice)) for x in found)


@pytest.mark.parametrize("device", [CPU, "a100", "tpu"])
def test_well_set_model(device):
    report = audit(mlp(), device)
    assert report.findings == ()
    assert str(report).endswith("Nothing found.")
    assert report.simulated and report.batch_size == 256


# ---- Formats and the way a step runs ----


@pytest.mark.parametrize(
    ("mode", "device", "advice"),
    [
        ("mixed_float16", "p100", "'float32'"),
        ("mixed_float16", "gtx1660", "'float32'"),
        ("mixed_float16", "tpu", "'mixed_bfloat16'"),
        ("mixed_bfloat16", "v100", "'mixed_float16'"),
        ("mixed_bfloat16", "cpu-avx2", "'float32'"),
        ("float32", "a100", "'mixed_bfloat16'"),
        ("float32", "v100", "'mixed_float16'"),
    ],
)
def test_format_without_a_fast_unit_or_a_fast_one_that_is_not_used(
    mode, device, advice
):
    report = audit(mlp(mode), device)
    assert rules(report)[0] == "fast_unit"
    assert advice in report.findings[0].advice


def test_float32_where_nothing_is_faster():
    for device in ("p100", "gtx1660", "cpu-avx2"):
        assert audit(mlp("float32"), device).findings == ()


def test_tf32():
    model = mlp("float32")
    assert "tf32" not in rules(audit(model, "a100"))
    assert audit(model, "a100").formats == {"tf32": 1.0}
    report = audit_stock(model, "a100")
    assert "mode 'tf32'" in find(report, "tf32")
    assert report.formats == {"float32": 1.0}
    assert "tf32" not in rules(audit_stock(model, "v100"))


def test_xla():
    model = build(
        "mixed_bfloat16",
        (1024,),
        lambda: layers.Dense(1024),
        lambda: layers.LayerNormalization(),
        lambda: layers.Activation("linear", dtype="float32"),
    )
    assert "jit_compile=False" in find(audit(model, CPU, jit_compile=True), "xla")
    assert "jit_compile=True" in find(audit(model, "a100", jit_compile=False), "xla")
    assert rules(audit(model, CPU)) == rules(audit(model, "a100")) == []
    rewritten = audit(mlp("float32"), "a100", jit_compile=True, rewrite="float16")
    assert "bypasses the graph rewrite" in find(rewritten, "xla")


def test_whether_xla_compiles_is_as_compiled_or_as_keras_decides():
    model = mlp()
    on = {device: audit(model, device).jit_compile for device in (CPU, "a100", "tpu")}
    assert on == {CPU: False, "a100": True, "tpu": True}
    assert not audit(mlp("float32"), "a100", rewrite="float16").jit_compile
    model.compile("sgd", "mse", jit_compile=True)
    assert audit(model, CPU).jit_compile and audit(model, None).jit_compile
    assert not audit(model, None, jit_compile=False).jit_compile
    images = keras.Input((8, 8, 3))
    turned = keras.Model(images, layers.RandomRotation(0.1)(images))
    assert not audit(turned, "a100").jit_compile  # Keras has no XLA for it.


def test_eager():
    model = mlp()
    model.compile("sgd", "mse", run_eagerly=True)
    report = audit(model, "a100")
    assert rules(report) == ["eager"] and not report.jit_compile


def test_rewrite_takes_the_float32_layers():
    report = audit(mlp("float32"), "a100", rewrite="float16")
    assert report.formats == {"float16": 1.0}
    assert rules(report) == []


@pytest.mark.parametrize("device", [CPU, "a100"])
def test_too_little_work(device):
    model = mlp()
    assert "1 to 4 rows" in find(audit(model, device, batch_size=2), "batch")
    small = mlp(units=128)
    assert "1.2 MFLOP" in find(audit(small, device, batch_size=32), "batch")
    assert "batch" not in rules(audit(model, device, batch_size=64))


# ---- Layers ----


def convolutions(mode, *parts, **keywords):
    head = [layers.GlobalAveragePooling2D, lambda: layers.Dense(8, dtype="float32")]
    return build(mode, (32, 32, 8), *parts, *head, **keywords)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda **keywords: layers.DepthwiseConv2D(3, name="apart", **keywords),
        lambda **keywords: layers.SeparableConv2D(64, 3, name="apart", **keywords),
    ],
    ids=["depthwise", "separable"],
)
def test_depthwise_convolutions(layer, dtype):
    parts = (lambda: layers.Conv2D(64, 3), lambda: layer(dtype=dtype))
    report = audit(convolutions("mixed_bfloat16", *parts), "a100")
    text = find(report, "depthwise")
    assert "#41715" in text and f"net/apart ({dtype or 'bfloat16'})" in text
    assert "depthwise" not in rules(audit(convolutions("float32", *parts), "a100"))
    plain = convolutions("mixed_bfloat16", parts[0])
    assert "depthwise" not in rules(audit(plain, "a100"))


def test_float32_layers_in_a_16_bit_model():
    parts = [
        lambda: layers.Dense(1024, name="first"),
        lambda: layers.Dense(1024, name="island", dtype="float32"),
        lambda: layers.Dense(16, dtype="float32", name="head"),
    ]
    report = audit(build("mixed_bfloat16", (1024,), *parts))
    (island,) = [x for x in report.findings if x.rule == "float32_islands"]
    assert island.layers == ("net/island",)
    share = 1024 / (2 * 1024 + 16)
    assert island.share == pytest.approx(share)
    assert "float32_islands" not in rules(audit(mlp()))
    large = build(
        "mixed_bfloat16", (1024,), lambda: layers.Dense(4096, dtype="float32")
    )
    assert rules(audit(large)) == ["fast_unit"]  # Without 16 bits it is no island.


def test_large_output_layer_in_float32():
    model = mlp(units=64)
    report = audit(model, batch_size=8192)
    assert "casts its logits" in find(report, "float32_islands")
    assert audit(mlp(units=64, dtype=None), batch_size=8192).formats == {
        "bfloat16": 1.0
    }


def test_casts():
    parts = [
        lambda: layers.Dense(1024),
        lambda: layers.Activation("relu", dtype="float32", name="wide"),
        lambda: layers.Dense(1024, name="back"),
        lambda: layers.Activation("linear", dtype="float32"),
    ]
    report = audit(build("mixed_bfloat16", (1024,), *parts))
    assert rules(report) == ["casts"]
    assert set(report.findings[0].layers) == {"net/wide", "net/back"}
    # Into 16 bits at the input, out of them at the output, and inside a layer.
    normal = (lambda: layers.Dense(1024), lambda: layers.LayerNormalization())
    assert rules(audit(build("mixed_bfloat16", (1024,), *normal, *parts[-1:]))) == []


@pytest.mark.parametrize(
    ("mode", "device", "size", "padded"),
    [
        ("mixed_bfloat16", "a100", 1001, 1008),
        ("mixed_float16", "v100", 1001, 1008),
        ("mixed_float16", "t4", 1004, 1008),
        ("float32", "a100", 1001, 1004),
        ("mixed_bfloat16", "a100", 1008, None),
        ("float32", "a100", 1004, None),
        ("mixed_bfloat16", CPU, 1001, None),
        ("float32", "v100", 1001, None),
    ],
)
def test_alignment(mode, device, size, padded):
    body = lambda: layers.Dense(size, name="body")  # noqa: E731
    model = build(mode, (1024,), body, lambda: layers.Dense(16, dtype="float32"))
    report = audit(model, device)
    if padded is None:
        assert "alignment" not in rules(report)
    else:
        assert f"net/body (units {size} -> {padded})" in find(report, "alignment")


def test_alignment_of_other_layers():
    with tfamp.policy_scope("mixed_bfloat16"):
        ids = keras.Input((64,), dtype="int32")
        x = layers.Embedding(1000, 256)(ids)
        x = layers.MultiHeadAttention(4, 15, name="attention")(x, x)
        attention = keras.Model(ids, x)
    text = find(audit(attention, "a100"), "alignment")
    assert "attention (key_dim 15 -> 16)" in text
    head = lambda: layers.Dense(3003, name="words")  # noqa: E731
    gru = lambda: layers.GRU(250, name="gru")  # noqa: E731
    model = build("mixed_bfloat16", (64, 256), gru, head)
    text = find(audit(model, "a100", batch_size=30), "alignment")
    for phrase in (
        "gru (units 250 -> 256)",
        "units 3003 -> 3008",
        "batch size 30 -> 32",
    ):
        assert phrase in text
    images = build("mixed_bfloat16", (64, 64, 3), lambda: layers.Conv2D(60, 3))
    text = find(audit(images, "a100"), "alignment")
    assert "image channels 3 -> 4" in text and "filters 60 -> 64" in text


@pytest.mark.parametrize("device", [CPU, "a100"])
def test_channels_first(device):
    def model(data_format, shape):
        layer = lambda: layers.Conv2D(64, 3, data_format=data_format, name="conv")  # noqa: E731
        end = lambda: layers.Activation("linear", dtype="float32")  # noqa: E731
        return build("mixed_bfloat16", shape, layer, end)

    report = audit(model("channels_first", (16, 32, 32)), device)
    assert "net/conv" in find(report, "data_format")
    assert rules(audit(model("channels_last", (32, 32, 16)), device)) == []


# ---- Accuracy ----


def test_16_bit_outputs():
    assert "head (linear in bfloat16)" in find(audit(mlp(dtype=None)), "outputs")
    softmax = audit(mlp(dtype=None, activation="softmax"))
    assert "head (softmax in bfloat16)" in find(softmax, "outputs")
    assert "outputs" not in rules(audit(mlp(activation="softmax")))


def test_softmax_that_was_rounded_before_a_cast_of_the_outputs():
    with tfamp.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((1024,))
        x = layers.Dense(1024, activation="softmax", name="head")(inputs)
        logits = layers.Dense(1024, name="logits")(inputs)
        rounded = keras.Model(inputs, keras.ops.cast(x, "float32"))
        exact = keras.Model(inputs, keras.ops.cast(logits, "float32"))
    assert "softmax" in find(audit(rounded), "outputs")
    assert audit(exact).findings == ()


def test_loss_scaling():
    model = mlp("mixed_float16")
    assert "loss_scaling" not in rules(audit(model, "v100"))  # Not compiled.
    model.compile(keras.optimizers.SGD(), "mse", auto_scale_loss=False)
    report = audit(model, "v100")
    (finding,) = [x for x in report.findings if x.rule == "loss_scaling"]
    assert finding.layers == ("net/body",) and finding.share is None
    model.compile(keras.optimizers.SGD(), "mse")
    assert "loss_scaling" not in rules(audit(model, "v100"))
    bfloat16 = mlp()
    bfloat16.compile("sgd", "mse")
    assert "loss_scaling" not in rules(audit(bfloat16, "a100"))


def test_16_bit_weights():
    model = build("float32", (1024,), lambda: layers.Dense(1024, dtype="bfloat16"))
    report = audit(model, "a100")
    assert f"{1024 * 1025:,} weights in bfloat16" in find(report, "narrow_variables")


def test_bias_gradients():
    model = mlp()
    assert rules(audit_stock(model)) == ["bias_gradients"]
    assert rules(audit_stock(model, batch_size=64)) == []
    assert rules(audit_stock(model, jit_compile=True)) == ["xla"]
    assert rules(audit_stock(model, "a100", jit_compile=True)) == []
    convolution = lambda: layers.Conv2D(64, 3)  # noqa: E731  Summed by oneDNN.
    other = lambda: layers.Conv1D(64, 3, name="other")  # noqa: E731
    end = lambda: layers.Activation("linear", dtype="float32")  # noqa: E731
    model = build("mixed_bfloat16", (32, 32, 16), convolution, end)
    assert rules(audit_stock(model)) == []
    model = build("mixed_bfloat16", (512, 64), other, end)
    assert "other" in find(audit_stock(model), "bias_gradients")
    assert rules(audit(model)) == []


# ---- Models of every kind ----


class Reader(keras.Model):
    """A subclassed model that reads integers, and calls a layer twice."""

    def __init__(self):
        super().__init__(name="reader")
        self.embedding = layers.Embedding(100, 64)
        self.inner = layers.Dense(64, name="inner")
        self.head = layers.Dense(3001, name="head")

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
    report = audit(model, "v100", inputs=ids)
    assert report.batch_size == 512
    assert report.multiplications == 512 * 64 * (2 * 64 * 64 + 64 * 3001)
    assert "reader/head (units 3001 -> 3008)" in find(report, "alignment")
    assert "reader/head" in find(report, "outputs")


BATCH = 4
# Shape of the input, layer, multiplications of a forward pass for one example.
COUNTED = {
    "dense": ((20,), lambda: layers.Dense(12), 20 * 12),
    "dense of sequences": ((7, 20), lambda: layers.Dense(12), 7 * 20 * 12),
    "conv1d": ((9, 6), lambda: layers.Conv1D(10, 3), 7 * 10 * 3 * 6),
    "strided": ((9, 9, 6), lambda: layers.Conv2D(10, 3, 2), 16 * 10 * 9 * 6),
    "grouped": ((8, 8, 16), lambda: layers.Conv2D(32, 3, groups=4), 36 * 32 * 9 * 4),
    "first": (
        (6, 9, 9),
        lambda: layers.Conv2D(10, 3, data_format="channels_first"),
        49 * 10 * 9 * 6,
    ),
    "conv3d": ((5, 5, 5, 3), lambda: layers.Conv3D(4, 2), 64 * 4 * 8 * 3),
    # Each position of the input meets the kernel once.
    "transposed": ((5, 5, 6), lambda: layers.Conv2DTranspose(4, 3), 25 * 6 * 9 * 4),
    "depthwise": ((9, 9, 6), lambda: layers.DepthwiseConv2D(3), 49 * 6 * 9),
    "separable": (
        (9, 9, 6),
        lambda: layers.SeparableConv2D(8, 3),
        49 * (6 * 9 + 6 * 8),
    ),
    "einsum": (
        (7, 20),
        lambda: layers.EinsumDense("abc,cde->abde", (None, 3, 4)),
        1680,
    ),
    "lstm": ((9, 6), lambda: layers.LSTM(8), 9 * (6 + 8) * 4 * 8),
    "stacked cells": (
        (9, 6),
        lambda: layers.RNN([layers.GRUCell(8), layers.GRUCell(5)]),
        9 * ((6 + 8) * 3 * 8 + (8 + 5) * 3 * 5),
    ),
    "both ways": (
        (9, 6),
        lambda: layers.Bidirectional(layers.LSTM(8)),
        2 * 9 * (6 + 8) * 4 * 8,
    ),
    "each time step": (
        (5, 20),
        lambda: layers.TimeDistributed(layers.Dense(12)),
        5 * 20 * 12,
    ),
    "model in a model": (
        (20,),
        lambda: keras.Sequential([layers.Dense(12), layers.Dense(5)]),
        20 * 12 + 12 * 5,
    ),
}


@pytest.mark.parametrize(("shape", "make", "one"), COUNTED.values(), ids=COUNTED)
def test_multiplications(shape, make, one):
    model = keras.Sequential([keras.Input(shape), make()])
    assert tfamp.audit(model, batch_size=BATCH).multiplications == BATCH * one


def test_multiplications_of_attention():
    queries, keys = keras.Input((6, 16)), keras.Input((7, 16))
    outputs = layers.MultiHeadAttention(2, 5)(queries, keys)
    model = keras.Model([queries, keys], outputs)
    projections = (6 + 7 + 7 + 6) * 16 * 10
    expected = BATCH * (projections + 2 * 2 * 6 * 7 * 5)
    assert tfamp.audit(model, batch_size=BATCH).multiplications == expected


def test_open_sizes_are_told():
    model = build("float32", (None, 8), lambda: layers.Dense(8))
    assert "taken to be 128" in tfamp.audit(model).notes[0]
    report = tfamp.audit(model, inputs=np.zeros((2, 5, 8)))
    assert report.notes == () and report.multiplications == 2 * 5 * 8 * 8


class Mixer(layers.Layer):
    """A layer that multiplies by weights of its own."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[-2], shape[-2]))

    def call(self, x):
        return tf.einsum("bsd,st->btd", x, self.mixing)


def test_layers_whose_work_is_not_counted_are_named():
    parts = (lambda: layers.Embedding(9, 8), lambda: Mixer(name="mixer"))
    model = build("float32", (6,), *parts, lambda: layers.GRU(8), dtype="int32")
    (note,) = tfamp.audit(model, batch_size=2).notes
    assert note.endswith("not counted: net/mixer")


class Keeper(layers.Layer):
    """A layer that keeps what it was called with, and adds a loss."""

    kept = None

    def call(self, x):
        self.kept = x
        self.add_loss(tf.reduce_sum(x))
        return x


def test_an_audit_changes_nothing():
    model = build(
        "float32",
        (8,),
        Keeper,
        lambda: layers.Dense(4, activity_regularizer="l2"),
        layers.BatchNormalization,
        lambda: layers.Dropout(0.5, seed=1),
    )
    model.compile("sgd", "mse")
    inputs = np.ones((4, 8), "float32")
    model(inputs)
    weights = [np.array(v) for v in model.variables]
    inside = [dict(vars(layer)) for layer in model._flatten_layers()]
    losses = [float(loss) for loss in model.losses]
    tfamp.audit(model)
    with pytest.raises(ValueError, match="(?s)cannot be traced .* Pass `inputs`"):
        tfamp.audit(model, inputs=np.ones((4, 9), "float32"))
    for old, new in zip(weights, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    for layer, before in zip(model._flatten_layers(), inside, strict=True):
        now = vars(layer)
        assert now.keys() == before.keys()
        assert [name for name in now if now[name] is not before[name]] == []
    assert [float(loss) for loss in model.losses] == losses
    model.fit(inputs, np.ones((4, 4)), verbose=0)


# ---- Arguments and the report ----


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device": "a1000"}, ValueError, "Did you mean 'a100'"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"device": 1}, TypeError, "device=1"),
        (
            {"batch_size": 3, "inputs": np.zeros((2, 1024))},
            ValueError,
            "batch_size=3, inputs of 2",
        ),
    ],
    ids=["device", "batch size", "type", "two batch sizes"],
)
def test_bad_arguments(keywords, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tfamp.audit(mlp("float32"), **keywords)
    with pytest.raises(TypeError, match="must be a Keras model"):
        tfamp.audit(layers.Dense(3))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def report():
    return audit(mlp(units=1001, dtype=None), "a100")


def test_findings_about_speed_come_first_and_by_their_share():
    model = build(
        "mixed_bfloat16",
        (1001,),
        lambda: layers.Dense(1001),
        lambda: layers.Dense(1024, dtype="float32"),
        lambda: layers.Dense(1024),
    )
    model.compile("sgd", "mse", run_eagerly=True)
    report = audit(model, "a100")
    shares = [finding.share for finding in report.findings]
    speed = [share for share in shares if share is not None]
    assert rules(report)[0] == "eager" and len(speed) > 2
    assert shares == [*sorted(speed, reverse=True), None]


def test_report_of_this_host():
    report = tfamp.audit(mlp("float32"))
    assert not report.simulated and report.batch_size == 32
    assert isinstance(report, tfamp.AuditReport)


def test_report_as_data_and_text(report):
    content = json.loads(json.dumps(report.to_dict()))
    assert content["schema_version"] == 2
    assert content["formats"] == report.formats
    assert content["findings"][0]["rule"] == "alignment"
    assert content["findings"][-1]["layers"] == ["net/head"]
    text = str(report)
    assert text == report.to_markdown()
    assert text.startswith("# Audit of 'net'\n")
    assert "compute capability 8.0) (simulated), batch size 256, XLA on" in text
    assert max(map(len, text.splitlines())) <= 88
    joined = " ".join(text.split())
    for finding in report.findings:
        assert f"{finding.what}.** {finding.evidence}. -> {finding.advice}" in joined
