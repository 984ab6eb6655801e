"""`policy_scope`; and the fixture that guards every test's globals."""

import os
from concurrent import futures

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
BF16 = "mixed_bfloat16"


@pytest.fixture(autouse=True)
def restore_precision():
    """Puts back what the test writes on purpose."""
    before = helpers.read_globals()
    yield
    helpers.write_globals(before)


def globals_now():
    """The two globals, read without tfamp."""
    return (
        keras.config.dtype_policy().name,
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )


@pytest.mark.issue("tensorflow#127346")
@pytest.mark.parametrize("mode", MODES)
def test_layers_built_inside_have_the_mode_and_keep_it_outside(mode):
    policy, dtype, tf32 = MODES[mode]
    before = globals_now()
    outer = keras.layers.Dense(2)
    with tfamp.policy_scope(mode) as entered:
        assert entered.name == mode
        assert globals_now() == (policy, tf32)
        layer = keras.layers.Dense(2)
        assert outer(tf.ones((1, 4))).dtype == "float32"
        with tfamp.policy_scope("tf32"):
            assert globals_now() == ("float32", True)
        assert globals_now() == (policy, tf32)
    assert globals_now() == before
    assert layer.compute_dtype == layer(tf.ones((1, 4))).dtype == dtype
    assert {v.dtype for v in layer.variables} == {"float32"}


def test_scope_restores_the_very_policy_and_flag_also_after_an_error():
    given = keras.dtype_policies.DTypePolicyMap(default_policy="float64")
    keras.config.set_dtype_policy(given)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    with pytest.raises(KeyError), tfamp.policy_scope("float32"):
        keras.config.set_dtype_policy(BF16)  # Changed inside.
        raise KeyError
    assert keras.config.dtype_policy() is given
    for mode in ("fp16", "auto", "", None):
        with pytest.raises(ValueError, match="Unknown precision mode"):
            tfamp.policy_scope(mode).__enter__()
    assert keras.config.dtype_policy() is given
    assert globals_now()[1]


def test_scope_can_decorate_a_function_that_builds_layers():
    build = tfamp.policy_scope(BF16)(lambda: keras.layers.Dense(2))
    assert build().compute_dtype == build().compute_dtype == "bfloat16"
    assert keras.layers.Dense(2).compute_dtype == "float32"


def test_policy_belongs_to_the_calling_thread_and_tf32_to_the_process():
    with tfamp.policy_scope(BF16), futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(globals_now).result() == ("float32", True)


def test_guard_names_each_leak_and_undoes_it(monkeypatch):
    before = helpers.read_globals()
    keras.config.set_dtype_policy("mixed_float16")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    os.environ["TFAMP_NEW"] = "1"
    del os.environ["PATH"]
    setattr(keras.Model, "compile", lambda self: None)  # noqa: B010
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")  # pytest's, and no leak.
    leaks = helpers.find_leaks(before, helpers.read_globals())
    helpers.write_globals(before)
    assert [leak.split(":")[0] for leak in leaks] == [
        "Grappler option auto_mixed_precision",
        "Grappler option layout_optimizer",
        "Model.compile",
        "TF32 flag",
        "dtype policy",
        "environment variable PATH",
        "environment variable TFAMP_NEW",
    ]
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert "compile" not in vars(keras.Model)


def test_a_scope_of_enable_ends_as_if_it_had_not_been():
    x, y = tf.ones((8, 4)), tf.ones((8, 1))

    def fitted():
        layers = [keras.layers.Dense(4), keras.layers.Dense(1, name="head")]
        model = keras.Sequential(layers)
        helpers.fit(model, x, y)
        return model

    before = helpers.read_globals()
    with tfamp.enabled(BF16) as outer:
        assert (outer.effective, tfamp.status()) == (BF16, outer)
        with tfamp.enabled("mixed_float16", overrides={"head": "float32"}) as inner:
            assert inner.effective == "mixed_float16"
            assert isinstance(fitted().optimizer, tfamp.LossScaleOptimizer)
        assert not isinstance(fitted().optimizer, tfamp.LossScaleOptimizer)
        assert tfamp.status().overrides == outer.overrides == "none"
        with pytest.raises(ZeroDivisionError), tfamp.enabled("float32"):
            _ = 1 / 0
        assert tfamp.status().effective == BF16
        with pytest.raises(ValueError, match="mixed_float15"):
            tfamp.enabled("mixed_float15").__enter__()
        assert tfamp.status().effective == BF16
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert tfamp.status().requested is None
