"""Devices that this host need not have: what the decisions read of them, as data.

Layer 0 modules do not import one another; `tfamp.diagnostics.devices` turns an entry
into a `hardware.DeviceDescription`.
"""

import difflib
import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """Peak rates of a device, without sparsity.

    Attributes:
      float32: TFLOP/s of ordinary float32 arithmetic.
      tf32: TFLOP/s of TF32 tensor cores; None where there are none.
      half: TFLOP/s of 16-bit tensor cores that accumulate in float32; None where
        there are none.
      bandwidth: GB/s of the device's memory.
    """

    float32: float
    tf32: float | None
    half: float | None
    bandwidth: float


class TableDevice(NamedTuple):
    """One device of the table.

    Attributes:
      key: What `get` takes, e.g. "a100".
      kind: "CPU", "GPU" or "TPU".
      name: Product name as its driver reports it.
      compute_capability: CUDA compute capability; None for other devices.
      cpu_flags: Instruction set flags of a CPU.
      onednn: Whether TensorFlow's oneDNN kernels are on by default (CPU only).
      pattern: Regular expression that finds the product in a driver's name.
      peaks: Peak rates; None where no source gives them.
    """

    key: str
    kind: str
    name: str
    compute_capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()
    onednn: bool = False
    pattern: str = ""
    peaks: Peaks | None = None


def _gpu(key, name, capability, pattern, *peaks):
    return TableDevice(
        key, "GPU", name, capability, pattern=pattern, peaks=Peaks(*peaks)
    )


def _cpu(key, name, *flags, onednn=True):
    return TableDevice(key, "CPU", name, None, frozenset(("avx2", *flags)), onednn)


# Peaks: NVIDIA's data sheets of P100 (2016), V100 (2020), T4 (2019), A10 (2021), L4
# (2023), A100 of 40 GB (2020), H100 and H200 (2024), SXM boards where there are two;
# halved where the sheet gives them with sparsity. GeForce: the white papers "NVIDIA
# Turing GPU Architecture" (2018), "NVIDIA Ampere GA102" (2021), "NVIDIA Ada GPU
# Architecture" (2023); product pages for the GTX 1660 (2019).
DEVICES: dict[str, TableDevice] = {
    device.key: device
    for device in (
        _gpu(
            "p100", "Tesla P100-SXM2-16GB", (6, 0), r"\bP100\b", 10.6, None, None, 732
        ),
        _gpu("v100", "Tesla V100-SXM2-16GB", (7, 0), r"\bV100\b", 15.7, None, 125, 900),
        _gpu("t4", "Tesla T4", (7, 5), r"\bT4\b", 8.1, None, 65, 320),
        _gpu(
            "gtx1660",
            "NVIDIA GeForce GTX 1660",
            (7, 5),
            r"GTX 1660(?! (Ti|SUPER))",
            *(5.0, None, None, 192),
        ),
        _gpu(
            "rtx2080ti",
            "NVIDIA GeForce RTX 2080 Ti",
            (7, 5),
            r"RTX 2080 Ti",
            *(13.4, None, 53.8, 616),
        ),
        _gpu(
            "a100", "NVIDIA A100-SXM4-40GB", (8, 0), r"\bA100\b", 19.5, 156, 312, 1555
        ),
        _gpu("a10", "NVIDIA A10", (8, 6), r"\bA10\b", 31.2, 62.5, 125, 600),
        _gpu(
            "rtx3090",
            "NVIDIA GeForce RTX 3090",
            (8, 6),
            r"RTX 3090(?! Ti)",
            *(35.6, 35.6, 71, 936),
        ),
        _gpu("l4", "NVIDIA L4", (8, 9), r"\bL4\b", 30.3, 60, 121, 300),
        _gpu(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            (8, 9),
            r"RTX 4090(?! D)",
            *(82.6, 82.6, 165.2, 1008),
        ),
        _gpu(
            "h100", "NVIDIA H100 80GB HBM3", (9, 0), r"H100.*HBM3", 67, 495, 989, 3350
        ),
        _gpu("h200", "NVIDIA H200", (9, 0), r"\bH200\b(?! NVL)", 67, 495, 989, 4800),
        TableDevice("tpu", "TPU", "TPU"),
        _cpu("cpu-avx512-bf16", "CPU with AVX512_BF16", "avx512f", "avx512_bf16"),
        _cpu(
            "cpu-amx",
            "CPU with AMX",
            *("avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
        ),
        _cpu("cpu-avx512", "CPU with AVX-512, no bfloat16", "avx512f", "avx512_vnni"),
        _cpu("cpu-avx2", "CPU with AVX2 only", onednn=False),
    )
}


def get(key: str) -> TableDevice:
    """Returns a device of the table.

    Args:
      key: One of `DEVICES`, e.g. "a100"; in lower case.

    Returns:
      A `TableDevice`.

    Raises:
      ValueError: If there is none; near misses and all keys are named.
    """
    if isinstance(key, str) and key in DEVICES:
        return DEVICES[key]
    near = difflib.get_close_matches(str(key).lower(), DEVICES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Unknown device. Received: {key!r}. "
        f"Expected one of {', '.join(map(repr, DEVICES))}.{hint}"
    )


def find(name: str) -> TableDevice | None:
    """Returns the entry of a product name as a driver reports it, None if unknown.

    Args:
      name: E.g. "NVIDIA A100-SXM4-80GB". A part of a device ("... MIG 1g.10gb") has
        not its peaks, and is unknown.
    """
    if re.search(r"\bMIG\b", name):
        return None
    matches = (
        device
        for device in DEVICES.values()
        if device.pattern and re.search(device.pattern, name)
    )
    return next(matches, None)
