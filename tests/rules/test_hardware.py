import pathlib

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import hardware


def gpu(name, capability=None):
    return hardware.DeviceDescription("GPU", name, capability)


def cpu(*flags, onednn=True):
    flags = frozenset(("avx2", "avx512f", *flags))
    return hardware.DeviceDescription("CPU", "Some CPU", None, flags, onednn)


TABLE = hardware.DEVICES
V100, A100, TPU = TABLE["v100"], TABLE["a100"], TABLE["tpu"]
GTX_1070 = gpu("NVIDIA GeForce GTX 1070", (6, 1))
AMD, PLAIN_CPU = gpu("AMD Instinct MI250X"), cpu()
OFF = cpu("avx512_bf16", onednn=False)

# A device, its fast formats, what "auto" chooses, and the decisive fact.
AMPERE, TURING = {"float16", "bfloat16", "tf32"}, {"float16"}
ADA = {*AMPERE, "float8"}
F32, F16, BF16 = "float32", "mixed_float16", "mixed_bfloat16"
CASES = {
    "GTX 1070": (GTX_1070, set(), F32, "no tensor cores (capability 6.1 <"),
    "p100": (..., set(), F32, "bfloat16 is emulated (capability 6.0 <"),
    "v100": (..., TURING, F16, "capability 7.0 >= 7.0"),
    "t4": (..., TURING, F16, "capability 7.5 >= 7.0"),
    "rtx2080ti": (..., TURING, F16, "capability 7.5 >= 7.0"),
    "gtx1660": (..., set(), F32, "no tensor cores despite 7.5"),
    "a100": (..., AMPERE, BF16, "tensor cores (capability 8.0 >= 8.0)"),
    **dict.fromkeys(("a10", "rtx3090"), (..., AMPERE, BF16, "capability 8.6 >=")),
    "jetson-orin": (..., AMPERE, BF16, "capability 8.7 >="),
    **dict.fromkeys(("l4", "l40s", "rtx4090"), (..., ADA, BF16, "capability 8.9 >=")),
    **dict.fromkeys(("h100", "h200"), (..., ADA, BF16, "capability 9.0 >=")),
    "b200": (..., ADA, BF16, "capability 10.0 >="),
    "b300": (..., ADA, BF16, "capability 10.3 >="),
    "jetson-thor": (..., ADA, BF16, "capability 11.0 >="),
    "rtx5090": (..., ADA, BF16, "capability 12.0 >="),
    "gb10": (..., ADA, BF16, "capability 12.1 >="),
    "tpu": (..., {"bfloat16"}, BF16, "TPU matrix units"),
    "cpu-avx512-bf16": (..., {"bfloat16"}, BF16, "avx512_bf16"),
    "cpu-amx": (..., {"bfloat16"}, BF16, "amx_bf16"),
    "cpu-amx-hidden": (..., set(), F32, "AMX is absent, or hidden"),
    "oneDNN off": (OFF, set(), F32, "oneDNN is off"),
    "cpu-avx512": (..., set(), F32, "no native bfloat16"),
    "cpu-avx2": (..., set(), F32, "no native bfloat16"),
    "AMD": (AMD, set(), F32, "the compute capability is unknown"),
}


@pytest.mark.issue("tensorflow#45441")
@pytest.mark.parametrize("name", CASES)
def test_formats_and_mode_of_one_device_with_reasons(name):
    device, fast, mode, fact = CASES[name]
    device = hardware.find_device(name) if device is ... else device
    support = hardware.describe_support(device)
    blackwell = (device.compute_capability or (0, 0)) >= (10, 0)
    named = {"float32", "tf32", "bfloat16", "float16", "float8"}
    assert set(support) == named | ({"float4"} if blackwell else set())
    assert blackwell == ("float4" in support and not support["float4"].supported)
    assert all(row.format == key and row.reason for key, row in support.items())
    assert {key for key, row in support.items() if row.fast} == fast
    assert all(row.supported for row in support.values() if row.fast)
    assert support["tf32"].supported == support["tf32"].fast
    assert support["float16"].supported == (device.kind != "TPU")
    decision = hardware.choose_mode([device])
    assert decision.mode == mode and fact in decision.reason
    assert hardware.device_label([device]) == device.label


def test_every_device_of_the_table_has_its_mode():
    assert TABLE.keys() <= CASES.keys()


@pytest.mark.issue("tensorflow#44191")
@pytest.mark.parametrize(
    ("name", "has_tensor_cores"),
    [
        ("NVIDIA TITAN RTX", True),
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
        ([], F32, "none", "no device was found"),
        ([V100, A100], F16, f"{V100.label}, {A100.label}", "float16 tensor cores"),
        ([A100, A100], BF16, f"2 x {A100.label}", "bfloat16 tensor cores"),
        ([cpu("amx_bf16"), GTX_1070], F32, GTX_1070.label, "no tensor cores"),
        ([PLAIN_CPU, TPU, TPU], BF16, "2 x TPU", "TPU matrix units"),
    ],
    ids=["none", "V100 and A100", "two A100", "a GPU counts", "TPUs count"],
)
def test_mode_and_reason_of_several_devices(devices, mode, device, fact):
    decision = hardware.choose_mode(devices)
    assert decision.mode == mode and fact in decision.reason
    assert hardware.device_label(devices) == device
    assert hardware.format_support("float32", devices).supported
    # What one of them does not support outweighs what another is slow at.
    float16 = hardware.format_support("float16", [GTX_1070, *devices])
    assert float16.supported == (TPU not in devices)


def test_cpu_is_read_from_the_operating_system():
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("/proc/cpuinfo does not exist: not Linux")
    text = info.read_text()
    (device,) = [d for d in hardware.read_devices() if d.kind == "CPU"]
    assert device.name == "CPU" or f": {device.name}\n" in text
    assert device.cpu_flags and device.cpu_flags <= set(text.split())
    assert device.compute_capability is None
    support = hardware.detect_support()
    assert support[device.label] == hardware.describe_support(device)


def test_visible_gpus_are_described_by_what_tensorflow_tells_of_them(monkeypatch):
    # Physical GPUs cannot be made up through the public API of TensorFlow.
    details = {
        "GPU:0": {"device_name": "NVIDIA A100", "compute_capability": (8, 0)},
        "GPU:1": {"device_name": "AMD Instinct"},
    }
    listed = {"CPU": [], "GPU": list(details), "TPU": ["TPU:0"]}
    monkeypatch.setattr(tf.config, "get_visible_devices", listed.__getitem__)
    monkeypatch.setattr(tf.config, "list_physical_devices", None)  # Hidden ones, too.
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", details.__getitem__
    )
    assert hardware.read_devices() == [
        gpu("NVIDIA A100", (8, 0)),
        gpu("AMD Instinct"),
        hardware.DeviceDescription("TPU"),
    ]


def test_a_device_is_this_hosts_the_tables_or_ones_own(monkeypatch):
    assert hardware.find_device() in hardware.read_devices()
    monkeypatch.setattr(hardware, "read_devices", lambda: [PLAIN_CPU, A100, V100])
    assert hardware.find_device() is A100
    assert hardware.find_device(AMD) is AMD
    with pytest.raises(ValueError, match="'A1000'.*'cpu-avx2'.*mean 'a100'"):
        hardware.find_device("A1000")
    with pytest.raises(ValueError, match="Received: device=3"):
        hardware.find_device(3)  # pyright: ignore[reportArgumentType]


# ---- What `enable` makes of it ----


@pytest.fixture
def devices(monkeypatch):
    """Returns a function that makes the host look as if it had these devices."""
    yield lambda *found: monkeypatch.setattr(hardware, "read_devices", lambda: found)
    tfamp.disable()


@pytest.mark.parametrize("name", ["v100", "a100", "cpu-avx2", "tpu"])
def test_auto_sets_the_mode_for_the_device_and_says_why(name, devices):
    devices(PLAIN_CPU, hardware.find_device(name))
    status = tfamp.enable()
    _, _, mode, fact = CASES[name]
    assert (status.requested, status.effective) == ("auto", mode)
    assert fact in status.reason and keras.config.dtype_policy().name == mode


def test_unsupported_mode_raises_or_falls_back_with_the_reason(devices):
    devices(TPU)
    with pytest.raises(tfamp.UnsupportedModeError, match="TPUs have no float16"):
        tfamp.enable(F16)
    with pytest.warns(UserWarning, match="TPUs have no float16"):
        status = tfamp.enable(F16, on_unsupported="warn")
    assert (status.requested, status.effective) == (F16, BF16)
    assert "TPUs have no float16" in status.reason
    devices(PLAIN_CPU)
    with pytest.warns(UserWarning, match="float32 is the nearest"):
        assert tfamp.enable("tf32", on_unsupported="warn").effective == F32
