"""The batch-size finder: the search, and trials in processes that take real steps."""

import json
import math

import helpers
import hypothesis
import pytest
from hypothesis import strategies

import tfamp
from tfamp.measuring import (
    batch_size,
    process_memory,
    processes,
    training_steps,
    trials,
    workloads,
)
from tfamp.recipes import images

MIB = process_memory.MIB
MODES = ("float32", "mixed_bfloat16")


def make_config(**fields):
    given = {"name": "tiny", "data__name": "digits", "data__image_size": 8, **fields}
    return helpers.configured(images, **given)


def search(threshold, allowed=4096, start=8):
    """Returns the bracket for sizes that fit up to a threshold, and what was tried."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= threshold

    sizes = range(8, allowed + 1, 8)
    return batch_size.search(fits, sizes, start // 8 - 1, batch_size.TOLERANCE), tried


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


@pytest.mark.parametrize(("allowed", "start"), [(8, 8), (96, 96), (800, 8), (4096, 8)])
def test_no_more_trials_are_made_than_are_announced(allowed, start):
    thresholds = range(0, allowed + 8, 8)
    counts = [len(search(each, allowed, start)[1]) for each in thresholds]
    most = batch_size.most_trials(allowed // 8, start // 8 - 1)
    assert max(counts) <= most <= max(counts) + 2


# ---- Trials ----


@pytest.fixture
def stand_in(monkeypatch):
    """A trial takes 100 MiB, and of an example 2 MiB in float32 and 1 MiB in others."""
    made = []

    def call(function, asked, steps, *, memory):
        assert function is training_steps.train
        config, keywords, size, count = asked
        mode = keywords["mode"]
        assert (config["precision"]["mode"], config["batch_size"]) == (mode, size)
        assert config["optimizer"]["accumulation_steps"] == count
        made.append((mode, size))
        held = (100 + (2 if mode == "float32" else 1) * size) * MIB
        if held > memory.host:
            return processes.Outcome(None, "MemoryError: full")
        figures = {"host_bytes": held, "device_bytes": None, "peak_bytes": held}
        return processes.Outcome({**figures, "unit": "images", "description": "net"})

    monkeypatch.setattr(processes, "call", call)
    monkeypatch.setattr(workloads, "check", lambda configs: list(configs))
    return made


def find(folder, **fields):
    """Searches in 612 MiB: 256 examples fit in float32, 512 in others."""
    asked = {"modes": MODES, "limit": "612MiB", **fields}
    return tfamp.find_batch_size(make_config(), workdir=folder, **asked)


def test_both_modes_are_compared_and_finished_trials_not_made_again(
    tmp_path, stand_in, monkeypatch, capsys
):
    found = find(tmp_path / "a")
    first, second = found.sizes
    assert (first["batch_size"], first["failing"], first["ratio"]) == (256, 264, None)
    assert (second["batch_size"], second["failing"]) == (512, 520)
    assert second["ratio"] == 2.0 and second["peak_bytes"] == 612 * MIB
    assert stand_in[0] == ("float32", 8)
    text = (tmp_path / "a/report.md").read_text()
    row = next(line for line in text.splitlines() if "mixed_bfloat16" in line)
    cells = ["mixed_bfloat16", "512", "1", "520", "2.00", "612 MiB"]
    assert [cell.strip() for cell in row.split("|")[1:7]] == cells
    assert "memory of the CPU: 612 MiB" in text and "net" in text
    stored = json.loads((tmp_path / "a/batch_sizes.json").read_text())
    assert stored["sizes"][1]["batch_size"] == 512
    said = capsys.readouterr().err.splitlines()
    # Doubled at most to 65536, and then bisected to 3 %.
    assert said[:2] == ["1 of at most 21: float32, batch 8", "  fits: 116 MiB"]
    assert "(at most 1 min left)" in said[2]
    assert "  does not fit: MemoryError: full" in said
    made = len(stand_in)
    find(tmp_path / "a")
    said = capsys.readouterr().err.splitlines()
    assert len(stand_in) == made
    assert said[0] == "1 of at most 21: float32, batch 8 (measured before)"
    assert all(line.endswith("(measured before)") for line in said[::2])
    find(tmp_path / "a", verbose=0)
    assert capsys.readouterr().err == ""
    with pytest.raises(tfamp.RunError, match="other settings"):
        find(tmp_path / "a", steps=3)
    # Trials that had more room, and those that had less.
    for limit, sizes in (("400MiB", [144, 296]), ("700MiB", [296, 592])):
        other = find(tmp_path / "a", limit=limit)
        assert [x["batch_size"] for x in other.sizes] == sizes
        most = process_memory.parse_size(limit)
        assert all(size["peak_bytes"] <= most for size in other.sizes)
    # Another machine, or other versions, know nothing of these.
    made = len(stand_in)
    monkeypatch.setattr(trials, "place", lambda machine: {"device": "other"})
    assert find(tmp_path / "a") == found
    assert len(stand_in) > made


@pytest.mark.parametrize(
    ("whole", "expected"),
    [(256, [(256, 1), (256, 1)]), (1000, [(250, 4), (500, 2)]), (331, [(1, 331)] * 2)],
)
def test_the_rest_of_an_effective_batch_is_accumulated(whole, expected, stand_in):
    limit = "612MiB" if whole != 331 else "400MiB"
    found = find(None, effective_batch=whole, limit=limit)
    assert [(x["batch_size"], x["accumulation_steps"]) for x in found.sizes] == expected
    assert "accumulation steps" in str(found)


def test_largest_batch_that_is_allowed_ends_the_search(tmp_path, stand_in):
    first, second = find(tmp_path / "a", max_batch_size=100).sizes
    assert (first["batch_size"], first["failing"]) == (96, None)
    assert second["ratio"] is None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"limit": "110MiB"}, tfamp.RunError, "smallest batch size"),
        ({"limit": "2 gigs"}, ValueError, "Received: limit='2 gigs'. Expected.*'2GiB'"),
        ({"limit": 0}, ValueError, "Received: limit=0"),
        ({"effective_batch": 0}, ValueError, "effective_batch=0"),
        ({"max_batch_size": 7}, ValueError, "max_batch_size"),
        ({"limit": "2 TiB"}, ValueError, "more than this host can spare"),
    ],
    ids=str,
)
def test_what_no_search_can_answer_is_an_error(
    fields, error, message, tmp_path, stand_in
):
    with pytest.raises(error, match=message):
        find(tmp_path / "a", **fields)


def test_wrong_settings_are_refused_before_a_folder_is_made(tmp_path):
    wrong = {"strategy": "mirrored"}, {"data__name": "unheard_of"}
    for fields, words in zip(wrong, ("one device", "unheard_of"), strict=True):
        with pytest.raises(ValueError, match=words):
            tfamp.find_batch_size(make_config(**fields), workdir=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_real_processes_are_held_to_the_limit_and_take_nothing_down(tmp_path):
    sizes = {"data__image_size": 256, "model__blocks": ((64,),), "model__dense": 0}
    found = tfamp.find_batch_size(
        make_config(**sizes),
        modes=("mixed_bfloat16",),
        limit="1800MiB",
        max_batch_size=512,
        steps=1,
        workdir=tmp_path,
    )
    (size,) = found.sizes
    assert 8 <= size["batch_size"] < (size["failing"] or 0)
    assert size["peak_bytes"] <= 1800 * MIB
    reasons = [t["reason"] for t in size["trials"] if t["reason"]]
    assert reasons and all("limit" in r or "memory" in r.lower() for r in reasons)


OWN = """
import keras
import tensorflow as tf


def build(batch_size):
    layers = [keras.layers.Dense(4096, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    one = tf.zeros((64,)), tf.zeros((1,))
    return model, tf.data.Dataset.from_tensors(one).repeat().batch(batch_size)


def fixed(batch_size):
    return build(16)
"""


@pytest.mark.issue("tensorflow#45081")
def test_a_model_of_one_s_own_is_tried_in_processes(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    asked = {"modes": ["float32"], "steps": 1, "workdir": tmp_path / "found"}
    found = tfamp.find_batch_size(
        f"{file}:build", "1500MiB", effective_batch=64, **asked
    )
    (size,) = found.sizes
    assert (size["batch_size"], size["accumulation_steps"]) == (64, 1)
    assert "sequential" in str(found) and "1,500 MiB" in str(found)
    assert 100 * MIB < size["peak_bytes"] < 1500 * MIB
    words = "must return batches of the requested size.*16 examples for batch_size=8"
    with pytest.raises(tfamp.RunError, match=words):
        tfamp.find_batch_size(f"{file}:fixed", modes=["float32"])
    with pytest.raises(ValueError, match="Function not found"):
        tfamp.find_batch_size(f"{tmp_path / 'none.py'}:build")
