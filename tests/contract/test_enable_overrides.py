"""Modes of single layers under `enable`, in models that are compiled or first built."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tfamp


@pytest.fixture(autouse=True)
def off_at_the_end():
    yield
    tfamp.disable()


@keras.saving.register_keras_serializable(package="test_enable_overrides")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.body(x))


def functional():
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, name="body")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def late():
    dense = [keras.layers.Dense(n, name=f"dense_{n}") for n in (4, 2)]
    return keras.Sequential(dense, name="stack")


class MadeInBuild(Subclassed):
    def __init__(self, **kwargs):
        keras.Model.__init__(self, **kwargs)

    def build(self, shape):
        self.body = keras.layers.Dense(4, name="body")
        self.head = keras.layers.Dense(2, name="head")


def made_in_build():
    return MadeInBuild(name="net")


def in_a_stack():
    return keras.Sequential([keras.Input((3,)), *late().layers], name="stack")


def wrapped():
    lstm = keras.layers.LSTM(2, name="lstm")
    both = keras.layers.Bidirectional(lstm, name="both")
    head = keras.layers.Dense(2, name="head")
    split = keras.layers.Reshape((3, 1), name="split")
    return keras.Sequential([keras.Input((3,)), split, both, head], name="stack")


def attention():
    x = keras.Input((3,))
    y = keras.layers.Reshape((3, 1), name="split")(x)
    y = keras.layers.MultiHeadAttention(1, 2, name="mha")(y, y)
    return keras.Model(x, keras.layers.Dense(2, name="head")(y[:, 0]))


def subclassed():
    return Subclassed(name="net")


def called():
    model = subclassed()
    model(X)
    return model


def nested():
    x = keras.Input((3,))
    return keras.Model(x, in_a_stack()(x))


def built_in_name():
    model = subclassed()
    with pytest.warns(UserWarning, match="despite not being"):
        model.build((None, 3))
    return model


X, Y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")


def dtypes(model):
    return {
        layer.name: layer.compute_dtype
        for layer in model.layers
        if isinstance(layer, keras.layers.Dense)
    }


def policies(model):
    return {row.path: row.policy for row in tfamp.describe_layers(model)[1:]}


def trained(build):
    model = build()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    return model


@pytest.mark.parametrize(
    "build", [functional, subclassed, called, made_in_build, built_in_name]
)
def test_a_model_trains_with_its_own_modes(build):
    """Whoever builds it; `build` of a class with none of its own builds no layer."""
    tfamp.enable("mixed_bfloat16", overrides={"(net/)?head": "float32"})
    assert dtypes(trained(build)) == {"body": "bfloat16", "head": "float32"}


def test_unmatched_patterns_raise_when_a_built_model_is_compiled():
    tfamp.enable("mixed_bfloat16", overrides={"hed": "float32", "net/head": "float32"})
    model = functional()
    with pytest.raises(tfamp.OverrideError, match="'hed', 'net/head'") as caught:
        model.compile("sgd", "mse")
    assert "Known paths" in str(caught.value) and "'head'" in str(caught.value)
    assert not model.compiled


def test_a_pattern_may_match_in_a_model_that_was_compiled_before():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32", "g/.*": "float32"})
    generator = Subclassed(name="g")
    generator(X)
    with pytest.raises(tfamp.OverrideError, match="no layer: 'head'"):
        generator.compile("sgd", "mse")
    tfamp.enable("mixed_bfloat16", overrides={"g/.*": "float32"})
    generator.compile("sgd", "mse")
    functional().compile("sgd", "mse")


def test_float16_layers_alone_get_loss_scaling():
    tfamp.enable("float32", overrides={"body": "mixed_float16"})
    model = functional()
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    assert dtypes(model) == {"body": "float16", "head": "float32"}


def test_status_names_overrides_and_the_mode():
    given = {"head": "float32"}
    status = tfamp.enable("mixed_bfloat16", overrides=given)
    given["nothing"] = "float32"  # The dict is copied.
    assert status.effective == "mixed_bfloat16"
    assert status.overrides.startswith("'head': float32 (when a model is compiled")
    functional().compile("sgd", "mse")
    assert tfamp.status().overrides == "'head': float32"
    keras.config.set_dtype_policy("float32")
    assert "was changed" in tfamp.status().reason


def test_layers_outside_are_not_watched_after_disable():
    tfamp.enable("mixed_bfloat16", overrides={"dense.*": "float32"})
    tfamp.disable()
    assert keras.layers.Dense(1, dtype="bfloat16")(tf.ones((1, 1))).dtype == tf.bfloat16


# --- loaded models ----------------------------------------------------------------


LOADERS = pytest.mark.parametrize(
    "load", [tfamp.load_model, keras.models.load_model], ids=["tfamp", "keras"]
)
SAVED = {
    functional: "head",
    in_a_stack: "stack/dense_2",
    nested: "stack/dense_2",
    subclassed: "net/head",
    wrapped: "stack/both/forward_lstm",
    attention: "mha/query",
}


@LOADERS
@pytest.mark.parametrize(("build", "pattern"), SAVED.items())
def test_the_same_patterns_hold_for_a_loaded_model(build, pattern, load, tmp_path):
    tfamp.enable("mixed_bfloat16", overrides={pattern: "float32"})
    model = trained(build)
    model.save(tmp_path / "m.keras")
    tfamp.enable("mixed_bfloat16", overrides={pattern: "float32"})  # It knows no layer.
    loaded = load(tmp_path / "m.keras")
    loaded.fit(X, Y, verbose=0)
    found = policies(loaded)
    assert list(found.values()) == list(policies(model).values())
    assert found[pattern] == "float32" and "mixed_bfloat16" in found.values()
    layers = loaded._flatten_layers()
    assert {type(layer.dtype_policy) for layer in layers} == {keras.DTypePolicy}
    model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(loaded(X), model(X))


@LOADERS
def test_overrides_win_over_the_modes_in_a_file(load, tmp_path):
    trained(in_a_stack).save(tmp_path / "m.keras")
    tfamp.enable("float32", overrides={"stack/dense_4": "mixed_bfloat16"})
    loaded = load(tmp_path / "m.keras")
    assert dtypes(loaded) == {"dense_4": "bfloat16", "dense_2": "float32"}


@LOADERS
def test_a_loaded_model_is_checked_when_it_trains_and_not_before(load, tmp_path):
    """What it is made part of may not be there yet."""
    trained(functional).save(tmp_path / "m.keras")
    tfamp.enable("mixed_bfloat16", overrides={"hed": "float32"})
    loaded = load(tmp_path / "m.keras")
    for _ in range(2):
        with pytest.raises(tfamp.OverrideError, match="no layer: 'hed'"):
            loaded.fit(X, Y, verbose=0)
    with pytest.raises(tfamp.OverrideError, match="no layer: 'hed'"):
        loaded.compile("sgd", "mse")


def test_overrides_patch_no_more_of_keras_than_compile_and_the_training_step():
    names = [(keras.Layer, "__call__"), (keras.Layer, "_open_name_scope")]
    names += [(keras.Sequential, "from_config"), (keras.Model, "build_from_config")]
    before = [getattr(owner, name) for owner, name in names]
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    assert [getattr(owner, name) for owner, name in names] == before


# --- models made without the overrides ---------------------------------------------


@pytest.mark.parametrize("build", [functional, in_a_stack, subclassed])
def test_models_built_before_or_converted_are_not_asked_for_the_patterns(build):
    older = build()
    older(X)
    tfamp.enable("mixed_float16", overrides={"head|.*dense_2|.*/head": "float32"})
    before = policies(older)
    with pytest.warns(UserWarning):
        older.compile("sgd", "mse")
        older.fit(X, Y, verbose=0)
    assert policies(older) == before
    tfamp.set_precision(older, "mixed_bfloat16")
    before = policies(older)
    assert policies(trained(lambda: older)) == before


def test_an_older_model_inside_a_new_one_is_asked_with_it():
    older = functional()
    tfamp.enable("mixed_bfloat16", overrides={"head": "mixed_float16"})
    x = keras.Input((3,))
    outer = keras.Model(x, keras.layers.Dense(2, name="new")(older(x)))
    outer.compile("sgd", "mse")
    assert dtypes(older) == {"body": "float32", "head": "float16"}
    with pytest.raises(tfamp.OverrideError, match="1 pattern matched no layer: 'hed'"):
        tfamp.enable("mixed_bfloat16", overrides={"hed": "float32"})
        keras.Model(x, keras.layers.Dense(2)(x)).compile("sgd")


class CompilesItself(keras.Model):
    def __init__(self, units=2, **kwargs):
        x = keras.Input((3,))
        super().__init__(x, keras.layers.Dense(units, name="deep")(x), **kwargs)
        self.units = units
        self.compile("sgd", "mse")

    def get_config(self):
        return {"units": self.units, "name": self.name}


def test_a_model_that_compiles_itself_is_checked_when_it_trains():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    base = CompilesItself()
    with pytest.raises(tfamp.OverrideError, match="no layer: 'head'"):
        base.fit(X, Y, verbose=0)
    head = keras.layers.Dense(2, name="head")(base.output)
    keras.Model(base.input, head).compile("sgd", "mse")
    base.fit(X, Y, verbose=0)


# --- models built late -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "build", [late, subclassed, made_in_build], ids=lambda build: build.__name__
)
def test_float16_layers_that_are_built_late_get_loss_scaling(build, mode):
    asked = {"stack/dense_4|net/body": "mixed_float16"}
    tfamp.enable(mode, overrides=asked)
    model = trained(build)
    assert "float16" in dtypes(model).values()
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)


def test_models_without_float16_get_none():
    tfamp.enable("mixed_bfloat16", overrides={"stack/dense_4": "float32"})
    model = trained(late)
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_the_advice_about_unscaled_optimizers_is_true():
    tfamp.enable("float32")
    half = keras.layers.Dense(4, dtype="mixed_float16", name="half")
    model = MadeInBuild(name="net")
    model.build = lambda shape: setattr(model, "body", half)
    model.call = lambda x: model.body(x)[:, :2]
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="`compile` again, now that the model is"):
        model.fit(X, Y, verbose=0)
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("build", [subclassed, built_in_name])
def test_unmatched_patterns_raise_each_time_a_model_is_trained(build):
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    model = build()
    model.compile("sgd", "mse")
    for _ in range(3):
        with pytest.raises(tfamp.OverrideError, match="Known paths: .*'net/head'"):
            model.fit(X, Y, verbose=0)
    tfamp.set_precision(model, "mixed_bfloat16")
    model.fit(X, Y, verbose=0)


def test_steps_before_the_first_know_their_own_modes():
    """No step is trained in the base mode: a trace alone builds the model."""
    seen = []

    class Watches(Subclassed):
        def call(self, x):
            y = super().call(x)
            seen.append(y.dtype.name)
            return y

    tfamp.enable("mixed_bfloat16", overrides={"net/.*": "float32"})
    model = Watches(name="net")
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0, batch_size=8)
    assert seen[0] == "bfloat16" and seen[-1] == "float32"  # Traced twice, run once.
    assert int(model.optimizer.iterations) == 1
    other = Watches(name="net")
    other.compile("sgd", "mse")
    other.train_on_batch(X, Y)
    other.train_on_batch(X, Y)
    assert int(other.optimizer.iterations) == 2
    assert dtypes(other) == {"body": "float32", "head": "float32"}
    eager = subclassed()
    eager.compile("sgd", "mse", run_eagerly=True)
    eager.fit(X, Y, verbose=0, batch_size=4)
    assert dtypes(eager) == {"body": "float32", "head": "float32"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_first_fit_that_fails_is_a_first_one_again(error):
    class Fails(Subclassed):
        def call(self, x):
            if fails:
                raise error
            return super().call(x)

    fails = [True]
    tfamp.enable("mixed_bfloat16", overrides={"net/head": "float32"})
    model = Fails(name="net")
    model.compile("sgd", "mse")
    with pytest.raises(error):
        model.fit(X, Y, verbose=0)
    fails.clear()
    model.fit(X, Y, verbose=0)
    assert dtypes(model) == {"body": "bfloat16", "head": "float32"}


def test_another_enable_is_asked_by_a_model_of_which_all_was_overridden():
    tfamp.enable("mixed_bfloat16", overrides={".*": "float32"})
    model = called()
    model.compile("sgd", "mse")
    tfamp.enable("mixed_bfloat16", overrides={"net/body": "mixed_bfloat16"})
    model.compile("sgd", "mse")
    assert dtypes(model) == {"body": "bfloat16", "head": "float32"}


def test_a_bad_optimizer_changes_no_layer():
    tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    model = functional()
    with pytest.raises(ValueError, match="nope"):
        model.compile("nope", "mse")
    assert dtypes(model) == {"body": "bfloat16", "head": "bfloat16"}


def test_known_paths_leave_out_what_keras_makes_for_itself():
    tfamp.enable("mixed_bfloat16", overrides={"hed": "float32", "stack/.*": "float32"})
    with pytest.raises(tfamp.OverrideError) as caught:
        trained(in_a_stack)
    known = "Known paths: 'stack', 'stack/dense_4', 'stack/dense_2'."
    assert known in str(caught.value)


def test_layers_that_set_precision_builds_are_built_once():
    model = built_in_name()
    tfamp.set_precision(model, "mixed_bfloat16")
    assert model(X).dtype == "float32" and len(model.weights) == 4


# --- what a file does not hold -----------------------------------------------------


@pytest.mark.parametrize(
    ("build", "asked", "lost"),
    [
        (functional, "head", None),
        (in_a_stack, "stack/.*", None),
        (wrapped, ".*/forward_lstm", None),
        (attention, "mha", None),
        (attention, "mha/query", "'mha/query'"),
        (subclassed, "net/head", "'net/head'"),
    ],
)
def test_the_log_names_once_what_a_saved_file_does_not_hold(
    build, asked, lost, monkeypatch, tmp_path
):
    said = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: said.append(text % args)
    )
    tfamp.enable("mixed_bfloat16", overrides={asked: "float32"})
    model = trained(build)
    trained(build)
    said = [line for line in said if "saved file" in line]
    assert len(said) == (lost is not None)
    assert lost is None or f"itself: {lost}. " in said[0]
    model.save(tmp_path / "m.keras")
    tfamp.disable()
    loaded = keras.models.load_model(tmp_path / "m.keras")
    same = list(policies(loaded).values()) == list(policies(model).values())
    assert same == (lost is None)
    assert lost or np.array_equal(loaded(X), model(X))
