"""What the machine gives: measured within a budget, told with its clock."""

import math

import pytest
import tensorflow as tf

from tfamp import hardware
from tfamp.benchmark import calibration
from tfamp.precision import policy

MIB = 2**20


@pytest.fixture
def small(monkeypatch):
    """Sizes for a test."""
    monkeypatch.setattr(calibration, "_SIZES", {"CPU": (16, 32), "GPU": (16, 32)})
    monkeypatch.setattr(calibration, "_ARRAY_BYTES", 4 * MIB)


def test_every_supported_format_and_the_bandwidth_are_measured(small):
    found = calibration.measure(seconds=0.02)
    devices = hardware.read_devices()
    names = hardware.describe_support(devices[0])
    supported = {n for n in names if hardware.format_support(n, devices).supported}
    assert found.peaks.keys() == found.sizes.keys() == supported
    assert all(1e6 < peak < 1e16 for peak in found.peaks.values())
    assert set(found.sizes.values()) <= {(16, 16, 16), (32, 32, 32)}
    assert found.bandwidth is not None and 1e7 < found.bandwidth < 1e14
    assert found.bandwidth_bytes == 3 * 4 * MIB
    assert found.device == hardware.device_label(devices)
    assert (found.clock_mhz is None) == (calibration.clocks()[0] is None)
    assert not found.failed


class FakeClock:
    """A device of so many FLOP/s at each size; remembers what was measured."""

    def __init__(self, speeds):
        self.speeds, self.measured = speeds, []
        self.now = 0.0
        self.precisions = []

    def multiplier(self, size, dtype, products):
        def run():
            self.precisions.append((dtype, policy.read().tensor_float_32))
            self.now += 2 * size**3 * products / self.speeds[size]

        self.measured.append(size)
        return run

    def install(self, monkeypatch):
        monkeypatch.setattr(calibration, "_multiplier", self.multiplier)
        monkeypatch.setattr(calibration.time, "perf_counter", lambda: self.now)


def test_the_best_size_counts(monkeypatch):
    device = FakeClock({10: 1e6, 20: 3e6, 40: 2e6})
    device.install(monkeypatch)
    best, size = calibration.peak("float32", 1.0, (10, 20, 40), 2)
    assert best == pytest.approx(3e6)
    assert size == 20
    assert device.measured == [10, 20, 40]


def test_a_slow_format_stops_before_a_size_that_takes_longer_than_is_left(monkeypatch):
    # One run takes 0.02 s, of the next size 0.16 s, of the last 1.28 s.
    device = FakeClock(dict.fromkeys((10, 20, 40), 2e5))
    device.install(monkeypatch)
    best, size = calibration.peak("float16", 1.0, (10, 20, 40), 2)
    assert best == pytest.approx(2e5)
    assert device.measured == [10, 20]
    assert device.now < 1.2


def test_the_first_size_is_measured_however_slow(monkeypatch):
    device = FakeClock({10: 10.0})
    device.install(monkeypatch)
    assert calibration.peak("float16", 0.1, (10, 20), 1) == (pytest.approx(10.0), 10)
    assert device.measured == [10]


@pytest.mark.parametrize(
    ("name", "dtype", "tf32"),
    [
        ("float32", "float32", False),
        ("tf32", "float32", True),
        ("bfloat16", "bfloat16", True),
    ],
)
def test_tf32_is_set_for_the_format_and_put_back(monkeypatch, name, dtype, tf32):
    device = FakeClock({10: 1e6})
    device.install(monkeypatch)
    before = policy.read()
    calibration.peak(name, 0.01, (10,), 1)
    assert set(device.precisions) == {(dtype, tf32)}
    assert policy.read() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_keep_their_size_and_depend_on_each_other(dtype):
    values = [calibration._multiplier(64, dtype, n)() for n in (1, 2, 8)]
    assert all(0 < abs(value) < 50 for value in values)
    assert len(set(values)) == 3


def test_both_ways_to_measure_the_bandwidth_agree_on_a_cpu():
    if tf.config.get_visible_devices("GPU"):
        pytest.skip("the second way then measures the GPU")
    ways = [
        way(0.02, 8 * MIB)
        for way in (calibration._cpu_bandwidth, calibration._gpu_bandwidth)
    ]
    # In caches, and on a busy machine: the same but for the kernels.
    assert abs(math.log10(ways[0] / ways[1])) < 2


def test_arrays_leave_memory_to_others(monkeypatch):
    monkeypatch.setattr(calibration.memory_limit, "available", lambda: 80 * MIB + 9)
    assert calibration.array_bytes() == 10 * MIB
    monkeypatch.setattr(calibration.memory_limit, "available", lambda: 2**40)
    assert calibration.array_bytes() == 512 * MIB

    def unknown():
        raise calibration.errors.RunError("no Linux")

    monkeypatch.setattr(calibration.memory_limit, "available", unknown)
    assert calibration.array_bytes() == 512 * MIB


@pytest.mark.parametrize(
    ("text", "mhz", "line"),
    [
        (
            "1980, 2619, 1980, 45, 312.50\n1200, 1, 1, 1, 1\n",
            1980.0,
            "GPU: clock 1980 MHz, memory 2619 MHz, at most 1980 MHz, 45 C, 312.50 W",
        ),
        ("[N/A], 2619, [N/A], 45, [N/A]", None, "GPU: memory 2619 MHz, 45 C"),
        ("No devices were found", None, ""),
        ("", None, ""),
    ],
    ids=["first of two", "parts not known", "message", "nothing"],
)
def test_nvidia_smi_is_parsed(text, mhz, line):
    assert calibration.parse_nvidia_smi(text) == (mhz, line)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CPUINFO = (
    "processor\t: 0\ncpu MHz\t\t: 2000.500\n\nprocessor\t: 1\ncpu MHz\t\t: 3000.5\n"
)


@pytest.mark.parametrize(
    ("files", "mhz", "line"),
    [
        (
            {"proc/cpuinfo": CPUINFO},
            2500.5,
            "CPU: 2500 MHz, 2000 to 3000 over 2 cores",
        ),
        (
            {
                "proc/cpuinfo": CPUINFO,
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3400000\n",
            },
            3400.0,
            "CPU: 3400 MHz, 3400 to 3400 over 1 core",
        ),
        ({"proc/cpuinfo": "processor\t: 0\n"}, None, ""),
        ({}, None, ""),
    ],
    ids=["cpuinfo", "cpufreq", "no clock", "nothing"],
)
def test_clock_of_the_cpu_is_the_mean_of_its_cores(tmp_path, files, mhz, line):
    if tf.config.get_visible_devices("GPU"):
        pytest.skip("the clock is the GPU's")
    assert calibration.clocks(write(tmp_path, files)) == (mhz, line)
