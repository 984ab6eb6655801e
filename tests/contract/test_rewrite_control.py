"""The graph rewrite as users switch it on, through Keras' compile and fit."""

import contextlib
import os
import threading
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import hardware, patches
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import control, training_hooks

FLAG = "TF_ENABLE_AUTO_MIXED_PRECISION"
LONG_FLAG = "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE"

pytestmark = pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast
    or bool(tf.config.list_physical_devices("GPU")),
    reason=f"needs a CPU with native bfloat16; detected {helpers.describe_support()}",
)


@pytest.fixture(autouse=True)
def off_at_the_end():
    yield
    tfamp.disable_graph_rewrite()
    tfamp.disable()


def model_and_data(jit_compile="auto", **compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(8),
        ]
    )
    model.compile("sgd", "mse", jit_compile=jit_compile, **compiled)
    x = np.random.default_rng(0).standard_normal((256, 64)).astype("float32")
    return model, x, x[:, :8]


def train(steps=3, **compiled):
    model, x, y = model_and_data(**compiled)
    return [float(model.train_on_batch(x, y)) for _ in range(steps)]


def test_first_step_shows_what_was_rewritten():
    before = tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert before.dtype_policy == "float32"
    assert before.effective == "float32"
    assert "no training step seen yet" in before.graph_rewrite
    losses = train()
    seen = tfamp.status()
    assert seen.effective == "mixed_bfloat16"
    assert "effective: bfloat16" in seen.graph_rewrite
    assert training_hooks.last_report().converted > 0
    tfamp.disable()
    np.testing.assert_allclose(losses, train(), rtol=1e-2)


def test_losses_stay_float32():
    exact = train(1)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    rounded = np.array(train(1), np.float32)
    np.testing.assert_allclose(rounded, exact, rtol=1e-3)
    # A loss that went through bfloat16 would end in 16 zero bits.
    assert int(rounded.view(np.uint32)[0]) & 0xFFFF


@pytest.mark.parametrize("mode", ["auto", "mixed_bfloat16"])
def test_a_new_training_function_is_looked_at_again(mode):
    tfamp.enable(mode, graph_rewrite=True)
    train(1)
    first = training_hooks.last_report()
    train(1)
    assert training_hooks.last_report() is not first


@pytest.mark.parametrize("rewrite", [False, True])
def test_keras_own_choice_of_xla_is_none_under_a_rewrite(rewrite, monkeypatch):
    # As Keras 3.15 chooses on a host with a GPU.
    owner = patches.trainer_class("_resolve_auto_jit_compile")
    monkeypatch.setattr(owner, "_resolve_auto_jit_compile", lambda self: True)
    tfamp.enable("mixed_bfloat16", graph_rewrite=rewrite)
    model, _, _ = model_and_data("auto")
    assert model.jit_compile is not rewrite


def test_xla_that_is_asked_for_is_reported_at_compile_and_at_the_first_step():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with pytest.warns(UserWarning, match="XLA bypasses the graph rewrite"):
        model, x, y = model_and_data(jit_compile=True)
    with pytest.warns(UserWarning, match="effective: none, because .*XLA"):
        model.train_on_batch(x, y)
    assert tfamp.status().effective == "float32"


def test_eager_training_is_reported():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with pytest.warns(UserWarning, match="run_eagerly=True runs no graph"):
        model, x, y = model_and_data(run_eagerly=True)
    with pytest.warns(UserWarning, match="effective: none, because .*eager"):
        model.train_on_batch(x, y)


# ---- Before and after ----

SCOPES = {
    "enable": lambda: _enabled(lambda: tfamp.enable("mixed_bfloat16")),
    "enable with overrides": lambda: _enabled(
        lambda: tfamp.enable("mixed_bfloat16", overrides={"head": "float32"})
    ),
    "enable with a rewrite": lambda: _enabled(
        lambda: tfamp.enable("auto", graph_rewrite=True)
    ),
    "enable twice": lambda: _enabled(
        lambda: (
            tfamp.enable("mixed_bfloat16", graph_rewrite=True),
            tfamp.enable("mixed_bfloat16"),
        )
    ),
    "enable_graph_rewrite": lambda: _enabled(tfamp.enable_graph_rewrite),
    "both": lambda: _enabled(
        lambda: (
            tfamp.enable_graph_rewrite(denylist_add=["Tanh"], inferlist_remove="Tanh"),
            tfamp.enable("auto", graph_rewrite=True),
        )
    ),
    "policy_scope": lambda: tfamp.policy_scope("mixed_bfloat16"),
    "graph_rewrite_scope": lambda: tfamp.graph_rewrite_scope("bfloat16"),
    "control.enabled": lambda: control.enabled("auto", graph_rewrite=True),
}


@contextlib.contextmanager
def _enabled(enable):
    enable()
    try:
        yield
    finally:
        tfamp.disable()
        tfamp.disable_graph_rewrite()


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("given", ["as TensorFlow starts", "the user's own"])
def test_globals_are_identical_before_and_after(scope, raises, given, monkeypatch):
    options = tf.config.optimizer
    own = {"auto_mixed_precision": False, "min_graph_nodes": 7, "remapping": True}
    if given == "the user's own":
        options.set_experimental_options(own)
        monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD", "Sin")
        monkeypatch.setenv(LONG_FLAG, "0")
    before = helpers.read_globals()
    try:
        with contextlib.suppress(KeyError), SCOPES[scope]():
            assert helpers.find_leaks(before, helpers.read_globals())
            if raises:
                raise KeyError(scope)
        assert helpers.find_leaks(before, helpers.read_globals()) == []
        assert options.get_experimental_options() == before.grappler
    finally:
        if given == "the user's own":
            options.set_experimental_options(dict.fromkeys(own))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: tfamp.enable("float32", graph_rewrite=True), "`mode` names the"),
        (lambda: tfamp.enable("tf32", graph_rewrite=True), "`mode` names the"),
        (lambda: tfamp.enable("bf16", graph_rewrite=True), "Unknown precision mode"),
        (lambda: tfamp.enable("mixed_float16", graph_rewrite=True), "float16"),
        (lambda: tfamp.enable(graph_rewrite="yes"), "`graph_rewrite` must be True"),
        (lambda: tfamp.enable(graph_rewrite={"dtype": "auto"}), "`mode` names the"),
        (lambda: tfamp.enable(graph_rewrite={"lists": 1}), "lists"),
        (
            lambda: tfamp.enable(graph_rewrite=True, overrides={"a": "float32"}),
            "knows no layers",
        ),
        (lambda: tfamp.enable_graph_rewrite("float32"), "float32"),
        (lambda: tfamp.enable_graph_rewrite(level="HIGH"), "HIGH"),
        (lambda: tfamp.enable_graph_rewrite(denylist_add="Ssin"), "Ssin"),
    ],
)
def test_bad_requests_change_nothing(call, error):
    before = helpers.read_globals()
    with pytest.raises((ValueError, TypeError), match=error):
        call()
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert graph_rewrite.active() is None
    assert tfamp.status().requested is None


def test_hooks_that_cannot_be_installed_leave_no_rewrite(monkeypatch):
    before = helpers.read_globals()
    with monkeypatch.context() as patched:
        patched.setattr(patches.trainer_class(), "compile", lambda self, *a: None)
        with pytest.raises(RuntimeError, match="hides its arguments"):
            tfamp.enable_graph_rewrite()
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert graph_rewrite.active() is None


def test_a_failed_enable_keeps_the_earlier_one():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    held, hooked = helpers.read_globals(), patches.trainer_class().compile
    with pytest.raises(ValueError, match="denylist|Ssin"):
        tfamp.enable("auto", graph_rewrite={"denylist_add": "Ssin"})
    assert helpers.find_leaks(held, helpers.read_globals()) == []
    assert graph_rewrite.active().dtype == "bfloat16"
    assert patches.trainer_class().compile is hooked


# ---- The published environment variables ----


@pytest.mark.parametrize("name", [FLAG, LONG_FLAG])
def test_the_environment_asks_for_the_rewrite(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    status = tfamp.enable()
    assert status.dtype_policy == "float32"
    assert graph_rewrite.active().dtype == "bfloat16"
    tfamp.disable()
    assert os.environ[name] == "1"


def test_the_environment_and_a_mixed_policy_exclude_each_other(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    with pytest.raises(ValueError, match="undo float32 layers.*Unset the variable"):
        tfamp.enable("mixed_bfloat16")
    assert tfamp.enable("mixed_bfloat16", graph_rewrite=False).graph_rewrite == "off"


@pytest.mark.parametrize("mode", ["float32", "tf32"])
def test_a_float32_mode_wins_over_the_environment_and_says_so(mode, monkeypatch):
    monkeypatch.setenv(FLAG, "true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status = tfamp.enable(mode, on_unsupported="warn")
    assert any("for none: there is none" in str(each.message) for each in caught)
    assert status.graph_rewrite == "off"


def test_our_own_setting_is_not_taken_for_the_users():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert os.environ[FLAG] == os.environ[LONG_FLAG] == "1"
    status = tfamp.enable("mixed_bfloat16")
    assert status.graph_rewrite == "off"
    assert FLAG not in os.environ


def test_a_child_process_does_not_take_our_settings_for_the_users(monkeypatch):
    prefix = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
    monkeypatch.setenv(prefix + "DENYLIST_ADD", "Sin")
    lists = {"level": "TREAT_INFER_AS_DENY", "denylist_add": "Cos"}
    tfamp.enable("mixed_bfloat16", graph_rewrite=lists)
    inherited = dict(os.environ)
    tfamp.disable()
    with monkeypatch.context() as child:
        for name in inherited.keys() - os.environ.keys():
            child.setenv(name, inherited[name])
        child.setenv(prefix + "DENYLIST_ADD", inherited[prefix + "DENYLIST_ADD"])
        assert os.environ[FLAG] == os.environ[LONG_FLAG] == "1"
        assert "Cos" in os.environ[prefix + "DENYLIST_ADD"]
        assert tfamp.enable("mixed_bfloat16").graph_rewrite == "off"
        tfamp.enable("mixed_bfloat16", graph_rewrite=True)
        assert os.environ[prefix + "DENYLIST_ADD"] == "Sin"
        assert prefix + "LEVEL" not in os.environ
        tfamp.disable()


def test_a_child_process_takes_over_what_the_user_asked_for(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    tfamp.enable("auto")
    inherited = dict(os.environ)
    tfamp.disable()
    with monkeypatch.context() as child:
        for name in inherited.keys() - os.environ.keys():
            child.setenv(name, inherited[name])
        assert "bfloat16 requested" in tfamp.enable("auto").graph_rewrite
        tfamp.disable()


def test_an_empty_flag_is_an_unset_one(monkeypatch):
    monkeypatch.setenv(FLAG, "")
    assert tfamp.enable("float32").graph_rewrite == "off"
    tfamp.disable()
    assert os.environ[FLAG] == ""


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_a_value_that_is_no_boolean_is_refused(value, monkeypatch):
    monkeypatch.setenv(FLAG, value)
    with pytest.raises(ValueError, match=FLAG):
        tfamp.enable()


# ---- Policy and rewrite exclude each other ----


def test_rewrite_refuses_a_mixed_policy():
    tfamp.enable("mixed_bfloat16")
    with pytest.raises(ValueError, match="policy"):
        tfamp.enable_graph_rewrite()
    assert graph_rewrite.active() is None


@pytest.mark.parametrize(
    "keywords",
    [{"mode": "mixed_bfloat16"}, {"mode": "auto"}, {"graph_rewrite": False}],
    ids=str,
)
def test_mixed_policy_refuses_a_rewrite(keywords):
    tfamp.enable_graph_rewrite()
    with pytest.raises(ValueError, match="disable_graph_rewrite"):
        tfamp.enable(**keywords)
    assert tfamp.status().dtype_policy == "float32"


def test_float32_policy_beside_a_rewrite_and_back():
    tfamp.enable_graph_rewrite()
    tfamp.enable("float32")
    assert graph_rewrite.active() is not None
    tfamp.disable()
    assert graph_rewrite.active() is not None
    tfamp.disable_graph_rewrite()
    assert graph_rewrite.active() is None


def test_disable_brings_back_the_rewrite_that_stood_before():
    tfamp.enable_graph_rewrite(denylist_add="Sin")
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    tfamp.disable()
    assert graph_rewrite.active().config.denylist_add == ("Sin",)


def test_disable_graph_rewrite_ends_that_of_enable_for_good():
    tfamp.enable_graph_rewrite()
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    tfamp.disable_graph_rewrite()
    tfamp.disable()
    assert graph_rewrite.active() is None
    assert patches.trainer_class().compile is _plain_compile


_plain_compile = patches.trainer_class().compile


def test_scope_inside_a_session_keeps_the_session():
    tfamp.enable("float32", loss_scale=False)
    with tfamp.graph_rewrite_scope() as status:
        assert "bfloat16 requested" in status.graph_rewrite
    assert tfamp.status().graph_rewrite == "off"
    assert tfamp.status().loss_scaling == "off, as asked"


def test_a_session_does_not_revive_a_scope_that_has_ended():
    with tfamp.graph_rewrite_scope():
        tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert graph_rewrite.active() is None
    tfamp.disable()
    assert graph_rewrite.active() is None


def test_a_rewrite_on_top_of_a_session_outlives_it():
    tfamp.enable("float32")
    tfamp.enable_graph_rewrite(denylist_add="Sin")
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    tfamp.disable()
    assert graph_rewrite.active().config.denylist_add == ("Sin",)


def test_sixteen_bit_layers_under_a_rewrite_are_refused():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with tfamp.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        late = keras.Sequential([keras.layers.Dense(2, dtype="mixed_bfloat16")])
    with pytest.raises(ValueError, match="undoes float32 layers"):
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="dense_?"):
        late.compile("sgd", "mse")


def test_loss_scaling_is_described_without_a_session():
    tfamp.enable_graph_rewrite()
    assert "not needed by mixed_bfloat16" in tfamp.status().loss_scaling


# ---- Models that were compiled, or trained, before ----


def test_a_model_that_trained_before_is_looked_at_too():
    model, x, y = model_and_data()
    model.train_on_batch(x, y)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model.train_on_batch(x, y)
    assert training_hooks.last_report().effective == "bfloat16"


def test_xla_of_a_model_that_trained_before_is_reported():
    model, x, y = model_and_data(jit_compile=True)
    model.train_on_batch(x, y)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with pytest.warns(UserWarning, match="effective: none, because .*XLA"):
        model.train_on_batch(x, y)
    model.train_on_batch(x, y)  # Once is enough.


def test_a_first_step_that_failed_is_looked_at_again():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model, x, y = model_and_data()
    with pytest.raises(Exception, match="(?i)shape|incompatible|dimension"):
        model.train_on_batch(x[:, :3], y)
    model.train_on_batch(x, y)
    assert training_hooks.last_report().effective == "bfloat16"


def test_what_was_seen_before_is_known_when_the_rewrite_comes_back():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model, x, y = model_and_data()
    model.train_on_batch(x, y)
    first = training_hooks.last_report()
    tfamp.disable()
    model.train_on_batch(x, y)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert training_hooks.last_report() is None
    model.train_on_batch(x, y)
    assert training_hooks.last_report() is first


def test_the_same_rewrite_in_other_words_is_not_called_ineffective():
    model, x, y = model_and_data()
    tfamp.enable_graph_rewrite()
    model.train_on_batch(x, y)
    tfamp.disable_graph_rewrite()
    tfamp.enable(
        "mixed_bfloat16", graph_rewrite={"float32_ops": "Sum,BiasAddGrad,Mean"}
    )
    model.train_on_batch(x, y)
    assert tfamp.status().effective == "mixed_bfloat16"


def test_a_failing_step_that_was_optimized_is_not_called_ineffective():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    x = np.ones((16, 8), "float32")
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_on_batch(x, np.full(16, 9))
    model.train_on_batch(x, np.zeros(16))
    assert tfamp.status().effective == "mixed_bfloat16"


def test_a_mixed_model_that_trained_before_is_refused():
    with tfamp.policy_scope("mixed_bfloat16"):
        model, x, y = model_and_data()
    model.train_on_batch(x, y)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    before = model.get_weights()[0]
    with pytest.raises(ValueError, match="undoes float32 layers"):
        model.train_on_batch(x, y)
    np.testing.assert_array_equal(model.get_weights()[0], before)


def test_a_step_after_the_rewrite_ended_warns_of_nothing():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model, x, y = model_and_data()
    model.make_train_function()
    tfamp.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(x, y)


# ---- Threads ----


def test_a_thread_that_ran_before_follows_when_it_trains():
    model, x, y = model_and_data(jit_compile=False)
    turn, done, losses = threading.Event(), threading.Event(), []

    def work():
        model.predict(x, verbose=0)  # Its options are cached from here on.
        done.set()
        turn.wait(60)
        losses.append(model.train_on_batch(x, y))

    thread = threading.Thread(target=work)
    thread.start()
    done.wait(60)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    turn.set()
    thread.join()
    assert training_hooks.last_report().effective == "bfloat16"


def test_sync_thread_is_public():
    tfamp.enable_graph_rewrite()
    tfamp.sync_thread()
    assert not graph_rewrite.thread_is_stale()


def test_no_warning_in_an_ordinary_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfamp.enable(graph_rewrite=True)
        train(1)
