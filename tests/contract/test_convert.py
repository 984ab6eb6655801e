"""`set_precision`: which layers change, what stays, what is refused."""

import re
from typing import Any

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers as L

import tfamp

OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"
SOFTMAX = "softmax stays in float32: its exponentials overflow and its sums round"
F32, BF16, F16 = "float32", "mixed_bfloat16", "mixed_float16"


def rows(model):
    return {row.path: row for row in tfamp.describe_layers(model)}


def bits(values):
    return [np.asarray(v).tobytes() for v in keras.tree.flatten(values)]


def run(model, x):
    """Outputs, from states of zeros where there are any."""
    for state in models.states(model)[len(model.weights) :]:
        state.assign(np.zeros(state.shape))
    return bits(model(x, training=False))


@pytest.fixture
def messages(monkeypatch):
    """What is logged, as text by level."""
    found = {"info": [], "warning": []}
    for level, lines in found.items():
        monkeypatch.setattr(
            logging, level, lambda text, *args, lines=lines: lines.append(text % args)
        )
    return found


# --- the same model ---------------------------------------------------------------

CASES = [(name, BF16) for name in models.MODELS]
CASES += [(name, F16) for name in ("functional", "shared", "subclassed", "own class")]


@pytest.mark.issue("OpenSeq2Seq#233")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_precision_is_assigned_in_place_and_taken_back(name, mode):
    """An override leaves outputs and softmax in the mode, as a model built in it."""
    build = models.MODELS[name]
    model = build()
    model.layers[len(model.layers) // 2].trainable = False
    x = models.batch(model)
    expected, before = run(model, x), models.described(model)
    assert tfamp.set_precision(model, mode, {".*": mode}) is model
    now = models.described(model)
    policies, old = now.pop("policies"), before.pop("policies")
    if name == "tf.function":  # It is cloned, with nothing traced.
        now["calls"] = before["calls"]
    assert now == before
    assert [(row[0], row[2]) for row in policies] == [(row[0], row[2]) for row in old]
    assert mode in {policy for _, policy, _ in policies}
    with tfamp.policy_scope(mode):
        twin = build()
    for each in twin._flatten_layers():
        if each.name == "norm":  # A dtype that a class fixes counts where it is made.
            each.dtype_policy = keras.DTypePolicy(mode)
    models.give_weights(model, twin)
    assert run(model, x) == run(twin, x)
    tfamp.set_precision(model, F32)
    assert {each.compute_dtype for each in model._flatten_layers()} == {F32}
    assert run(model, x) == expected


def computed(model, x):
    """Returns {layer: dtypes of the products and activations in its trace}."""
    function = tf.function(lambda x: model(x, training=False))
    graph = function.get_concrete_function(tf.constant(x)).graph
    kinds = ("MatMul", "BatchMatMulV2", "Softmax", "Sigmoid", "Tanh", "Rsqrt")
    found = {}
    for op in graph.get_operations():
        if op.type in kinds:
            scopes = [part for part in op.name.split("/")[:-1] if part != "Tensordot"]
            name = re.sub(r"(_\d+)+$", "", scopes[-1])
            found.setdefault(name, set()).add(op.outputs[0].dtype.name)
    return found


@pytest.mark.issue("keras-cv#752")
def test_layers_compute_in_what_is_asked_and_outputs_and_softmax_in_float32(messages):
    model = models.functional()
    x = models.batch(model)
    tfamp.set_precision(model, BF16, {"mha/query": F32, "each": F16, "both": F32})
    assert computed(model, x) == {
        "query": {"float32"},
        "key": {"bfloat16"},
        "value": {"bfloat16"},
        "mha": {"float32", "bfloat16"},  # A float32 query; scores are bfloat16.
        "softmax": {"bfloat16"},
        "attention_output": {"bfloat16"},
        "lstm_cell": {"float32"},
        "each": {"float16"},
        "gate": {"float32"},
        "head": {"float32"},
        "act": {"float32"},
    }
    probe = keras.Model(model.input, [layer.output for layer in model.layers[1:]])
    dtypes = [y.dtype.name for y in probe(x, training=False)]
    expected = ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    assert dtypes == expected + ["float32"] * 3
    found = rows(model)
    assert found["mha/query"].reason == "requested by 'mha/query'"
    assert found["each/dense"].policy == F16
    cell = "both/forward_lstm/lstm_cell"
    assert found[cell] == (cell, F32, "in 'both', requested by 'both'")
    assert found["gate"].reason == SOFTMAX
    assert found["head"].reason == OUTPUT
    for name in ("act", "drop"):
        assert found[name] == (name, F32, PASSES_OUTPUT)
    assert found["flat"] == ("flat", BF16, f"the mode is {BF16}")
    (line,) = messages["info"]
    assert line.startswith("set_precision: 20 layers, 12 of them not mixed_bfloat16: ")
    assert "mha/query: float32 (requested by 'mha/query')" in line


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        # An override holds for what is inside; its own pattern is nearer.
        (
            "shared",
            {"left": F32, "both": F16},
            {"left": F32, "relu": F32, "both": F16, "right/own": BF16},
        ),
        ("shared", {"left": F32, "right": F16, "both": F32}, {"both": F32}),
        (
            "subclassed",
            {"model/block": F32},
            {"model/block/norm": F32, "model/block/last": F32, "model/inner": BF16},
        ),
        ("subclassed", {"model/block/norm": F16}, {"model/block/norm": F16}),
        # The mode holds whatever dtype a layer was made with.
        ("subclassed", {}, {"model/block/norm": BF16, "model/head": F32}),
    ],
)
def test_the_nearest_pattern_of_the_last_call_counts(name, asked, expected):
    model = models.MODELS[name]()
    tfamp.set_precision(model, F16, {".*": F16})
    tfamp.set_precision(model, BF16, asked)
    found = rows(model)
    assert {path: found[path].policy for path in expected} == expected


def test_layers_of_float64_of_integers_and_of_files_keep_what_they_are(tmp_path):
    inner = keras.Sequential([keras.Input((2,)), L.Dense(2)])
    inner.export(tmp_path / "saved", verbose=False)
    x = keras.Input((2,))
    y = L.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve")(x)
    y = L.Dense(2, dtype="float64", name="wide")(y)
    ids = L.IntegerLookup(vocabulary=[1, 2], name="ids")
    low = L.Dense(2, name="low")(y)
    model = keras.Model(x, [L.Dense(1, name="out")(low), ids(x)])
    data = models.batch(model)
    expected = bits(model(data))
    tfamp.set_precision(model, BF16)
    assert rows(model).keys() >= {"low", "out"}
    assert not rows(model).keys() & {"wide", "ids"}
    assert model.get_layer("wide").compute_dtype == "float64"
    model(data)
    tfamp.set_precision(model, F32)
    assert bits(model(data)) == expected


def test_constants_of_normalization_are_as_precise_as_its_layer():
    given = L.Normalization(mean=[1.001, 7.0], variance=[1.0, 2.0], name="scale")
    given = keras.Sequential([keras.Input((2,)), given, L.Dense(1)])
    for model in (models.normalized(), given):
        scale = model.get_layer("scale")
        expected = bits(scale.mean)
        tfamp.set_precision(model, BF16, {".*scale": BF16})
        assert scale.mean.dtype == "bfloat16"
        tfamp.set_precision(model, BF16)  # What takes raw values is float32.
        assert bits(scale.mean) == expected


def test_no_global_changes_and_overrides_in_force_are_not_asked():
    def globals_now():
        flag = tf.config.experimental.tensor_float_32_execution_enabled()
        return keras.config.dtype_policy(), flag

    tfamp.enable(F32, overrides={"body": F16})
    before, model = globals_now(), models.OwnClass()
    for mode, expected in (("tf32", F32), (BF16, "bfloat16")):
        tfamp.set_precision(model, mode)
        model.compile("sgd", "mse")
        assert globals_now() == before
        assert model.body.compute_dtype == expected
    tfamp.disable()


# --- training ---------------------------------------------------------------------

Y = np.ones((5, 2))


def compiled(optimizer: Any = "adam"):
    model = models.OwnClass()
    model.compile(optimizer, "mse")
    return model


def test_what_was_traced_is_traced_again_also_in_the_middle_of_fit():
    model, seen = compiled(), []
    data: dict[str, Any] = {"x": models.batch(model), "y": Y, "verbose": 0}
    call = model.body.call
    model.body.call = lambda x, **kw: seen.append(x.dtype) or call(x, **kw)
    model.fit(**data)
    model.predict(data["x"], verbose=0)

    def change(epoch, logs):
        if epoch == 1:
            tfamp.set_precision(model, BF16)
            seen.clear()

    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    model.fit(**data, epochs=2, callbacks=[changing])
    assert set(seen) == {tf.bfloat16}
    model.evaluate(**data)
    model.predict(data["x"], verbose=0)
    assert len(seen) > 2 and set(seen) == {tf.bfloat16}


def test_a_call_that_is_a_function_of_tensorflow_is_traced_again():
    model = models.MODELS["tf.function"]()
    x = models.batch(model)
    for mode in (BF16, F32, BF16):  # The head gets the same from the layer before it.
        tfamp.set_precision(model, BF16, {"net/head": mode})
        assert model(x).dtype == mode.removeprefix("mixed_")


def test_a_compiled_model_that_trains_float16_scales_its_loss_from_then_on(tmp_path):
    model = compiled()
    x = models.batch(model)
    model.fit(x, Y, verbose=0)
    steps = int(model.optimizer.iterations)
    tfamp.set_precision(model, F16)
    assert type(model.optimizer) is tfamp.LossScaleOptimizer
    assert int(model.optimizer.inner_optimizer.iterations) == steps
    losses = model.fit(x, Y, epochs=9, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is tfamp.LossScaleOptimizer
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale)


def test_the_loss_is_scaled_as_enable_was_asked():
    tfamp.enable(BF16, loss_scale={"growth_interval": 7})
    assert tfamp.set_precision(compiled(), F16).optimizer.growth_interval == 7
    tfamp.enable(BF16, loss_scale=False)
    plain = tfamp.set_precision(compiled(), F16).optimizer
    assert type(plain) is keras.optimizers.Adam
    tfamp.disable()
    assert tfamp.set_precision(compiled(None), F16).optimizer is None


def test_16_bit_variables_are_widened_exactly_but_not_under_a_built_optimizer():
    keras.config.set_dtype_policy("bfloat16")
    model = models.OwnClass()
    keras.config.set_dtype_policy(F32)
    x = models.batch(model)
    helpers.fit(model, x, Y, "adam")
    before, weights = models.described(model), [np.float32(w) for w in model.weights]
    with pytest.raises(tfamp.ConversionError, match="new optimizer first"):
        tfamp.set_precision(model, BF16)
    assert models.described(model) == before
    assert {w.dtype for w in model.trainable_weights} == {"bfloat16"}
    model.compile("adam", "mse")
    tfamp.set_precision(model, BF16)
    assert {w.dtype for w in model.trainable_weights} == {"float32"}
    assert bits(model.weights) == bits(weights)
    assert model.inputs[0].dtype == "float32"
    model.fit(x, Y, verbose=0)


def test_the_log_names_what_a_saved_file_does_not_hold(messages, tmp_path):
    model = tfamp.set_precision(models.OwnClass(), BF16)
    (line,) = messages["warning"]
    assert "itself: 'body'. " in line
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.body.compute_dtype != model.body.compute_dtype
    tfamp.set_precision(models.sequential(), BF16)
    assert len(messages["warning"]) == 1


# --- output layers ----------------------------------------------------------------


def pair(x):
    return L.Dense(4, name="d")(x), L.Dense(4, name="e")(x)


def stack(x):
    ends = L.Dense(3, name="a"), L.Dense(2, name="b")
    return keras.Sequential([keras.Input((4, 4)), *ends], name="stack")(x)


def model_of(build):
    x = keras.Input((4, 4))
    return keras.Model(x, build(x))


# A model, and the layers that compute or pass on an output.
OUTPUTS = {
    "operations": (
        lambda: model_of(lambda x: keras.ops.softmax(keras.ops.sum(pair(x)[0], 1))),
        "d",
    ),
    "sum": (lambda: model_of(lambda x: L.Add(name="add")(pair(x))), "add d e"),
    "attention": (
        lambda: model_of(lambda x: L.MultiHeadAttention(1, 2, name="m")(x, x)),
        "m/attention_output",
    ),
    "recurrent": (
        lambda: model_of(
            lambda x: L.Bidirectional(L.LSTM(2, name="lstm"), name="w")(x)
        ),
        "w/backward_lstm w/forward_lstm",
    ),
    "stack": (lambda: model_of(stack), "stack/b"),
    "own weights": (lambda: model_of(lambda x: models.Block("block")(x)), "block"),
    "integers": (
        lambda: model_of(lambda x: [pair(x)[0], keras.ops.argmax(L.Dense(3)(x))]),
        "d",
    ),
    "tied": (models.tied_embedding, "table"),
    "tf.function": (models.MODELS["tf.function"], "net/head"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_output_layers_are_those_that_compute_or_pass_on_an_output(case):
    build, expected = OUTPUTS[case]
    model = tfamp.set_precision(build(), BF16)
    found = [r.path for r in rows(model).values() if r.reason.endswith(OUTPUT[11:])]
    assert sorted(found) == expected.split()


class Reads(keras.Model):
    """Keras records no dtypes of what a class of one's own takes."""

    def __init__(self):
        super().__init__(name="reads")
        self.head = L.Dense(2, name="head")

    def call(self, ids):
        return self.head(tf.one_hot(ids, 3))


def test_unknown_outputs_are_said_to_be_unknown(messages):
    model, ids = Reads(), np.array([[0, 2]])
    model(ids)
    tfamp.set_precision(model, BF16)
    line = messages["warning"][0]
    assert "outputs are not known" in line and "`overrides`" in line
    tfamp.set_precision(model, BF16, {"reads/head": F32})
    assert model(ids).dtype == "float32"


# --- what is refused --------------------------------------------------------------


@pytest.fixture(scope="module")
def built():
    """Models in float16, by name."""
    names = "functional", "shared", "normalized"
    found = {name: models.MODELS[name]() for name in names}
    return {name: tfamp.set_precision(model, F16) for name, model in found.items()}


WRONG = tfamp.OverrideError
NONE = "2 patterns matched no layer: 'hed', 'x/"


@pytest.mark.parametrize(
    ("model", "mode", "asked", "error", "message"),
    [
        ("functional", BF16, {"hed": F32, "x/.*": F32}, WRONG, NONE),
        ("functional", BF16, {"outer/head": F32}, WRONG, "'head'"),
        ("functional", BF16, {"each/dense": F32}, WRONG, "'each', "),
        ("functional", BF16, {r"mha/softmax\w*": F32}, WRONG, "'mha', "),
        ("functional", BF16, {"both/.*_lstm/.*": F32}, WRONG, "'both/backward_lstm', "),
        ("functional", BF16, {"head": "tf32"}, WRONG, "a flag of the whole process"),
        ("functional", BF16, {"hea.": F32, ".ead": F16}, WRONG, "match 'head'"),
        ("shared", BF16, {"left": F32, "right": F16}, WRONG, "shared by 'left' and"),
        ("functional", "fp16", {}, ValueError, "Did you mean 'mixed_float16'"),
        (lambda: L.Dense(2), BF16, {}, TypeError, "must be a `keras.Model`. Received"),
        (models.Subclassed, BF16, {}, ValueError, "is not built"),
    ],
)
def test_what_cannot_be_done_changes_nothing(model, mode, asked, error, message, built):
    model = built[model] if isinstance(model, str) else model()
    is_model = isinstance(model, keras.Model)
    before = is_model and models.described(model), keras.config.dtype_policy()
    with pytest.raises(error) as caught:
        tfamp.set_precision(model, mode, asked)
    assert message in str(caught.value)
    now = is_model and models.described(model), keras.config.dtype_policy()
    assert now == before


def test_a_layer_that_refuses_half_way_changes_nothing(built, monkeypatch):
    model = built["normalized"]
    before = models.described(model), bits(model.get_layer("scale").mean)

    def fail(self):
        raise MemoryError

    monkeypatch.setattr(L.Normalization, "finalize_state", fail)
    with pytest.raises(MemoryError):
        tfamp.set_precision(model, BF16)
    assert (models.described(model), bits(model.get_layer("scale").mean)) == before
