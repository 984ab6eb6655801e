"""Private or patched names of Keras that tfamp touches; fails when Keras moves them."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import patches
from tfamp.kernels import keras_kernels, row_gradients
from tfamp.loss_scaling import keras_optimizers
from tfamp.precision import keras_hooks, model_structure


def tiny_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.fixture
def hooked():
    """Installs a transform that notes its calls; removes it afterwards."""
    calls = []

    def transform(model, optimizer):
        calls.append((model, optimizer))
        return keras.optimizers.SGD(0.5)

    keras_hooks.install(transform, lambda model: None)
    yield calls
    keras_hooks.remove()


def test_compile_is_defined_once_for_all_models():
    trainer = patches.trainer_class()
    assert "auto_scale_loss" in inspect.signature(trainer.compile).parameters
    for kind in (keras.Model, keras.Sequential):
        assert kind.compile is trainer.compile


def test_hook_transforms_by_position_keyword_and_default(hooked):
    model = tiny_model()
    model.compile("adam", "mse")
    model.compile(optimizer="adam", loss="mse")
    model.compile(loss="mse")
    assert [type(o).__name__ for _, o in hooked] == ["Adam", "Adam", "RMSprop"]
    assert all(m is model for m, _ in hooked)
    assert float(model.optimizer.learning_rate) == 0.5
    assert model.get_compile_config()["optimizer"]["class_name"] == "SGD"


def test_hook_leaves_no_optimizer_and_no_auto_scaling_alone(hooked):
    model = tiny_model()
    model.compile(None, "mse")
    model.compile("adam", "mse", auto_scale_loss=False)
    assert hooked == []
    assert type(model.optimizer).__name__ == "Adam"


def test_keras_adds_no_scaling_of_its_own_behind_the_hook(hooked):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="half")
    model.dtype_policy = keras.dtype_policies.get("mixed_float16")
    model.compile("adam", "mse")
    assert type(model.optimizer) is keras.optimizers.SGD


def test_loading_under_the_hook_still_compiles(hooked, tmp_path):
    model = tiny_model()
    model.compile("adam", "mse")
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").compiled


def test_removing_the_hook_restores_keras_own_function():
    own = patches.trainer_class().compile
    keras_hooks.install(lambda model, optimizer: optimizer, lambda model: None)
    keras_hooks.install(lambda model, optimizer: optimizer, lambda model: None)
    assert patches.trainer_class().compile is not own
    keras_hooks.remove()
    keras_hooks.remove()
    assert patches.trainer_class().compile is own


def test_method_put_over_the_hook_stays_when_the_hook_goes(monkeypatch):
    calls, own = [], patches.trainer_class().compile
    keras_hooks.install(lambda model, given: calls.append(1) or given, lambda m: None)
    trainer, hook = patches.trainer_class(), patches.trainer_class().compile

    @functools.wraps(hook)
    def theirs(*args, **kwargs):
        return hook(*args, **kwargs)

    monkeypatch.setattr(trainer, "compile", theirs)
    keras_hooks.remove()
    assert trainer.compile is theirs
    tiny_model().compile("adam", "mse")
    assert calls == []  # The hook beneath is asleep.
    monkeypatch.undo()
    trainer.compile = own


def test_compile_that_hides_its_arguments_is_refused(monkeypatch):
    own = patches.trainer_class().compile
    hiding = lambda *args, **kwargs: own(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(patches.trainer_class(), "compile", hiding)
    with pytest.raises(RuntimeError, match="functools.wraps"):
        keras_hooks.install(lambda model, given: given, lambda model: None)
    assert patches.trainer_class().compile is hiding


def test_flatten_layers_finds_wrapped_and_nested_layers():
    wrapped = keras.layers.TimeDistributed(keras.layers.Dense(2, name="wrapped"))
    inner = keras.Sequential([keras.Input((3, 4)), wrapped])
    outer = keras.Sequential([keras.Input((3, 4)), inner])
    names = [layer.name for layer in model_structure.flatten_layers(outer)]
    assert outer.name in names and inner.name in names and "wrapped" in names


def test_accumulation_names_exist():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    assert callable(optimizer._backend_reset_gradient_accumulators)
    assert optimizer._iterations.dtype == "int64"


def test_seed_generator_state_is_a_variable_named_and_shaped_as_expected():
    # training/callbacks.py finds dropout's state by this name.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    states = [v for v in model.variables if v.name == "seed_generator_state"]
    assert [s.shape for s in states] == [(2,)]
    before = states[0].numpy()
    model(np.ones((1, 2)), training=True)
    np.testing.assert_array_equal(states[0].numpy() - before, [0, 1])


def test_fit_builds_from_a_batch_in_a_method_of_its_own():
    # training/distributed_fit.py calls it with a batch and then takes its place.
    own = keras.Model._maybe_symbolic_build
    assert list(inspect.signature(own).parameters) == ["self", "iterator", "data_batch"]
    calls = []
    model = tiny_model()
    model.compile("sgd", "mse")
    model._maybe_symbolic_build = lambda iterator=None, data_batch=None: calls.append(1)
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    model.evaluate(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    assert len(calls) == 2


def test_replicas_keep_moving_statistics_apart():
    # "none": each its own. Otherwise training/callbacks.py need not average them.
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    assert [w.aggregation for w in layer.non_trainable_weights] == ["none", "none"]


def test_names_of_optimizers_that_are_read_or_replaced_exist():
    inner = keras.optimizers.SGD(0.1)
    assert isinstance(inner._learning_rate, keras.Variable)
    assert type(inner).__module__.startswith("keras.")
    assert list(inspect.signature(inner._all_reduce_sum_gradients).parameters) == [
        "grads_and_vars"
    ]
    assert inner._distribution_strategy is tf.distribute.get_strategy()


def test_gradient_reduction_is_off_only_inside_and_only_here():
    members = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(members[0], {"other": members[1]})
    )
    pairs = [(1.0, "a")]
    with keras_optimizers.without_gradient_reduction(several):
        assert [m._all_reduce_sum_gradients(pairs) for m in members] == [pairs] * 2
        assert "_all_reduce_sum_gradients" not in vars(keras.optimizers.SGD(0.1))
    assert all("_all_reduce_sum_gradients" not in vars(m) for m in members)


def test_optimizers_are_found_in_dir_and_saved_in_groups_of_their_own():
    # LossScaleOptimizer.__dir__ leaves the inner one out for that reason.
    walk = keras.src.saving.saving_lib._walk_saveable
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert "inner_optimizer" in [name for name, _ in walk(made)]
    ours = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert "inner_optimizer" not in [name for name, _ in walk(ours)]


def test_optimizers_list_all_the_variables_that_they_write():
    # `masked_assignments` masks those; Nadam makes one outside of the list.
    nadam = keras.optimizers.Nadam(0.1)
    nadam.build([keras.Variable([1.0])])
    assert any(nadam._u_product is v for v in nadam.variables)


KERNELS = {
    "gelu": ["x", "approximate"],
    "silu": ["x"],
    "dropout": ["inputs", "rate", "noise_shape", "seed"],
    "layer_normalization": ["x", "gamma", "beta", "axis", "epsilon", "kwargs"],
    "update_step": ["self", "gradient", "variable", "learning_rate"],
    "clip_by_global_norm": ["value_list", "clip_norm"],
    "make_test_function": ["self", "force"],
    "make_predict_function": ["self", "force"],
}


def test_functions_that_fused_kernels_replace_have_these_parameters():
    found = {
        name: list(inspect.signature(vars(owner)[name]).parameters)
        for owner, name, _ in keras_kernels._places()
    }
    assert found == KERNELS


def test_layers_call_the_functions_that_are_replaced(monkeypatch):
    """Through the modules, and not by names that they imported."""
    called = []

    def noting(name, original):
        def function(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        return function

    for owner, name, _ in keras_kernels._places():
        monkeypatch.setattr(owner, name, noting(name, vars(owner)[name]))
    layers = [
        keras.layers.Dense(4, "gelu"),
        keras.layers.Dense(4, "silu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.5),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.predict(np.ones((2, 2)), verbose=0)
    assert set(called) == set(KERNELS)


def test_call_context_tells_whether_layers_train():
    seen = []

    class Look(keras.layers.Layer):
        def call(self, x):
            seen.append(keras_kernels._trains())
            return x

    look = Look()
    for training in (True, False, None):
        look(np.ones(1), training=training)
    assert seen == [True, False, False]
    assert not keras_kernels._trains()


def test_optimizers_apply_by_the_method_that_is_hooked():
    owner = row_gradients._base_optimizer.BaseOptimizer
    assert list(inspect.signature(owner.apply).parameters) == [
        "self",
        "grads",
        "trainable_variables",
    ]
    for kind in (keras.optimizers.SGD, keras.optimizers.AdamW):
        assert kind.apply is owner.apply
