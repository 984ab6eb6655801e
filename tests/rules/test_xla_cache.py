"""Files of XLA's programs that are kept, and the assembler of its kernels."""

import os

import pytest

from tfamp.diagnostics import doctor
from tfamp.facts import builds, graph_context, hardware, xla_cache, xla_flags

GPU = hardware.DEVICES["h100"]
PART = b"\x0a\x01k\x12\x01p"
WHOLE = PART + b"\x1a\x82\x02" + b"x" * 258


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Returns a function that begins the cache anew: its folder, and why none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(xla_cache.NAME, raising=False)
    monkeypatch.setattr(xla_cache, "_cache", None)
    monkeypatch.setattr(xla_cache, "_read_now", lambda folder, users: True)
    monkeypatch.setattr(builds, "find_ptxas", lambda: None)
    monkeypatch.setattr(builds, "driver_release", lambda: "580.95")

    def begin(*gpus):
        monkeypatch.setattr(builds, "read_gpus", lambda: list(gpus or [GPU]))
        xla_cache._cache = None
        xla_cache.start()
        return xla_cache._cache.folder, xla_cache._cache.reason

    return begin


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        (WHOLE, True),
        (b"", False),
        (PART, False),
        (WHOLE[:-1], False),
        (WHOLE + b"\x1a", False),
        (b"\x08" + WHOLE, False),
        (WHOLE[:8] + b"\xff" * 20, False),
        (bytes(len(WHOLE)), False),
    ],
    ids=range(8),
)
def test_only_whole_files_are_kept(start, content, whole):
    folder, _ = start()
    file = folder / "program.pb"
    file.write_bytes(content)
    start()
    assert file.exists() == whole


def test_the_oldest_files_of_all_folders_go_at_the_limit(start, monkeypatch):
    folder, _ = start()
    other = folder.with_name("2.19.1-sm80-0")
    other.mkdir()
    files = [other / "old", folder / "half.tmp", folder / "new.pb"]
    for age, file in enumerate(files):
        file.write_bytes(WHOLE)
        os.utime(file, (age, age))
    monkeypatch.setattr(xla_cache, "LIMIT", 2 * len(WHOLE))
    start()
    assert [file.exists() for file in files] == [False, True, True]


def test_a_folder_holds_for_one_kind_of_gpu_driver_and_ptxas(start, monkeypatch):
    found = {start()[0]}
    assert start(GPU, GPU)[0] in found
    found.add(start(GPU._replace(name="NVIDIA H200"))[0])
    found.add(start(GPU._replace(compute_capability=(10, 0)))[0])
    for name, value in (("driver_release", "590"), ("find_ptxas", ("ptxas", (13,)))):
        monkeypatch.setattr(builds, name, lambda value=value: value)
        found.add(start()[0])
    monkeypatch.setenv(xla_flags.NAME, "--xla_some_flag=1")
    found.add(start()[0])
    assert len(found) == 6
    assert start(GPU, GPU._replace(name="other")) == (None, "GPUs of several kinds")


def test_a_full_disk_is_no_folder(start, monkeypatch, caplog):
    monkeypatch.setattr(xla_cache, "LIMIT", 2**60)
    folder, reason = start()
    assert folder is None and "GiB are free" in reason


def test_programs_of_determinism_are_kept_apart(start, monkeypatch):
    found = {start()[0]}
    assert "op determinism" not in xla_cache.describe()
    monkeypatch.setattr(graph_context, "deterministic", lambda: True)
    assert "another op determinism" in xla_cache.describe()
    found.add(start()[0])
    assert len(found) == 2 and "op determinism" not in xla_cache.describe()


def test_every_release_that_was_tried_has_its_flags():
    assert {"2.19", "2.20", "2.21"} <= xla_flags.KNOWN.keys()
    for flags in xla_flags.KNOWN.values():
        assert all(x.startswith("--xla_gpu_") and x.endswith("=false") for x in flags)


# ---- ptxas ----


@pytest.fixture
def ptxas(monkeypatch, tmp_path):
    """Returns a function that puts a ptxas of some release into a folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(builds, "_NVCC_FOLDER", str(tmp_path / "wheel"))
    monkeypatch.setattr(builds, "_ROOTS", ())

    def put(folder, release):
        file = tmp_path / folder / "ptxas"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release 12, V{release}'\n"
        )
        file.chmod(0o755)
        builds._version.cache_clear()
        return str(file)

    return put


def test_xla_takes_the_first_ptxas_that_can_be_used(ptxas, monkeypatch, tmp_path):
    assert builds.find_ptxas() is None
    assert "nvidia-cuda-nvcc-cu12" in builds.describe_ptxas((9, 0))
    file = ptxas("wheel/bin", "12.9.86")
    assert builds.find_ptxas() == (file, (12, 9, 86))
    ptxas("path", "12.3.103")  # XLA excludes it, and those before 11.8.
    assert builds.find_ptxas() == (file, (12, 9, 86))
    assert builds.find_ptxas() == (file, (12, 9, 86))
    file = ptxas("path", "12.4.131")
    assert builds.find_ptxas() == (file, (12, 4, 131))
    file = ptxas("own/bin", "13.0.88")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path / 'own'}")
    assert builds.find_ptxas() == (file, (13, 0, 88))


@pytest.mark.parametrize(
    ("release", "capability", "found"),
    [
        ("12.0.76", (9, 0), True),
        ("12.5.82", (9, 0), True),
        ("12.6.84", (10, 0), True),
        ("12.6.85", (9, 0), False),
        ("11.8.89", (9, 0), False),
        ("12.9.86", (12, 0), False),
        ("12.5.82", (8, 9), False),
    ],
)
@pytest.mark.parametrize("folder", ["path", "wheel/bin"])
def test_a_ptxas_with_a_known_defect_is_a_finding(
    ptxas, monkeypatch, release, capability, found, folder
):
    ptxas(folder, release)
    device = hardware.DeviceDescription("GPU", "a GPU", capability)
    monkeypatch.setattr(hardware, "read_devices", lambda: [device])
    row = doctor.describe().facts["ptxas"]
    assert row.startswith(release)
    assert ("4826023" in row) == found
    assert ('"nvidia-cuda-nvcc-cu12>=12.9"' in row) == found
    assert ("xla_gpu_cuda_data_dir" in row) == (found and folder == "path")


def test_ptxas_matters_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [hardware.DEVICES["cpu-amx"]])
    assert "ptxas" not in doctor.describe().facts


def test_gpus_are_read_by_the_driver(monkeypatch):
    """Without one there are none; tests/contract/test_xla_flags.py has one."""
    monkeypatch.setattr(builds, "read_build", lambda: builds.Build(False))
    assert builds.read_gpus() == []
