"""TensorFlow's switches are set, seen to work, and put back exactly."""

import os
import subprocess
import sys
import threading

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp import errors, hardware
from tfamp.graph_rewrite import graphs as rewrite_graphs
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.graph_rewrite.switch import LOG_PATH, PREFIX, RewriteConfig

FLAG = "TF_ENABLE_AUTO_MIXED_PRECISION"
BF16_CPU = hardware.DeviceDescription(
    "CPU", "Some CPU", None, frozenset({"avx512f", "avx512_bf16"}), onednn=True
)
OPTION = "auto_mixed_precision_onednn_bfloat16"
requires_onednn = pytest.mark.skipif(
    not hardware._onednn_is_on(), reason="TensorFlow's oneDNN kernels are off"
)


@pytest.fixture(autouse=True)
def native_cpu(monkeypatch):
    """TensorFlow rewrites to bfloat16 on any CPU; this module asks for a fast one."""
    monkeypatch.setattr(hardware, "read_devices", lambda: [BF16_CPU])
    yield
    graph_rewrite.disable()


def read_globals():
    found = helpers.read_globals()
    return found.grappler, found.environ


class Step:
    """A function of one matrix product; counts its traces."""

    def __init__(self):
        self.traces = 0
        generator = np.random.default_rng(0)
        self.x = tf.constant(generator.normal(size=(8, 64)), tf.float32)
        self.weights = tf.Variable(generator.normal(size=(64, 64)), dtype=tf.float32)
        self.function = tf.function(self._run)
        self.exact = self.x.numpy().astype(float) @ self.weights.numpy().astype(float)

    def _run(self, x):
        self.traces += 1
        with tf.device("CPU:0"):
            return tf.nn.relu(tf.matmul(x, self.weights)) + 1.0

    def is_rewritten(self):
        """Whether a call's result has bfloat16's error."""
        result = self.function(self.x).numpy() - 1.0
        exact = np.maximum(self.exact, 0)
        return bool(np.abs(result - exact).max() > 1e-3 * np.abs(exact).max())

    def optimized(self):
        """Returns the graphs that TensorFlow makes executable for one call."""
        collector = rewrite_graphs.Collector()
        collector.start()
        self.function(self.x)
        collector.stop()
        return [graph for graph in collector.graphs if "MatMul" in graph.before]


# ---- What is set, and put back ----


def test_enable_sets_flags_and_the_switch_that_works():
    rewrite = graph_rewrite.enable()
    options, environ = read_globals()
    assert (rewrite.dtype, rewrite.reason) == (
        "bfloat16",
        "native bfloat16 (avx512_bf16) through oneDNN",
    )
    assert graph_rewrite.active() is rewrite
    assert options[OPTION] is True and options["auto_mixed_precision"] is False
    assert environ[FLAG] == environ[f"{FLAG}_GRAPH_REWRITE"] == "1"
    assert environ[f"{PREFIX}INFERLIST_REMOVE"] == "BiasAddGrad,Mean,Sum"
    assert not graph_rewrite.float16_requested()


def set_by_the_user(monkeypatch):
    monkeypatch.setenv(FLAG, "0")
    monkeypatch.setenv(f"{PREFIX}WHITELIST_ADD", "Sin, Cos")
    monkeypatch.setenv(f"{PREFIX}LEVEL", "")
    tf.config.optimizer.set_experimental_options(
        {OPTION: False, "auto_mixed_precision_mkl": True, "min_graph_nodes": 7}
    )


@pytest.fixture
def users_globals(monkeypatch):
    options = ("auto_mixed_precision_mkl", OPTION, "min_graph_nodes")
    set_by_the_user(monkeypatch)
    yield read_globals()
    tf.config.optimizer.set_experimental_options(dict.fromkeys(options))


def test_disable_puts_back_what_the_user_had_set(users_globals):
    graph_rewrite.enable()
    environ = os.environ
    assert environ[f"{PREFIX}ALLOWLIST_ADD"] == "Cos,Sin"
    assert f"{PREFIX}WHITELIST_ADD" not in environ
    graph_rewrite.enable(RewriteConfig(dtype="bfloat16", denylist_add="Tan"))
    assert environ[f"{PREFIX}ALLOWLIST_ADD"] == "Cos,Sin"
    graph_rewrite.disable()
    assert read_globals() == users_globals
    graph_rewrite.disable()
    assert read_globals() == users_globals
    assert graph_rewrite.active() is None


def test_disable_puts_back_what_was_not_set():
    before = read_globals()
    graph_rewrite.enable(RewriteConfig(level="TREAT_INFER_AS_DENY"))
    assert read_globals() != before
    graph_rewrite.disable()
    assert read_globals() == before


def test_snapshot_restores_another_request_and_none():
    none, before = graph_rewrite.snapshot(), read_globals()
    first = graph_rewrite.enable(RewriteConfig(denylist_add="Tan"))
    one, during = graph_rewrite.snapshot(), read_globals()
    second = graph_rewrite.enable(RewriteConfig(float32_ops=()))
    assert second.before == first.before
    graph_rewrite.restore(one)
    assert (graph_rewrite.active(), read_globals()) == (first, during)
    graph_rewrite.restore(none)
    assert (graph_rewrite.active(), read_globals()) == (None, before)


REFUSED = {
    "policy": (RewriteConfig(), "must compute in float32"),
    "float16": (RewriteConfig(dtype="float16"), "cannot apply the float16 graph"),
    "lists": (RewriteConfig(allowlist_add="Exp"), "would be on 2 lists"),
    "folder": (RewriteConfig(log_path=f"{__file__}/dumps"), "cannot be made"),
}


@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
@pytest.mark.parametrize(("config", "match"), REFUSED.values(), ids=REFUSED)
def test_refused_request_changes_nothing(config, match, active):
    rewrite = graph_rewrite.enable() if active else None
    policy = keras.config.dtype_policy()
    if match == REFUSED["policy"][1]:
        keras.config.set_dtype_policy("mixed_bfloat16")
    before = read_globals()
    try:
        with pytest.raises(ValueError, match=match):
            graph_rewrite.enable(config)
    finally:
        keras.config.set_dtype_policy(policy)
    assert read_globals() == before
    assert graph_rewrite.active() is rewrite


@pytest.mark.parametrize("fault", ["options", "warning"])
def test_failure_midway_changes_nothing(monkeypatch, fault):
    before = read_globals()
    config = RewriteConfig()
    if fault == "options":
        options = {**before[0], OPTION: False}
        real = tf.config.optimizer.get_experimental_options
        answers = iter([before[0], before[0], options])
        monkeypatch.setattr(
            tf.config.optimizer, "get_experimental_options", lambda: next(answers)
        )
        with pytest.raises(RuntimeError, match="did not take the options"):
            graph_rewrite.enable(config)
        monkeypatch.setattr(tf.config.optimizer, "get_experimental_options", real)
    else:
        # Warnings are errors here.
        with pytest.raises(UserWarning, match="removes MatMul, which the clearlist"):
            graph_rewrite.enable(RewriteConfig(clearlist_remove="MatMul"))
    assert read_globals() == before
    assert graph_rewrite.active() is None


def test_what_has_no_effect_is_warned_about():
    with pytest.warns(UserWarning, match="removes MatMul, which the clearlist") as seen:
        rewrite = graph_rewrite.enable(RewriteConfig(clearlist_remove="MatMul"))
    assert len(seen) == 1
    assert len(rewrite.warnings) == 1
    assert graph_rewrite.active() is rewrite


def test_unsupported_host_is_told_as_such(monkeypatch):
    plain = BF16_CPU._replace(cpu_flags=frozenset())
    monkeypatch.setattr(hardware, "read_devices", lambda: [plain])
    with pytest.raises(errors.UnsupportedModeError, match="no native bfloat16"):
        graph_rewrite.enable()


# ---- The published flags ----


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (FLAG, "1", True),
        (f"{FLAG}_GRAPH_REWRITE", "True", True),
        (FLAG, "0", False),
        (FLAG, "FALSE", False),
        (f"{FLAG}_LOSS_SCALING", "1", False),
    ],
)
def test_request_by_environment(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert graph_rewrite.requested_by_environment() is expected


def test_own_flags_are_no_request_by_environment():
    assert not graph_rewrite.requested_by_environment()
    graph_rewrite.enable()
    assert not graph_rewrite.requested_by_environment()


def test_users_flag_stays_a_request_while_enabled(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    graph_rewrite.enable()
    assert graph_rewrite.requested_by_environment()


def test_flag_that_is_no_bool_is_refused(monkeypatch):
    monkeypatch.setenv(FLAG, "yes")
    with pytest.raises(ValueError, match=f"variable {FLAG} must be.*'yes'"):
        graph_rewrite.requested_by_environment()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({OPTION: True}, "bfloat16"),
        ({"auto_mixed_precision_mkl": True}, "bfloat16"),
        ({"auto_mixed_precision": True}, "float16"),
    ],
    ids=["none", "bfloat16", "mkl", "float16"],
)
def test_requested_dtype_is_read_from_the_options_too(options, expected):
    tf.config.optimizer.set_experimental_options(options)
    try:
        assert graph_rewrite.requested_dtype() == expected
    finally:
        tf.config.optimizer.set_experimental_options(dict.fromkeys(options))


# ---- What TensorFlow does with it ----


@requires_onednn
def test_traced_function_is_switched_both_ways_without_a_trace():
    step, seen = Step(), []
    for on in (False, True, False, True, False):
        (graph_rewrite.enable if on else graph_rewrite.disable)()
        seen.append(step.is_rewritten())
    assert seen == [False, True, False, True, False]
    assert step.traces == 1


@requires_onednn
def test_another_list_is_taken_up_and_a_known_one_costs_nothing():
    step = Step()
    default, without = RewriteConfig(), RewriteConfig(allowlist_remove="MatMul")

    def converted(config):
        graph_rewrite.enable(config)
        return [graph.converted for graph in step.optimized()]

    assert all(converted(default))
    assert converted(without) == [0]
    assert not step.is_rewritten()
    assert converted(default) == converted(without) == []  # Both are there already.
    graph_rewrite.enable(default)
    assert step.is_rewritten()


def test_numbers_of_settings_are_unique_and_negative():
    numbers = set()
    for config in (
        RewriteConfig(),
        RewriteConfig(float32_ops=()),
        RewriteConfig(level="TREAT_INFER_AS_DENY"),
        RewriteConfig(),
    ):
        graph_rewrite.enable(config)
        numbers.add(tf.config.optimizer.get_experimental_options()["min_graph_nodes"])
    assert len(numbers) == 3
    assert max(numbers) < 0


@requires_onednn
def test_small_graph_is_rewritten_too():
    weights = tf.ones((64, 64))
    graph_rewrite.enable()
    product = tf.function(lambda x: tf.matmul(x, weights))
    with tf.device("CPU:0"):
        result = product(tf.fill((1, 64), 1 + 2.0**-12))
    assert result.numpy()[0, 0] == 64.0  # bfloat16 rounds the 2**-12 away.


# ---- Threads ----


@requires_onednn
def test_thread_with_cached_options_is_stale_until_synchronized():
    step, seen = Step(), []
    ready, enabled = threading.Event(), threading.Event()

    def work():
        seen.append((graph_rewrite.thread_is_stale(), step.is_rewritten()))
        ready.set()
        enabled.wait(60)
        seen.append((graph_rewrite.thread_is_stale(), step.is_rewritten()))
        graph_rewrite.sync_thread()
        seen.append((graph_rewrite.thread_is_stale(), step.is_rewritten()))

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    graph_rewrite.enable()
    enabled.set()
    thread.join()
    assert seen == [(False, False), (True, False), (False, True)]
    assert not graph_rewrite.thread_is_stale()
    assert step.is_rewritten()


@requires_onednn
def test_new_thread_follows():
    step, seen = Step(), []
    graph_rewrite.enable()
    thread = threading.Thread(target=lambda: seen.append(step.is_rewritten()))
    thread.start()
    thread.join()
    assert seen == [True]


# ---- Dumps and previews ----


@requires_onednn
def test_log_folder_is_made_and_filled(tmp_path):
    folder = tmp_path / "new" / "dumps"
    graph_rewrite.enable(RewriteConfig(log_path=str(folder)))
    assert os.listdir(folder) == []
    step = Step()
    step.function(step.x)
    assert any(name.startswith("graphdef_Auto") for name in os.listdir(folder))


def test_log_folder_of_the_user_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_PATH, str(tmp_path / "dumps"))
    graph_rewrite.enable()
    assert (tmp_path / "dumps").is_dir()
    assert graph_rewrite.log_folder() == str(tmp_path / "dumps")


def test_switching_while_graphs_are_dumped_elsewhere(tmp_path):
    before = read_globals()
    with graph_rewrite.dumping_to(str(tmp_path)):
        graph_rewrite.enable(RewriteConfig(log_path=str(tmp_path / "mine")))
        assert os.environ[LOG_PATH] == str(tmp_path)
        assert graph_rewrite.log_folder() == str(tmp_path / "mine")
    assert os.environ[LOG_PATH] == str(tmp_path / "mine")
    graph_rewrite.enable(RewriteConfig(log_path=str(tmp_path / "mine")))
    with graph_rewrite.dumping_to(str(tmp_path)):
        graph_rewrite.disable()
        assert graph_rewrite.log_folder() is None
    assert read_globals() == before


class Interruption(Exception):
    pass


@pytest.mark.parametrize("scope", ["dumping", "anew", "previewing", "simulating"])
@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
def test_scope_puts_all_back_after_an_exception(scope, active, tmp_path):
    if active:
        graph_rewrite.enable()
    before = read_globals()
    plan = graph_rewrite.make_plan(RewriteConfig(float32_ops=()))
    made = {
        "dumping": lambda: graph_rewrite.dumping_to(str(tmp_path)),
        "anew": graph_rewrite.optimized_anew,
        "previewing": lambda: graph_rewrite.previewing(plan),
        "simulating": lambda: graph_rewrite.previewing(plan, simulate_gpu=True),
    }[scope]()
    with pytest.raises(Interruption), made:
        assert read_globals() != before or scope == "previewing"
        raise Interruption
    assert read_globals() == before


def test_enable_inside_of_optimized_anew_stays():
    before = read_globals()
    with graph_rewrite.optimized_anew():
        graph_rewrite.enable()
        during = read_globals()
    assert read_globals() == during
    with graph_rewrite.optimized_anew():
        graph_rewrite.disable()
    assert read_globals() == before


# ---- The environment variable that ends the process ----

_CHILD = """
import os, sys
import tensorflow as tf
from tfamp import graph_rewrite, hardware
cpu = hardware.DeviceDescription("CPU", "", None, frozenset({"avx512_bf16"}), True)
hardware.read_devices = lambda: [cpu]
if sys.argv[1] == "tfamp":
    try:
        graph_rewrite.enable()
    except ValueError as error:
        print("REFUSED", error)
        sys.exit(3)
else:
    option = "auto_mixed_precision_onednn_bfloat16"
    tf.config.optimizer.set_experimental_options({option: True})
tf.function(lambda x: tf.matmul(x, x) + 1)(tf.ones((4, 4)))
"""


@requires_onednn
def test_simulate_gpu_that_is_no_bool_is_refused_and_would_end_the_process():
    environ = {**os.environ, f"{PREFIX}SIMULATE_GPU": "yes"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, who],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for who in ("tfamp", "tensorflow")
    ]
    (out, _), _ = [run.communicate(timeout=300) for run in runs]
    assert runs[0].returncode == 3
    assert out.startswith("REFUSED The environment variable") and "'yes'" in out
    assert runs[1].returncode < 0  # A signal: else the refusal is not needed.
