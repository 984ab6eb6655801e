"""Private or patched names of Keras that tfamp touches; fails when Keras moves them."""

import inspect

import keras
import numpy as np
import pytest

from tfamp import keras_hooks, model_structure


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
    trainer = keras_hooks.trainer_class()
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
    own = keras_hooks.trainer_class().compile
    keras_hooks.install(lambda model, optimizer: optimizer, lambda model: None)
    keras_hooks.install(lambda model, optimizer: optimizer, lambda model: None)
    assert keras_hooks.trainer_class().compile is not own
    keras_hooks.remove()
    keras_hooks.remove()
    assert keras_hooks.trainer_class().compile is own


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
