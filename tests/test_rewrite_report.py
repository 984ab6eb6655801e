"""Reports of the graph rewrite say what TensorFlow did, with its own numbers."""

import json
import os
import re
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import hardware
from tfamp.graph_rewrite import record as rewrite_record
from tfamp.graph_rewrite import report as rewrite_report
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.graph_rewrite.report import graph_rewrite_report, observe
from tfamp.graph_rewrite.switch import PREFIX, RewriteConfig

BF16_CPU = hardware.DeviceDescription(
    "CPU", "Some CPU", None, frozenset({"avx512f", "avx512_bf16"}), onednn=True
)
pytestmark = pytest.mark.skipif(
    not hardware._onednn_is_on(), reason="TensorFlow's oneDNN kernels are off"
)


@pytest.fixture(autouse=True)
def native_cpu(monkeypatch):
    """TensorFlow rewrites to bfloat16 on any CPU; this module asks for a fast one."""
    monkeypatch.setattr(hardware, "read_devices", lambda: [BF16_CPU])
    with tf.device("CPU:0"):
        yield
    graph_rewrite.disable()
    tf.config.run_functions_eagerly(False)


# ---- Equal to TensorFlow's log ----

_CHILD = """
import json, sys
import keras, numpy as np, tensorflow as tf
from tfamp import graph_rewrite, hardware, rewrite_report
cpu = hardware.DeviceDescription("CPU", "", None, frozenset({"avx512_bf16"}), True)
hardware.read_devices = lambda: [cpu]
tf.config.set_visible_devices([], "GPU")
graph_rewrite.enable()
report = rewrite_report.graph_rewrite_report
layers, random = keras.layers, np.random.default_rng(0).normal

def tensor(*shape):
    return tf.constant(random(size=shape), tf.float32)

def model(*stack):
    made = keras.Sequential(stack)
    made.compile("adam", "mse", jit_compile=False)
    return made

def observed(*calls):
    with rewrite_report.observe() as seen:
        for call in calls:
            call()
    return seen.report()

dense = model(layers.Input((16,)), layers.Dense(32, "gelu"), layers.Dense(4, "softmax"))
conv = model(
    layers.Input((8, 8, 3)), layers.Conv2D(8, 3), layers.BatchNormalization(),
    layers.Conv2DTranspose(4, 3, activation="relu"), layers.GlobalMaxPooling2D(),
)
lstm = model(layers.Input((5, 8)), layers.LSTM(8), layers.Dense(4))
weights = tf.Variable(tensor(16, 16))
constant = random(size=(16, 16)).astype("float32")

@tf.function
def cached(x):
    return tf.reduce_sum(tf.exp(tf.matmul(tf.matmul(x, weights), constant)))

@tf.function
def branches(x):
    y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, weights), lambda: -x)
    return tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z @ weights), (0, y))

x, image, words, y = tensor(8, 16), tensor(4, 8, 8, 3), tensor(4, 5, 8), tensor(4, 4)
cases = {
    "dense": lambda: observed(lambda: dense.train_on_batch(x, tensor(8, 4))),
    "conv": lambda: observed(lambda: conv.train_on_batch(image, y)),
    "lstm": lambda: observed(lambda: lstm.train_on_batch(words, y)),
    "fit": lambda: observed(lambda: dense.fit(x, tensor(8, 4), verbose=0)),
    "constant": lambda: report(cached, x),
    "cached": lambda: report(cached, x),
    "branches": lambda: report(branches, x),
    "two": lambda: observed(
        lambda: dense.predict_on_batch(x), lambda: conv.predict_on_batch(image)
    ),
    "preview": lambda: report(cached, x, preview=True),
    "preview_lstm": lambda: report(lambda x: lstm(x), words, preview=True),
    "simulated": lambda: report(cached, x, simulate_gpu=True),
    "nothing": lambda: report(lambda x: x + 1, x),
}
for name, case in cases.items():
    sys.stderr.write(f"\\nCASE {name}\\n")
    sys.stderr.flush()
    print(json.dumps({name: case().to_dict()}), flush=True)
"""
_LINE = re.compile(
    r"Converted (\d+)/(\d+) nodes to (\w+) precision using (\d+) cast\(s\)"
)
CASES = re.findall(r'^    "(\w+)": lambda', _CHILD, re.MULTILINE)


@pytest.fixture(scope="module")
def child():
    """Returns case -> (report as a dict, TensorFlow's log lines as match groups)."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
    )
    assert done.returncode == 0, done.stderr
    reports = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            reports |= json.loads(line)
    _, *parts = re.split(r"^CASE (\w+)$", done.stderr, flags=re.MULTILINE)
    logs = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: (reports[name], _LINE.findall(logs[name])) for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_tensorflows_log(child, case):
    report, lines = child[case]
    total = {
        "converted": sum(int(n) for n, _, _, _ in lines),
        "casts": sum(int(k) for _, _, _, k in lines),
    }
    if lines:
        total["nodes"] = sum(int(m) for _, m, _, _ in lines)
    assert {name: report[name] for name in total} == total
    assert {dtype for _, _, dtype, _ in lines} == {report["effective"]} - {None}
    assert bool(lines) is (case != "nothing")


def test_cases_cover_several_lines_and_many_nodes(child):
    assert len(child["two"][1]) == 2
    assert child["lstm"][0]["converted"] > 50
    assert child["simulated"][0]["effective"] == "float16"
    assert child["constant"][0] == child["cached"][0]


@pytest.mark.parametrize("case", [case for case in CASES if case != "nothing"])
def test_table_accounts_for_each_conversion(child, case):
    report, _ = child[case]
    gained = lost = 0
    for op in report["before"].keys() | report["after"].keys():
        if op != "Cast":
            before, after = report["before"].get(op, {}), report["after"].get(op, {})
            low = report["effective"]
            gained += after.get(low, 0) - before.get(low, 0)
            lost += before.get("float32", 0) - after.get("float32", 0)
    assert gained == lost == report["converted"]


# ---- Which operations ----


def loss_and_gradients(model, x, y):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(y, model(x)))
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


@pytest.fixture(scope="module")
def transposed():
    """A model whose bias gradient is TensorFlow's `BiasAddGrad`, with a batch."""
    generator = np.random.default_rng(1)
    model = keras.Sequential(
        [keras.layers.Input((8, 8, 2)), keras.layers.Conv2DTranspose(4, 3)]
    )
    x = tf.constant(generator.normal(size=(32, 8, 8, 2)), tf.float32)
    y = tf.constant(generator.normal(1, size=(32, 10, 10, 4)), tf.float32)
    return model, x, y


@pytest.mark.parametrize(
    ("float32_ops", "dtype"),
    [(graph_rewrite.FLOAT32_OPS, "float32"), ((), "bfloat16")],
    ids=["default", "own"],
)
def test_bias_gradients_and_reductions_stay_in_float32(transposed, float32_ops, dtype):
    graph_rewrite.enable(RewriteConfig(float32_ops=float32_ops))
    report = graph_rewrite_report(loss_and_gradients(*transposed), *transposed[1:])
    assert report.effective == "bfloat16"
    assert report.after["BiasAddGrad"] == {dtype: 1}
    assert dtype in report.after["Mean"]
    assert report.before["BiasAddGrad"] == {"float32": 1}


def test_loss_and_bias_gradient_are_those_of_float32(transposed):
    step = loss_and_gradients(*transposed)
    loss, (*_, bias) = step(*transposed[1:])
    errors = {}
    for float32_ops in (graph_rewrite.FLOAT32_OPS, ()):
        graph_rewrite.enable(RewriteConfig(float32_ops=float32_ops))
        low_loss, (*_, low_bias) = step(*transposed[1:])
        scale = np.abs(bias).max()
        errors[bool(float32_ops)] = (
            abs(low_loss / loss - 1),
            np.abs(low_bias - bias).max() / scale,
        )
    assert errors[True][0] < 1e-3 and errors[True][1] < 1e-2
    assert errors[False][1] > 0.1  # Else the default is not needed.


# ---- What is told ----


@pytest.fixture(scope="module")
def product():
    generator = np.random.default_rng(2)
    weights = tf.Variable(generator.normal(size=(16, 16)), dtype=tf.float32)
    calls = tf.Variable(0)

    @tf.function
    def multiply(x):
        calls.assign_add(1)
        return tf.nn.relu(tf.matmul(x, weights) + 1.0)

    multiply.calls = calls
    multiply.x = tf.constant(generator.normal(size=(4, 16)), tf.float32)
    return multiply


def test_executed_function_is_told(product):
    graph_rewrite.enable()
    before = int(product.calls)
    report = graph_rewrite_report(product, product.x)
    assert int(product.calls) == before + 1
    assert (report.requested, report.effective, report.reason) == (
        "bfloat16",
        "bfloat16",
        "",
    )
    assert report.functions == 1 and not report.preview
    assert report.after["MatMul"] == {"bfloat16": 1}
    expected = (
        f"requested bfloat16 rewrite, effective: bfloat16, {report.converted} of "
        f"{report.nodes} nodes converted, 1 cast"
    )
    assert str(report) == expected
    lines = report.to_markdown().splitlines()
    assert lines[0] == expected
    assert "| MatMul | 1 float32 | 1 bfloat16 |" in lines
    assert not any(line.startswith("| _Arg ") for line in lines)
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert as_dict.pop("schema_version") == 1
    assert as_dict == report._asdict()


def test_function_that_ran_before_is_told_alike(product):
    graph_rewrite.enable()
    product(product.x)
    first = graph_rewrite_report(product, product.x)
    assert first.converted > 0
    assert graph_rewrite_report(product, product.x) == first
    graph_rewrite.disable()
    assert graph_rewrite_report(product, product.x).effective is None
    graph_rewrite.enable()
    assert graph_rewrite_report(product, product.x) == first


@pytest.mark.parametrize("kind", ["concrete", "callable", "method"])
def test_other_kinds_of_functions(product, kind):
    class Model(tf.Module):
        @tf.function
        def call(self, x):
            return product(x)

    made = {
        "concrete": product.get_concrete_function(product.x),
        "callable": lambda x: product(x),
        "method": Model().call,
    }[kind]
    graph_rewrite.enable()
    for preview in (False, True):
        report = graph_rewrite_report(made, product.x, preview=preview)
        assert report.effective == "bfloat16"
        assert report.after["MatMul"] == {"bfloat16": 1}


def xla(product):
    compiled = tf.function(product.python_function, jit_compile=True)
    return compiled, {}


def inside_of_xla(product):
    compiled = tf.function(
        lambda x: tf.matmul(x, x, transpose_b=True), jit_compile=True
    )
    return tf.function(lambda x: compiled(x) + 1), {}


def eager(product):
    tf.config.run_functions_eagerly(True)
    return product, {}


def nothing_to_convert(product):
    return tf.function(lambda x: x + 1), {}


def switched_off(product):
    return product, {"disable_meta_optimizer": True}


def option_taken_back(product):
    return product, {"auto_mixed_precision_onednn_bfloat16": False}


REASONS = {
    xla: "XLA compiles it (jit_compile=True)",
    inside_of_xla: "XLA compiles it (jit_compile=True)",
    eager: "functions run eagerly",
    nothing_to_convert: "none of the operations (AddV2) is both on the allow list",
    switched_off: "TensorFlow's graph optimizers are switched off",
    option_taken_back: "'auto_mixed_precision_onednn_bfloat16' is off",
}


@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_reason_is_told_where_nothing_is_converted(product, make):
    graph_rewrite.enable()
    fn, options = make(product)
    found = {"disable_meta_optimizer": None}
    tf.config.optimizer.set_experimental_options(options)
    try:
        report = graph_rewrite_report(fn, product.x)
    finally:
        tf.config.optimizer.set_experimental_options(found)
    assert (report.requested, report.effective) == ("bfloat16", None)
    assert report.converted == report.casts == 0
    assert REASONS[make] in report.reason
    start = "requested bfloat16 rewrite, effective: none, because "
    assert str(report) == start + report.reason


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("ALLOWLIST_ADD", "Exp", "'Exp' would be on 2 lists, allowlist and denylist"),
        ("LEVEL", "UNSAFE_FORCE_ALL", "is UNSAFE_FORCE_ALL, with which"),
        ("WHITELIST_REMOVE", "MatMul", "none of the operations (AddV2, MatMul, Relu)"),
    ],
)
def test_variable_that_is_changed_later_is_told(
    product, monkeypatch, variable, value, part
):
    graph_rewrite.enable()
    monkeypatch.setenv(PREFIX + variable, value)
    report = graph_rewrite_report(product, product.x)
    assert report.effective is None and part in report.reason


def test_call_compiled_by_xla_inside_is_told(product):
    compiled, _ = xla(product)
    graph_rewrite.enable()
    report = graph_rewrite_report(lambda x: compiled(x) + product(x), product.x)
    assert report.effective == "bfloat16"
    assert report.reason == "1 call in it is compiled by XLA and not rewritten"


def test_stale_thread_is_told_and_left_alone(product):
    reports, ready, enabled = [], threading.Event(), threading.Event()

    def work():
        product(product.x)
        ready.set()
        enabled.wait(60)
        reports.append(graph_rewrite_report(product, product.x))
        reports.append(graph_rewrite_report(product, product.x))
        graph_rewrite.sync_thread()
        reports.append(graph_rewrite_report(product, product.x))

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    graph_rewrite.enable()
    enabled.set()
    thread.join()
    assert [report.effective for report in reports] == [None, None, "bfloat16"]
    assert "call tfamp.sync_thread() in it" in reports[1].reason


@pytest.mark.parametrize("flag", [False, True], ids=["unset", "flag"])
def test_no_request_is_told(product, monkeypatch, flag):
    if flag:
        monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    report = graph_rewrite_report(product, product.x)
    assert (report.requested, report.effective) == (None, None)
    assert "no graph rewrite is enabled" in report.reason
    assert ("does not read the environment flags" in report.reason) is flag
    assert report.before["MatMul"] == report.after["MatMul"] == {"float32": 1}
    assert str(report).startswith("requested no rewrite, effective: none, because ")


def test_option_set_without_tfamp_is_seen(product):
    name = "auto_mixed_precision_onednn_bfloat16"
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        report = graph_rewrite_report(product, product.x)
    finally:
        tf.config.optimizer.set_experimental_options({name: None})
    assert (report.requested, report.effective) == ("bfloat16", "bfloat16")


# ---- Previews ----


@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
@pytest.mark.parametrize(
    ("keywords", "dtype", "note"),
    [
        ({"preview": True}, "bfloat16", ""),
        ({"simulate_gpu": True}, "float16", "for a GPU that is simulated"),
    ],
    ids=["here", "gpu"],
)
def test_preview_runs_nothing(product, active, keywords, dtype, note):
    if active:
        graph_rewrite.enable()
    before, options = int(product.calls), tf.config.optimizer.get_experimental_options()
    environ = dict(os.environ)
    report = graph_rewrite_report(product, product.x, **keywords)
    assert int(product.calls) == before
    assert tf.config.optimizer.get_experimental_options() == options
    assert dict(os.environ) == environ
    assert (report.requested, report.effective, report.preview) == (dtype, dtype, True)
    assert report.after["MatMul"] == {dtype: 1}
    assert report.reason.startswith(note)
    assert ("no rewrite is enabled" in report.reason) is not active
    assert str(report).startswith(f"preview: requested {dtype} rewrite, effective: ")


def test_preview_follows_the_request(product):
    graph_rewrite.enable(RewriteConfig(allowlist_remove="MatMul"))
    report = graph_rewrite_report(product, product.x, preview=True)
    assert report.effective is None
    assert "none of the operations (AddV2, MatMul, Relu)" in report.reason


def test_preview_without_kernels_for_gpus_is_a_lower_bound(product, monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: False)
    report = graph_rewrite_report(product, product.x, simulate_gpu=True)
    assert report.lower_bound
    assert f"at least {report.converted} of {report.nodes} nodes" in str(report)
    assert not graph_rewrite_report(product, product.x, preview=True).lower_bound


def test_preview_of_what_this_host_cannot_do_has_the_reason(product, monkeypatch):
    plain = BF16_CPU._replace(cpu_flags=frozenset())
    monkeypatch.setattr(hardware, "read_devices", lambda: [plain])
    report = graph_rewrite_report(product, product.x, preview=True)
    assert report.effective is None and "no native bfloat16" in report.reason
    assert report.before == report.after
    assert graph_rewrite_report(product, product.x, simulate_gpu=True).converted > 0


def test_preview_of_a_function_for_xla_converts_nothing(product):
    compiled, _ = xla(product)
    report = graph_rewrite_report(compiled, product.x, preview=True)
    assert (report.effective, report.converted) == (None, 0)
    assert "XLA compiles it" in report.reason


# ---- Observing ----


def test_any_threads_functions_are_observed(product):
    graph_rewrite.enable()

    def work():
        tf.function(lambda x: tf.matmul(x, x, transpose_b=True))(product.x)

    with observe() as observation:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = observation.report()
    assert report.functions == report.after["MatMul"]["bfloat16"] == 2


def test_observations_overlap(product):
    graph_rewrite.enable()
    with observe(fresh=True) as outer:
        product(product.x)
        with observe(fresh=True) as inner:
            product(product.x)
    assert inner.report().functions == 1
    assert outer.report().functions == 2
    assert rewrite_record.RECORDER._open == 0


def test_kept_function_is_not_seen_unless_asked_for(product):
    graph_rewrite.enable()
    product(product.x)
    with observe() as observation:
        product(product.x)
    assert "no graph was optimized meanwhile" in observation.report().reason
    with observe(fresh=True) as observation:
        product(product.x)
    assert observation.report().converted > 0


def test_hints_come_first_where_nothing_is_converted(product):
    graph_rewrite.enable()
    with observe() as observation:
        tf.function(lambda x: x + 1)(product.x)
    report = observation.report(["the model runs eagerly."])
    assert report.reason == "the model runs eagerly"
    with observe(fresh=True) as observation:
        product(product.x)
    assert observation.report(["the model runs eagerly"]).reason == ""


def test_switching_inside_is_followed_and_undone(product):
    before = dict(os.environ), tf.config.optimizer.get_experimental_options()
    with observe() as observation:
        graph_rewrite.enable()
        product(product.x)
        tf.function(lambda x: tf.matmul(x, x, transpose_b=True))(product.x)
        graph_rewrite.disable()
    assert observation.report().effective == "bfloat16"
    assert before == (dict(os.environ), tf.config.optimizer.get_experimental_options())


def test_exception_inside_puts_all_back(product):
    before = dict(os.environ), tf.config.optimizer.get_experimental_options()
    with pytest.raises(ZeroDivisionError), observe(fresh=True) as observation:
        product(product.x)
        raise ZeroDivisionError
    assert before == (dict(os.environ), tf.config.optimizer.get_experimental_options())
    assert "no graph rewrite is enabled" in observation.report().reason


def test_report_inside_is_an_error():
    with observe() as observation:
        with pytest.raises(RuntimeError, match="reports after its block"):
            observation.report()


def test_dumps_go_to_the_users_folder_too(product, tmp_path):
    graph_rewrite.enable(RewriteConfig(log_path=str(tmp_path)))
    assert graph_rewrite_report(product, product.x).converted > 0
    names = os.listdir(tmp_path)
    assert sum(name.startswith("graphdef_preop_") for name in names) == 2
    assert sum(name.startswith("paintbuckets_") for name in names) == 1


def test_rewrite_is_seen_where_nothing_can_be_dumped(product, monkeypatch):
    graph_rewrite.enable()
    expected = graph_rewrite_report(product, product.x)
    monkeypatch.setattr(rewrite_report.rewrite_graphs, "dumped_graphs", lambda _: [])
    report = graph_rewrite_report(product, product.x)
    assert report.effective == "bfloat16"
    assert 0 < report.converted <= expected.converted


@pytest.mark.parametrize("outside", [False, True])
def test_preview_leaves_out_what_xla_compiles(outside):
    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.matmul(x, x)

    @tf.function
    def mixed(x):
        return tf.nn.relu(tf.matmul(compiled(x), x)) if outside else compiled(x) + 1.0

    x = tf.ones((64, 64))
    with tfamp.graph_rewrite_scope("bfloat16"):
        preview = tfamp.graph_rewrite_report(mixed, x, preview=True)
        executed = tfamp.graph_rewrite_report(mixed, x)
    assert "XLA" in preview.reason and "XLA" in executed.reason
    assert (preview.effective, preview.converted) == (
        executed.effective,
        executed.converted,
    )
    assert (preview.converted > 0) is outside
