import os
import threading

import helpers
import keras
import pytest
import tensorflow as tf

import tfamp

# Mode -> (Keras policy, compute dtype, TF32 allowed).
MODES = {
    "float32": ("float32", "float32", False),
    "tf32": ("float32", "float32", True),
    "mixed_bfloat16": ("mixed_bfloat16", "bfloat16", True),
    "mixed_float16": ("mixed_float16", "float16", True),
}
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def restore_precision():
    """Puts back what the test writes on purpose."""
    before = keras.config.dtype_policy(), globals_now()[1]
    yield
    keras.config.set_dtype_policy(before[0])
    tf.config.experimental.enable_tensor_float_32_execution(before[1])


def globals_now():
    """The two globals, read without tfamp."""
    return (
        keras.config.dtype_policy().name,
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )


def layer_after(build):
    """Compute dtype of a layer built here, and dtype of its output."""
    layer = build()
    return layer.compute_dtype, layer(tf.ones((1, 4))).dtype.name


@every_mode
def test_scope_sets_the_mode_inside_and_restores_it_outside(mode):
    before = globals_now()
    with tfamp.policy_scope(mode) as entered:
        assert entered.name == mode
        assert globals_now() == (MODES[mode][0], MODES[mode][2])
    assert globals_now() == before


def test_scope_restores_the_very_policy_and_flag_also_after_an_error():
    given = keras.dtype_policies.DTypePolicyMap(default_policy="float64")
    keras.config.set_dtype_policy(given)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    with pytest.raises(KeyError, match="from inside"):
        with tfamp.policy_scope("float32"):
            keras.config.set_dtype_policy("mixed_bfloat16")  # Changed inside.
            raise KeyError("from inside")
    assert keras.config.dtype_policy() is given
    assert globals_now()[1]


def test_nested_scopes_restore_in_order():
    seen = [globals_now()]
    with tfamp.policy_scope("mixed_float16"):
        seen.append(globals_now())
        with tfamp.policy_scope("float32"):
            seen.append(globals_now())
            with tfamp.policy_scope("tf32"):
                seen.append(globals_now())
            assert globals_now() == seen[2]
        assert globals_now() == seen[1]
    assert globals_now() == seen[0]
    assert seen[1:] == [("mixed_float16", True), ("float32", False), ("float32", True)]


@pytest.mark.parametrize("mode", ["fp16", "auto", "", None], ids=repr)
def test_unknown_mode_changes_nothing(mode):
    keras.config.set_dtype_policy("mixed_bfloat16")
    before = globals_now()
    with pytest.raises(ValueError, match="Unknown precision mode"):
        with tfamp.policy_scope(mode):
            pytest.fail("The scope was entered.")
    assert globals_now() == before


def test_scope_can_decorate_a_function_that_builds_layers():
    @tfamp.policy_scope("mixed_bfloat16")
    def build():
        return keras.layers.Dense(2)

    assert layer_after(build) == ("bfloat16", "bfloat16")
    assert layer_after(build) == ("bfloat16", "bfloat16")
    assert layer_after(lambda: keras.layers.Dense(2)) == ("float32", "float32")


@every_mode
def test_layer_built_inside_keeps_its_precision_outside(mode):
    compute_dtype = MODES[mode][1]
    with tfamp.policy_scope(mode):
        layer = keras.layers.Dense(2)
    output = layer(tf.ones((1, 4)))
    assert layer.compute_dtype == compute_dtype
    assert output.dtype == compute_dtype
    assert {v.dtype for v in layer.variables} == {"float32"}


def test_layer_built_outside_keeps_its_precision_inside():
    layer = keras.layers.Dense(2)
    with tfamp.policy_scope("mixed_bfloat16"):
        output = layer(tf.ones((1, 4)))
    assert output.dtype == "float32"


def test_policy_belongs_to_the_calling_thread_and_tf32_to_the_process():
    seen = []
    with tfamp.policy_scope("mixed_bfloat16"):
        thread = threading.Thread(target=lambda: seen.append(globals_now()))
        thread.start()
        thread.join()
    assert seen == [("float32", True)]


# ---- The fixture that guards every test's globals: helpers.py and conftest.py ----


def _replace_compile():
    setattr(keras.Model, "compile", lambda self: None)  # noqa: B010


GLOBAL_CHANGES = {
    "dtype policy": lambda: keras.config.set_dtype_policy("mixed_float16"),
    "TF32 flag": lambda: tf.config.experimental.enable_tensor_float_32_execution(True),
    "Grappler option auto_mixed_precision": lambda: (
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    ),
    "Grappler option layout_optimizer": lambda: (
        tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    ),
    "environment variable TFAMP_NEW": lambda: os.environ.update(TFAMP_NEW="1"),
    "environment variable PATH": lambda: os.environ.pop("PATH"),
    "Model.compile": _replace_compile,
}


@pytest.mark.parametrize("name", GLOBAL_CHANGES)
def test_guard_names_a_leak_and_undoes_it(name):
    before = helpers.read_globals()
    GLOBAL_CHANGES[name]()
    (leak,) = helpers.find_leaks(before, helpers.read_globals())
    helpers.write_globals(before)
    assert leak.startswith(name)
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert "compile" not in vars(keras.Model)


def test_guard_ignores_the_variable_that_pytest_sets(monkeypatch):
    before = helpers.read_globals()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert helpers.find_leaks(before, helpers.read_globals()) == []
