import re

import pytest

from tfamp import device_table, hardware
from tfamp.diagnostics import devices

MODES = {
    "p100": "float32",
    "v100": "mixed_float16",
    "t4": "mixed_float16",
    "gtx1660": "float32",
    "rtx2080ti": "mixed_float16",
    "a100": "mixed_bfloat16",
    "a10": "mixed_bfloat16",
    "rtx3090": "mixed_bfloat16",
    "l4": "mixed_bfloat16",
    "rtx4090": "mixed_bfloat16",
    "h100": "mixed_bfloat16",
    "h200": "mixed_bfloat16",
    "tpu": "mixed_bfloat16",
    "cpu-avx512-bf16": "mixed_bfloat16",
    "cpu-amx": "mixed_bfloat16",
    "cpu-avx512": "float32",
    "cpu-avx2": "float32",
}
GPUS = {k: d for k, d in device_table.DEVICES.items() if d.kind == "GPU"}


def test_every_device_has_its_mode_in_this_test():
    assert MODES.keys() == device_table.DEVICES.keys()


@pytest.mark.parametrize(("key", "mode"), MODES.items())
def test_decision_for_a_device(key, mode):
    described = devices.description(device_table.get(key))
    assert hardware.choose_mode([described]).mode == mode


@pytest.mark.parametrize("key", GPUS)
def test_peaks_agree_with_the_support(key):
    entry = device_table.get(key)
    support = hardware.describe_support(devices.description(entry))
    assert (entry.peaks.half is not None) == support["float16"].fast
    assert (entry.peaks.tf32 is not None) == support["tf32"].supported
    known = [
        peak
        for peak in (entry.peaks.float32, entry.peaks.tf32, entry.peaks.half)
        if peak is not None
    ]
    assert known == sorted(known)


def test_operations_per_byte_are_those_of_the_guide():
    # NVIDIA, "Matrix Multiplication Background User's Guide": 138.9 for V100.
    peaks = device_table.get("v100").peaks
    assert 1e3 * peaks.half / peaks.bandwidth == pytest.approx(138.9, abs=0.05)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("Tesla V100-PCIE-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce GTX 1660", "gtx1660"),
        ("NVIDIA GeForce GTX 1660 Ti", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA T400", None),
        ("Quadro P1000", None),
        ("Quadro GV100", None),
        ("Tesla V100S-PCIE-32GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb", None),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("", None),
    ],
)
def test_find_knows_a_driver_name(name, key):
    found = device_table.find(name)
    assert (found.key if found else None) == key


@pytest.mark.parametrize("key", GPUS)
def test_find_knows_its_own_names(key):
    assert device_table.find(GPUS[key].name).key == key


def test_unknown_key_names_the_near_one_and_all():
    with pytest.raises(ValueError, match=re.escape("Did you mean 'a100'?")) as caught:
        device_table.get("A1000")
    assert "'cpu-avx2'" in str(caught.value) and "'A1000'" in str(caught.value)


def test_subject_of_a_host_device_is_not_simulated():
    (cpu,) = [d for d in hardware.read_devices() if d.kind == "CPU"]
    assert not devices.subject(cpu).simulated
    assert devices.subject("a100").simulated
    assert devices.subject("a100").label.endswith("simulated")
    with pytest.raises(TypeError, match="Received: device=3"):
        devices.subject(3)  # pyright: ignore[reportArgumentType]
