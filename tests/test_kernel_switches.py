"""Kernel switches: requested and effective, set, and restored exactly."""

import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import tfamp
from tfamp import hardware, kernel_switches, switch_effects, switch_table

A100 = hardware.DeviceDescription("GPU", "NVIDIA A100", (8, 0))
T4 = hardware.DeviceDescription("GPU", "Tesla T4", (7, 5))
AMD = hardware.DeviceDescription("GPU", "AMD Instinct")
CPU = hardware.DeviceDescription("CPU", "a CPU", None, frozenset(), onednn=True)
AMX = CPU._replace(cpu_flags=frozenset({"amx_bf16"}))
LATE = "on if set in time"


@pytest.fixture(autouse=True)
def determinism_is_left_off():
    assert not config.is_op_determinism_enabled()
    yield
    left = config.is_op_determinism_enabled()
    config.disable_op_determinism()
    assert not left, "The test left op determinism on."


def find(name, devices=(A100, CPU), tf32=True, deterministic=False, started=False, **e):
    host = switch_effects.Host(e, devices, tf32, deterministic, started)
    (switch,) = [s for s in switch_effects.evaluate(host) if s.name == name]
    return switch


CONV = "TF_FP16_CONV_USE_FP32_COMPUTE"
MATMUL = "TF_FP16_MATMUL_USE_FP32_COMPUTE"
EIGEN = "TF_CONV2D_USE_FP16_ACCUMULATE"
AUTOTUNE = "TF_CUDNN_USE_AUTOTUNE"
OVERRIDE = "NVIDIA_TF32_OVERRIDE"
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
FPMATH = "ONEDNN_DEFAULT_FPMATH_MODE"
LEVEL = "--xla_gpu_autotune_level"


@pytest.mark.parametrize(
    ("name", "host", "requested", "effective", "phrase"),
    [
        ("TF32", {}, "on", "on", "capability 8.0 >= 8.0"),
        ("TF32", {"tf32": False}, "off", "off", "10 bits"),
        ("TF32", {"devices": [T4]}, "on", "off", "capability 7.5 < 8.0"),
        ("TF32", {"devices": [A100, T4]}, "on", "off", "7.5"),
        ("TF32", {"devices": [CPU]}, "on", "off", "needs an NVIDIA GPU"),
        ("TF32", {OVERRIDE: "0"}, "on", "off", "NVIDIA_TF32_OVERRIDE=0 forbids"),
        ("TF32", {OVERRIDE: "1"}, "on", "on", "capability 8.0"),
        (OVERRIDE, {}, "nothing", "nothing", "0 forbids"),
        (OVERRIDE, {OVERRIDE: "0"}, "TF32 off", "TF32 off", "0 forbids"),
        (OVERRIDE, {OVERRIDE: "1"}, "unknown", "unknown", "documents 0 alone"),
        (OVERRIDE, {OVERRIDE: "0", "devices": [CPU]}, "TF32 off", "no effect", "GPU"),
        (CONV, {}, "on", "on", "float32"),
        (CONV, {CONV: "0"}, "off", "off", "in float16"),
        (CONV, {CONV: "false"}, "on", "on", "float32"),
        (CONV, {CONV: "0", "devices": [CPU]}, "off", "no effect", "no NVIDIA GPU"),
        (CONV, {CONV: "0", "devices": [AMD]}, "off", "no effect", "no NVIDIA GPU"),
        (CONV, {CONV: "1", "started": True}, "on", LATE, "too late"),
        (CONV, {"started": True}, "on", "on", "float32"),
        (MATMUL, {MATMUL: "FALSE"}, "off", "off", "cuBLASLt"),
        (MATMUL, {MATMUL: "yes"}, "on", "on", "'yes' is none of 0, 1, false, true"),
        (EIGEN, {EIGEN: "1"}, "on", "on", "float16"),
        (EIGEN, {EIGEN: "true"}, "off", "off", "float16"),
        (EIGEN, {EIGEN: "1", "devices": [A100]}, "on", "no effect", "no CPU"),
        (AUTOTUNE, {AUTOTUNE: "0", "started": True}, "off", "off", "fastest"),
        (AUTOTUNE, {"deterministic": True}, "on", "off", "op determinism"),
        (
            "TF_CUDNN_DETERMINISTIC",
            {"deterministic": True},
            "off",
            "on",
            "op determinism is on",
        ),
        ("op determinism", {"deterministic": True}, "on", "on", "set_random_seed"),
        (
            "TF_DETERMINISTIC_OPS",
            {"TF_DETERMINISTIC_OPS": "1"},
            "on",
            "off",
            "set after TensorFlow had read it",
        ),
        (LEVEL, {}, "4", "4", "algorithms"),
        (
            LEVEL,
            {"XLA_FLAGS": "--xla_gpu_autotune_level=2 --xla_gpu_autotune_level=0"},
            "0",
            "0",
            "algorithms",
        ),
        (
            "--xla_cpu_enable_fast_math",
            {"XLA_FLAGS": "--xla_cpu_enable_fast_math", "started": True},
            "true",
            "true if set in time",
            "too late",
        ),
        (
            "--xla_gpu_exclude_nondeterministic_ops",
            {"deterministic": True},
            "false",
            "true",
            "op determinism is on",
        ),
        (ONEDNN, {ONEDNN: "0"}, "off", "on", "after TensorFlow's import"),
        (ONEDNN, {}, "on", "on", "another order"),
        (FPMATH, {}, "STRICT", "STRICT", "oneDNN"),
        (FPMATH, {FPMATH: "bf16"}, "BF16", "no effect", "only AMX"),
        (FPMATH, {FPMATH: "bf16", "devices": [AMX]}, "BF16", "unknown", "AMX"),
        (
            FPMATH,
            {FPMATH: "any", "devices": [AMX._replace(onednn=False)]},
            "ANY",
            "no effect",
            "oneDNN is off",
        ),
        (
            "TF_SET_ONEDNN_FPMATH_MODE",
            {"TF_SET_ONEDNN_FPMATH_MODE": "bf16", "devices": [AMX]},
            "STRICT",
            "STRICT",
            "oneDNN",
        ),
        (
            "TF_CUDNN_USE_FRONTEND",
            {"TF_CUDNN_USE_FRONTEND": "1"},
            "1",
            "no effect",
            "2.21 does not read it",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_requested_and_effective_and_why(name, host, requested, effective, phrase):
    switch = find(name, **host)
    assert (switch.requested, switch.effective) == (requested, effective)
    assert phrase in switch.reason
    assert switch.read_by


def test_variables_that_nothing_reads_are_told_of_only_where_they_are_set():
    host = switch_effects.Host({}, [A100], True, False, False)
    names = [s.name for s in switch_effects.evaluate(host)]
    assert not set(names) & set(switch_table.UNREAD)
    assert len(names) == len(set(names))


def test_this_host_is_described_as_tensorflow_reports_it(monkeypatch):
    monkeypatch.setenv(CONV, "0")
    found = {s.name: s for s in kernel_switches.describe()}
    assert found["TF32"].requested == "off"  # conftest.py turns it off.
    assert found["op determinism"].effective == "off"
    assert found[CONV].value == "0"
    onednn = any(device.onednn for device in hardware.read_devices())
    assert found[ONEDNN].effective == ("on" if onednn else "off")
    if not tf.config.list_physical_devices("GPU"):
        assert found[CONV].effective == "no effect"
        assert found[AUTOTUNE].effective == "no effect"


# ---- TF32 through the modes ----


@pytest.mark.parametrize(
    ("mode", "requested", "effective"),
    [("float32", "off", "off"), ("tf32", "on", "on"), ("mixed_bfloat16", "on", "on")],
)
def test_modes_turn_tf32_on_and_off(monkeypatch, mode, requested, effective):
    monkeypatch.setattr(hardware, "read_devices", lambda: [A100, CPU])
    with tfamp.policy_scope("tf32" if mode == "float32" else "float32"):
        try:
            tfamp.enable(mode)
            (tf32,) = [s for s in kernel_switches.describe() if s.name == "TF32"]
            flag = tf.config.experimental.tensor_float_32_execution_enabled()
        finally:
            tfamp.disable()
    assert (tf32.requested, tf32.effective) == (requested, effective)
    assert flag == (requested == "on")


# ---- Setting ----


def in_force(switches):
    return {switch.name: switch.requested for switch in switches}


@pytest.fixture
def fresh(monkeypatch):
    """As before TensorFlow's runtime starts, and without the variables."""
    monkeypatch.setattr(kernel_switches, "_has_started", lambda: False)
    for name in kernel_switches.OWNED:
        monkeypatch.delenv(name, raising=False)


def test_scope_sets_and_restores_exactly(fresh, monkeypatch):
    monkeypatch.setenv(CONV, "7")
    before = dict(os.environ)
    with kernel_switches.scope(
        deterministic=True, cudnn_autotune=False, float16_accumulation="float16"
    ) as switches:
        assert config.is_op_determinism_enabled()
        assert os.environ[CONV] == os.environ[MATMUL] == os.environ[AUTOTUNE] == "0"
        assert os.environ[EIGEN] == "1"
        assert in_force(switches) == {
            "op determinism": "on",
            AUTOTUNE: "off",
            CONV: "off",
            MATMUL: "off",
            "TF_FP16_RNN_USE_FP32_COMPUTE": "off",
            EIGEN: "on",
        }
    assert dict(os.environ) == before
    assert not config.is_op_determinism_enabled()


def test_scope_restores_after_an_error_and_keeps_an_outer_setting(fresh):
    before = dict(os.environ)
    with kernel_switches.scope(deterministic=True, cudnn_autotune=False):
        inside = dict(os.environ)
        with pytest.raises(KeyError):
            with kernel_switches.scope(deterministic=False, cudnn_autotune=True):
                assert os.environ[AUTOTUNE] == "1"
                assert not config.is_op_determinism_enabled()
                raise KeyError
        assert dict(os.environ) == inside
        assert config.is_op_determinism_enabled()
    assert dict(os.environ) == before


def test_only_what_is_asked_for_changes(fresh):
    before = dict(os.environ)
    assert kernel_switches.configure() == []
    assert dict(os.environ) == before
    with kernel_switches.scope(cudnn_autotune=True) as switches:
        assert in_force(switches) == {AUTOTUNE: "on"}
        assert dict(os.environ) == {**before, AUTOTUNE: "1"}


def test_float32_accumulation_is_tensorflows_default(fresh):
    defaults = in_force(kernel_switches.describe())
    with kernel_switches.scope(float16_accumulation="float32") as switches:
        assert in_force(switches).items() <= defaults.items()


@pytest.mark.parametrize(
    ("arguments", "error", "phrases"),
    [
        (
            {"deterministic": 1, "cudnn_autotune": "no"},
            TypeError,
            ["deterministic=1", "cudnn_autotune='no'"],
        ),
        (
            {"deterministic": True, "float16_accumulation": "half"},
            ValueError,
            ["'half'", "'float16'"],
        ),
    ],
    ids=["types", "value"],
)
def test_bad_argument_changes_nothing(arguments, error, phrases):
    before = dict(os.environ)
    with pytest.raises(error) as caught:
        kernel_switches.configure(**arguments)
    assert all(phrase in str(caught.value) for phrase in phrases)
    assert dict(os.environ) == before
    assert not config.is_op_determinism_enabled()


def test_switch_that_may_come_too_late_is_warned_of_once(fresh, monkeypatch):
    monkeypatch.setattr(kernel_switches, "_has_started", lambda: True)
    monkeypatch.setattr(hardware, "read_devices", lambda: [A100, CPU])
    with pytest.warns(UserWarning) as caught:
        with kernel_switches.scope(float16_accumulation="float16"):
            pass
    (warning,) = caught
    for name in switch_table.ACCUMULATION:
        assert name in str(warning.message)
    # What stands already is no change; autotuning is read for each new kernel.
    with kernel_switches.scope(float16_accumulation="float32", cudnn_autotune=False):
        pass


def test_random_operations_need_a_seed_under_determinism():
    with kernel_switches.scope(deterministic=True):
        keras.utils.set_random_seed(1)
        assert tf.random.normal((2,)).shape == (2,)
        tf.random.set_seed(None)
        with pytest.raises(RuntimeError, match="seed"):
            tf.random.normal((2,))


def test_markdown_has_a_row_for_each_switch():
    switches = kernel_switches.describe()
    switches[0] = switches[0]._replace(reason="a | b")
    lines = kernel_switches.to_markdown(switches).splitlines()
    assert len(lines) == len(switches) + 2
    assert lines[0].startswith("| switch | set to | requested | effective |")
    assert r"a \| b" in lines[2]
    assert {line.replace(r"\|", "").count("|") for line in lines} == {7}


# ---- TensorFlow 2.21 ----


def test_tensorflow_reads_these_names_and_not_the_others():
    """The names are in its binaries; a name that it stopped reading is in none."""
    folder = pathlib.Path(tf.sysconfig.get_lib())
    libraries = [*folder.glob("libtensorflow_*.so*"), *folder.glob("python/*.so")]
    if not libraries:
        pytest.skip(f"no shared libraries in {folder}: another build of TensorFlow")
    gpu = tf.test.is_built_with_cuda()
    expected = {v.name for v in switch_table.VARIABLES if gpu or v.needs == "CPU"}
    expected |= {switch_table.DETERMINISTIC, *switch_table.XLA_FLAGS}
    wanted = {*expected, *switch_table.UNREAD}
    found = set()
    for library in libraries:
        with open(library, "rb") as file:
            tail = b""
            while block := file.read(1 << 26):
                text = tail + block
                found |= {name for name in wanted - found if name.encode() in text}
                tail = block[-100:]
    assert found == expected


_RUN = """
import os
import tensorflow as tf
from tensorflow.python.eager import context
from tfamp import kernel_switches
kernel_switches.describe()
print("STARTED", context.context()._initialized)
kernel_switches.configure(float16_accumulation="{dtype}")
x, kernel = tf.ones((1, 1, 1, 8192), "float16"), tf.fill((1, 1, 8192, 1), 0.1)
y = tf.nn.conv2d(x, tf.cast(kernel, "float16"), 1, "SAME")
print("SUM", float(y[0, 0, 0, 0]), context.context()._initialized)
"""


@pytest.fixture(scope="module")
def sums():
    """The same float16 convolution on the CPU, after `configure`, by accumulation."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    for name in kernel_switches.OWNED:
        environ.pop(name, None)
    runs = {
        dtype: subprocess.run(
            [sys.executable, "-c", _RUN.format(dtype=dtype)],
            capture_output=True,
            text=True,
            env=environ,
            timeout=300,
        )
        for dtype in ("float32", "float16")
    }
    for run in runs.values():
        assert run.returncode == 0, run.stderr
        assert "UserWarning" not in run.stderr
    return {dtype: run.stdout.split() for dtype, run in runs.items()}


def test_accumulation_of_a_cpu_convolution_follows_the_switch(sums):
    flags = next(d for d in hardware.read_devices() if d.kind == "CPU").cpu_flags
    if flags & {"avx512_fp16", "amx_fp16", "avx_ne_convert"}:
        pytest.skip("oneDNN computes float16 convolutions on this CPU, not Eigen")
    exact = 8192 * tfamp.formats.represent(0.1, "float16").stored
    errors = {k: abs(float(words[3]) - exact) / exact for k, words in sums.items()}
    epsilon = tfamp.float_format("float16").epsilon
    assert errors["float32"] <= epsilon / 2  # One rounding, at the end.
    assert errors["float16"] > 4 * epsilon


def test_describing_does_not_start_tensorflow(sums):
    for words in sums.values():
        assert words[:2] == ["STARTED", "False"]
        assert words[4] == "True"  # The private name means what is read from it.


def test_xla_takes_the_tf32_flag_when_it_compiles():
    product = tf.function(lambda x: tf.matmul(x, x), jit_compile=True)
    x = tf.ones((4, 4))
    precisions = {}
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        for flag in (True, False):
            tf.config.experimental.enable_tensor_float_32_execution(flag)
            text = product.experimental_get_compiler_ir(x)(stage="hlo")
            precisions[flag] = "operand_precision={highest,highest}" in text
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    assert precisions == {True: False, False: True}
