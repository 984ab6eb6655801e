"""The graph rewrite as users switch it on, see it, and take it back."""

import contextlib
import json
import os
from concurrent import futures

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
BF16 = "mixed_bfloat16"

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


def enable(**keywords):
    return tfamp.enable(BF16, graph_rewrite=keywords or True)


def shown():
    """What `status` says of the rewrite: "off", "bfloat16 requested ...", or seen."""
    return tfamp.status().graph_rewrite


# ---- Training ----

X = np.random.default_rng(0).standard_normal((256, 64)).astype("float32")
Y = X[:, :8]


def compiled(**keywords):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("sgd", "mse", **keywords)
    return model


def trained(**keywords):
    model = compiled(**keywords)
    model.train_on_batch(X, Y)
    return model


def test_the_first_step_shows_what_was_rewritten():
    before = enable()
    assert (before.dtype_policy, before.effective) == ("float32", "float32")
    assert "no training step seen yet" in before.graph_rewrite
    model = compiled()
    losses = np.array([model.train_on_batch(X, Y) for _ in range(3)], np.float32)
    first = shown()
    assert tfamp.status().effective == BF16
    assert "effective: bfloat16" in first and "nodes converted" in first
    # A new model is looked at again.
    deeper = keras.Sequential([keras.layers.Dense(64, "relu") for _ in range(3)])
    deeper.compile("sgd", "mse")
    deeper.train_on_batch(np.ones((8, 4)), np.ones((8, 64)))
    assert "effective: bfloat16" in shown() != first
    # What was seen is known when the rewrite comes back.
    tfamp.disable()
    model.train_on_batch(X, Y)
    enable()
    assert "no training step seen yet" in shown()
    model.train_on_batch(X, Y)
    assert shown() == first
    tfamp.disable()
    model = compiled()
    exact = [float(model.train_on_batch(X, Y)) for _ in range(3)]
    np.testing.assert_allclose(losses, exact, rtol=1e-2)
    np.testing.assert_allclose(losses[0], exact[0], rtol=1e-3)
    # A loss that went through bfloat16 would end in 16 zero bits.
    assert int(losses.view(np.uint32)[0]) & 0xFFFF


def trained_before():
    model = trained()
    enable()
    model.train_on_batch(X, Y)


def after_a_step_that_failed():
    enable()
    model = compiled()
    with pytest.raises(Exception, match="(?i)shape|incompatible|dimension"):
        model.train_on_batch(X[:, :3], Y)
    model.train_on_batch(X, Y)


def after_an_optimized_step_that_failed():
    enable()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_on_batch(X[:16, :8], np.full(16, 9))
    model.train_on_batch(X[:16, :8], np.zeros(16))


def the_same_rewrite_in_other_words():
    model = compiled()
    tfamp.enable_graph_rewrite()
    model.train_on_batch(X, Y)
    tfamp.disable_graph_rewrite()
    enable(float32_ops="Sum,BiasAddGrad,Mean")
    model.train_on_batch(X, Y)


def in_a_thread_that_ran_before():
    model = compiled(jit_compile=False)
    with futures.ThreadPoolExecutor(1) as thread:
        # Its options are cached from here on.
        thread.submit(model.predict, X, verbose=0).result()
        enable()
        thread.submit(model.train_on_batch, X, Y).result()


@pytest.mark.parametrize(
    "train",
    [
        trained_before,
        after_a_step_that_failed,
        after_an_optimized_step_that_failed,
        the_same_rewrite_in_other_words,
        in_a_thread_that_ran_before,
    ],
)
def test_a_rewritten_step_is_seen(train):
    train()
    assert "effective: bfloat16" in shown()
    assert tfamp.status().effective == BF16


def test_fit_evaluate_and_predict_are_rewritten_and_return_float32():
    model = compiled()
    exact = model.predict(X, verbose=0)
    tfamp.enable_graph_rewrite()
    low = model.predict(X, verbose=0)
    error = np.abs(low - exact).max() / np.abs(exact).max()
    assert low.dtype == np.float32 and 1e-4 < error < 2e-2
    before = model.evaluate(X, Y, verbose=0)
    history = model.fit(X, Y, epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0] < before * 1.01
    assert "effective: bfloat16" in shown()
    assert {w.dtype for w in model.weights} == {"float32"}


@pytest.mark.parametrize("rewrite", [False, True])
def test_keras_own_choice_of_xla_is_none_under_a_rewrite(rewrite, monkeypatch):
    # As Keras 3.15 chooses on a host with a GPU.
    name = "_resolve_auto_jit_compile"
    owner = next(base for base in keras.Model.__mro__ if name in vars(base))
    monkeypatch.setattr(owner, name, lambda self: True)
    tfamp.enable(BF16, graph_rewrite=rewrite)
    assert compiled().jit_compile is not rewrite


@pytest.mark.parametrize("before", [False, True], ids=["new", "trained before"])
@pytest.mark.parametrize(
    ("keywords", "at_compile", "at_step"),
    [
        ({"jit_compile": True}, "run_eagerly=False, jit_compile=True", "XLA"),
        ({"run_eagerly": True}, "run_eagerly=True, jit_compile=False", "eager"),
    ],
)
def test_what_bypasses_the_rewrite_is_reported(keywords, at_compile, at_step, before):
    if before:
        model = trained(**keywords)
        enable()
    else:
        enable()
        with pytest.warns(UserWarning, match=at_compile):
            model = compiled(**keywords)
    with pytest.warns(UserWarning, match=f"effective: none, because .*{at_step}"):
        model.train_on_batch(X, Y)
    assert tfamp.status().effective == "float32"
    if not model.run_eagerly:
        model.train_on_batch(X, Y)  # Once is enough.


def test_a_step_after_the_rewrite_ended_warns_of_nothing():
    enable()
    model = compiled()
    model.make_train_function()
    tfamp.disable()
    model.train_on_batch(X, Y)  # Warnings are errors.


# ---- Before and after ----

CHANGES = {
    "enable": lambda scope: tfamp.enable(BF16),
    "with overrides": lambda scope: tfamp.enable(BF16, overrides={"x": "float32"}),
    "with a rewrite": lambda scope: tfamp.enable("auto", graph_rewrite=True),
    "twice": lambda scope: (enable(), tfamp.enable(BF16)),
    "the rewrite alone": lambda scope: tfamp.enable_graph_rewrite(),
    "both": lambda scope: (
        tfamp.enable_graph_rewrite(denylist_add=["Tanh"], inferlist_remove="Tanh"),
        tfamp.enable("auto", graph_rewrite=True),
    ),
    "policy_scope": lambda scope: scope.enter_context(tfamp.policy_scope(BF16)),
    "graph_rewrite_scope": lambda scope: scope.enter_context(
        tfamp.graph_rewrite_scope("bfloat16")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_users_own_globals_are_back_after_an_error(change, monkeypatch):
    """Those that TensorFlow starts with are looked at after every test."""
    options = tf.config.optimizer
    given = {"auto_mixed_precision": False, "min_graph_nodes": 7, "remapping": True}
    options.set_experimental_options(given)
    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Sin")
    monkeypatch.setenv(LONG_FLAG, "0")
    before = helpers.read_globals()
    try:
        with pytest.raises(KeyError), contextlib.ExitStack() as scope:
            scope.callback(tfamp.disable_graph_rewrite)
            scope.callback(tfamp.disable)
            CHANGES[change](scope)
            assert helpers.find_leaks(before, helpers.read_globals())
            raise KeyError
        assert helpers.find_leaks(before, helpers.read_globals()) == []
        assert options.get_experimental_options() == before.grappler
    finally:
        options.set_experimental_options(dict.fromkeys(given))


OVERRIDES = {"overrides": {"a": "float32"}}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: tfamp.enable("float32", graph_rewrite=True), "`mode` names the"),
        (lambda: tfamp.enable("tf32", graph_rewrite=True), "`mode` names the"),
        (lambda: tfamp.enable("bf16", graph_rewrite=True), "Unknown precision mode"),
        (lambda: tfamp.enable("mixed_float16", graph_rewrite=True), "float16"),
        (lambda: tfamp.enable(graph_rewrite="yes"), "`graph_rewrite` must be True"),
        (lambda: tfamp.enable(graph_rewrite={"dtype": "auto"}), "`mode` names the"),
        (lambda: tfamp.enable(graph_rewrite={"lists": 1}), "'lists'. Expected some of"),
        (lambda: enable(denylist_add=3), "denylist_add=3"),
        (lambda: tfamp.enable(graph_rewrite=True, **OVERRIDES), "does not see layers"),
        (lambda: tfamp.enable_graph_rewrite("float32"), "float32"),
        (lambda: tfamp.enable_graph_rewrite(denylist_add="Ssin"), "denylist_add.*Ssin"),
    ],
)
@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
def test_bad_requests_change_nothing(call, error, enabled):
    if enabled:
        enable()
    before = helpers.read_globals(), tfamp.status()
    with pytest.raises((ValueError, TypeError), match=error):
        call()
    assert helpers.find_leaks(before[0], helpers.read_globals()) == []
    assert tfamp.status() == before[1]


# ---- The published environment variables ----


@pytest.mark.issue("NVIDIA/tensorflow#39")
@pytest.mark.parametrize("name", [FLAG, LONG_FLAG])
def test_the_environment_asks_for_the_rewrite(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert tfamp.enable().dtype_policy == "float32"
    assert "bfloat16 requested" in shown()
    tfamp.disable()
    assert os.environ[name] == "1"
    with pytest.raises(ValueError, match="undo float32 layers.*Unset the variable"):
        tfamp.enable(BF16)
    assert tfamp.enable(BF16, graph_rewrite=False).graph_rewrite == "off"
    with pytest.warns(UserWarning, match="requests none"):
        assert tfamp.enable("float32").graph_rewrite == "off"


def test_flags_that_are_no_request(monkeypatch):
    enable()
    assert os.environ[FLAG] == os.environ[LONG_FLAG] == "1"
    assert tfamp.enable(BF16).graph_rewrite == "off"  # Our own setting.
    assert FLAG not in os.environ
    tfamp.disable()
    monkeypatch.setenv(FLAG, "")
    assert tfamp.enable("float32").graph_rewrite == "off"
    tfamp.disable()
    assert os.environ[FLAG] == ""
    for value in ("yes", "2", " 1"):
        monkeypatch.setenv(FLAG, value)
        with pytest.raises(ValueError, match=FLAG):
            tfamp.enable()


# ---- Policy and rewrite exclude each other; sessions and scopes nest ----


@pytest.mark.parametrize(
    "keywords",
    [{"mode": BF16}, {"mode": "auto"}, {"graph_rewrite": False}],
    ids=str,
)
def test_a_mixed_policy_and_a_rewrite_exclude_each_other(keywords):
    tfamp.enable_graph_rewrite()
    with pytest.raises(ValueError, match="disable_graph_rewrite"):
        tfamp.enable(**keywords)
    assert tfamp.status().dtype_policy == "float32"
    tfamp.disable_graph_rewrite()
    tfamp.enable(BF16)
    with pytest.raises(ValueError, match="policy"):
        tfamp.enable_graph_rewrite()
    assert shown() == "off"


def test_a_rewrite_beside_a_session():
    plain = keras.Model.compile
    tfamp.enable_graph_rewrite(denylist_add="Sin")
    assert "not needed by mixed_bfloat16" in tfamp.status().loss_scaling
    tfamp.enable("float32")  # Beside it.
    tfamp.disable()
    assert shown() != "off"
    enable()  # In its place, and back.
    assert PREFIX + "DENYLIST_ADD" not in os.environ
    tfamp.disable()
    assert os.environ[PREFIX + "DENYLIST_ADD"] == "Sin"
    enable()  # Both end for good.
    tfamp.disable_graph_rewrite()
    tfamp.disable()
    assert shown() == "off"
    assert keras.Model.compile is plain


def test_a_scope_inside_a_session_and_a_session_inside_a_scope():
    tfamp.enable("float32", loss_scale=False)
    with tfamp.graph_rewrite_scope() as status:
        assert "bfloat16 requested" in status.graph_rewrite
    assert tfamp.status().graph_rewrite == "off"
    assert tfamp.status().loss_scaling == "off, as requested"
    with tfamp.graph_rewrite_scope():
        enable()
    assert shown() == "off"
    tfamp.disable()
    assert shown() == "off"  # The scope is not revived.


def test_sixteen_bit_layers_under_a_rewrite_are_refused():
    with tfamp.policy_scope(BF16):
        earlier = trained()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        late = keras.Sequential([keras.layers.Dense(2, dtype=BF16)])
    enable()
    for each in (model, late):
        with pytest.raises(ValueError, match="(?s)dense.*undoes float32 layers"):
            each.compile("sgd", "mse")
    before = earlier.get_weights()[0]
    with pytest.raises(ValueError, match="undoes float32 layers"):
        earlier.train_on_batch(X, Y)
    np.testing.assert_array_equal(earlier.get_weights()[0], before)


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

    def report(self, **keywords):
        return tfamp.graph_rewrite_report(self.function, self.x, **keywords)


def test_a_traced_function_is_switched_both_ways_without_a_trace():
    step, seen = Step(), []
    for removed in (None, (), "MatMul", None, (), "MatMul", ()):
        if removed is None:
            tfamp.disable_graph_rewrite()
        else:
            tfamp.enable_graph_rewrite(allowlist_remove=removed)
        seen.append(step.is_rewritten())
    assert seen == [False, True, False, False, True, False, True]
    assert step.traces == 1


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_thread_that_called_a_function_before_keeps_its_options(synchronized):
    step = Step()
    with futures.ThreadPoolExecutor(1) as thread:
        before = thread.submit(step.is_rewritten).result()
        tfamp.enable_graph_rewrite()
        if synchronized:
            thread.submit(tfamp.sync_thread).result()
        after = thread.submit(step.is_rewritten).result()
    assert (before, after) == (False, synchronized)
    assert step.is_rewritten()


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


def converted(*operations):
    """Which of the operations a report on `chain` shows in bfloat16."""
    report = tfamp.graph_rewrite_report(chain, tf.ones((8, 8)))
    return {op for op in operations if "bfloat16" in report.after[op]}


@pytest.mark.parametrize(
    ("keywords", "low", "wide"),
    [
        ({}, "MatMul Relu", "Exp"),
        ({"allowlist_remove": "MatMul"}, "", "MatMul Relu"),
        ({"denylist_add": ["Relu"]}, "MatMul", "Relu"),
        ({"clearlist_remove": "Relu"}, "MatMul", "Relu"),
        ({"inferlist_remove": "AddV2"}, "MatMul", "AddV2"),
        ({"float32_ops": "AddV2, Relu"}, "MatMul", "AddV2 Relu"),
        ({"allowlist_add": "Exp"}, "MatMul Exp", ""),
        ({"allowlist_add": "Exp", "float32_ops": "Exp,Relu"}, "MatMul Exp", "Relu"),
        ({"clearlist_add": "Exp"}, "MatMul Exp", ""),
        ({"inferlist_add": "Exp"}, "MatMul Exp", ""),
    ],
    ids=str,
)
def test_lists_change_what_is_converted(keywords, low, wide):
    tfamp.enable_graph_rewrite(**keywords)
    assert converted(*low.split(), *wide.split()) == set(low.split())


def test_the_users_own_list_variables_hold_beside_the_arguments(monkeypatch):
    monkeypatch.setenv(PREFIX + "CLEARLIST_REMOVE", "Relu")
    with tfamp.graph_rewrite_scope(inferlist_remove="Tanh,AddV2"):
        assert converted("MatMul", "Relu") == {"MatMul"}
    assert os.environ[PREFIX + "CLEARLIST_REMOVE"] == "Relu"
    monkeypatch.setenv(PREFIX + "CLEARLIST_ADD", "Cos")
    for edit in ("allowlist_add", "clearlist_remove"):  # Else TensorFlow gives up.
        with pytest.raises(ValueError, match="Cos: added to the"):
            tfamp.enable_graph_rewrite(**{edit: "Cos"})
    assert shown() == "off"


@pytest.mark.parametrize(
    ("keywords", "dtype"), [({}, "float32"), ({"float32_ops": ()}, "bfloat16")]
)
def test_bias_gradients_and_losses_stay_in_float32(keywords, dtype):
    """Of a transposed convolution, whose bias gradient oneDNN does not fuse."""
    layer = keras.layers.Conv2DTranspose(4, 3)
    x = tf.random.normal((16, 16, 16, 3))
    layer.build(x.shape)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x) - 1.0))
        return loss, tape.gradient(loss, layer.bias)

    loss, bias = step(x)
    # TensorFlow's own gradient, without the cure that `enable` installs.
    with tfamp.graph_rewrite_scope(**keywords):
        report = tfamp.graph_rewrite_report(step, x)
        low_loss, low_bias = step(x)
    assert report.effective == "bfloat16"
    assert report.after["BiasAddGrad"] == {dtype: 1}
    assert dtype in report.after["Mean"]
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
    assert report.functions == 1 and not report.preview
    assert report.before["MatMul"] == {"float32": 1}
    assert report.after["MatMul"] == {"bfloat16": 1}
    expected = (
        f"requested bfloat16 rewrite, effective: bfloat16, {report.converted} of "
        f"{report.nodes} nodes converted, {report.casts} cast"
    )
    assert report.converted > 0 and str(report).startswith(expected)
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert as_dict.pop("schema_version") == 1
    assert as_dict == report._asdict()
    # One that ran before is told alike.
    assert step.is_rewritten() and step.report() == report
    tfamp.disable_graph_rewrite()
    assert step.report().effective is None
    tfamp.enable_graph_rewrite()
    assert step.report() == report


def in_a_method(step):
    class Module(tf.Module):
        @tf.function
        def call(self, x):
            return step.function(x)

    return Module().call


FUNCTIONS = {
    "concrete": lambda step: step.function.get_concrete_function(step.x),
    "callable": lambda step: lambda x: step.function(x),
    "method": in_a_method,
}


@pytest.mark.parametrize("preview", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_other_kinds_of_functions(kind, preview):
    step = Step()
    tfamp.enable_graph_rewrite()
    function = FUNCTIONS[kind](step)
    report = tfamp.graph_rewrite_report(function, step.x, preview=preview)
    assert report.effective == "bfloat16"
    assert report.after["MatMul"] == {"bfloat16": 1}


def xla(step):
    return tf.function(step.run, jit_compile=True)


def inside_of_xla(step):
    compiled = xla(step)
    return tf.function(lambda x: compiled(x) + 1)


# How the function is made, with which options, and the reason.
REASONS = {
    "XLA": (xla, {}, "XLA"),
    "inside of XLA": (inside_of_xla, {}, "XLA"),
    "eager": (lambda step: lambda x: step.run(x), {}, "run_eagerly"),
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
    report = tfamp.graph_rewrite_report(both, step.x, preview=True)
    assert report.effective is None and "have no preview" in report.reason


def test_no_request_is_told_and_an_option_set_without_tfamp_is_seen(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    report = Step().report()
    assert (report.requested, report.effective) == (None, None)
    assert "no graph rewrite is enabled" in report.reason
    assert "TensorFlow 2 reads no environment flag" in report.reason
    assert str(report).startswith("requested no rewrite, effective: none, because ")
    tf.config.optimizer.set_experimental_options({OPTION: True})
    try:
        report = Step().report()
    finally:
        tf.config.optimizer.set_experimental_options({OPTION: None})
    assert (report.requested, report.effective) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
def test_a_preview_runs_and_changes_nothing(active):
    step = Step()
    if active:
        tfamp.enable_graph_rewrite()
    before = helpers.read_globals()
    report = step.report(preview=True)
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert int(step.calls) == 0
    assert (report.requested, report.effective) == ("bfloat16", "bfloat16")
    assert report.preview and report.after["MatMul"] == {"bfloat16": 1}
    assert ("no rewrite is enabled" in report.reason) is not active
    assert str(report).startswith("preview: requested bfloat16 rewrite, effective: ")
    if not active:  # Where a rewrite cannot be.
        with tfamp.policy_scope(BF16):
            report = step.report(preview=True)
        assert report.effective is None
        assert "must compute in float32" in report.reason


def test_a_function_that_fails_puts_all_back():
    tfamp.enable_graph_rewrite()
    before = helpers.read_globals()
    solve = tf.function(tf.linalg.inv)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tfamp.graph_rewrite_report(solve, tf.zeros((2, 2)))
    assert helpers.find_leaks(before, helpers.read_globals()) == []
