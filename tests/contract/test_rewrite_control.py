"""The graph rewrite as users switch it on, see it, and take it back."""

import contextlib
import json
import os
import threading
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

FLAG = "TF_ENABLE_AUTO_MIXED_PRECISION"
LONG_FLAG = "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
OPTION = "auto_mixed_precision_onednn_bfloat16"

pytestmark = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU"))
    or not all(rows["bfloat16"].fast for rows in tfamp.detect_support().values()),
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


def requested():
    """What `status` says of the rewrite: "off", "bfloat16 requested ...", or seen."""
    return tfamp.status().graph_rewrite


def owner_of(name):
    """The class above `keras.Model` that defines a method."""
    return next(base for base in keras.Model.__mro__ if name in vars(base))


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
    assert "nodes converted" in seen.graph_rewrite
    tfamp.disable()
    np.testing.assert_allclose(losses, train(), rtol=1e-2)


def test_a_new_training_function_is_looked_at_again():
    tfamp.enable("auto", graph_rewrite=True)
    train(1)
    first = requested()
    deeper = keras.Sequential([keras.layers.Dense(64, "relu") for _ in range(3)])
    deeper.compile("sgd", "mse")
    deeper.train_on_batch(np.ones((8, 4)), np.ones((8, 64)))
    assert "effective: bfloat16" in requested() != first


@pytest.mark.parametrize("rewrite", [False, True])
def test_keras_own_choice_of_xla_is_none_under_a_rewrite(rewrite, monkeypatch):
    # As Keras 3.15 chooses on a host with a GPU.
    name = "_resolve_auto_jit_compile"
    monkeypatch.setattr(owner_of(name), name, lambda self: True)
    tfamp.enable("mixed_bfloat16", graph_rewrite=rewrite)
    model, _, _ = model_and_data("auto")
    assert model.jit_compile is not rewrite


def test_xla_that_is_asked_for_is_reported_at_compile_and_at_the_first_step():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with pytest.warns(UserWarning, match="run_eagerly=False, jit_compile=True"):
        model, x, y = model_and_data(jit_compile=True)
    with pytest.warns(UserWarning, match="effective: none, because .*XLA"):
        model.train_on_batch(x, y)
    assert tfamp.status().effective == "float32"


def test_eager_training_is_reported():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    with pytest.warns(UserWarning, match="run_eagerly=True, jit_compile=False"):
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
        (lambda: tfamp.enable_graph_rewrite(denylist_add="Ssin"), "denylist_add.*Ssin"),
    ],
)
def test_bad_requests_change_nothing(call, error):
    before = helpers.read_globals()
    with pytest.raises((ValueError, TypeError), match=error):
        call()
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert requested() == "off"
    assert tfamp.status().requested is None


def test_hooks_that_cannot_be_installed_leave_no_rewrite(monkeypatch):
    before = helpers.read_globals()
    with monkeypatch.context() as patched:
        patched.setattr(owner_of("compile"), "compile", lambda self, *a: None)
        with pytest.raises(RuntimeError, match="hides its arguments"):
            tfamp.enable_graph_rewrite()
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert requested() == "off"


def test_a_failed_enable_keeps_the_earlier_one():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    held, hooked = helpers.read_globals(), keras.Model.compile
    with pytest.raises(ValueError, match="denylist|Ssin"):
        tfamp.enable("auto", graph_rewrite={"denylist_add": "Ssin"})
    assert helpers.find_leaks(held, helpers.read_globals()) == []
    assert "bfloat16 requested" in requested()
    assert keras.Model.compile is hooked


# ---- The published environment variables ----


@pytest.mark.parametrize("name", [FLAG, LONG_FLAG])
def test_the_environment_asks_for_the_rewrite(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    status = tfamp.enable()
    assert status.dtype_policy == "float32"
    assert "bfloat16 requested" in requested()
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
    assert requested() == "off"


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
    assert requested() != "off"
    tfamp.disable()
    assert requested() != "off"
    tfamp.disable_graph_rewrite()
    assert requested() == "off"


def test_disable_graph_rewrite_ends_that_of_enable_for_good():
    plain = keras.Model.compile
    tfamp.enable_graph_rewrite()
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    tfamp.disable_graph_rewrite()
    tfamp.disable()
    assert requested() == "off"
    assert keras.Model.compile is plain


def test_scope_inside_a_session_keeps_the_session():
    tfamp.enable("float32", loss_scale=False)
    with tfamp.graph_rewrite_scope() as status:
        assert "bfloat16 requested" in status.graph_rewrite
    assert tfamp.status().graph_rewrite == "off"
    assert tfamp.status().loss_scaling == "off, as asked"


def test_a_session_does_not_revive_a_scope_that_has_ended():
    with tfamp.graph_rewrite_scope():
        tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert requested() == "off"
    tfamp.disable()
    assert requested() == "off"


def test_a_rewrite_on_top_of_a_session_outlives_it():
    tfamp.enable("float32")
    tfamp.enable_graph_rewrite(denylist_add="Sin")
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    tfamp.disable()
    assert os.environ[PREFIX + "DENYLIST_ADD"] == "Sin"


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
    assert "effective: bfloat16" in requested()


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
    assert "effective: bfloat16" in requested()


def test_what_was_seen_before_is_known_when_the_rewrite_comes_back():
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    model, x, y = model_and_data()
    model.train_on_batch(x, y)
    first = requested()
    tfamp.disable()
    model.train_on_batch(x, y)
    tfamp.enable("mixed_bfloat16", graph_rewrite=True)
    assert "no training step seen yet" in requested()
    model.train_on_batch(x, y)
    assert requested() == first


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


def test_fit_evaluate_and_predict_are_rewritten_and_return_float32():
    model, x, y = model_and_data()
    exact = model.predict(x, verbose=0)
    tfamp.enable_graph_rewrite()
    low = model.predict(x, verbose=0)
    error = np.abs(low - exact).max() / np.abs(exact).max()
    assert low.dtype == np.float32 and 1e-4 < error < 2e-2
    before = model.evaluate(x, y, verbose=0)
    history = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0] < before * 1.01
    assert "effective: bfloat16" in requested()
    assert {w.dtype for w in model.weights} == {"float32"}


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
    assert "effective: bfloat16" in requested()


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_thread_that_called_a_function_before_keeps_its_options(synchronized):
    step, seen = Step(), []
    ready, enabled = threading.Event(), threading.Event()

    def work():
        seen.append(step.is_rewritten())
        ready.set()
        enabled.wait(60)
        if synchronized:
            tfamp.sync_thread()
        seen.append(step.is_rewritten())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    tfamp.enable_graph_rewrite()
    enabled.set()
    thread.join()
    assert seen == [False, synchronized]
    assert step.is_rewritten()


# ---- Functions, without Keras ----


class Step:
    """A function of one matrix product; counts its traces and its calls."""

    def __init__(self):
        self.traces, self.calls = 0, tf.Variable(0)
        generator = np.random.default_rng(0)
        self.x = tf.constant(generator.normal(size=(8, 64)), tf.float32)
        self.weights = tf.Variable(generator.normal(size=(64, 64)), dtype=tf.float32)
        self.function = tf.function(self.run)
        self.exact = self.x.numpy().astype(float) @ self.weights.numpy().astype(float)

    def run(self, x):
        self.traces += 1
        self.calls.assign_add(1)
        return tf.nn.relu(tf.matmul(x, self.weights)) + 1.0

    def is_rewritten(self):
        """Whether a call's result has bfloat16's error."""
        result = self.function(self.x).numpy() - 1.0
        exact = np.maximum(self.exact, 0)
        return bool(np.abs(result - exact).max() > 1e-3 * np.abs(exact).max())

    def report(self):
        return tfamp.graph_rewrite_report(self.function, self.x)


def test_a_traced_function_is_switched_both_ways_without_a_trace():
    step, seen = Step(), []
    for on in (False, True, False, True, False):
        (tfamp.enable_graph_rewrite if on else tfamp.disable_graph_rewrite)()
        seen.append(step.is_rewritten())
    assert seen == [False, True, False, True, False]
    assert step.traces == 1


def test_a_traced_function_follows_a_change_of_lists():
    step, seen = Step(), []
    for removed in ((), "MatMul", (), "MatMul"):
        tfamp.enable_graph_rewrite(allowlist_remove=removed)
        seen.append(step.is_rewritten())
    assert seen == [True, False, True, False]
    assert step.traces == 1


def test_a_small_graph_is_rewritten_too():
    weights = tf.ones((64, 64))
    product = tf.function(lambda x: tf.matmul(x, weights))
    with tfamp.graph_rewrite_scope():
        result = product(tf.fill((1, 64), 1 + 2.0**-12))
    assert result.numpy()[0, 0] == 64.0  # bfloat16 rounds the 2**-12 away.


# ---- The lists ----


@tf.function
def chain(x):
    product = tf.matmul(x, x)
    return tf.exp(product) + tf.tanh(tf.nn.relu(product + 1.0))


CONVERTED = {
    "as TensorFlow does": ({}, {"MatMul": True, "Exp": False, "Relu": True}),
    "not at all": ({"allowlist_remove": "MatMul"}, {"MatMul": False, "Relu": False}),
    "kept": ({"denylist_add": ["Relu"]}, {"MatMul": True, "Relu": False}),
    "clear removed": ({"clearlist_remove": "Relu"}, {"Relu": False}),
    "infer removed": ({"inferlist_remove": "AddV2"}, {"AddV2": False}),
    "float32_ops": ({"float32_ops": "AddV2, Relu"}, {"AddV2": False, "Relu": False}),
    "added": ({"allowlist_add": "Exp"}, {"MatMul": True, "Exp": True}),
    "clear": ({"clearlist_add": "Exp"}, {"MatMul": True, "Exp": True}),
    "inferred": ({"inferlist_add": "Exp"}, {"MatMul": True, "Exp": True}),
}


@pytest.mark.parametrize(("keywords", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_lists_change_what_is_converted(keywords, expected):
    tfamp.enable_graph_rewrite(**keywords)
    report = tfamp.graph_rewrite_report(chain, tf.ones((8, 8)))
    found = {op: "bfloat16" in report.operations[op] for op in expected}
    assert found == expected


def test_the_users_own_list_variables_hold_beside_the_arguments(monkeypatch):
    monkeypatch.setenv(PREFIX + "CLEARLIST_REMOVE", "Relu")
    with tfamp.graph_rewrite_scope(inferlist_remove="Tanh,AddV2"):
        report = tfamp.graph_rewrite_report(chain, tf.ones((8, 8)))
    assert report.operations["MatMul"] == {"bfloat16": 1}
    assert report.operations["Relu"] == {"float32": 1}
    assert os.environ[PREFIX + "CLEARLIST_REMOVE"] == "Relu"


def loss_and_bias_gradient():
    """Of a transposed convolution, whose bias gradient oneDNN does not fuse."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Conv2DTranspose(4, 3)
    x = tf.random.normal((16, 16, 16, 3))
    layer.build(x.shape)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x) - 1.0))
        return loss, tape.gradient(loss, layer.bias)

    return step, x


@pytest.mark.parametrize(
    ("float32_ops", "dtype"), [(None, "float32"), ((), "bfloat16")]
)
def test_bias_gradients_and_losses_stay_in_float32(float32_ops, dtype):
    step, x = loss_and_bias_gradient()
    loss, bias = step(x)
    given = {} if float32_ops is None else {"float32_ops": float32_ops}
    # TensorFlow's own gradient, without the cure that `enable` installs.
    with tfamp.graph_rewrite_scope(**given):
        report = tfamp.graph_rewrite_report(step, x)
        low_loss, low_bias = step(x)
    assert report.effective == "bfloat16"
    assert report.operations["BiasAddGrad"] == {dtype: 1}
    assert dtype in report.operations["Mean"]
    wrong = np.abs(low_bias - bias).max() / np.abs(bias).max()
    if dtype == "float32":
        assert abs(low_loss / loss - 1) < 1e-3 and wrong < 1e-2
    else:
        assert wrong > 0.1  # Else the default is not needed.


# ---- The report ----


def test_a_function_is_run_once_and_told():
    step = Step()
    tfamp.enable_graph_rewrite()
    report = step.report()
    assert int(step.calls) == 1
    assert (report.requested, report.effective) == ("bfloat16", "bfloat16")
    assert report.functions == 1
    assert report.operations["MatMul"] == {"bfloat16": 1}
    expected = (
        f"requested bfloat16 rewrite, effective: bfloat16, {report.converted} of "
        f"{report.nodes} nodes converted, {report.casts} cast"
    )
    assert str(report).startswith(expected)
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert as_dict.pop("schema_version") == 2
    assert as_dict == report._asdict()


def test_a_function_that_ran_before_is_told_alike():
    step = Step()
    tfamp.enable_graph_rewrite()
    assert step.is_rewritten()
    first = step.report()
    assert first.converted > 0
    assert step.report() == first
    tfamp.disable_graph_rewrite()
    assert step.report().effective is None
    tfamp.enable_graph_rewrite()
    assert step.report() == first


@pytest.mark.parametrize("kind", ["concrete", "callable", "method"])
def test_other_kinds_of_functions(kind):
    step = Step()

    class Module(tf.Module):
        @tf.function
        def call(self, x):
            return step.function(x)

    made = {
        "concrete": lambda: step.function.get_concrete_function(step.x),
        "callable": lambda: lambda x: step.function(x),
        "method": lambda: Module().call,
    }[kind]()
    tfamp.enable_graph_rewrite()
    report = tfamp.graph_rewrite_report(made, step.x)
    assert report.effective == "bfloat16"
    assert report.operations["MatMul"] == {"bfloat16": 1}


def xla(step):
    return tf.function(step.run, jit_compile=True)


def inside_of_xla(step):
    compiled = xla(step)
    return tf.function(lambda x: compiled(x) + 1)


# How the function is made, with which options, and the reason.
REASONS = {
    "XLA": (xla, {}, "XLA"),
    "inside of XLA": (inside_of_xla, {}, "XLA"),
    "eager": (lambda step: lambda x: step.run(x), {}, "runs eagerly"),
    "nothing": (lambda step: tf.function(lambda x: x + 1), {}, "allow list"),
    "switched off": (
        lambda step: step.function,
        {"disable_meta_optimizer": True},
        "graph optimizers are switched off",
    ),
    "taken back": (lambda step: step.function, {OPTION: False}, f"'{OPTION}' is off"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_told_where_nothing_is_converted(name):
    step = Step()
    make, options, reason = REASONS[name]
    tfamp.enable_graph_rewrite()
    tf.config.optimizer.set_experimental_options(options)
    tf.config.run_functions_eagerly(name == "eager")
    try:
        report = tfamp.graph_rewrite_report(make(step), step.x)
    finally:
        tf.config.run_functions_eagerly(False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": None})
    assert (report.requested, report.effective) == ("bfloat16", None)
    assert report.converted == report.casts == 0
    assert reason in report.reason
    start = "requested bfloat16 rewrite, effective: none, because "
    assert str(report) == start + report.reason


def test_a_call_compiled_by_xla_inside_is_told():
    step = Step()
    compiled = xla(step)
    both = tf.function(lambda x: compiled(x) + step.function(x))
    tfamp.enable_graph_rewrite()
    report = tfamp.graph_rewrite_report(both, step.x)
    assert report.effective == "bfloat16"
    assert "a part is compiled by XLA and not rewritten" in report.reason


def test_no_request_is_told(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    report = Step().report()
    assert (report.requested, report.effective) == (None, None)
    assert "no graph rewrite is enabled" in report.reason
    assert "TensorFlow 2 reads no environment flag" in report.reason
    assert str(report).startswith("requested no rewrite, effective: none, because ")


def test_an_option_set_without_tfamp_is_seen():
    tf.config.optimizer.set_experimental_options({OPTION: True})
    try:
        report = Step().report()
    finally:
        tf.config.optimizer.set_experimental_options({OPTION: None})
    assert (report.requested, report.effective) == ("bfloat16", "bfloat16")


def test_a_function_that_fails_puts_all_back():
    tfamp.enable_graph_rewrite()
    before = helpers.read_globals()
    solve = tf.function(tf.linalg.inv)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tfamp.graph_rewrite_report(solve, tf.zeros((2, 2)))
    assert helpers.find_leaks(before, helpers.read_globals()) == []
