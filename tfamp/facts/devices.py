"""Devices that are known by name, and what GPUs compute and move at most.

Nothing here imports TensorFlow: the command tells a mistyped name at once.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tfamp import checks


class DeviceDescription(NamedTuple):
    """What the decision needs to know of a device.

    Attributes:
      kind: "CPU", "GPU" or "TPU".
      name: Product name where known, e.g. "NVIDIA A100-SXM4-40GB".
      compute_capability: CUDA's (major, minor); None if it is no CUDA GPU.
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
        return f"{name} (compute capability {dotted(self.compute_capability)})"


def dotted(version: tuple[int, ...]) -> str:
    """Returns a compute capability as NVIDIA writes it: (8, 0) is "8.0"."""
    return ".".join(map(str, version))


def _gpu(name, *compute_capability):
    return DeviceDescription("GPU", name, compute_capability)


def _cpu(name, *flags, onednn=True):
    return DeviceDescription("CPU", name, None, frozenset(("avx2", *flags)), onednn)


# Devices that this host need not have, with the names that their drivers report.
# Compute capabilities: https://developer.nvidia.com/cuda-gpus.
DEVICES: dict[str, DeviceDescription] = {
    "p100": _gpu("Tesla P100-SXM2-16GB", 6, 0),
    "v100": _gpu("Tesla V100-SXM2-16GB", 7, 0),
    "t4": _gpu("Tesla T4", 7, 5),
    "gtx1660": _gpu("NVIDIA GeForce GTX 1660", 7, 5),
    "rtx2080ti": _gpu("NVIDIA GeForce RTX 2080 Ti", 7, 5),
    "a100": _gpu("NVIDIA A100-SXM4-40GB", 8, 0),
    "a10": _gpu("NVIDIA A10", 8, 6),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", 8, 6),
    "jetson-orin": _gpu("Jetson AGX Orin", 8, 7),
    "l4": _gpu("NVIDIA L4", 8, 9),
    "l40s": _gpu("NVIDIA L40S", 8, 9),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 8, 9),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 9, 0),
    "h200": _gpu("NVIDIA H200", 9, 0),
    "b200": _gpu("NVIDIA B200", 10, 0),
    "b300": _gpu("NVIDIA B300", 10, 3),
    "jetson-thor": _gpu("Jetson T5000 (Thor)", 11, 0),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 12, 0),
    "gb10": _gpu("NVIDIA GB10 (DGX Spark)", 12, 1),
    "tpu": DeviceDescription("TPU", "TPU"),
    "cpu-avx512-bf16": _cpu("CPU with AVX512_BF16", "avx512f", "avx512_bf16"),
    "cpu-amx": _cpu("CPU with AMX", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
    "cpu-amx-hidden": _cpu(
        "Intel CPU, AMX hidden", "avx512f", "avx512_bf16", "avx512_fp16"
    ),
    "cpu-avx512": _cpu("CPU with AVX-512, no bfloat16", "avx512f", "avx512_vnni"),
    "cpu-avx2": _cpu("CPU with AVX2 only", onednn=False),
}


def named(name: object) -> DeviceDescription:
    """Returns a device of the table `DEVICES`.

    Raises:
      ValueError: If it has none of that name.
    """
    if isinstance(name, str) and name in DEVICES:
        return DEVICES[name]
    raise ValueError(
        f"Unknown device. Received: device={name!r}. Expected one of "
        f"{', '.join(map(repr, DEVICES))}.{checks.nearest(name, DEVICES)}"
    )


class Peak(NamedTuple):
    """Peaks of a GPU: 1e12 operations a second by format, and 1e9 bytes a second.

    Without sparsity; products are summed in float32. None: the GPU does not have it.
    """

    low: float  # float16 and, from Ampere on, bfloat16.
    tf32: float | None
    float32: float
    memory: float


# By the names that drivers report: those of `DEVICES`, as far as NVIDIA's data
# sheets of the product, or its white paper (GeForce), have the figures.
PEAKS: dict[str, Peak] = {
    "Tesla P100-SXM2-16GB": Peak(21.2, None, 10.6, 732),
    "Tesla V100-SXM2-16GB": Peak(125, None, 15.7, 900),
    "Tesla T4": Peak(65, None, 8.1, 320),
    "NVIDIA A100-SXM4-40GB": Peak(312, 156, 19.5, 1555),
    "NVIDIA A10": Peak(125, 62.5, 31.2, 600),
    "NVIDIA L4": Peak(121, 60, 30.3, 300),
    "NVIDIA L40S": Peak(362, 183, 91.6, 864),
    "NVIDIA GeForce RTX 4090": Peak(165, 82.6, 82.6, 1008),
    "NVIDIA H100 80GB HBM3": Peak(989, 494, 67, 3350),
    "NVIDIA H200": Peak(989, 494, 67, 4800),
}


def seconds(
    device: DeviceDescription, operations: Mapping[str, float], moved: int | None
) -> dict[str, float]:
    """Returns the least time that arithmetic and memory need on a device.

    Args:
      device: The device.
      operations: Format -> additions and multiplications in it.
      moved: Bytes that are read and written; None if that is not known.

    Returns:
      {"arithmetic": seconds, "memory": seconds}, as far as both are known.
    """
    if (peak := PEAKS.get(device.name)) is None:
        return {}
    low = dict.fromkeys(("float16", "bfloat16", "float8"), peak.low)
    if peak.tf32 is None:  # Older than bfloat16, which is computed as float32.
        low["bfloat16"] = peak.float32
    rates = low | {"tf32": peak.tf32 or peak.float32}
    times = [n / rates.get(name, peak.float32) for name, n in operations.items()]
    bounds = {"arithmetic": sum(times) / 1e12}
    return bounds if moved is None else bounds | {"memory": moved / peak.memory / 1e9}
