"""Whether a build of TensorFlow has a GPU's code, and what is said of the driver."""

import sys
import types

import pytest
import tensorflow as tf

import tfamp
from tfamp.diagnostics import doctor
from tfamp.facts import builds, hardware

# What the wheels of TensorFlow 2.19 to 2.21 record.
WHEEL = builds.Build(
    True, "12.5.1", "9", ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90")
)
NEWER = WHEEL._replace(cuda="12.9", capabilities=("sm_80", "sm_100", "sm_120a"))
ONLY_CODE = WHEEL._replace(capabilities=("sm_80", "sm_90"))
OLD = WHEEL._replace(capabilities=("sm_80",))


@pytest.mark.issue("tensorflow#89272", "tensorflow#90291", "tensorflow#60739")
@pytest.mark.parametrize(
    ("device", "build", "words"),
    [
        *((name, WHEEL, []) for name in ("p100", "v100", "t4", "a100", "a10", "l4")),
        *((name, WHEEL, []) for name in ("rtx4090", "h100", "h200")),
        *((name, WHEEL, ["PTX", "minutes"]) for name in ("b200", "b300", "rtx5090")),
        ("rtx5090", WHEEL, ["12.0", "CUDA 12.5.1", "sm_89", "sm_120"]),
        ("rtx5090", WHEEL, ["TF_CUDA_COMPUTE_CAPABILITIES=12.0"]),
        ("rtx5090", ONLY_CODE, ["do not run"]),
        ("h100", OLD, ["9.0", "do not run"]),
        ("v100", OLD, ["7.0", "do not run"]),  # No code for what is older.
        *((name, NEWER, []) for name in ("b200", "b300", "rtx5090", "gb10")),
        *((name, NEWER, ["source"]) for name in ("jetson-orin", "jetson-thor")),
        ("h100", builds.Build(False), ["without CUDA", "tensorflow[and-cuda]"]),
        ("rtx5090", builds.Build(True), []),  # 2.22.0rc0 does not record them.
    ],
)
def test_code_for_a_gpu_is_found_in_a_build(device, build, words, monkeypatch):
    monkeypatch.setattr(builds, "read_build", lambda: build)
    said = builds.missing_code(hardware.DEVICES[device].compute_capability)
    assert [word for word in words if word not in said] == []
    assert bool(said) == bool(words)


def test_a_gpu_without_code_is_reported_before_training(monkeypatch):
    monkeypatch.setattr(builds, "read_build", lambda: WHEEL)
    cpu = hardware.read_devices()[0]
    here = [cpu, hardware.DEVICES["rtx5090"]]
    monkeypatch.setattr(hardware, "read_devices", lambda: here)
    with pytest.warns(UserWarning, match="no code for compute capability 12.0"):
        tfamp.enable("float32")
    assert "no code for compute capability 12.0" in tfamp.status().versions
    support = tfamp.detect_support()[here[1].label]
    assert "no code for compute capability 12.0" in support["float32"].reason
    tfamp.disable()


class Error(Exception):
    """Stands in for NVML's."""


def driver(cuda=12080, count=1, free=70, mode=0, mig=(0, 0), fails=False):
    """Stands in for NVIDIA's library where there is no driver."""

    def answer(value):
        return lambda *handle: value

    def fail(*handle):
        raise Error("Driver Not Loaded")

    return types.SimpleNamespace(
        NVMLError=Error,
        nvmlInit=fail if fails else answer(None),
        nvmlShutdown=answer(None),
        nvmlSystemGetDriverVersion=answer("570.86"),
        nvmlSystemGetCudaDriverVersion_v2=answer(cuda),
        nvmlDeviceGetCount=answer(count),
        nvmlDeviceGetHandleByIndex=answer(None),
        nvmlDeviceGetName=answer("NVIDIA A100"),
        nvmlDeviceGetMemoryInfo=answer(
            types.SimpleNamespace(free=free << 30, total=80 << 30)
        ),
        nvmlDeviceGetComputeMode=answer(mode),
        nvmlDeviceGetMigMode=fail if mig is None else answer(mig),
        NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3,
        NVML_COMPUTEMODE_PROHIBITED=2,
        NVML_DEVICE_MIG_ENABLE=1,
    )


HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}
CUDA_LESS = builds.Build(False)


@pytest.mark.parametrize(
    ("given", "build", "environ", "row", "words"),
    [
        (driver(fails=True), WHEEL, {}, "NVIDIA driver", ["Driver Not Loaded"]),
        (None, WHEEL, {}, "NVIDIA driver", ["nvidia-ml-py"]),
        (driver(), WHEEL, {}, "NVIDIA driver", ["570.86", "CUDA 12.8"]),
        (driver(11040), WHEEL, {}, "NVIDIA driver", ["11.4", "too old", "12.5.1"]),
        (driver(), WHEEL, HIDDEN, "GPUs", ["CUDA_VISIBLE_DEVICES='-1'"]),
        (driver(), CUDA_LESS, {}, "GPUs", ["without CUDA"]),
        (driver(), WHEEL, {}, "GPUs", ["libraries", "tensorflow[and-cuda]"]),
        (driver(), WHEEL, {}, "GPU 0", ["NVIDIA A100", "70.0 of 80.0 GiB"]),
        (driver(free=1), WHEEL, {}, "GPU 0", ["out of memory"]),
        (driver(mode=3), WHEEL, {}, "GPU 0", ["exclusive"]),
        (driver(mode=2), WHEEL, {}, "GPU 0", ["prohibited"]),
        (driver(mig=(1, 1)), WHEEL, {}, "GPU 0", ["MIG", "UUID"]),
        (driver(mig=None), WHEEL, {}, "GPU 0", ["NVIDIA A100"]),
    ],
)
def test_what_the_driver_reports(given, build, environ, row, words, monkeypatch):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees a GPU here")
    monkeypatch.setitem(sys.modules, "pynvml", given)
    monkeypatch.setattr(builds, "read_build", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    said = doctor.describe().facts[row]
    assert [word for word in words if word not in said] == []
