"""What GPUs compute and move at most, as their makers state it."""

from collections.abc import Mapping
from typing import NamedTuple

from tfamp.facts.hardware import DeviceDescription


class Peak(NamedTuple):
    """Peaks of a GPU: 1e12 operations a second by format, and 1e9 bytes a second.

    Without sparsity; products are summed in float32. None: the GPU does not have it.
    """

    low: float  # float16 and, from Ampere on, bfloat16.
    tf32: float | None
    float32: float
    memory: float


# By the names that drivers report: those of `hardware.DEVICES`, as far as NVIDIA's data
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
