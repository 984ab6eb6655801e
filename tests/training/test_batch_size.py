"""The batch-size finder: the search, and trials in processes that take real steps."""

import json
import math

import hypothesis
import pytest
from hypothesis import strategies

from tfamp import errors
from tfamp.recipes import images
from tfamp.training import batch_size, find_batch_size, processes, synthetic

MIB = processes.MIB
MODES = ("float32", "mixed_bfloat16")


def make_config():
    config = images.get_config()
    config.name, config.data.name, config.data.image_size = "tiny", "digits", 8
    return config


def search(threshold, allowed=4096, start=8):
    """Returns the bracket for sizes that fit up to a threshold, and what was tried."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= threshold

    return batch_size.search(fits, allowed, start), tried


@pytest.mark.parametrize(
    ("threshold", "keywords", "bracket", "tried"),
    [
        (100, {}, (96, 104), [8, 16, 32, 64, 128, 96, 112, 104]),
        (100, {"start": 96}, (96, 104), [96, 192, 144, 120, 104]),
        (100, {"start": 992}, (96, 104), [992, 496, 248, 120, 56, 88, 104, 96]),
        (7, {}, (0, 8), [8]),
        (500, {"allowed": 63}, (56, None), [8, 16, 32, 56]),
        (500, {"allowed": 63, "start": 96}, (56, None), [56]),
    ],
    ids=str,
)
def test_search_doubles_then_bisects(threshold, keywords, bracket, tried):
    assert search(threshold, **keywords) == (bracket, tried)


@hypothesis.given(
    threshold=strategies.integers(0, 2**17),
    allowed=strategies.integers(8, 2**17),
    start=strategies.integers(1, 2**14).map(lambda number: 8 * number),
)
def test_search_brackets_the_threshold_in_few_trials(threshold, allowed, start):
    (low, high), tried = search(threshold, allowed, start)
    assert low <= threshold and all(size % 8 == 0 for size in tried)
    assert len(set(tried)) == len(tried) and max(tried) <= allowed
    if high is None:
        assert low == allowed // 8 * 8
    else:
        assert threshold < high <= low + max(8, batch_size.TOLERANCE * low)
    assert {low, high} - {0, None} <= set(tried)
    assert len(tried) <= 2 * math.log2(allowed / 8 + 2) + 3


# ---- Trials ----


@pytest.fixture
def stand_in(monkeypatch):
    """A trial takes 100 MiB, and of an example 2 MiB in float32 and 1 MiB in others."""
    made = []

    def call(function, config, steps, *, memory):
        assert function is batch_size.train
        made.append((config["precision"]["mode"], config["batch_size"]))
        each = 2 if made[-1][0] == "float32" else 1
        held = (100 + each * made[-1][1]) * MIB
        if held > memory.host:
            return processes.Outcome(None, "MemoryError: full")
        figures = {"host_bytes": held, "peak_bytes": held}
        return processes.Outcome({**figures, "unit": "images", "description": "net"})

    monkeypatch.setattr(processes, "call", call)
    monkeypatch.setattr(synthetic, "check", lambda configs: list(configs))
    return made


def find(folder, said=None, **fields):
    """Searches in 612 MiB: 256 examples fit in float32, 512 in others."""
    asked = {"modes": MODES, "memory_limit_mb": 612, **fields}
    said = [] if said is None else said
    return find_batch_size(make_config(), workdir=folder, report=said.append, **asked)


def test_both_modes_are_compared_and_finished_trials_not_made_again(tmp_path, stand_in):
    found = find(tmp_path / "a")
    first, second = found.sizes
    assert (first["batch_size"], first["failing"], first["ratio"]) == (256, 264, None)
    assert (second["batch_size"], second["failing"]) == (512, 520)
    assert second["ratio"] == 2.0 and second["peak_bytes"] == 612 * MIB
    assert stand_in[0] == ("float32", 8)
    text = (tmp_path / "a/report.md").read_text()
    row = next(line for line in text.splitlines() if "mixed_bfloat16" in line)
    cells = ["mixed_bfloat16", "512", "520", "2.00", "612 MiB"]
    assert [cell.strip() for cell in row.split("|")[1:6]] == cells
    assert "memory of the CPU: 612 MiB" in text and "net" in text
    stored = json.loads((tmp_path / "a/batch_sizes.json").read_text())
    assert stored["sizes"][1]["batch_size"] == 512
    made, said = len(stand_in), []
    find(tmp_path / "a", said)
    assert len(stand_in) == made and all("tried before" in line for line in said)
    with pytest.raises(errors.RunError, match="other settings"):
        find(tmp_path / "a", memory_limit_mb=500)


def test_largest_batch_that_is_allowed_ends_the_search(tmp_path, stand_in):
    first, second = find(tmp_path / "a", max_batch_size=100).sizes
    assert (first["batch_size"], first["failing"]) == (96, None)
    assert second["ratio"] is None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"memory_limit_mb": 110}, errors.RunError, "smallest batch size"),
        ({"max_batch_size": 7}, ValueError, "max_batch_size"),
        ({"memory_limit_mb": 2**40}, ValueError, "more than this host can spare"),
    ],
    ids=str,
)
def test_what_no_search_can_answer_is_an_error(
    fields, error, message, tmp_path, stand_in
):
    with pytest.raises(error, match=message):
        find(tmp_path / "a", **fields)


def test_wrong_settings_are_refused_before_a_folder_is_made(tmp_path):
    config = make_config()
    config.strategy = "mirrored"
    with pytest.raises(ValueError, match="one device"):
        find_batch_size(config, workdir=tmp_path / "a")
    config.strategy, config.data.name = "none", "unheard_of"
    with pytest.raises(ValueError, match="unheard_of"):
        find_batch_size(config, workdir=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_real_processes_are_held_to_the_limit_and_take_nothing_down(tmp_path):
    config = make_config()
    config.data.image_size, config.model.blocks = 256, ((64,),)
    config.model.dense = 0
    found = find_batch_size(
        config,
        ("mixed_bfloat16",),
        memory_limit_mb=1800,
        max_batch_size=512,
        steps=1,
        workdir=tmp_path,
        report=[].append,
    )
    (size,) = found.sizes
    assert 8 <= size["batch_size"] < (size["failing"] or 0)
    assert size["peak_bytes"] <= 1800 * MIB
    reasons = [t["reason"] for t in size["trials"] if t["reason"]]
    assert reasons and all("limit" in r or "memory" in r.lower() for r in reasons)
