"""Which precision a device runs, and has units of its own for, each with its reason.

Functions of a `DeviceDescription`: one of this host (`read_devices`), or of the table
`DEVICES`. The reason of float32 also says whether the installed TensorFlow has a GPU's
code (`builds`).
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfamp.facts import builds, names
from tfamp.facts.devices import DEVICES as DEVICES
from tfamp.facts.devices import DeviceDescription, dotted, named

FP16_TENSOR_CORES = (7, 0)  # NVIDIA Volta; Keras 2's compatibility check, too.
BF16_TENSOR_CORES = (8, 0)  # NVIDIA Ampere, which also brought TF32.
FP8_TENSOR_CORES = (8, 9)  # NVIDIA Ada; XLA's GEMM rewriter uses them.
FP4_TENSOR_CORES = (10, 0)  # NVIDIA Blackwell.
FAST_BF16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")

# Turing chips TU116 and TU117 report capability 7.5 but have no tensor cores:
# mixed_float16 was measured 4 times slower there (tensorflow/tensorflow#44191).
_NO_TENSOR_CORES = re.compile(
    r"\bGTX 16\d\d|\bMX(450|550)\b|\bT(400|500|550|600|1000|1200|2000)\b"
)


_simulated: "list[DeviceDescription]" = []


class PrecisionSupport(NamedTuple):
    """Whether a format runs on a device, and why.

    `fast` says that the device has units for it (tensor cores, instructions), not that
    a model was measured to train faster.
    """

    format: str
    supported: bool
    fast: bool
    reason: str


class Decision(NamedTuple):
    """The chosen mode's name, and the reason."""

    mode: str
    reason: str


def find_device(device: str | DeviceDescription | None = None) -> DeviceDescription:
    """Returns the device that a question is about.

    Args:
      device: None for this host's training device (its first accelerator, else its
        CPU); a key of `DEVICES`, e.g. "a100"; or a description, which is returned.

    Raises:
      ValueError: If it is none of these.
    """
    if device is None:
        return training_devices(read_devices())[0]
    if isinstance(device, DeviceDescription):
        return device
    return named(device)


def describe_support(device: DeviceDescription) -> dict[str, PrecisionSupport]:
    """Returns the support of every format on a device, by the format's name.

    References:
      NVIDIA, "Train With Mixed Precision" (tensor cores: float16 from 7.0,
      bfloat16 and TF32 from 8.0),
      https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/
      Measured on an AMD EPYC with AVX512_BF16:
      mixed_bfloat16 1.3 to 1.7 times faster than float32, mixed_float16 up to 9
      times slower; without native bfloat16 0.4 times.
    """
    rules = {"GPU": _gpu_support, "CPU": _cpu_support, "TPU": _tpu_support}
    lacks = device.compute_capability and builds.missing_code(device.compute_capability)
    rows = {
        "float32": (True, False, lacks or "always available"),
        "tf32": (False, False, "TF32 needs an NVIDIA GPU of capability 8.0 or more"),
        "float8": (
            True,
            False,
            "float8 is emulated: values are rounded to it, and computed in 16 bits",
        ),
        **rules[device.kind](device),
    }
    return {name: PrecisionSupport(name, *row) for name, row in rows.items()}


def _gpu_support(device):
    capability = device.compute_capability
    if capability is None:
        unknown = "the compute capability is unknown, so tensor cores are, too"
        return dict.fromkeys(("float16", "bfloat16"), (True, False, unknown))
    volta, ampere = FP16_TENSOR_CORES, BF16_TENSOR_CORES
    float16 = _cores(
        capability, volta, "it has float16 tensor cores", "no tensor cores"
    )
    bfloat16 = _cores(
        capability, ampere, "it has bfloat16 tensor cores", "bfloat16 is emulated"
    )
    tf32 = _cores(capability, ampere, "it has TF32 tensor cores", "no TF32")
    if _NO_TENSOR_CORES.search(device.name):
        despite = f"despite {dotted(capability)}"
        float16 = False, f"{device.name} has no tensor cores {despite}"
    rows = {
        "float16": (True, *float16),
        "bfloat16": (True, *bfloat16),
        "tf32": (tf32[0], *tf32),
    }
    if capability >= FP8_TENSOR_CORES:
        only = "it has float8 tensor cores, for products of XLA (jit_compile=True)"
        rows["float8"] = True, True, only
    if capability >= FP4_TENSOR_CORES:
        rows["float4"] = False, False, "TensorFlow does not use FP4 tensor cores"
    return rows


def _cores(capability, least, fast, slow):
    """Returns whether a GPU has the tensor cores of some capability, and why."""
    has = capability >= least
    compared = f"{dotted(capability)} {'>=' if has else '<'} {dotted(least)}"
    return has, f"{fast if has else slow} (capability {compared})"


def _cpu_support(device):
    native = ", ".join(f for f in FAST_BF16_CPU_FLAGS if f in device.cpu_flags)
    is_slow = _lacks_amx(device)
    if not native:
        why = "no native bfloat16 (avx512_bf16 or amx_bf16)"
    elif is_slow:
        why = (
            "bfloat16 without AMX is slower than float32 on this CPU (AMX is absent, "
            "or hidden by a virtual machine)"
        )
    elif device.onednn:
        why = f"native bfloat16 ({native}) through oneDNN"
    else:
        why = (
            f"the CPU has {native}, but oneDNN is off "
            "(set TF_ENABLE_ONEDNN_OPTS=1 before start)"
        )
    return {
        "bfloat16": (True, bool(native) and device.onednn and not is_slow, why),
        "float16": (
            True,
            False,
            "float16 on a CPU is 9 (AMD EPYC) to 45 (Intel) times slower",
        ),
    }


def _lacks_amx(device):
    """Whether an Intel CPU of the cores that have AVX512_FP16 shows no AMX.

    Its AVX512_BF16 alone has half of float32's rate: measured on a Xeon, 67 to 90
    GFLOPS for 120 to 155 in float32 (products of 512 to 4096 rows, 3x3 convolutions); a
    step of BERT took 1.2 times float32's.
    """
    flags = device.cpu_flags
    is_intel = "intel" in device.name.lower()
    return is_intel and "avx512_fp16" in flags and "amx_bf16" not in flags


def _tpu_support(device):
    return {
        "bfloat16": (True, True, "TPU matrix units compute in bfloat16"),
        "float16": (False, False, "TPUs have no float16; use mixed_bfloat16"),
    }


def choose_mode(devices: Sequence[DeviceDescription]) -> Decision:
    """Returns the 16-bit mode that all training devices have units for, else float32.

    bfloat16 comes first, because its exponent is float32's and
    it needs no loss scaling; then float16; then float32.
    """
    each = [format_support(name, devices) for name in ("bfloat16", "float16")]
    for support in each:
        if support.fast:
            return Decision(f"mixed_{support.format}", support.reason)
    reasons = dict.fromkeys(support.reason for support in each)
    return Decision("float32", "; ".join(reasons))


def format_support(name: str, devices: Sequence[DeviceDescription]) -> PrecisionSupport:
    """Returns a format's support on that training device which supports it least."""
    devices = training_devices(devices)
    if not devices:
        return PrecisionSupport(name, name == "float32", False, "no device was found")
    each = [describe_support(device)[name] for device in devices]
    return min(each, key=lambda support: (support.supported, support.fast))


def missing_code(devices: Sequence[DeviceDescription]) -> list[str]:
    """Returns a sentence for each GPU that TensorFlow was not built for."""
    gpus = [d for d in dict.fromkeys(devices) if d.compute_capability]
    lacks = {d.label: builds.missing_code(d.compute_capability) for d in gpus}
    return [f"{label}: {what}" for label, what in lacks.items() if what]


def training_devices(devices: Sequence[DeviceDescription]) -> list[DeviceDescription]:
    """Returns a host's accelerators if it has any, else its CPU."""
    return [d for d in devices if d.kind != "CPU"] or list(devices)


def device_label(devices: Sequence[DeviceDescription]) -> str:
    """Returns the training devices' names as one phrase, "none" without any."""
    names = [device.label for device in training_devices(devices)]
    counts = {name: names.count(name) for name in names}
    parts = [name if n == 1 else f"{n} x {name}" for name, n in counts.items()]
    return ", ".join(parts) or "none"


@contextlib.contextmanager
def simulated(device: DeviceDescription) -> Iterator[None]:
    """Scopes another device in place of this host's, wherever a device decides."""
    _simulated.append(device)
    try:
        yield
    finally:
        _simulated.pop()


def simulated_device() -> DeviceDescription | None:
    """Returns the device that `simulated` puts in place of this host's; else None."""
    return _simulated[-1] if _simulated else None


def read_devices() -> list[DeviceDescription]:
    """Describes this process' visible devices, the CPU first, without starting them."""
    if _simulated:
        return _simulated[-1:]
    visible = tf.config.get_visible_devices
    devices = [_read_cpu() for _ in visible("CPU")[:1]]
    for gpu in visible("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "")
        capability = details.get("compute_capability")
        devices.append(DeviceDescription("GPU", name, capability))
    return devices + [DeviceDescription("TPU") for _ in visible("TPU")]


def detect_support() -> dict[str, dict[str, PrecisionSupport]]:
    """Returns what each of this host's devices supports, with reasons.

    Returns:
      Dict from a device's label to a dict from format name to `PrecisionSupport`.
    """
    return {device.label: describe_support(device) for device in read_devices()}


def _read_cpu():
    info = pathlib.Path("/proc/cpuinfo")  # Linux only; elsewhere no flag is known.
    text = info.read_text().split("\n\n")[0] if info.exists() else ""
    fields = dict(re.findall(r"^(\S.*?)\s*:\s*(.*?)\s*$", text, re.MULTILINE))
    flags = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name", "CPU")
    return DeviceDescription("CPU", name, None, frozenset(flags), _onednn_is_on())


def _onednn_is_on():
    ask = names.resolve("tensorflow.python.util._pywrap_util_port:IsMklEnabled")
    return bool(ask()) if ask else os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") != "0"
