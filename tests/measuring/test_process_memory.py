"""What memory is a process': a share of the host's, a container's rest, a peak."""

import resource
import sys
import types

import pytest

from tfamp import errors
from tfamp.measuring import process_memory


def test_limit_is_a_share_of_what_is_available_and_never_more(monkeypatch):
    monkeypatch.setattr(process_memory, "available", lambda: 1000 * process_memory.MIB)
    memory, text = process_memory.limits(None)
    assert memory == (800 * process_memory.MIB, None) and "80% of the 1,000 MiB" in text
    memory, text = process_memory.limits(500 * process_memory.MIB)
    assert memory.host == 500 * process_memory.MIB and "as requested" in text
    with pytest.raises(ValueError, match="Expected at most 800 MiB"):
        process_memory.limits(801 * process_memory.MIB)


def test_limit_under_which_tensorflow_crashes_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    with pytest.raises(errors.RunError, match="ulimit -v 1048576"):
        process_memory.limits(None)


def test_a_container_leaves_what_it_has_not_used(tmp_path):
    files = {"memory.max": 2000, "memory.current": 700}
    for name, number in files.items():
        (tmp_path / name).write_text(f"{number}\n")
    (tmp_path / "memory.stat").write_text("file 9\ninactive_file 100\n")
    assert list(process_memory._left_to_group(tmp_path)) == [1400]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(process_memory._left_to_group(tmp_path)) == []


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_a_peak_is_in_bytes_where_no_file_has_it(platform, unit, monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(sys, "platform", platform)
    usage = types.SimpleNamespace(ru_maxrss=7)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert process_memory.peak_host() == 7 * unit
