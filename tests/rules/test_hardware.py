import pathlib
import re
from typing import NamedTuple

import pytest
import tensorflow as tf

from tfamp import hardware


def gpu(name, capability=None):
    return hardware.DeviceDescription("GPU", name, capability)


def cpu(*flags, onednn=True, name="Some CPU"):
    flags = frozenset(("avx2", "avx512f", *flags))
    return hardware.DeviceDescription("CPU", name, None, flags, onednn)


TABLE = hardware.DEVICES
P100, V100, T4, A100 = (TABLE[name] for name in ("p100", "v100", "t4", "a100"))
H200, TPU = TABLE["h200"], TABLE["tpu"]
GTX_1070 = gpu("NVIDIA GeForce GTX 1070", (6, 1))
GTX_1660_TI = gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))
AMD = gpu("AMD Instinct MI250X")
PLAIN_CPU = cpu()


class Case(NamedTuple):
    """One device, its fast formats, what "auto" chooses, and the decisive fact."""

    device: hardware.DeviceDescription
    fast: set[str]
    mode: str
    fact: str


NATIVE = cpu("avx512_bf16")
OFF = cpu("avx512_bf16", onednn=False)
ALL = {"float16", "bfloat16", "tf32"}
CASES = {
    "GTX 1070": Case(GTX_1070, set(), "float32", "no tensor cores (capability 6.1 <"),
    "P100": Case(P100, set(), "float32", "bfloat16 is emulated (capability 6.0 <"),
    "V100": Case(V100, {"float16"}, "mixed_float16", "capability 7.0 >= 7.0"),
    "T4": Case(T4, {"float16"}, "mixed_float16", "capability 7.5 >= 7.0"),
    "GTX 1660": Case(GTX_1660_TI, set(), "float32", "no tensor cores despite 7.5"),
    "A100": Case(A100, ALL, "mixed_bfloat16", "tensor cores (capability 8.0 >= 8.0)"),
    "H200": Case(H200, ALL, "mixed_bfloat16", "tensor cores (capability 9.0 >= 8.0)"),
    "TPU": Case(TPU, {"bfloat16"}, "mixed_bfloat16", "TPU matrix units"),
    "native CPU": Case(NATIVE, {"bfloat16"}, "mixed_bfloat16", "avx512_bf16"),
    "AMX": Case(cpu("amx_bf16"), {"bfloat16"}, "mixed_bfloat16", "amx_bf16"),
    "oneDNN off": Case(OFF, set(), "float32", "oneDNN is off"),
    "CPU": Case(PLAIN_CPU, set(), "float32", "no native bfloat16"),
    "AMD": Case(AMD, set(), "float32", "the compute capability is unknown"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_mode_and_reason_of_one_device(case):
    decision = hardware.choose_mode([case.device])
    assert decision.mode == case.mode
    assert case.fact in decision.reason
    assert hardware.device_label([case.device]) == case.device.label


@every_case
def test_support_of_one_device_has_a_row_with_a_reason_for_each_format(case):
    support = hardware.describe_support(case.device)
    assert set(support) == {"float32", "tf32", "bfloat16", "float16"}
    assert all(row.format == name and row.reason for name, row in support.items())
    assert {name for name, row in support.items() if row.fast} == case.fast
    assert all(row.supported for row in support.values() if row.fast)
    assert support["tf32"].supported == support["tf32"].fast
    assert support["float16"].supported == (case.device.kind != "TPU")


def test_detected_support_is_that_of_each_device():
    found = {d.label: hardware.describe_support(d) for d in hardware.read_devices()}
    assert hardware.detect_support() == found != {}


def test_without_devices_only_float32_is_supported():
    assert hardware.format_support("float32", []).supported
    float16 = hardware.format_support("float16", [])
    assert (float16.supported, float16.reason) == (False, "no device was found")


@pytest.mark.parametrize(
    ("name", "has_tensor_cores"),
    [
        ("Tesla T4", True),
        ("NVIDIA TITAN RTX", True),
        ("NVIDIA GeForce RTX 2060", True),
        ("NVIDIA T400 4GB", False),
        ("NVIDIA T550 Laptop GPU", False),
        ("NVIDIA T1200 Laptop GPU", False),
        ("Quadro T2000 with Max-Q Design", False),
        ("NVIDIA GeForce GTX 1660 SUPER", False),
        ("NVIDIA GeForce MX450", False),
    ],
)
def test_turing_chips_without_tensor_cores_are_told_by_name(name, has_tensor_cores):
    support = hardware.describe_support(gpu(name, (7, 5)))["float16"]
    assert support.fast == has_tensor_cores
    assert ("no tensor cores" in support.reason) != has_tensor_cores


@pytest.mark.parametrize(
    ("devices", "mode", "device", "fact"),
    [
        ([], "float32", "none", "no device was found"),
        (
            [V100, A100],
            "mixed_float16",
            f"{V100.label}, {A100.label}",
            "float16 tensor cores",
        ),
        ([A100, A100], "mixed_bfloat16", f"2 x {A100.label}", "bfloat16 tensor cores"),
        ([cpu("amx_bf16"), GTX_1070], "float32", GTX_1070.label, "no tensor cores"),
        ([PLAIN_CPU, TPU, TPU], "mixed_bfloat16", "2 x TPU", "TPU matrix units"),
    ],
    ids=["none", "V100 and A100", "two A100", "a GPU counts", "TPUs count"],
)
def test_mode_and_reason_of_several_devices(devices, mode, device, fact):
    decision = hardware.choose_mode(devices)
    assert decision.mode == mode
    assert fact in decision.reason
    assert hardware.device_label(devices) == device


def test_an_unsupported_format_outweighs_a_slow_one():
    devices = [GTX_1070, TPU]
    assert hardware.format_support("float16", devices).supported is False
    assert hardware.format_support("float32", devices).supported is True


def test_cpu_is_read_from_the_operating_system():
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("/proc/cpuinfo does not exist: not Linux")
    text = info.read_text()
    (device,) = [d for d in hardware.read_devices() if d.kind == "CPU"]
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    assert device.name == (name.group(1).strip() if name else "CPU")
    assert device.cpu_flags == set(flags.group(1).split() if flags else ())
    assert device.compute_capability is None


def test_gpus_are_described_by_what_tensorflow_tells_of_them(monkeypatch):
    # Physical GPUs cannot be made up through the public API of TensorFlow.
    details = {
        "GPU:0": {"device_name": "NVIDIA A100", "compute_capability": (8, 0)},
        "GPU:1": {"device_name": "AMD Instinct"},
    }
    listed = {"CPU": [], "GPU": list(details), "TPU": ["TPU:0"]}
    monkeypatch.setattr(tf.config, "get_visible_devices", listed.__getitem__)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", details.__getitem__
    )
    assert hardware.read_devices() == [
        gpu("NVIDIA A100", (8, 0)),
        gpu("AMD Instinct"),
        hardware.DeviceDescription("TPU"),
    ]


def test_hidden_devices_do_not_count(monkeypatch):
    """As after `tf.config.set_visible_devices([], "GPU")`."""
    visible = tf.config.get_visible_devices("CPU")
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: visible if kind == "CPU" else []
    )
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: visible)
    assert [device.kind for device in hardware.read_devices()] == ["CPU"]


# ---- The table of devices ----

MODES = {
    **dict.fromkeys(("p100", "gtx1660", "cpu-avx512", "cpu-avx2"), "float32"),
    **dict.fromkeys(("v100", "t4", "rtx2080ti"), "mixed_float16"),
    **dict.fromkeys(("a100", "a10", "rtx3090", "l4", "rtx4090"), "mixed_bfloat16"),
    **dict.fromkeys(("h100", "h200", "tpu"), "mixed_bfloat16"),
    **dict.fromkeys(("cpu-avx512-bf16", "cpu-amx"), "mixed_bfloat16"),
}


def test_every_device_of_the_table_has_its_mode():
    found = {
        key: hardware.choose_mode([hardware.find_device(key)]).mode
        for key in hardware.DEVICES
    }
    assert found == MODES


def test_an_unknown_key_is_told_with_all():
    with pytest.raises(ValueError, match="'A1000'.*'cpu-avx2'.*mean 'a100'"):
        hardware.find_device("A1000")


def test_a_device_is_this_hosts_the_tables_or_ones_own(monkeypatch):
    assert hardware.find_device() in hardware.read_devices()
    monkeypatch.setattr(hardware, "read_devices", lambda: [PLAIN_CPU, A100, V100])
    assert hardware.find_device() is A100
    assert hardware.find_device(AMD) is AMD
    with pytest.raises(TypeError, match="Received: device=3"):
        hardware.find_device(3)  # pyright: ignore[reportArgumentType]
