"""Modes of single layers under `enable`, in models that are compiled or first built."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers as L

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

BF16, F16, F32 = "mixed_bfloat16", "mixed_float16", "float32"
X, Y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")


def enable(overrides, mode=BF16):
    return tfamp.enable(mode, overrides=overrides)


# ---- Models of three numbers that return two ----


@keras.saving.register_keras_serializable(package="test_enable_overrides")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body, self.head = L.Dense(4, name="body"), L.Dense(2, name="head")

    def call(self, x):
        return self.head(self.body(x))


class MadeInBuild(Subclassed):
    def __init__(self, **kwargs):
        keras.Model.__init__(self, **kwargs)

    def build(self, shape):
        self.body, self.head = L.Dense(4, name="body"), L.Dense(2, name="head")


def functional():
    inputs = keras.Input((3,))
    x = L.Dense(4, name="body")(inputs)
    return keras.Model(inputs, L.Dense(2, name="head")(x))


def subclassed():
    return Subclassed(name="net")


def called():
    model = subclassed()
    model(X)
    return model


def made_in_build():
    return MadeInBuild(name="net")


def built_in_name():
    model = subclassed()
    with pytest.warns(UserWarning, match="despite not being"):
        model.build((None, 3))
    return model


def late():
    layers = L.Dense(4, name="body"), L.Dense(2, name="head")
    return keras.Sequential(layers, name="net")


def in_a_stack():
    return keras.Sequential([keras.Input((3,)), *late().layers], name="net")


def nested():
    x = keras.Input((3,))
    return keras.Model(x, in_a_stack()(x))


def wrapped():
    both = L.Bidirectional(L.LSTM(2, name="lstm"), name="both")
    split = L.Reshape((3, 1), name="split")
    layers = keras.Input((3,)), split, both, L.Dense(2)
    return keras.Sequential(layers, name="net")


def attention():
    x = keras.Input((3,))
    y = L.Reshape((3, 1), name="split")(x)
    y = L.MultiHeadAttention(1, 2, name="mha")(y, y)
    return keras.Model(x, L.Dense(2, name="head")(y[:, 0]))


class CompilesItself(keras.Model):
    def __init__(self):
        x = keras.Input((3,))
        super().__init__(x, L.Dense(2, name="deep")(x))
        self.compile("sgd", "mse")


def dtypes(model):
    """Compute dtypes of the body and the head."""
    return [x.compute_dtype for x in model.layers if isinstance(x, L.Dense)]


def policies(model):
    """Without a sequential model's own, which Keras 3.15 does not save."""
    rows = tfamp.describe_layers(model)[1:]
    return {row.path: row.policy for row in rows if row.path != "net"}


def fit(model, **keywords):
    model.fit(X, Y, verbose=0, **keywords)
    return model


def trained(build, **keywords):
    model = build()
    model.compile("sgd", "mse", **keywords)
    return fit(model)


# ---- What is assigned, and when ----


@pytest.mark.issue("keras#12249")
@pytest.mark.parametrize(
    "build",
    [functional, subclassed, called, made_in_build, built_in_name, late, in_a_stack],
)
def test_a_model_trains_with_its_own_modes(build):
    """Whoever builds it; float16 alone gets loss scaling."""
    enable({"(net/)?body": F16}, F32)
    model = trained(build)
    assert dtypes(model) == ["float16", "float32"]
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    enable({"head": F32})  # Its name is a pattern in a model of any kind.
    model = trained(build)
    assert dtypes(model) == ["bfloat16", "float32"]
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_status_names_overrides_and_the_mode():
    given = {"head": F32}
    status = enable(given)
    given["nothing"] = F32  # The dict is copied.
    assert status.effective == BF16
    assert status.overrides == "'head': float32"


def test_the_advice_about_unscaled_optimizers_is_true():
    tfamp.enable(F32)
    half = L.Dense(4, dtype=F16, name="half")
    model = made_in_build()
    model.build = lambda shape: setattr(model, "body", half)
    model.call = lambda x: model.body(x)[:, :2]
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="`compile` again, now that the model is") as w:
        fit(model)
    assert "half" in helpers.warned(w)[0]
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    fit(model)


class Watches(Subclassed):
    def __init__(self):
        super().__init__(name="net")
        self.seen = []

    def call(self, x):
        y = super().call(x)
        self.seen.append(y.dtype.name)
        return y


def test_steps_before_the_first_know_their_own_modes():
    """No step is trained in the base mode: a trace alone builds the model."""
    enable({"net/.*": F32})
    model = trained(Watches, jit_compile=False)
    assert {*model.seen} == {"float32"}
    assert int(model.optimizer.iterations) == 1  # Traced several times, run once.
    model = Watches()
    model.compile("sgd", "mse")
    for _ in range(2):
        model.train_on_batch(X, Y)
    assert int(model.optimizer.iterations) == 2
    assert dtypes(model) == ["float32", "float32"]
    assert dtypes(trained(subclassed, run_eagerly=True)) == ["float32", "float32"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_first_fit_that_fails_is_a_first_one_again(error):
    class Fails(Subclassed):
        def call(self, x):
            if fails:
                raise error
            return super().call(x)

    fails = [True]
    enable({"net/head": F32})
    model = Fails(name="net")
    model.compile("sgd", "mse")
    with pytest.raises(error):
        fit(model)
    fails.clear()
    assert dtypes(fit(model)) == ["bfloat16", "float32"]


def test_another_enable_is_asked_by_a_model_of_which_all_was_overridden():
    enable({".*": F32})
    model = called()
    model.compile("sgd", "mse")
    enable({"net/body": BF16})
    model.compile("sgd", "mse")
    assert dtypes(model) == ["bfloat16", "float32"]


@pytest.mark.parametrize("build", [functional, in_a_stack, subclassed])
def test_models_built_before_or_converted_are_not_asked_for_the_patterns(build):
    older = build()
    older(X)
    enable({"(net/)?head": F32}, F16)
    before = policies(older)
    with pytest.warns(UserWarning):
        older.compile("sgd", "mse")
        fit(older)
    assert policies(older) == before
    tfamp.set_precision(older, BF16)
    before = policies(older)
    assert policies(trained(lambda: older)) == before


def test_an_older_model_inside_a_new_one_is_asked_with_it():
    older = functional()
    enable({"head": F16})
    x = keras.Input((3,))
    outer = keras.Model(x, L.Dense(2, name="new")(older(x)))
    outer.compile("sgd", "mse")
    assert dtypes(older) == ["float32", "float16"]


def test_layers_that_set_precision_builds_are_built_once():
    model = built_in_name()
    tfamp.set_precision(model, BF16)
    assert model(X).dtype == "float32" and len(model.weights) == 4


# ---- Patterns that match nothing ----


def test_unmatched_patterns_raise_when_a_built_model_is_compiled():
    enable({"hed": F32, "net/head": F32, "(body|head)": F32})
    model = functional()
    known = "2 patterns .* 'hed', 'net/head'. Known paths: .*'body', 'head'."
    with pytest.raises(tfamp.OverrideError, match=known):
        model.compile("sgd", "mse")
    assert not model.compiled
    with pytest.raises(ValueError, match="nope"):  # A bad optimizer changes no layer.
        model.compile("nope", "mse")
    assert dtypes(model) == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("build", [subclassed, built_in_name, late])
def test_unmatched_patterns_raise_each_time_a_model_is_trained(build):
    enable({"^head": F32})
    model = build()
    model.compile("sgd", "mse")
    known = "Known paths: 'net', 'net/body', 'net/head'."  # No more of Keras' own.
    for _ in range(2):
        with pytest.raises(tfamp.OverrideError, match=known):
            fit(model)
    tfamp.set_precision(model, BF16)
    fit(model)


def test_a_pattern_may_match_in_a_model_that_was_compiled_before():
    enable({"^head": F32, "g/.*": F32})
    generator = Subclassed(name="g")
    generator(X)
    with pytest.raises(tfamp.OverrideError, match="no layer: '.head'"):
        generator.compile("sgd", "mse")
    enable({"g/.*": F32})
    generator.compile("sgd", "mse")
    functional().compile("sgd", "mse")


def test_a_model_that_compiles_itself_is_checked_when_it_trains():
    enable({"head": F32})
    base = CompilesItself()
    with pytest.raises(tfamp.OverrideError, match="no layer: 'head'"):
        fit(base)
    head = L.Dense(2, name="head")(base.output)
    keras.Model(base.input, head).compile("sgd", "mse")
    fit(base)


# ---- Saved and loaded models ----

LOADERS = tfamp.load_model, keras.models.load_model
# A model, a pattern, and what a saved file does not hold of it.
SAVED = [
    (functional, "head", None),
    (in_a_stack, "net/head", None),
    (nested, "net/head", None),
    (wrapped, "net/both/forward_lstm", None),
    (attention, "mha", None),
    pytest.param(
        attention,
        "mha/query",
        "'mha/query'",
        marks=pytest.mark.skipif(
            keras.__version__ < "3.11", reason="Keras 3.10's attention casts nothing"
        ),
    ),
    (subclassed, "net/head", "'net/head'"),
]


@pytest.mark.parametrize(("build", "pattern", "lost"), SAVED)
def test_patterns_hold_for_loaded_models_and_the_log_names_what_a_file_loses(
    build, pattern, lost, monkeypatch, tmp_path
):
    said, path = [], tmp_path / "m.keras"
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: said.append(text % args)
    )
    enable({pattern: F32})
    model = trained(build)
    trained(build)
    said = [line for line in said if "saved file" in line]
    assert len(said) == (lost is not None)  # Once.
    assert lost is None or f"itself: {lost}. " in said[0]
    model.save(path)
    expected = list(policies(model).values())
    enable({pattern: F32})  # It knows no layer.
    loaded = [load(path) for load in LOADERS]
    for each in (model, *loaded):
        fit(each)
    for each in loaded:
        assert list(policies(each).values()) == expected
        assert {BF16, F32} <= {*expected}
        kinds = {type(layer.dtype_policy) for layer in each._flatten_layers()}
        assert kinds == {keras.DTypePolicy}
        np.testing.assert_array_equal(each(X), model(X))
    tfamp.disable()
    plain = keras.models.load_model(path)
    assert (list(policies(plain).values()) == expected) == (lost is None)


@pytest.mark.parametrize("load", LOADERS, ids=["tfamp", "keras"])
def test_a_loaded_model_is_asked_when_it_trains_and_not_before(load, tmp_path):
    trained(in_a_stack).save(tmp_path / "m.keras")
    enable({"net/body": BF16}, F32)  # It wins over the modes in a file.
    assert dtypes(load(tmp_path / "m.keras")) == ["bfloat16", "float32"]
    enable({"hed": F32})  # What it is made part of may not be there yet.
    loaded = load(tmp_path / "m.keras")
    for _ in range(2):
        with pytest.raises(tfamp.OverrideError, match="no layer: 'hed'"):
            fit(loaded)
    with pytest.raises(tfamp.OverrideError, match="no layer: 'hed'"):
        loaded.compile("sgd", "mse")


def test_patterns_that_disagree_raise_at_a_layers_first_call():
    overrides = {"head": "float32", "h.*": "mixed_bfloat16"}
    tfamp.enable("mixed_float16", overrides=overrides)
    head = keras.layers.Dense(2, name="head")
    with pytest.raises(tfamp.OverrideError, match="2 patterns match 'head'"):
        head(np.ones((1, 4)))


class Eager(keras.Model):
    """Cannot be traced: it looks at numbers."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(2)

    def call(self, x):
        return self.head(x) * float(tf.reduce_max(x))


def test_a_model_that_cannot_be_traced_is_warned_of(caplog):
    tfamp.enable("mixed_bfloat16")
    model = Eager()
    assert model(tf.ones((2, 4))).dtype == "float32"
    (line,) = [x for x in caplog.messages if "outputs are not known" in x]
    assert repr(model.name) in line and "`overrides`" in line
