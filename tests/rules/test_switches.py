"""Kernel switches: requested and effective, set, and restored exactly."""

import mmap
import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import graph_context, hardware, switches

A100 = hardware.DEVICES["a100"]
AMD = hardware.DeviceDescription("GPU", "AMD Instinct")
CPU = hardware.DEVICES["cpu-avx2"]
AUTOTUNE, CONV, MATMUL, RNN, EIGEN = switches.VARIABLES
FLIPPED = {CONV: "0", MATMUL: "0", RNN: "0", EIGEN: "1"}
_read_devices = hardware.read_devices


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As before TensorFlow's runtime starts, and without the variables."""
    monkeypatch.setattr(graph_context, "has_started", lambda: False)
    monkeypatch.setattr(hardware, "read_devices", lambda: [A100, CPU])
    for name in switches.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    left = graph_context.deterministic()
    switches._set_determinism(False)
    assert not left, "The test left op determinism on."


def find(name):
    (switch,) = [each for each in switches.describe() if each.name == name]
    return switch


@pytest.mark.parametrize(
    ("name", "text", "host", "requested", "effective", "phrase"),
    [
        (CONV, None, {}, "1", "1", ""),
        (CONV, "0", {}, "0", "0", ""),
        (EIGEN, None, {}, "0", "0", ""),
        (CONV, "0", {"devices": [CPU]}, "0", "no effect", "no NVIDIA GPU"),
        (CONV, "0", {"devices": [AMD]}, "0", "no effect", "no NVIDIA GPU"),
        (
            CONV,
            "1",
            {"started": True},
            "1",
            "1 if set before it was read",
            "has started",
        ),
        (CONV, None, {"started": True}, "1", "1", ""),
        (AUTOTUNE, "0", {"started": True}, "0", "0", ""),
        (switches.GROWTH, "true", {}, "true", "true", ""),
        (switches.GROWTH, "true", {"devices": [CPU]}, "true", "no effect", "no NVIDIA"),
        (AUTOTUNE, None, {"deterministic": True}, "1", "0", "op determinism"),
        (switches.DETERMINISM, None, {"deterministic": True}, "1", "1", ""),
    ],
)
def test_requested_effective_and_why(
    monkeypatch, name, text, host, requested, effective, phrase
):
    if text is not None:
        monkeypatch.setenv(name, text)
    devices = host.get("devices", [A100, CPU])
    monkeypatch.setattr(hardware, "read_devices", lambda: devices)
    monkeypatch.setattr(graph_context, "has_started", lambda: "started" in host)
    with switches.scope(deterministic="deterministic" in host):
        found = find(name)
    assert found[:3] == (name, requested, effective)
    assert phrase in found.reason


def test_scopes_set_and_restore_exactly_also_after_an_error(monkeypatch):
    monkeypatch.setenv(CONV, "7")
    before = dict(os.environ)
    with switches.scope(deterministic=True, cudnn_autotune=False):
        inside = dict(os.environ)
        assert inside == {**before, AUTOTUNE: "0"}  # Nothing that was not asked for.
        with pytest.raises(KeyError):
            with switches.scope(
                deterministic=False, cudnn_autotune=True, float16_accumulation="float16"
            ):
                assert dict(os.environ) == {**before, AUTOTUNE: "1", **FLIPPED}
                assert not graph_context.deterministic()
                raise KeyError
        assert dict(os.environ) == inside
        assert graph_context.deterministic()
    assert dict(os.environ) == before
    assert not graph_context.deterministic()


def test_switch_that_may_come_too_late_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(graph_context, "has_started", lambda: True)
    with pytest.warns(UserWarning) as caught:
        with switches.scope(float16_accumulation="float16"):
            pass
    (warning,) = caught
    assert all(name in str(warning.message) for name in FLIPPED)
    # What stands already is no change; autotuning is read for each new kernel.
    with switches.scope(float16_accumulation="float32", cudnn_autotune=False):
        pass


def test_random_operations_need_a_seed_under_determinism():
    with switches.scope(deterministic=True):
        keras.utils.set_random_seed(1)
        assert tf.random.normal((2,)).shape == (2,)
        tf.random.set_seed(None)
        with pytest.raises(RuntimeError, match="seed"):
            tf.random.normal((2,))


def test_tensorflow_reads_these_names():
    """They are in its binaries."""
    folder = pathlib.Path(tf.sysconfig.get_lib())
    libraries = [*folder.glob("libtensorflow_*.so*"), *folder.glob("python/*.so")]
    if not libraries:
        pytest.skip(f"no shared libraries in {folder}: another build of TensorFlow")
    wanted = set(switches.VARIABLES if tf.test.is_built_with_cuda() else [EIGEN])
    found = set()
    for library in libraries:
        with library.open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found |= {x for x in wanted - found if text.find(x.encode()) >= 0}
    assert found == wanted


_RUN = """
import tensorflow as tf
from tfamp.facts import graph_context, hardware
from tfamp.facts import switches
switches.describe()
onednn = hardware.read_devices()[0].onednn
print(graph_context.has_started(), onednn)
with switches.scope(float16_accumulation="float16"):
    x, kernel = tf.ones((1, 1, 1, 8192), "float16"), tf.fill((1, 1, 8192, 1), 0.1)
    y = tf.nn.conv2d(x, tf.cast(kernel, "float16"), 1, "SAME")
print(graph_context.has_started(), float(y[0, 0, 0, 0]))
"""


def test_in_a_process_of_its_own_a_switch_is_in_time():
    """Describing starts nothing; a convolution on the CPU adds up as it is asked."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _RUN]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=300
    )
    assert run.returncode == 0, run.stderr
    before, onednn, after, total = run.stdout.split()
    assert (before, onednn, after) == ("False", "False", "True")
    flags = set().union(*(each.cpu_flags for each in _read_devices()))
    if flags & {"avx512_fp16", "amx_fp16", "avx_ne_convert"}:
        pytest.skip("oneDNN computes float16 convolutions on this CPU, not Eigen")
    exact = 8192 * tfamp.represent(0.1, "float16").stored
    epsilon = tfamp.float_format("float16").epsilon
    assert abs(float(total) / exact - 1) > 4 * epsilon
    # In this process TensorFlow has its default, which rounds once, at the end.
    x, kernel = tf.ones((1, 1, 1, 8192), "float16"), tf.fill((1, 1, 8192, 1), 0.1)
    with tf.device("CPU"):
        y = tf.nn.conv2d(x, tf.cast(kernel, "float16"), 1, "SAME")
    assert abs(float(y[0, 0, 0, 0]) / exact - 1) <= epsilon / 2
