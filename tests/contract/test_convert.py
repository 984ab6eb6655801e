"""`set_precision`: which layers change, what stays, what is refused."""

import re
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers as L

import tfamp

OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"
SOFTMAX = "softmax stays in float32: its exponentials overflow and its sums round"
RNG = np.random.default_rng(3)


def batch(*shape):
    return RNG.normal(size=shape).astype("float32")


# --- models, all made in float32 --------------------------------------------------


def functional():
    x = keras.Input((4, 4), name="x")
    y = L.MultiHeadAttention(2, 2, dropout=0.1, name="mha")(x, x)
    lstm = L.LSTM(3, return_sequences=True, name="lstm")
    y = L.Bidirectional(lstm, name="both")(y)
    y = L.TimeDistributed(L.Dense(3, name="dense"), name="each")(y)
    y = L.Dense(4, activation="softmax", name="gate")(y)
    y = L.Dense(2, name="head")(L.Flatten(name="flat")(y))
    y = L.Dropout(0.5, name="drop")(L.Activation("sigmoid", name="act")(y))
    return keras.Model(x, y, name="outer"), batch(5, 4, 4)


def shared():
    """A layer is shared between a model and two nested ones."""
    both = L.Dense(4, name="both")
    a, b, x = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    left = keras.Model(a, L.ReLU(name="relu")(both(a)), name="left")
    right = keras.Sequential([b, L.Dense(4, name="own"), both], name="right")
    return keras.Model(x, [right(left(x)), both(x)]), batch(3, 4)


class Block(L.Layer):
    """Takes no dtype, makes layers with names of Keras' choice, and pins one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = L.Dense(3)
        self.norm = L.LayerNormalization(dtype="float32", name="norm")

    def build(self, shape):
        self.last = L.Dense(3, name="last")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(name="block")
        self.head = L.Dense(2, name="head")

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
        self.units, self.body = units, L.Dense(units, name="body")
        super().__init__(x, L.Dense(2, name="head")(self.body(x)), **kwargs)

    def get_config(self):
        return {"units": self.units, "name": self.name}


def of_its_own_class():
    return Named(3), batch(3, 4)


def normalized():
    scale = L.Normalization(name="scale")
    x = np.float32([[1.001, 7.0], [2.002, 9.0], [3.003, 8.0]])
    scale.adapt(x)
    layer = L.Dense(3, name="body")
    stack = [keras.Input((2,)), scale, layer, L.Dense(2, name="head")]
    return keras.Sequential(stack), x


def without_input():
    model, x = keras.Sequential([L.Dense(3), L.Dense(2)]), batch(3, 4)
    model(x)
    return model, x


def frozen_and_rnn():
    x = keras.Input((3, 2), batch_size=2)
    model = keras.Model(x, L.Dense(2)(L.GRU(3, stateful=True)(x)))
    model.layers[1].trainable = False
    data = batch(2, 3, 2)
    model(data)
    return model, data


MODELS = [functional, shared, subclassed, of_its_own_class]
MODELS += [normalized, without_input, frozen_and_rnn]
BF16 = "mixed_bfloat16"


def rows(model):
    return {row.path: row for row in tfamp.describe_layers(model)}


def bits(values):
    return [np.asarray(v).tobytes() for v in keras.tree.flatten(values)]


def state_of(model):
    """What of a model a conversion could disturb, as plain values."""
    flat = model._flatten_layers()
    states = [getattr(each, "states", None) or () for each in flat]
    return (
        [(v.path, v.dtype, v.numpy().tobytes()) for v in model.variables],
        [(each.path, each.dtype_policy.name, each.trainable) for each in flat],
        [(len(each._inbound_nodes), len(each._outbound_nodes)) for each in flat],
        ["call" in vars(each) for each in flat],
        [state.numpy().tolist() for state in keras.tree.flatten(states)],
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


@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("build", MODELS)
def test_weights_stay_and_float32_is_bit_identical_again(build, mode):
    model, x = build()
    nodes, states = state_of(model)[2:4], state_of(model)[4]
    weights, expected = bits(model.weights), bits(model(x, training=False))
    if states:
        reset(model, states)
    assert tfamp.set_precision(model, mode) is model
    assert bits(model.weights) == weights
    assert {w.dtype for w in model.trainable_weights} <= {"float32"}
    low = mode.removeprefix("mixed_")
    assert any(each.compute_dtype == low for each in model._flatten_layers())
    assert state_of(model)[2:4] == nodes
    tfamp.set_precision(model, "float32")
    assert {each.compute_dtype for each in model._flatten_layers()} == {"float32"}
    assert bits(model(x, training=False)) == expected


def reset(model, states):
    layers_ = [each for each in model._flatten_layers() if getattr(each, "states", 0)]
    for layer in layers_:
        for state, value in zip(layer.states, states, strict=False):
            state.assign(value)


@pytest.mark.parametrize("build", MODELS)
def test_it_computes_what_a_model_built_in_the_mode_computes(build):
    """But for the outputs and softmax, which an override leaves in the mode."""
    model, x = build()
    tfamp.set_precision(model, BF16, {".*": "mixed_bfloat16"})
    keras.utils.set_random_seed(1)
    with tfamp.policy_scope("mixed_bfloat16"):
        twin, _ = build()
    for ours, theirs in zip(twin.weights, model.weights, strict=True):
        ours.assign(theirs)
    pins = [each for each in twin._flatten_layers() if each.name == "norm"]
    for each in pins:  # A dtype that a class fixes counts only where it is made.
        each.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    for one in (model, twin):
        reset(one, [np.zeros((2, 3))])
    assert bits(model(x, training=False)) == bits(twin(x, training=False))


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
    copy = tfamp.set_precision(model, BF16, asked)
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
    assert found["gate"].reason == SOFTMAX
    assert found["head"].reason == OUTPUT
    for name in ("act", "drop"):
        assert found[name] == (name, "float32", PASSES_OUTPUT)
    assert found["flat"] == ("flat", "mixed_bfloat16", "the mode is mixed_bfloat16")


def test_no_loss_of_the_trace_for_outputs_is_left():
    x = keras.Input((4,))
    model = keras.Model(x, L.Dense(2, activity_regularizer="l2")(x))
    model(batch(2, 4))
    before = list(map(float, model.losses))
    assert list(map(float, tfamp.set_precision(model, BF16).losses)) == before


def test_an_override_says_otherwise_for_outputs_and_softmax():
    model, x = functional()
    asked = {"head|act|drop|gate": "mixed_float16"}
    copy = tfamp.set_precision(model, BF16, asked)
    assert copy(x).dtype == "float16"
    assert rows(copy)["gate"].policy == "mixed_float16"


def test_the_log_says_what_is_not_in_the_mode_and_why(messages):
    tfamp.set_precision(functional()[0], "mixed_bfloat16")
    (line,) = messages["info"]
    assert line.startswith("set_precision: 20 layers, 4 of them not mixed_bfloat16: ")
    assert f"head: float32 ({OUTPUT})" in line
    assert not messages["warning"]


def test_an_override_of_a_model_or_a_layer_holds_for_what_is_inside():
    model, x = shared()
    asked = {"left": "float32", "both": "mixed_float16"}
    found = rows(tfamp.set_precision(model, BF16, asked))
    assert found["relu"].policy == found["left"].policy == "float32"
    assert found["both"].policy == "mixed_float16"  # Its own pattern is nearer.
    assert found["right/own"].policy == "mixed_bfloat16"
    model, x = subclassed()
    copy = tfamp.set_precision(model, "mixed_float16", {"model/block": "float32"})
    assert {row.policy for row in rows(copy).values()} == {"mixed_float16", "float32"}
    assert {r.policy for p, r in rows(copy).items() if "block" in p} == {"float32"}
    assert copy(x)["y"].dtype == "float32"


def test_the_mode_holds_whatever_dtype_a_layer_was_made_with():
    model, x = subclassed()
    tfamp.set_precision(model, BF16)
    assert rows(model)["model/block/norm"][1:] == (BF16, f"the mode is {BF16}")
    tfamp.set_precision(model, "mixed_float16", {"model/block/norm": "float32"})
    assert rows(model)["model/block/norm"].policy == "float32"
    assert computed(model, x)["norm"] == {"float32"}


def test_layers_of_float64_of_integers_and_of_files_keep_what_they_are(tmp_path):
    inner = keras.Sequential([keras.Input((2,)), L.Dense(2)])
    inner.export(tmp_path / "saved", verbose=False)
    x = keras.Input((2,))
    y = L.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve")(x)
    y = L.Dense(2, dtype="float64", name="wide")(y)
    ids = L.IntegerLookup(vocabulary=[1, 2], name="ids")
    low = L.Dense(2, name="low")(y)
    model = keras.Model(x, [L.Dense(1, name="out")(low), ids(x)])
    data = batch(3, 2)
    expected = [np.asarray(each) for each in model(data)]
    tfamp.set_precision(model, BF16)
    assert rows(model).keys() >= {"low", "out"}
    assert not rows(model).keys() & {"wide", "ids"}
    assert model.get_layer("wide").compute_dtype == "float64"
    np.testing.assert_allclose(model(data)[0], expected[0], rtol=0.1, atol=0.05)
    tfamp.set_precision(model, "float32")
    assert bits(model(data)) == bits(expected)


def test_patterns_hold_again_and_the_last_call_counts():
    model, _ = subclassed()
    (first,) = [p for p in rows(model) if p.startswith("model/block/dense")]
    copy = tfamp.set_precision(model, BF16, {first: "float32"})
    assert copy.block.first.dtype_policy.name == "float32"
    again = tfamp.set_precision(copy, "mixed_bfloat16", {"model/block/last": "float32"})
    assert again.block.last.dtype_policy.name == "float32"
    assert again.block.first.dtype_policy.name == "mixed_bfloat16"


def test_shared_layers_stay_shared():
    model, _ = shared()
    copy = tfamp.set_precision(model, BF16)
    assert copy.count_params() == model.count_params() == 2 * (4 * 4 + 4)
    left, right = copy.get_layer("left"), copy.get_layer("right")
    assert left.get_layer("both") is right.get_layer("both") is copy.get_layer("both")


def test_layers_that_no_configuration_can_make_are_assigned_too():
    class NoConfig(keras.Model):
        def __init__(self, dense):
            super().__init__(name="no")
            self.dense, self.twice = dense, L.Lambda(lambda x: x * 2)
            self.head = L.Dense(2, name="head")

        def call(self, x):
            return self.head(self.twice(self.dense(x)))

    model, x = NoConfig(L.Dense(3, name="dense")), batch(2, 4)
    before = model(x)
    tfamp.set_precision(model, "mixed_float16", {"no/head": "mixed_float16"})
    assert model(x).dtype == "float16"
    tfamp.set_precision(model, "float32")
    assert bits(model(x)) == bits(before)


def test_a_layer_with_low_rank_parts_keeps_them():
    model, x = of_its_own_class()
    model.body.enable_lora(1)
    model.body.lora_kernel_b.assign(np.ones((1, 3)))
    expected = model(x)
    tfamp.set_precision(model, BF16)
    np.testing.assert_allclose(model(x), expected, rtol=0.1, atol=0.05)
    assert model.body.lora_enabled and model.body.compute_dtype == "bfloat16"


def test_what_was_traced_is_traced_again():
    model, x = of_its_own_class()
    model.compile("sgd", "mse")
    data: dict[str, Any] = {"x": x, "y": np.ones((3, 2)), "verbose": 0}
    seen = []
    call = model.body.call
    model.body.call = lambda x, **kw: seen.append(x.dtype) or call(x, **kw)
    model.fit(**data)
    model.predict(x, verbose=0)
    tfamp.set_precision(model, BF16)
    seen.clear()
    model.fit(**data)
    model.evaluate(**data)
    model.predict(x, verbose=0)
    assert seen and set(seen) == {tf.bfloat16}


def test_a_compiled_model_that_trains_float16_scales_its_loss_from_then_on(tmp_path):
    model, x = of_its_own_class()
    model.compile("adam", "mse")
    model.fit(x, np.ones((3, 2)), verbose=0)
    steps = int(model.optimizer.iterations)
    tfamp.set_precision(model, "mixed_float16")
    assert type(model.optimizer) is tfamp.LossScaleOptimizer
    assert int(model.optimizer.inner_optimizer.iterations) == steps
    losses = model.fit(x, np.ones((3, 2)), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is tfamp.LossScaleOptimizer
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale)


def test_the_loss_is_scaled_as_enable_was_asked():
    tfamp.enable("mixed_bfloat16", loss_scale={"growth_interval": 7})
    model, _ = of_its_own_class()
    model.compile("adam", "mse")
    assert tfamp.set_precision(model, "mixed_float16").optimizer.growth_interval == 7
    tfamp.enable("mixed_bfloat16", loss_scale=False)
    model, _ = of_its_own_class()
    model.compile("adam", "mse")
    tfamp.set_precision(model, "mixed_float16")
    assert type(model.optimizer) is keras.optimizers.Adam
    tfamp.disable()
    model.compile(None, "mse")
    assert tfamp.set_precision(model, "mixed_float16").optimizer is None


def test_a_callback_may_change_the_precision_in_fit():
    model, x = of_its_own_class()
    model.compile("sgd", "mse")

    def change(epoch, logs):
        tfamp.set_precision(model, BF16)

    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    model.fit(x, np.ones((3, 2)), epochs=2, callbacks=[changing], verbose=0)
    assert model.body.compute_dtype == "bfloat16"


@pytest.fixture
def narrow():
    """A model with weights of 16 bits, and a batch."""
    keras.config.set_dtype_policy("bfloat16")
    model = of_its_own_class()
    keras.config.set_dtype_policy("float32")
    return model


def test_16_bit_variables_are_widened_exactly(narrow):
    model, _ = narrow
    before = [np.float32(w) for w in model.weights]
    assert {w.dtype for w in model.trainable_weights} == {"bfloat16"}
    tfamp.set_precision(model, BF16)
    assert {w.dtype for w in model.trainable_weights} == {"float32"}
    assert bits(model.weights) == bits(before)
    assert model.inputs[0].dtype == "float32"


def test_weights_of_16_bits_under_a_built_optimizer_are_refused(narrow):
    model, x = narrow
    model.compile("adam", "mse")
    model.fit(x, np.ones((3, 2)), verbose=0)
    before = state_of(model)
    with pytest.raises(tfamp.ConversionError, match="new optimizer first"):
        tfamp.set_precision(model, BF16)
    assert state_of(model) == before
    model.compile("adam", "mse")
    tfamp.set_precision(model, BF16).fit(x, np.ones((3, 2)), verbose=0)


@pytest.mark.parametrize("decorate", [tf.function, lambda f: f], ids=["traced", "not"])
def test_a_call_that_is_a_function_of_tensorflow_is_traced_again(decorate):
    class OwnCall(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.head = L.Dense(2, name="head")

        @decorate
        def call(self, x):
            return self.head(x)

    model, x = OwnCall(name="net"), batch(3, 4)
    expected = model(x)
    tfamp.set_precision(model, BF16)
    assert rows(model)["net/head"].reason == OUTPUT
    tfamp.set_precision(model, BF16, {"net/head": BF16})
    assert model(x).dtype == "bfloat16"
    assert bits(tfamp.set_precision(model, "float32")(x)) == bits(expected)


# --- frozen layers ----------------------------------------------------------------


def frozen(build, *names):
    """Freezes layers, or all of a model."""
    model, _ = build()
    for each in [model.get_layer(name) for name in names] or [model]:
        each.trainable = False
    return model


def partly_frozen():
    model = frozen(shared, "left", "right")
    model.get_layer("right").get_layer("own").trainable = True
    return model


FROZEN = {
    "base": lambda: frozen(shared, "left"),
    "partly": partly_frozen,
    "functional": lambda: frozen(functional),
    "sequential": lambda: frozen(without_input),
    "subclassed": lambda: frozen(subclassed),
    "own class": lambda: frozen(of_its_own_class),
}


def trainables(model):
    flat = model._flatten_layers()
    flat = [each for each in flat if not isinstance(each, L.InputLayer)]
    flags = [(each.name.rstrip("_0123456789"), each.trainable) for each in flat]
    shapes = [tuple(w.shape) for w in model.trainable_weights]
    return flags, shapes, [w.trainable for w in model.weights]


@pytest.mark.parametrize("build", FROZEN.values(), ids=FROZEN)
def test_frozen_layers_stay_frozen(build):
    model = build()
    before = trainables(model)
    assert not all(each.trainable for each in model._flatten_layers())
    tfamp.set_precision(model, BF16)
    assert trainables(model) == before


# --- saved files ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "asked", "unsaved"),
    [
        (functional, {"both/forward_lstm": "float32"}, None),
        (functional, {"mha/query": "float32"}, "'mha/query'"),
        (of_its_own_class, {}, "'body'"),
        (without_input, {}, None),
    ],
)
def test_the_log_names_what_a_saved_file_does_not_hold(
    build, asked, unsaved, messages, tmp_path
):
    model, _ = build()
    copy = tfamp.set_precision(model, BF16, asked)
    assert len(messages["warning"]) == (unsaved is not None)
    assert unsaved is None or f"itself: {unsaved}. " in messages["warning"][0]
    copy.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    # Keras 3.15 saves none of a functional or sequential model's own.
    found, expected = (
        [row.policy for row in tfamp.describe_layers(each)[1:]]
        for each in (loaded, copy)
    )
    assert (found == expected) == (unsaved is None)


@pytest.mark.parametrize("given", [False, True])
def test_constants_of_normalization_are_as_precise_as_its_layer(given):
    model, x = normalized()
    if given:
        scale = L.Normalization(mean=[1.001, 7.0], variance=[1.0, 2.0], name="scale")
        model = keras.Sequential([keras.Input((2,)), scale, L.Dense(1)])
    expected = bits(model.get_layer("scale").mean)
    tfamp.set_precision(model, BF16, {".*scale": BF16})
    assert model.get_layer("scale").mean.dtype == "bfloat16"
    tfamp.set_precision(model, BF16)  # What takes raw values is float32.
    assert bits(model.get_layer("scale").mean) == expected


@pytest.mark.parametrize("mode", ["float32", "tf32", "mixed_bfloat16"])
def test_no_global_changes_and_overrides_in_force_are_not_asked(mode):
    tfamp.enable("float32", overrides={"body": "mixed_float16"})
    before = keras.config.dtype_policy(), tf32_flag()
    model = tfamp.set_precision(of_its_own_class()[0], mode)
    assert (keras.config.dtype_policy(), tf32_flag()) == before
    assert model.body.compute_dtype == model.dtype_policy.compute_dtype
    model.compile("sgd", "mse")
    assert model.body.compute_dtype == model.dtype_policy.compute_dtype
    tfamp.disable()


def tf32_flag():
    return tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.parametrize("asked", [{"head": "tf32"}, {"hed": "float32"}, {"(": "x"}])
def test_a_conversion_that_fails_leaves_every_layer_as_it_was(asked):
    model, x = functional()
    tfamp.set_precision(model, "mixed_float16")
    before = state_of(model)
    with pytest.raises(tfamp.OverrideError):
        tfamp.set_precision(model, BF16, asked)
    assert state_of(model) == before


def test_a_layer_that_refuses_half_way_leaves_every_layer_as_it_was(monkeypatch):
    model, x = normalized()
    before = state_of(model), bits(model.get_layer("scale").mean)

    def fail(self):
        raise MemoryError

    monkeypatch.setattr(L.Normalization, "finalize_state", fail)
    with pytest.raises(MemoryError):
        tfamp.set_precision(model, BF16)
    assert (state_of(model), bits(model.get_layer("scale").mean)) == before


def test_keras_hub_backbones_and_tied_heads():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 4, "intermediate_dim": 4}
    backbone = keras_hub.models.BertBackbone(9, max_sequence_length=3, **sizes)
    layer = "transformer_layer_0"
    asked = {f"{layer}/self_attention_layer": "mixed_float16"}
    copy = tfamp.set_precision(backbone, "mixed_bfloat16", asked)
    found = rows(copy)
    assert found[f"{layer}/self_attention_layer/query"].policy == "mixed_float16"
    assert found[f"{layer}/feedforward_output_dense"].policy == "mixed_bfloat16"
    assert found[f"{layer}/feedforward_layer_norm"].reason == OUTPUT
    assert found["pooled_dense"].policy == "float32"
    ids = {name: np.ones((1, 3), "int32") for name in backbone.input}
    assert {y.dtype.name for y in copy(ids).values()} == {"float32"}
    encoded = backbone(backbone.input)["sequence_output"]
    head = backbone.token_embedding(encoded, reverse=True)
    tied = tfamp.set_precision(keras.Model(backbone.input, head), "mixed_bfloat16")
    assert rows(tied)["token_embedding"].reason == OUTPUT
    assert tied.count_params() == backbone.count_params()
    assert tied(ids).dtype == "float32"


# --- output layers ----------------------------------------------------------------


def pair(x):
    return L.Dense(4, name="d")(x), L.Dense(4, name="e")(x)


def stack(x):
    ends = L.Dense(3, name="a"), L.Dense(2, name="b")
    return keras.Sequential([keras.Input((4, 4)), *ends], name="stack")(x)


# From an input to outputs, and the layers that compute or pass on one.
OUTPUTS = {
    "operations": (lambda x: keras.ops.softmax(keras.ops.sum(pair(x)[0], 1)), "d"),
    "sum": (lambda x: L.Add(name="add")(pair(x)), "add d e"),
    "attention": (
        lambda x: L.MultiHeadAttention(1, 2, name="m")(x, x),
        "m/attention_output",
    ),
    "recurrent": (
        lambda x: L.Bidirectional(L.GRU(2, name="gru"), name="both")(x),
        "both/backward_gru both/forward_gru",
    ),
    "stack": (stack, "stack/b"),
    "own weights around layers": (lambda x: Block(name="block")(x), "block"),
    "integers": (lambda x: [pair(x)[0], keras.ops.argmax(L.Dense(3)(x))], "d"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_output_layers_are_those_that_compute_or_pass_on_an_output(case):
    build, expected = OUTPUTS[case]
    x = keras.Input((4, 4))
    model = keras.Model(x, build(x))
    tfamp.set_precision(model, BF16)
    found = [r.path for r in rows(model).values() if r.reason.endswith(OUTPUT[11:])]
    assert sorted(found) == expected.split()


def test_unknown_outputs_are_said_to_be_unknown(messages):
    class Reads(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.head = L.Dense(2, name="head")

        def call(self, ids):
            return self.head(tf.one_hot(ids, 3))

        def get_config(self):
            return {"name": self.name}

    model, ids = Reads(name="reads"), np.array([[0, 2]])
    model(ids)
    tfamp.set_precision(model, BF16)
    line = messages["warning"][0]
    assert "outputs are not known" in line and "Name them in `overrides`" in line
    tfamp.set_precision(model, BF16, {"reads/head": "float32"})
    assert model(ids).dtype == "float32"


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"hed": "float32", "x/.*": "float32"},
            "2 patterns matched no layer: 'hed', 'x",
        ),
        ({"outer/head": "float32"}, "'head'"),
        ({"each/dense": "float32"}, "'each', "),
        ({r"mha/softmax\w*": "float32"}, "'mha', "),
        ({"both/backward_lstm/.*": "float32"}, "'both/backward_lstm', "),
        ({"head": "tf32"}, "TF32 is a flag of the whole process"),
        ({"hea.": "float32", ".ead": "mixed_float16"}, "2 patterns match 'head'"),
    ],
)
def test_overrides_that_cannot_be_followed_are_errors(asked, message):
    with pytest.raises(tfamp.OverrideError) as caught:
        tfamp.set_precision(functional()[0], "mixed_bfloat16", asked)
    assert message in str(caught.value)


def test_a_shared_layer_is_not_asked_two_things():
    model, _ = shared()
    asked = {"left": "float32", "right": "mixed_float16"}
    with pytest.raises(tfamp.OverrideError, match="'both' is shared by 'left' and"):
        tfamp.set_precision(model, BF16, asked)
    copy = tfamp.set_precision(model, BF16, {**asked, "both": "float32"})
    assert rows(copy)["both"].policy == "float32"


def quantized():
    model, _ = of_its_own_class()
    model.body.dtype_policy = "int8_from_float32"
    return model


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: L.Dense(2), TypeError, "must be a `keras.Model`. Received: Dense"),
        (Subclassed, ValueError, "is not built"),
        (quantized, tfamp.ConversionError, "quantized layers: body"),
    ],
    ids=["no model", "not built", "quantized"],
)
def test_a_model_that_cannot_be_converted_is_refused(build, error, message):
    before = keras.config.dtype_policy()
    with pytest.raises(error, match=message):
        tfamp.set_precision(build(), "mixed_bfloat16")
    assert keras.config.dtype_policy() is before


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="Unknown precision mode"):
        tfamp.set_precision(of_its_own_class()[0], "fp16")
