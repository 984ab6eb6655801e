"""Per-layer modes: what patterns mean, what is refused, what layers get under them."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfamp import errors, modes, patches
from tfamp.precision import layer_policies, overrides

BASE = modes.get_mode("mixed_bfloat16")
PATHS = ["body", "head", "model/decoder/dense", "model/decoder/norm"]


def parsed(asked, mode="mixed_bfloat16"):
    return overrides.parse(modes.get_mode(mode), asked)


# --- overrides by themselves ------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "asked", "messages"),
    [
        pytest.param(
            "mixed_bfloat16",
            {"(": "float32", "": "float32", 3: "float32", "head": "fp16"},
            [
                r"'(': not a regular expression",
                "'': a pattern must be a non-empty string",
                "3: a pattern must be a non-empty string. Received: 3 (int)",
                "'head': Unknown precision mode. Received: mode='fp16'",
            ],
            id="all at once",
        ),
        pytest.param(
            "mixed_float16",
            {"head": "tf32"},
            ["'head': TF32 is a flag of the whole process", "mode='tf32'"],
            id="tf32 for a layer",
        ),
        pytest.param(
            "tf32", {"head": "float32"}, ["beside mode='tf32'"], id="float32 in tf32"
        ),
        pytest.param("float32", {"head": None}, ["mode=None"], id="no mode"),
        pytest.param("float32", {"head": []}, ["mode=[]"], id="unhashable mode"),
        pytest.param("float32", [("head", "float32")], ["must be a dict"], id="list"),
    ],
)
def test_malformed_overrides_are_refused(mode, asked, messages):
    with pytest.raises(overrides.OverrideError) as caught:
        overrides.create_policy(modes.get_mode(mode), asked)
    assert [m for m in messages if m not in str(caught.value)] == []
    assert isinstance(caught.value, errors.TfampError)
    assert isinstance(caught.value, ValueError)


def test_policy_is_a_map_with_an_explicit_default_and_nothing_is_changed():
    asked = {"head": "float32", "body/.*": "mixed_float16"}
    before = dict(asked)
    policy = overrides.create_policy(BASE, asked)
    policy["other"] = "float32"
    assert asked == before
    again = overrides.create_policy(BASE, asked)
    assert sorted(again) == sorted(asked)
    assert keras.config.dtype_policy().name == "float32"  # No default of the map's.
    assert again["elsewhere"].name == "mixed_bfloat16"
    assert again["head"].name == "float32"
    assert again["body/dense"].name == "mixed_float16"
    assert json.dumps(keras.dtype_policies.serialize(again))


@pytest.mark.parametrize("asked", [None, {}])
def test_without_overrides_the_policy_is_plain(asked):
    policy = overrides.create_policy(modes.get_mode("tf32"), asked)
    assert policy == keras.DTypePolicy("float32")


# --- matching ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "own", "around"),
    [
        ("head", "head", True, False),
        ("head", "heads", False, False),
        ("head", "model/head", False, False),
        (".*head", "model/head", True, False),
        ("mha", "mha/query", False, True),
        ("m", "m/mha/query", False, True),
        ("query", "mha/query", False, False),
        ("a|b", "b", True, False),
        ("(?i)HEAD", "head", True, False),
        (r"(\w)\1", "aa", True, False),
    ],
)
def test_pattern_matches_a_whole_path_or_a_layer_around_it(pattern, path, own, around):
    each = parsed({pattern: "float32"})
    assert (overrides.find(path, each) is not None) == own
    assert (overrides.find_around(path, each) is not None) == around


def test_nearest_layer_around_wins():
    each = parsed({"block": "float32", "block/mha": "mixed_float16"})
    found = overrides.find_around("block/mha/query", each)
    assert found is not None and found.pattern == "block/mha"


def test_patterns_that_agree_are_not_ambiguous():
    overrides.check(PATHS, parsed({"head": "float32", "he.*": "float32"}))


@pytest.mark.parametrize(
    ("paths", "asked", "message"),
    [
        pytest.param(
            ["body", "head"],
            {"decoder/.*": "float32", "hed": "float32"},
            "2 patterns matched no layer: 'decoder/.*', 'hed'. "
            "Known paths: 'body', 'head'.",
            id="unmatched",
        ),
        pytest.param([], {"a": "float32"}, "Known paths: none yet.", id="no layers"),
        pytest.param(
            ["model/head", "model/body"],
            {"head": "float32"},
            "a subclassed one 'model/head': use 'model/head' instead of 'head'.",
            id="prefix to add",
        ),
        pytest.param(
            ["m/a/x", "m/y"],
            {"x|z": "float32"},
            "use 'm/a/(?:x|z)' instead of 'x|z'.",
            id="prefix for alternatives",
        ),
        pytest.param(
            ["head", "body"],
            {"model/he.*": "float32"},
            "use 'he.*' instead of 'model/he.*'.",
            id="prefix to drop",
        ),
        pytest.param(
            [f"block_{i}/dense" for i in range(40)],
            {"blok_7/dense": "float32"},
            "Known paths, nearest first: 'block_7/dense', ",
            id="long list",
        ),
        pytest.param(
            [f"block_{i}/dense" for i in range(40)],
            {"blok": "float32"},
            "and 35 more.",
            id="count of the rest",
        ),
        pytest.param(
            ["a/b", "a/c", "d"],
            {"a/.*": "float32", ".*b|.*c": "mixed_float16"},
            "2 patterns match 'a/b', 'a/c' with different modes: 'a/.*' (float32), "
            "'.*b|.*c' (mixed_float16).",
            id="ambiguous",
        ),
        pytest.param(
            ["a", "b"],
            {"a": "float32", "a|x": "mixed_float16", "none": "float32"},
            "1 pattern matched no layer: 'none'.",
            id="ambiguous and unmatched",
        ),
    ],
)
def test_check_says_what_is_wrong(paths, asked, message):
    with pytest.raises(overrides.OverrideError) as caught:
        overrides.check(paths, parsed(asked))
    assert message in str(caught.value)


# --- layers -----------------------------------------------------------------------


def _before(original, before_use):
    def method(layer, *args, **kwargs):
        before_use(layer)
        return original(layer, *args, **kwargs)

    return method


@contextlib.contextmanager
def resolving(mode, asked):
    """What `tfamp.enable` does: the global policy, and the hooks on layers."""
    resolver = layer_policies.Resolver(modes.get_mode(mode), asked)
    saved = keras.config.dtype_policy()
    hooks = [
        patches.Hook(
            keras.layers.Layer, name, lambda old: _before(old, resolver.before_use)
        )
        for name in ("__call__", "_open_name_scope")
    ]
    keras.config.set_dtype_policy(resolver.policy)
    try:
        yield resolver
    finally:
        keras.config.set_dtype_policy(saved)
        for hook in reversed(hooks):
            hook.remove()


def policies(model):
    """Returns {path, or name: policy} of all layers in a model."""
    return {
        layer.path or layer.name: layer.dtype_policy.name
        for layer in model._flatten_layers()
        if not isinstance(layer, layers.InputLayer)
    }


class Block(layers.Layer):
    """Takes no dtype; makes layers in `__init__` and in `build`, one of them pinned."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(3, name="first")
        self.act = layers.Activation("relu", name="act")
        self.pinned = layers.LayerNormalization(dtype="float64", name="pinned")

    def build(self, shape):
        self.last = layers.Dense(3, name="last")

    def call(self, x):
        return self.last(self.act(self.pinned(self.first(x))))


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(name="block")
        self.head = layers.Dense(2, name="head")
        self.probs = layers.Activation("sigmoid", name="probs")

    def call(self, x):
        return self.probs(self.head(self.block(x)))


def functional():
    x = keras.Input((4, 4), name="x")
    y = layers.MultiHeadAttention(2, 2, dropout=0.1, name="mha")(x, x)
    lstm = layers.LSTM(3, return_sequences=True, name="lstm")
    y = layers.Bidirectional(lstm, name="both")(y)
    y = layers.TimeDistributed(layers.Dense(3, name="dense"), name="each")(y)
    y = layers.Dense(2, name="head")(layers.Flatten(name="flat")(y))
    return keras.Model(x, layers.Softmax(name="probs")(y), name="outer")


def test_every_layer_of_a_functional_model_gets_a_plain_policy():
    asked = {
        "mha": "float32",
        "mha/query": "mixed_float16",
        "both/forward_lstm": "float32",
        "each": "mixed_float16",
        "probs": "float32",
    }
    with resolving("mixed_bfloat16", asked) as resolver:
        model = functional()
        layer_policies.check_model(model, resolver)
        model(np.ones((2, 4, 4)))
    found = policies(model)
    assert all(type(x.dtype_policy) is keras.DTypePolicy for x in model.layers[1:])
    assert {key: found[key] for key in sorted(found)} == {
        "outer": "mixed_bfloat16",
        "mha": "float32",
        "mha/query": "mixed_float16",
        "mha/key": "float32",
        "mha/value": "float32",
        "mha/attention_output": "float32",
        model.layers[1]._softmax.name: "float32",
        model.layers[1]._dropout_layer.name: "float32",
        "both": "mixed_bfloat16",
        "both/forward_lstm": "float32",
        "both/forward_lstm/lstm_cell": "float32",
        "both/backward_lstm": "mixed_bfloat16",
        "both/backward_lstm/lstm_cell": "mixed_bfloat16",
        "each": "mixed_float16",
        "each/dense": "mixed_float16",
        "flat": "mixed_bfloat16",
        "head": "mixed_bfloat16",
        "probs": "float32",
    }
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert model.output.dtype == "float32"
    assert {key: resolver.policy[key].name for key in resolver.policy} == {
        pattern: modes.get_mode(mode).policy for pattern, mode in asked.items()
    }


def test_layers_compute_in_their_mode_also_in_the_trace_that_builds_them():
    """Keras' own map would cast the first call's inputs by the default."""
    x = np.float32([[1.001, 2.0]])
    with resolving("mixed_bfloat16", {"exact": "float32"}):
        exact = layers.Dense(1, kernel_initializer="ones", name="exact")
        rounded = layers.Dense(1, kernel_initializer="ones", name="rounded")
        function = tf.function(lambda x: (exact(x), rounded(x)))
        outputs = function(x)
    assert [y.dtype.name for y in outputs] == ["float32", "bfloat16"]
    assert outputs[0].numpy().item() == np.float32(1.001) + np.float32(2)


def test_an_override_of_a_subclassed_model_reaches_what_its_layers_make():
    with resolving("float32", {"model/block": "mixed_bfloat16"}) as resolver:
        model = Subclassed(name="model")
        layer_policies.check_model(model, resolver)  # Not built: nothing is known.
        model(np.ones((2, 4), np.float32))
        layer_policies.check_model(model, resolver)
    assert policies(model) == {
        "model": "float32",
        "model/block": "mixed_bfloat16",
        "model/block/first": "mixed_bfloat16",
        "act": "mixed_bfloat16",
        "model/block/pinned": "float64",
        "model/block/last": "mixed_bfloat16",
        "model/head": "float32",
        "probs": "float32",
    }


def test_an_override_wins_over_a_dtype_given_to_the_layer_and_nothing_else_does():
    asked = {"named": "mixed_float16", "ids|table": "mixed_float16"}
    with resolving("mixed_bfloat16", asked) as resolver:
        named = layers.Dense(1, dtype="float32", name="named")
        other = layers.Dense(1, dtype="float32", name="other")
        ids = layers.IntegerLookup(vocabulary=[1, 2], name="ids")
        table = layers.Embedding(4, 2, name="table")
        x = keras.Input((1,), dtype="int64")
        model = keras.Model(x, [named(x), other(x), table(ids(x))])
        resolver.check(model)
    assert named.compute_dtype == "float16"
    assert other.compute_dtype == "float32"
    assert (ids.dtype, table.compute_dtype) == ("int64", "float16")


def test_layers_built_before_are_left_alone():
    before = layers.Dense(2, name="head")
    activation = layers.Activation("relu", name="act")
    x = keras.Input((2,))
    activation(before(x))
    with resolving("mixed_bfloat16", {"head|act": "mixed_float16"}):
        activation(before(keras.Input((2,))))
        with layer_policies.suspended():
            copied = layers.Activation("relu", dtype="float32", name="act")
            copied(x)
        copied(x)
    assert before.compute_dtype == activation.compute_dtype == "float32"
    assert copied.compute_dtype == "float32"


def test_a_contradiction_is_raised_where_the_layer_is_made():
    asked = {"he.*": "float32", ".*ad": "mixed_float16"}
    with resolving("mixed_bfloat16", asked):
        with pytest.raises(overrides.OverrideError, match="2 patterns match 'head'"):
            layers.Dense(2, name="head")(keras.Input((2,)))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("hed", "1 pattern matched no layer: 'hed'"),
        ("outer/head", "use 'head' instead of 'outer/head'"),
        (r"mha/softmax(_\d+)?", "name 'mha'"),
        ("both/forward_lstm/lstm_cell", "name 'both/forward_lstm'"),
        ("each/dense", "name 'each'"),
        ("outer", "'outer' is a model whose layers have paths of their own"),
    ],
)
def test_a_pattern_without_effect_is_an_error_that_says_what_to_name(pattern, message):
    with resolving("mixed_bfloat16", {pattern: "float32"}) as resolver:
        model = functional()
        model(np.ones((2, 4, 4)), training=True)
        with pytest.raises(overrides.OverrideError) as caught:
            layer_policies.check_model(model, resolver)
    assert message in str(caught.value)


def test_a_nested_model_is_no_target_but_its_layers_and_a_stack_are():
    def build():
        inner = keras.Input((2,))
        inner = keras.Model(inner, layers.Dense(2, name="deep")(inner), name="inner")
        stack = [keras.Input((2,)), layers.Dense(2, name="d"), layers.ReLU(name="r")]
        x = keras.Input((2,))
        return keras.Model(x, keras.Sequential(stack, name="stack")(inner(x)))

    with resolving("mixed_bfloat16", {"deep|stack": "float32"}) as resolver:
        model = build()
        resolver.check(model)
    inner, stack = model.layers[1:]
    assert [x.compute_dtype for x in inner.layers[1:]] == ["float32"]
    assert [x.compute_dtype for x in stack.layers] == ["float32", "float32"]
    with resolving("mixed_bfloat16", {"inner": "float32"}) as resolver:
        model = build()
        with pytest.raises(overrides.OverrideError, match=r"name them \('deep'\)"):
            resolver.check(model)


def test_a_pattern_counts_if_any_model_since_had_the_layer():
    with resolving("mixed_bfloat16", {"student": "float32"}) as resolver:
        x = keras.Input((2,))
        teacher = keras.Model(x, layers.Dense(2, name="teacher")(x))
        with pytest.raises(overrides.OverrideError, match="Known paths: 'teacher'"):
            layer_policies.check_model(teacher, resolver)
        layers.Dense(2, name="student")(x)
        layer_policies.check_model(teacher, resolver)


def test_a_saved_model_holds_plain_policies_and_loads_without_tfamp(tmp_path):
    with resolving("mixed_bfloat16", {"head": "float32", "probs": "float32"}):
        model = functional()
        x = np.random.default_rng(0).normal(size=(2, 4, 4)).astype("float32")
        expected = model(x).numpy()
    config = json.dumps(keras.saving.serialize_keras_object(model))
    assert "DTypePolicyMap" not in config and "tfamp" not in config
    clone = type(model).from_config(model.get_config())
    clone.set_weights([w.numpy() for w in model.weights])
    assert clone(x).numpy().tobytes() == expected.tobytes()
    assert clone.get_layer("head").dtype_policy.name == "float32"


def test_copies_that_keras_makes_of_unused_layers_are_resolved():
    """`Bidirectional` and `clone_model` write the policy down and read it again."""
    with resolving("mixed_bfloat16", {"copy": "float32"}) as resolver:
        source = layers.Dense(2, name="copy")
        copy = layers.Dense.from_config(source.get_config())
        assert copy.dtype_policy is not resolver.policy
        copy(keras.Input((2,)))
    assert copy.dtype_policy.name == "float32"
    assert type(copy.dtype_policy) is keras.DTypePolicy


def test_maps_of_the_user_are_left_alone():
    mine = keras.dtype_policies.DTypePolicyMap(
        default_policy="float32", policy_map={"b": keras.DTypePolicy("mixed_float16")}
    )
    with resolving("mixed_bfloat16", {"a": "float32"}):
        layer = layers.Dense(2, dtype=mine, name="b")
        layer(keras.Input((2,)))
    assert layer.dtype_policy is mine
    assert layer.compute_dtype == "float16"
