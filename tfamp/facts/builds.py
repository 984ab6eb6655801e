"""What the installed TensorFlow was built for, and what NVIDIA's driver reports.

TensorFlow's wheels contain GPU code for some compute capabilities. A newer GPU compiles
its kernels from PTX when they are first used, which takes minutes or fails.
"""

import ctypes
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.facts import devices

# NVIDIA Jetson: a desktop GPU's code does not run there.
# https://developer.nvidia.com/cuda-gpus and the CUDA programming guide's chapter on
# binary compatibility.
_JETSON = ((7, 2), (8, 7), (11, 0))
_AND_CUDA = 'pip install "tensorflow[and-cuda]"'
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY = (75, 76)
_ROOTS = ("/usr/local/cuda", "/opt/cuda")
_NVCC = "nvidia-cuda-nvcc-cu12>=12.9"  # The wheel of a ptxas without the defect below.
_NVCC_FOLDER = str(pathlib.Path(tf.__file__).parents[1] / "nvidia" / "cuda_nvcc")
_FULL = 0.1  # Share of a GPU's memory below which little can be trained.


class Build(NamedTuple):
    """What a wheel of TensorFlow was built for.

    Attributes:
      is_cuda: Whether it was built for CUDA.
      cuda: Release of CUDA, as "12.5.1"; empty if the wheel does not record it.
      cudnn: Release of cuDNN, the same.
      capabilities: "sm_80" for code of compute capability 8.0, "compute_90" for code
        and PTX of 9.0; empty if the wheel does not record them (2.22.0rc0).
    """

    is_cuda: bool
    cuda: str = ""
    cudnn: str = ""
    capabilities: tuple[str, ...] = ()

    def __str__(self):
        if not self.is_cuda:
            return "no CUDA"
        code = ", ".join(self.capabilities) or "compute capabilities not recorded"
        return f"CUDA {self.cuda or '?'}, cuDNN {self.cudnn or '?'}, {code}"


def read_build() -> Build:
    """Returns what the installed TensorFlow was built for."""
    build_info = tf.sysconfig.get_build_info()
    return Build(
        bool(build_info.get("is_cuda_build")),
        str(build_info.get("cuda_version", "")),
        str(build_info.get("cudnn_version", "")),
        tuple(build_info.get("cuda_compute_capabilities", ())),
    )


def missing_code(capability: tuple[int, int]) -> str:
    """Returns what a GPU lacks in the installed TensorFlow, and what to do.

    Args:
      capability: The GPU's compute capability.

    Returns:
      A sentence; empty if the code is there, or the wheel does not record it.

    References:
      tensorflow/tensorflow#89272, #90291 and #111958 (Blackwell).
    """
    build = read_build()
    if not build.is_cuda:
        return f"this TensorFlow was built without CUDA: {_AND_CUDA}"
    code = [_numbers(name) for name in build.capabilities]
    # Code of 8.0 runs on 8.6 and 8.9, not on 7.5 or 9.0.
    runs = [x for x in code if x[0] == capability[0] and x <= capability]
    jetson = capability in _JETSON
    if not code or (capability in code if jetson else runs):
        return ""
    here = ".".join(map(str, capability))
    built = f"this TensorFlow has no code for compute capability {here} ({build})"
    if jetson:
        return (
            f"{built}: build it from source on the device, since PyPI's wheel does "
            "not run"
        )
    ptx = [_numbers(x) for x in build.capabilities if x.startswith("compute_")]
    what = (
        "each kernel is compiled from PTX at first use: takes minutes, or fails"
        if any(x < capability for x in ptx)
        else "its kernels do not run"
    )
    return (
        f"{built}: {what}. Install a TensorFlow whose "
        f"tf.sysconfig.get_build_info() lists sm_{here.replace('.', '')}, or build one "
        f"from source with TF_CUDA_COMPUTE_CAPABILITIES={here}"
    )


def _numbers(name):
    """(8, 9) of "sm_89", (12, 0) of "compute_120"."""
    digits = name.rpartition("_")[2].rstrip("af")
    return int(digits[:-1]), int(digits[-1])


# ---- What the driver reports ----


def read_gpus() -> list[devices.DeviceDescription]:
    """Returns the GPUs that TensorFlow would use; it is not asked, and reads no flags.

    The driver respects CUDA_VISIBLE_DEVICES.
    """
    if not read_build().is_cuda:
        return []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return []
    gpus = []
    for each in range(number.value):
        device = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), each)
        cuda.cuDeviceGetName(name, len(name), device)
        version = [ctypes.c_int(), ctypes.c_int()]
        for what, part in zip(_CAPABILITY, version, strict=True):
            cuda.cuDeviceGetAttribute(ctypes.byref(part), what, device)
        major, minor = (part.value for part in version)
        label = name.value.decode(errors="replace")
        gpus.append(devices.DeviceDescription("GPU", label, (major, minor)))
    return gpus


def driver_release() -> str:
    """Returns the release of NVIDIA's driver, as "580.95.05"; "" if it is unknown."""
    release = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if not nvml.nvmlInit_v2():
        nvml.nvmlSystemGetDriverVersion(release, len(release))
        nvml.nvmlShutdown()
    return release.value.decode(errors="replace")


def describe_driver() -> dict[str, str]:
    """Returns what NVIDIA's driver reports, by NVML; `nvidia-smi` is not needed.

    Returns:
      {what: a sentence}: the driver's, and one for each GPU, each with what to do
      where TensorFlow cannot use it.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return {"NVIDIA driver": "unknown: pip install nvidia-ml-py"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"NVIDIA driver": f"none in use ({error})"}
    try:
        return dict(_driver_rows(nvml, read_build()))
    finally:
        nvml.nvmlShutdown()


def _driver_rows(nvml, build) -> Iterator[tuple[str, str]]:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 of CUDA 12.8.
    cuda = version // 1000, version % 1000 // 10
    text = f"{nvml.nvmlSystemGetDriverVersion()}, for CUDA {cuda[0]}.{cuda[1]} or older"
    needed = int(build.cuda.partition(".")[0] or 0)
    if cuda[0] < needed:
        text += (
            f": too old for TensorFlow's CUDA {build.cuda}. Update the driver to one "
            f"for CUDA {needed}"
        )
    yield "NVIDIA driver", text
    count = nvml.nvmlDeviceGetCount()
    if count and not tf.config.list_physical_devices("GPU"):
        yield "GPUs", f"{count}, of which TensorFlow sees none: {_hidden(build)}"
    for number in range(count):
        yield (
            f"GPU {number}",
            _describe_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(number)),
        )


def _hidden(build):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not build.is_cuda:
        return f"TensorFlow was built without CUDA: {_AND_CUDA}"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides them"
    return f"its CUDA libraries were not found: {_AND_CUDA}"


def _describe_gpu(nvml, handle):
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    parts = [
        nvml.nvmlDeviceGetName(handle),
        f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
    ]
    if memory.free < _FULL * memory.total:
        parts[-1] += ": other processes fill it, and training will run out of memory"
    exclusive = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "one process at a time may use it "
        "(exclusive mode): a second one fails with CUDA_ERROR_DEVICE_UNAVAILABLE",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "no process may compute on it (prohibited "
        "mode): nvidia-smi --compute-mode=DEFAULT",
    }
    mode = _or_none(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    parts += [exclusive[mode]] if mode in exclusive else []
    mig = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mig and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        parts.append(
            "MIG is on: a process sees one slice, which CUDA_VISIBLE_DEVICES names by "
            "its UUID"
        )
    return "; ".join(parts)


def _or_none(nvml, ask: Callable, handle) -> Any:
    """None where a GPU knows nothing of it: MIG before Ampere."""
    try:
        return ask(handle)
    except nvml.NVMLError:
        return None


# ---- The assembler of GPU code ----


def find_ptxas() -> tuple[str, tuple[int, ...]] | None:
    """Returns the file of the ptxas that XLA runs, and its version, as (12, 9, 86).

    None if it finds none.
    The first of these that can be used: of --xla_gpu_cuda_data_dir in XLA_FLAGS, of
    PATH, of CUDA's usual folders, of NVIDIA's wheel, of the environment (conda).

    References:
      XLA, `stream_executor/cuda/subprocess_compilation.cc`, `tsl/platform/default/
      cuda_root_path.cc`.
    """
    data_dirs = re.findall(
        r"xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", "")
    )
    folders = (
        *[os.path.join(root, "bin") for root in data_dirs[-1:]],
        *os.environ.get("PATH", "").split(os.pathsep),
        *[os.path.join(root, "bin") for root in (*_ROOTS, _NVCC_FOLDER, sys.prefix)],
    )
    for folder in folders:
        file = shutil.which("ptxas", path=folder) if folder else None
        version = _version(file) if file else ()
        if file and version >= (11, 8) and version != (12, 3, 103):
            return file, version
    return None


@functools.cache
def _version(file):
    """Of "Cuda compilation tools, release 12.9, V12.9.86"; () if it cannot be run."""
    try:
        output = subprocess.run(
            [file, "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()


def describe_ptxas(capability: tuple[int, int]) -> str:
    """Returns which ptxas XLA runs for a GPU, and what to do if it has a known defect.

    References:
      NVIDIA's bug 4826023, openxla/xla#19927.
    """
    if (found := find_ptxas()) is None:
        return f'not found, and XLA needs it: pip install "{_NVCC}"'
    file, version = found
    text = f"{'.'.join(map(str, version))} ({file})"
    if capability < (9, 0) or not (12, 0) <= version < (12, 6, 85):
        return text
    text += (
        ": from 12.0 to 12.6.84 it compiles some limits (clamp, min, max) wrongly for "
        f'capability 9.0 and more (nvbug 4826023): pip install "{_NVCC}"'
    )
    if not file.startswith(_NVCC_FOLDER):
        text += (
            f" and set XLA_FLAGS=--xla_gpu_cuda_data_dir={_NVCC_FOLDER}, which comes "
            "first"
        )
    return text
