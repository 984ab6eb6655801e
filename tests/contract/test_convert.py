"""`set_precision`: which layers change, what stays, what is refused."""

import json
import re

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
import test_overrides
from absl import logging
from keras import layers

from tfamp import modes
from tfamp.precision import (
    convert,
    float32_config,
    layer_policies,
    model_structure,
    overrides,
    policy,
    precision_plan,
)

RNG = np.random.default_rng(3)


def batch(*shape):
    return RNG.normal(size=shape).astype("float32")


# --- models, all made in float32 --------------------------------------------------


def functional():
    x = keras.Input((4, 4), name="x")
    y = layers.MultiHeadAttention(2, 2, dropout=0.1, name="mha")(x, x)
    lstm = layers.LSTM(3, return_sequences=True, name="lstm")
    y = layers.Bidirectional(lstm, name="both")(y)
    y = layers.TimeDistributed(layers.Dense(3, name="dense"), name="each")(y)
    y = layers.Dense(4, activation="softmax", name="gate")(y)
    y = layers.Dense(2, name="head")(layers.Flatten(name="flat")(y))
    y = layers.Dropout(0.5, name="drop")(layers.Activation("sigmoid", name="act")(y))
    return keras.Model(x, y, name="outer"), batch(5, 4, 4)


def shared():
    """A layer is shared between a model and two nested ones."""
    both = layers.Dense(4, name="both")
    a, b, x = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    left = keras.Model(a, layers.ReLU(name="relu")(both(a)), name="left")
    right = keras.Sequential([b, layers.Dense(4, name="own"), both], name="right")
    return keras.Model(x, [right(left(x)), both(x)]), batch(3, 4)


class Block(layers.Layer):
    """Takes no dtype, makes layers with names of Keras' choice, and pins one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(3)
        self.norm = layers.LayerNormalization(dtype="float32", name="norm")

    def build(self, shape):
        self.last = layers.Dense(3, name="last")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(name="block")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs):
        return {"y": keras.activations.tanh(self.head(self.block(inputs["x"])))}

    def get_config(self):
        return {"name": self.name}


def subclassed():
    model, x = Subclassed(name="model"), {"x": batch(3, 4)}
    model(x)
    return model, x


@keras.saving.register_keras_serializable("test_convert")
class Named(keras.Model):
    """A functional model of a class of its own, with a shortcut to a layer."""

    def __init__(self, units, **kwargs):
        x = keras.Input((4,), name="x")
        self.units, self.body = units, layers.Dense(units, name="body")
        super().__init__(x, layers.Dense(2, name="head")(self.body(x)), **kwargs)

    def get_config(self):
        return {"units": self.units, "name": self.name}


def of_its_own_class():
    return Named(3), batch(3, 4)


def normalized():
    scale = layers.Normalization(name="scale")
    x = np.float32([[1.001, 7.0], [2.002, 9.0], [3.003, 8.0]])
    scale.adapt(x)
    layer = layers.Dense(3, name="body")
    stack = [keras.Input((2,)), scale, layer, layers.Dense(2, name="head")]
    return keras.Sequential(stack), x


def without_input():
    model, x = keras.Sequential([layers.Dense(3), layers.Dense(2)]), batch(3, 4)
    model(x)
    return model, x


def frozen_and_rnn():
    x = keras.Input((3, 2), batch_size=2)
    model = keras.Model(x, layers.Dense(2)(layers.GRU(3, stateful=True)(x)))
    model.layers[1].trainable = False
    data = batch(2, 3, 2)
    model(data)
    return model, data


MODELS = [
    functional,
    shared,
    subclassed,
    of_its_own_class,
    normalized,
    without_input,
    frozen_and_rnn,
]


def rows(model):
    return {row.path: row for row in convert.describe(model)}


def bits(values):
    return [np.asarray(v).tobytes() for v in keras.tree.flatten(values)]


def state_of(model):
    """What of a model a conversion could disturb, as plain values."""
    flat = model_structure.flatten_layers(model)
    states = [s for each in flat for s in model_structure.recurrent_states(each)]
    return (
        [(v.path, v.dtype, v.numpy().tobytes()) for v in model.variables],
        [(each.path, each.dtype_policy.name, each.trainable) for each in flat],
        [(len(each._inbound_nodes), len(each._outbound_nodes)) for each in flat],
        ["call" in vars(each) for each in flat],
        [state.numpy().tolist() for state in states],
    )


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


@pytest.mark.parametrize("build", MODELS)
def test_weights_stay_and_float32_is_bit_identical_again(build):
    model, x = build()
    before = state_of(model)
    low = convert.set_precision(model, "mixed_bfloat16")
    assert state_of(model) == before
    assert bits(low.weights) == bits(model.weights)
    assert {w.dtype for w in low.trainable_weights} == {"float32"}
    assert [w.shape for w in low.trainable_weights] == [
        w.shape for w in model.trainable_weights
    ]
    assert any(x.compute_dtype == "bfloat16" for x in low._flatten_layers())
    assert not low.compiled
    again = convert.set_precision(low, "float32")
    assert bits(again(x, training=False)) == bits(model(x, training=False))
    assert [row.path for row in convert.describe(again)][0] == model.name


def computed(model, x):
    """Returns {layer: dtypes of the products and activations in its trace}."""
    function = tf.function(lambda x: model(x, training=False))
    graph = function.get_concrete_function(
        keras.tree.map_structure(tf.constant, x)
    ).graph
    kinds = ("MatMul", "BatchMatMulV2", "Softmax", "Sigmoid", "Tanh", "Rsqrt")
    found = {}
    for op in graph.get_operations():
        if op.type in kinds:
            scopes = [part for part in op.name.split("/")[:-1] if part != "Tensordot"]
            name = re.sub(r"(_\d+)+$", "", scopes[-1])
            found.setdefault(name, set()).add(op.outputs[0].dtype.name)
    return found


def test_layers_compute_in_what_is_asked_and_outputs_and_softmax_in_float32():
    model, x = functional()
    asked = {"mha/query": "float32", "each": "mixed_float16", "both": "float32"}
    copy = convert.set_precision(model, "mixed_bfloat16", asked)
    assert computed(copy, x) == {
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
    probe = keras.Model(copy.input, [layer.output for layer in copy.layers[1:]])
    dtypes = [y.dtype.name for y in probe(x, training=False)]
    assert dtypes == [layer.output.dtype for layer in copy.layers[1:]]
    expected = ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    assert dtypes == expected + ["float32"] * 3
    found = rows(copy)
    assert found["mha/query"].reason == "asked for by 'mha/query'"
    assert found["each/dense"].policy == "mixed_float16"
    assert found["both/forward_lstm/lstm_cell"] == (
        "both/forward_lstm/lstm_cell",
        "float32",
        "in 'both', asked for by 'both'",
    )
    assert found["gate"].reason == precision_plan.SOFTMAX
    assert found["head"].reason == precision_plan.OUTPUT
    for name in ("act", "drop"):
        assert found[name] == (name, "float32", precision_plan.PASSES_OUTPUT)
    assert found["flat"] == ("flat", "mixed_bfloat16", "the mode is mixed_bfloat16")


def test_an_override_says_otherwise_for_outputs_and_softmax():
    model, x = functional()
    asked = {"head|act|drop|gate": "mixed_float16"}
    copy = convert.set_precision(model, "mixed_bfloat16", asked)
    assert copy(x).dtype == copy.output.dtype == "float16"
    assert rows(copy)["gate"].policy == "mixed_float16"


def test_the_log_says_what_is_not_in_the_mode_and_why(messages):
    convert.set_precision(functional()[0], "mixed_bfloat16")
    (line,) = messages["info"]
    assert line.startswith("set_precision: 20 layers, 4 of them not mixed_bfloat16\n")
    assert f"  head: float32 ({precision_plan.OUTPUT})" in line
    assert not messages["warning"]


def test_an_override_of_a_model_or_a_layer_holds_for_what_is_inside():
    model, x = shared()
    asked = {"left": "float32", "both": "mixed_float16"}
    found = rows(convert.set_precision(model, "mixed_bfloat16", asked))
    assert found["relu"].policy == found["left"].policy == "float32"
    assert found["both"].policy == "mixed_float16"  # Its own pattern is nearer.
    assert found["right/own"].policy == "mixed_bfloat16"
    model, x = subclassed()
    copy = convert.set_precision(model, "mixed_float16", {"model/block": "float32"})
    assert {row.policy for row in rows(copy).values()} == {"mixed_float16", "float32"}
    assert {r.policy for p, r in rows(copy).items() if "block" in p} == {"float32"}
    assert copy(x)["y"].dtype == "float32"


def test_layers_that_a_class_makes_keep_the_dtype_it_fixes():
    model, x = subclassed()
    inside = "mixed_bfloat16"
    copy = convert.set_precision(model, "mixed_float16", {"model/block": inside})
    found = rows(copy)
    assert found["model/block/norm"].policy == "float32"
    assert found["model/block/norm"].reason.startswith("fixed by the class")
    assert found["model/block/last"].policy == inside
    assert computed(copy, x)["norm"] == {"float32"}
    plain = rows(convert.set_precision(model, "mixed_float16"))
    assert plain["model/block/norm"][1:] == ("float32", "made by 'block'")


def test_patterns_are_the_original_paths_and_hold_for_the_copy_again():
    model, _ = subclassed()
    (first,) = [p for p in rows(model) if p.startswith("model/block/dense")]
    copy = convert.set_precision(model, "mixed_bfloat16", {first: "float32"})
    assert copy.block.first.dtype_policy.name == "float32"
    again = convert.set_precision(
        copy, "mixed_bfloat16", {"model/block/last": "float32"}
    )
    assert again.block.last.dtype_policy.name == "float32"
    assert again.block.first.dtype_policy.name == "mixed_bfloat16"


def test_shared_layers_stay_shared():
    model, _ = shared()
    copy = convert.set_precision(model, "mixed_bfloat16")
    assert copy.count_params() == model.count_params() == 2 * (4 * 4 + 4)
    left, right = copy.get_layer("left"), copy.get_layer("right")
    assert left.get_layer("both") is right.get_layer("both") is copy.get_layer("both")


def test_a_class_of_its_own_is_kept_or_the_log_says_why_not(messages):
    model, _ = of_its_own_class()
    copy = convert.set_precision(model, "mixed_bfloat16")
    assert type(copy) is Named and copy.body is copy.get_layer("body")
    assert copy.body.compute_dtype == "bfloat16" and copy.output.dtype == "float32"
    model, x = Named(4), keras.Input((4,))
    outer = keras.Model(x, model(model.body(x)))
    messages["info"].clear()
    copy = convert.set_precision(outer, "mixed_bfloat16")
    assert copy.count_params() == outer.count_params()
    assert "comes back as a plain keras.Model: it shares layers" in messages["info"][0]


class Splits(layers.Layer):
    """As preprocessing layers of keras_hub: it makes a part of it on first use."""

    def build(self, shape):
        self.packer = layers.Rescaling(0.5)

    def call(self, x):
        return self.packer(x)


class WithPreprocessor(Named):
    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.preprocessor = Splits()


@pytest.mark.parametrize("used", [False, True])
def test_a_class_is_kept_with_a_preprocessor_that_was_used(used):
    model = WithPreprocessor(3)
    if used:
        model.preprocessor(batch(2, 4))
    copy = convert.set_precision(model, "mixed_bfloat16")
    assert type(copy) is WithPreprocessor
    assert copy.preprocessor(batch(2, 4)).shape == (2, 4)
    assert bits(copy.weights) == bits(model.weights)


# --- frozen layers ----------------------------------------------------------------


def frozen_base():
    outer, _ = shared()
    outer.get_layer("left").trainable = False
    return outer


def partly_frozen():
    model = frozen_base()
    model.get_layer("right").trainable = False
    model.get_layer("right").get_layer("own").trainable = True
    return model


def all_frozen(build):
    model, _ = build()
    model.trainable = False
    return model


FROZEN = {
    "base": frozen_base,
    "partly": partly_frozen,
    "functional": lambda: all_frozen(functional),
    "sequential": lambda: all_frozen(without_input),
    "subclassed": lambda: all_frozen(subclassed),
    "own class": lambda: all_frozen(of_its_own_class),
}


def trainables(model):
    flat = model_structure.flatten_layers(model)
    flat = [each for each in flat if not isinstance(each, layers.InputLayer)]
    flags = [(each.name.rstrip("_0123456789"), each.trainable) for each in flat]
    shapes = [tuple(w.shape) for w in model.trainable_weights]
    return flags, shapes, [w.trainable for w in model.weights]


@pytest.mark.parametrize("build", FROZEN.values(), ids=FROZEN)
def test_the_copy_is_frozen_as_the_model_is_and_can_be_unfrozen(build):
    model = build()
    copy = convert.set_precision(model, "mixed_bfloat16")
    assert trainables(copy) == trainables(model)
    assert not all(each.trainable for each in model_structure.flatten_layers(model))
    inner = [m for m in model_structure.flatten_layers(model) if m is not model]
    for each in [*(m for m in inner if isinstance(m, keras.Model)), model]:
        twin = copy if each is model else copy.get_layer(each.name)
        for flag in (True, False):
            each.trainable = twin.trainable = flag
            assert trainables(copy) == trainables(model)


# --- saved files ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "asked", "unsaved"),
    [
        pytest.param(functional, {"both/forward_lstm": "float32"}, None, id="kept"),
        pytest.param(functional, {"mha/query": "float32"}, "'mha/query'", id="inner"),
        pytest.param(of_its_own_class, {}, "'body', 'head'", id="own class"),
        pytest.param(without_input, {}, None, id="sequential"),
    ],
)
def test_the_log_names_what_a_saved_file_does_not_hold(
    build, asked, unsaved, messages, tmp_path
):
    model, _ = build()
    copy = convert.set_precision(model, "mixed_bfloat16", asked)
    assert len(messages["warning"]) == (unsaved is not None)
    assert unsaved is None or f"itself: {unsaved}. " in messages["warning"][0]
    copy.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    # Keras 3.15 saves none of a functional or sequential model's own.
    found, expected = (
        [row.policy for row in convert.describe(each)[1:]] for each in (loaded, copy)
    )
    assert (found == expected) == (unsaved is None)


def test_16_bit_variables_are_widened_exactly():
    with policy.policy_scope("float32"):
        keras.config.set_dtype_policy("bfloat16")
        model, _ = of_its_own_class()
    assert {w.dtype for w in model.trainable_weights} == {"bfloat16"}
    copy = convert.set_precision(model, "mixed_bfloat16")
    assert {w.dtype for w in copy.trainable_weights} == {"float32"}
    for old, new in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(np.float32(old), np.float32(new))
    assert copy.inputs[0].dtype == "float32"


def test_constants_of_normalization_are_as_precise_as_its_layer():
    model, x = normalized()
    copy = convert.set_precision(model, "mixed_bfloat16", {"scale": "float32"})
    scale = copy.get_layer("scale")
    assert bits(scale.mean) == bits(model.get_layer("scale").mean)
    assert scale.compute_dtype == "float32"


@pytest.mark.parametrize("mode", modes.MODES)
def test_no_global_changes_and_overrides_in_force_do_not_reach_the_copy(mode):
    model, _ = of_its_own_class()
    before = policy.read()
    resolver = layer_policies.Resolver(modes.get_mode("float32"), {"b.*": "float32"})
    with test_overrides.resolving("float32", {"body": "mixed_float16"}):
        inside = policy.read().dtype_policy
        copy = convert.set_precision(model, mode)
        assert policy.read().dtype_policy is inside
        assert copy.body.compute_dtype == copy.dtype_policy.compute_dtype
    assert policy.read() == before
    assert not resolver.paths


def test_a_compiled_model_can_be_compiled_again_and_trained():
    model, x = of_its_own_class()
    model.compile("adam", "mse")
    copy = convert.set_precision(model, "mixed_bfloat16")
    copy.compile(keras.optimizers.Adam.from_config(model.optimizer.get_config()), "mse")
    history = copy.fit(x, np.ones((3, 2)), epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0]


def test_keras_hub_backbones_and_tied_heads():
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=9,
        num_layers=1,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=4,
        max_sequence_length=3,
    )
    layer = "transformer_layer_0"
    asked = {f"{layer}/self_attention_layer": "mixed_float16"}
    copy = convert.set_precision(backbone, "mixed_bfloat16", asked)
    assert type(copy) is type(backbone)
    assert bits(copy.weights) == bits(backbone.weights)
    found = rows(copy)
    assert found[f"{layer}/self_attention_layer/query"].policy == "mixed_float16"
    assert found[f"{layer}/feedforward_output_dense"].policy == "mixed_bfloat16"
    assert found[f"{layer}/feedforward_layer_norm"].reason == precision_plan.OUTPUT
    assert found["pooled_dense"].policy == "float32"
    ids = {
        "token_ids": np.ones((1, 3), "int32"),
        "segment_ids": np.zeros((1, 3), "int32"),
        "padding_mask": np.ones((1, 3), "int32"),
    }
    assert {y.dtype.name for y in copy(ids).values()} == {"float32"}
    encoded = backbone(backbone.input)["sequence_output"]
    head = backbone.token_embedding(encoded, reverse=True)
    tied = convert.set_precision(keras.Model(backbone.input, head), "mixed_bfloat16")
    assert rows(tied)["token_embedding"].reason == precision_plan.OUTPUT
    assert tied.count_params() == backbone.count_params()
    assert tied(ids).dtype == "float32"


# --- output layers ----------------------------------------------------------------


def with_outputs(build):
    x = keras.Input((4, 4))
    return keras.Model(x, build(x))


OUTPUTS = {
    "ops after a head": (
        lambda x: keras.ops.softmax(
            keras.ops.reshape(layers.Dense(2, name="d")(x), (-1,))
        ),
        ["d"],
    ),
    "sum of two": (
        lambda x: layers.Add(name="add")(
            [layers.Dense(4, name="d")(x), layers.Dense(4, name="e")(x)]
        ),
        ["add", "d", "e"],
    ),
    "attention": (
        lambda x: layers.MultiHeadAttention(1, 2, name="mha")(x, x),
        ["mha/attention_output"],
    ),
    "recurrent": (
        lambda x: layers.Bidirectional(layers.GRU(2, name="gru"), name="both")(x),
        ["both/backward_gru", "both/forward_gru"],
    ),
    "stack": (
        lambda x: keras.Sequential(
            [keras.Input((4, 4)), layers.Dense(3, name="a"), layers.Dense(2, name="b")],
            name="stack",
        )(x),
        ["stack/b"],
    ),
    "own weights around layers": (lambda x: Block(name="block")(x), ["block"]),
    "two outputs, one of integers": (
        lambda x: [
            layers.Dense(2, name="d")(x),
            keras.ops.argmax(layers.Dense(3, name="e")(x)),
        ],
        ["d"],
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_output_layers_are_those_that_compute_or_pass_on_an_output(case):
    build, expected = OUTPUTS[case]
    model = with_outputs(build)
    before = state_of(model)
    found = [layer for layer, _ in precision_plan.output_layers(model)]
    assert sorted(model_structure.path_of(layer) for layer in found) == expected
    assert state_of(model) == before


def test_unknown_outputs_are_said_to_be_unknown(messages):
    class Reads(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.head = layers.Dense(2, name="head")

        def call(self, ids):
            return self.head(tf.one_hot(ids, 3))

        def get_config(self):
            return {"name": self.name}

    model, ids = Reads(name="reads"), np.array([[0, 2]])
    model(ids)
    with pytest.raises(convert.ConversionError, match="pass `sample_inputs`"):
        convert.set_precision(model, "mixed_bfloat16")
    assert "outputs are not known" in messages["warning"][0]
    copy = convert.set_precision(model, "mixed_bfloat16", sample_inputs=ids)
    assert rows(copy)["reads/head"].reason == precision_plan.OUTPUT
    assert bits(copy.weights) == bits(model.weights)
    assert sum("outputs are not known" in line for line in messages["warning"]) == 1


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"hed": "float32", "x/.*": "float32"},
            "2 patterns matched no layer: 'hed', 'x",
        ),
        ({"outer/head": "float32"}, "use 'head' instead of 'outer/head'"),
        ({"each/dense": "float32"}, "name 'each'"),
        ({r"mha/softmax\w*": "float32"}, "name 'mha'"),
        ({"both/backward_lstm/.*": "float32"}, "name 'both/backward_lstm'"),
        ({"head": "tf32"}, "TF32 is a flag of the whole process"),
        ({"hea.": "float32", ".ead": "mixed_float16"}, "2 patterns match 'head'"),
    ],
)
def test_overrides_that_cannot_be_followed_are_errors(asked, message):
    with pytest.raises(overrides.OverrideError) as caught:
        convert.set_precision(functional()[0], "mixed_bfloat16", asked)
    assert message in str(caught.value)


def test_a_shared_layer_is_not_asked_two_things():
    model, _ = shared()
    asked = {"left": "float32", "right": "mixed_float16"}
    with pytest.raises(overrides.OverrideError, match="'both' is shared by 'left' and"):
        convert.set_precision(model, "mixed_bfloat16", asked)
    copy = convert.set_precision(model, "mixed_bfloat16", {**asked, "both": "float32"})
    assert rows(copy)["both"].policy == "float32"


class FixedWeight(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(), dtype="bfloat16", name="w")

    def call(self, x):
        return x * keras.ops.cast(self.w, x.dtype)


def quantized():
    model, _ = of_its_own_class()
    model.body.dtype_policy = "int8_from_float32"
    return model


def low_rank():
    model, _ = of_its_own_class()
    model.body.enable_lora(1)
    return model


def test_weights_with_low_rank_parts_load_merged_as_the_error_says(tmp_path):
    model, x = of_its_own_class()
    model.body.enable_lora(1)
    model.body.lora_kernel_b.assign(np.ones((1, 3)))
    model.save_weights(tmp_path / "m.weights.h5")
    merged, _ = of_its_own_class()
    merged.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: layers.Dense(2),
            TypeError,
            "must be a `keras.Model`. Received: Dense",
        ),
        (lambda: Subclassed(), ValueError, "is not built"),
        (quantized, convert.ConversionError, "quantized layers: body"),
        (
            low_rank,
            convert.ConversionError,
            "LoRA in the layers: body.* load its weights",
        ),
        (
            lambda: with_outputs(FixedWeight(name="low")),
            convert.ConversionError,
            r"Received variables.*low/w \(bfloat16\)",
        ),
        (
            lambda: with_outputs(layers.Lambda(lambda x: x * 2, name="twice")),
            convert.ConversionError,
            r"Layer 'twice' \(Lambda\) cannot be rebuilt in mixed_bfloat16",
        ),
    ],
    ids=["no model", "not built", "quantized", "LoRA", "fixed variable", "lambda"],
)
def test_a_model_that_cannot_be_converted_is_refused(build, error, message):
    before = policy.read()
    with pytest.raises(error, match=message):
        convert.set_precision(build(), "mixed_bfloat16")
    assert policy.read() == before


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="Unknown precision mode"):
        convert.set_precision(of_its_own_class()[0], "fp16")


# --- pure parts -------------------------------------------------------------------

POLICY = {"module": "keras", "class_name": "DTypePolicy", "registered_name": None}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "mixed_bfloat16"}),
        (
            {"dtype": "int64", "a_dtype": "float16"},
            {"dtype": "int64", "a_dtype": "float16"},
        ),
        (
            {"dtype": {**POLICY, "config": {"name": "float32"}}},
            {"dtype": {**POLICY, "config": {"name": "mixed_bfloat16"}}},
        ),
        (
            {"layer": {"class_name": "Dense", "build_config": {"a": 1}, "config": {}}},
            {"layer": {"class_name": "Dense", "config": {}}},
        ),
        ({"build_config": [({"units": 3},)]}, {"build_config": [({"units": 3},)]}),
    ],
)
def test_configuration_takes_the_policy_and_nothing_else_changes(config, expected):
    before = json.dumps(config)
    assert float32_config.with_policy(config, "mixed_bfloat16") == expected
    assert json.dumps(config) == before


# --- private names ----------------------------------------------------------------


def test_keras_still_has_the_private_names_that_are_read():
    seen = []

    class Looks(layers.Layer):
        def call(self, x):
            seen.append((model_structure.layer_in_scope(), self.inner(x))[0])
            return x

    outer = Looks(name="outer")
    outer.inner = layers.Activation("relu", name="inner")
    assert not model_structure.was_used(outer.inner)
    assert model_structure.path_in_scope(outer) == "outer"
    outer(np.ones(2, np.float32))
    assert seen == [outer] and model_structure.layer_in_scope() is None
    assert outer.inner.path is None and model_structure.was_used(outer.inner)
    assert model_structure.path_of(outer.inner) == "outer/inner"
    assert model_structure.children(outer) == [outer.inner]
    loose = layers.Dense(1, name="loose")
    with model_structure.own_scope(loose), model_structure.own_scope(loose):
        assert model_structure.path_in_scope(layers.ReLU(name="in")) == "loose/in"
    model, _ = without_input()
    part = model_structure.is_part_of_sequential
    assert part(model._functional, model) and not part(model.layers[0], model)
    assert model_structure.is_built(model)
    assert not model_structure.is_built(keras.Sequential([layers.Dense(1)]))


def test_refreshing_leaves_no_trace_in_the_graph():
    model, x = functional()
    layer = model.get_layer("head")
    nodes = state_of(model)[2]
    layer.dtype_policy = "mixed_float16"
    assert layer.output.dtype == "float32"
    model_structure.refresh_dtypes(model)
    assert layer.output.dtype == "float16"
    assert state_of(model)[2] == nodes
    assert keras.Model(model.input, layer.output)(x).dtype == "float16"
