"""Which precision runs, and which runs fast, on a device, each with its reason.

The decisions are pure functions of a `DeviceDescription`; only `read_devices`
asks TensorFlow and the operating system.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

FP16_TENSOR_CORES = (7, 0)  # NVIDIA Volta; Keras 2's compatibility check, too.
BF16_TENSOR_CORES = (8, 0)  # NVIDIA Ampere, which also brought TF32.
FAST_BF16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")

# Turing chips TU116 and TU117 report capability 7.5 but have no tensor cores:
# mixed_float16 was measured 4 times slower there (tensorflow/tensorflow#44191).
_NO_TENSOR_CORES = re.compile(
    r"\bGTX 16\d\d|\bMX(450|550)\b|\bT(400|500|550|600|1000|1200|2000)\b"
)


class DeviceDescription(NamedTuple):
    """What the decision needs to know of a device.

    Attributes:
      kind: "CPU", "GPU" or "TPU".
      name: Product name where known, e.g. "NVIDIA A100-SXM4-40GB".
      compute_capability: CUDA compute capability, (major, minor); None if the
        device is not a CUDA GPU.
      cpu_flags: Instruction set flags of a CPU, in lower case.
      onednn: Whether TensorFlow's oneDNN kernels are on (CPU only).
    """

    kind: str
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()
    onednn: bool = False

    @property
    def label(self) -> str:
        """A short name for messages."""
        name = self.name or self.kind
        if self.compute_capability is None:
            return name
        major, minor = self.compute_capability
        return f"{name} (compute capability {major}.{minor})"


class PrecisionSupport(NamedTuple):
    """Whether one format runs on one device.

    Attributes:
      format: "float32", "tf32", "bfloat16" or "float16".
      supported: Whether it runs at all.
      fast: Whether it is expected to be faster than float32.
      reason: Why, in one phrase.
    """

    format: str
    supported: bool
    fast: bool
    reason: str


class Decision(NamedTuple):
    """The chosen mode's name, the device it was chosen for, and the reason."""

    mode: str
    device: str
    reason: str


def describe_support(device: DeviceDescription) -> dict[str, PrecisionSupport]:
    """Returns the support of every format on a device; a pure function.

    Args:
      device: A `DeviceDescription`.

    Returns:
      Dict from format name to `PrecisionSupport`.

    Raises:
      ValueError: If the device's kind is unknown.

    References:
      NVIDIA, "Train With Mixed Precision" (tensor cores: float16 from 7.0,
      bfloat16 and TF32 from 8.0). Measured on an AMD EPYC with AVX512_BF16:
      mixed_bfloat16 1.3 to 1.7 times faster than float32, mixed_float16 up to 9
      times slower; without native bfloat16 0.4 times.
    """
    rules = {"GPU": _gpu_support, "CPU": _cpu_support, "TPU": _tpu_support}
    if device.kind not in rules:
        raise ValueError(
            f"Unknown device kind. Received: kind={device.kind!r}. "
            f"Expected one of {', '.join(rules)}."
        )
    rows = [("float32", True, False, "always available"), *rules[device.kind](device)]
    return {row[0]: PrecisionSupport(*row) for row in rows}


def _gpu_support(device):
    capability = device.compute_capability
    if capability is None:
        unknown = "the compute capability is unknown, so no speed-up is expected"
        return [
            ("float16", True, False, unknown),
            ("bfloat16", True, False, unknown),
            ("tf32", False, False, "TF32 needs an NVIDIA GPU"),
        ]
    version = f"{capability[0]}.{capability[1]}"
    ampere = capability >= BF16_TENSOR_CORES
    bare = _NO_TENSOR_CORES.search(device.name) is not None
    if bare:
        float16 = (False, f"{device.name} has no tensor cores despite {version}")
    elif capability >= FP16_TENSOR_CORES:
        float16 = (True, f"float16 tensor cores (capability {version} >= 7.0)")
    else:
        float16 = (False, f"no tensor cores (capability {version} < 7.0)")
    if ampere:
        bfloat16 = (True, f"bfloat16 tensor cores (capability {version} >= 8.0)")
        tf32 = (True, True, f"TF32 tensor cores (capability {version} >= 8.0)")
    else:
        bfloat16 = (False, f"bfloat16 is emulated (capability {version} < 8.0)")
        tf32 = (False, False, f"no TF32 (capability {version} < 8.0)")
    return [
        ("float16", True, *float16),
        ("bfloat16", True, *bfloat16),
        ("tf32", *tf32),
    ]


def _cpu_support(device):
    native = [flag for flag in FAST_BF16_CPU_FLAGS if flag in device.cpu_flags]
    if native and device.onednn:
        bfloat16 = (True, f"native bfloat16 ({', '.join(native)}) through oneDNN")
    elif native:
        bfloat16 = (
            False,
            f"the CPU has {', '.join(native)}, but oneDNN is off "
            "(set TF_ENABLE_ONEDNN_OPTS=1 before start)",
        )
    else:
        bfloat16 = (False, "no native bfloat16 (avx512_bf16 or amx_bf16)")
    return [
        ("bfloat16", True, *bfloat16),
        ("float16", True, False, "float16 on a CPU runs, up to 9 times slower"),
        ("tf32", False, False, "TF32 needs an NVIDIA GPU of capability 8.0 or more"),
    ]


def _tpu_support(device):
    return [
        ("bfloat16", True, True, "TPU matrix units compute in bfloat16"),
        ("float16", False, False, "TPUs have no float16; use mixed_bfloat16"),
        ("tf32", False, False, "TF32 needs an NVIDIA GPU"),
    ]


def choose_mode(devices: Sequence[DeviceDescription]) -> Decision:
    """Returns the fastest mode that is safe on these devices; a pure function.

    bfloat16 comes first where it is fast, because its exponent is float32's and
    it needs no loss scaling; then float16; then float32. With several devices of
    a kind a format must be fast on each of them.

    Args:
      devices: The host's devices; CPUs count only where there is nothing else.

    Returns:
      A `Decision`.
    """
    devices = _training_devices(devices)
    if not devices:
        return Decision("float32", "none", "no device was found")
    label = _label(devices)
    reasons = []
    for mode, name in (("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16")):
        support = format_support(name, devices)
        if support.fast:
            return Decision(mode, label, support.reason)
        reasons.append(support.reason)
    return Decision("float32", label, "; ".join(reasons))


def format_support(name: str, devices: Sequence[DeviceDescription]) -> PrecisionSupport:
    """Returns a format's support on all training devices together.

    Args:
      name: "float32", "tf32", "bfloat16" or "float16".
      devices: The host's devices; CPUs count only where there is nothing else.

    Returns:
      The `PrecisionSupport` of the device that supports it least.
    """
    devices = _training_devices(devices)
    if not devices:
        return PrecisionSupport(name, name == "float32", False, "no device was found")
    each = [describe_support(device)[name] for device in devices]
    return min(each, key=lambda support: (support.supported, support.fast))


def _training_devices(devices):
    """Accelerators if there are any, else the CPU."""
    return [d for d in devices if d.kind != "CPU"] or list(devices)


def _label(devices):
    names = [device.label for device in devices]
    return ", ".join(
        name if names.count(name) == 1 else f"{names.count(name)} x {name}"
        for name in dict.fromkeys(names)
    )


def device_label(devices: Sequence[DeviceDescription]) -> str:
    """Returns the training devices' names as one phrase, "none" without any."""
    return _label(_training_devices(devices)) or "none"


def read_devices() -> list[DeviceDescription]:
    """Describes this process' devices without initializing them.

    Returns:
      A list of `DeviceDescription`, accelerators after the CPU; none that
      `tf.config.set_visible_devices` hides.
    """
    found = [_read_cpu() for _ in tf.config.get_visible_devices("CPU")[:1]]
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        found.append(
            DeviceDescription(
                kind="GPU",
                name=details.get("device_name", ""),
                compute_capability=details.get("compute_capability"),
            )
        )
    found += [DeviceDescription("TPU") for _ in tf.config.get_visible_devices("TPU")]
    return found


def detect_support() -> dict[str, dict[str, PrecisionSupport]]:
    """Returns what each of this host's devices supports, with reasons.

    Returns:
      Dict from a device's label to a dict from format name to
      `PrecisionSupport`.
    """
    return {device.label: describe_support(device) for device in read_devices()}


def _read_cpu() -> DeviceDescription:
    name, flags = "CPU", frozenset()
    info = pathlib.Path("/proc/cpuinfo")  # Linux only; elsewhere no flag is known.
    if info.exists():
        fields = dict(
            [part.strip() for part in line.split(":", 1)]
            for line in info.read_text().split("\n\n")[0].splitlines()
            if ":" in line
        )
        name = fields.get("model name", name)
        flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    return DeviceDescription("CPU", name, None, flags, _onednn_is_on())


def _onednn_is_on() -> bool:
    # TensorFlow 2.21 has no public reader of this switch; guarded by
    # tests/test_tensorflow_contract.py.
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())
