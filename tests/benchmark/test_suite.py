"""A benchmark over its processes: resumed, failing cells as rows, its files."""

import json
import re
import sys

import pytest
import stand_in

from tfamp import errors
from tfamp.benchmark import (
    exchange,
    plots,
    records,
    report_files,
    suite,
    suite_config,
)
from tfamp.training import run_files
from tfamp.training.tasks import images

PROGRAM = (sys.executable, "-S", stand_in.__file__)
MODES = ("float32", "mixed_bfloat16", "mixed_float16")


def make_config(batch_sizes=(8,), frameworks=("tfamp", "keras"), seeds=0):
    training = images.get_config()
    training.name, training.data.name = "tiny", "digits"
    config = suite_config.get_config()
    config.name, config.repeats, config.steps, config.warmup = "suite", 2, 4, 2
    task = suite_config.get_task(training)
    task.modes, task.frameworks, task.batch_sizes = MODES, frameworks, batch_sizes
    config.tasks.tiny = task
    if seeds:
        accuracy = suite_config.get_accuracy(training)
        accuracy.modes, accuracy.seeds, accuracy.target = MODES[:2], seeds, 0.94
        config.time_to_accuracy.tiny = accuracy
    return config


def run(config, folder, **keywords):
    lines = []
    made = suite.run(config, folder, lines.append, program=PROGRAM, **keywords)
    return made, lines


@pytest.fixture
def without_figures(monkeypatch):
    """Drawing takes seconds."""
    monkeypatch.setattr(plots, "applicable", lambda report: [])


quickly = pytest.mark.usefixtures("without_figures")


@pytest.fixture
def torch_is_there(monkeypatch):
    """PyTorch's cells are made up, too."""
    monkeypatch.setattr(
        exchange, "torch_versions", lambda python: ({"torch": "9.9"}, "")
    )
    monkeypatch.setattr(exchange, "command", lambda python: PROGRAM)


def test_all_files_are_written_and_the_report_has_a_row_for_each_cell(
    tmp_path, torch_is_there
):
    config = make_config(frameworks=records.FRAMEWORKS, seeds=3)
    made, lines = run(config, tmp_path, command="python scripts/benchmark.py")
    assert len(made.rows) == 9 and not any(row.failed for row in made.rows)
    assert lines[0] == "1 of 25: calibration"  # 9 cells twice, 6 runs.
    assert "left" in lines[2] and lines[-1].startswith("25 of 25")
    stored = json.loads((tmp_path / report_files.JSON).read_text())
    assert stored == json.loads(json.dumps(made.to_dict()))
    ours = made.rows[1]
    assert ours.cell.column == "mixed_bfloat16"
    assert ours.speed_up.low <= ours.speed_up.median <= ours.speed_up.high
    assert 1.5 < ours.speed_up.median < 1.9
    assert list(ours.losses) == ["0", "1"] and len(ours.losses["0"]) == 6
    assert {row.distance.flops for row in made.rows} == {1e9}
    assert ours.distance.peak == 2e11 and ours.distance.matrix_share == 0.6
    base, mixed = made.accuracy_rows
    assert base.reached == mixed.reached == 3
    assert mixed.ratio[0] == pytest.approx(1.7)
    assert made.peers == {"torch": "9.9"}
    page = (tmp_path / report_files.PAGE).read_text()
    text = (tmp_path / report_files.MARKDOWN).read_text()
    for shown in (page, text):
        assert made.advice.headline.partition(":")[0] in shown
        assert "not ours" in shown and "made up" in shown
    figures = {path.name for path in (tmp_path / report_files.FIGURES).iterdir()}
    assert {"speed_up.png", "speed_up.svg", "speed_up-dark.svg"} <= figures
    assert set(re.findall(r"\(figures/(\w+\.png)\)", text)) <= figures
    assert not (tmp_path / "exchange").exists()


@quickly
def test_interrupted_benchmark_measures_only_what_is_missing(tmp_path, monkeypatch):
    config = make_config(frameworks=("tfamp",), seeds=1)
    missing = "train-tiny-tfamp-mixed_bfloat16-batch8-xla_off-repeat1.json"
    monkeypatch.setenv("STOPS_AT", missing)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    assert not (tmp_path / report_files.JSON).exists()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    # Calibration and a repeat: the next one begins with the second cell.
    assert len(before) == 1 + 3
    monkeypatch.delenv("STOPS_AT")
    made, lines = run(config, tmp_path)
    assert [line.endswith("(measured before)") for line in lines] == [
        *[True] * 4,
        *[False] * 5,
    ]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert [row.repeats for row in made.rows] == [2, 2, 2]
    _, again = run(config, tmp_path)
    assert all(line.endswith("(measured before)") for line in again)
    config.repeats = 3  # Goes on from what is there.
    _, more = run(config, tmp_path)
    assert sum(line.endswith("(measured before)") for line in more) == len(again)


@quickly
def test_cell_without_memory_is_a_row_with_its_reason_and_the_rest_is_complete(
    tmp_path,
):
    config = make_config(batch_sizes=(8, 512), frameworks=("tfamp",))
    config.memory_limit_mb = 1500
    made, lines = run(config, tmp_path)
    failed = [row for row in made.rows if row.failed]
    assert [row.cell.batch_size for row in failed] == [512] * 3
    assert {row.failed for row in failed} == {
        "MemoryError: 1,600 MiB resident, the limit is 1,500 MiB"
    }
    assert [row.repeats for row in made.rows if not row.failed] == [2, 2, 2]
    # Not tried again in the next repeat.
    assert sum("failed" in line for line in lines) == 3
    text = (tmp_path / report_files.MARKDOWN).read_text()
    assert "batch 512: failed: MemoryError: 1,600 MiB resident" in text
    assert "3 of 6 cells have no figures" in text
    assert "held to 1,500 MiB" in text


@quickly
def test_mode_that_is_not_there_is_a_row_with_its_reason(tmp_path):
    config = make_config(frameworks=("tfamp",))
    config.tasks.tiny.modes = ("float32", "tf32")
    made, _ = run(config, tmp_path)
    assert made.rows[1].failed == "UnsupportedModeError: no TF32 here"
    assert made.advice.headline.startswith("No advice")


@quickly
def test_without_pytorch_its_cells_are_left_out_with_the_reason(tmp_path, monkeypatch):
    config = make_config(frameworks=("tfamp", "torch"))
    monkeypatch.setattr(exchange, "torch_versions", lambda python: ({}, "no torch"))
    made, lines = run(config, tmp_path / "run")
    assert {row.framework for row in made.rows} == {"tfamp"}
    assert lines[0] == "without PyTorch: no torch"
    (note,) = [note for note in made.notes if "PyTorch was not measured" in note]
    assert "no torch" in note and "tfamp[bench]" in note


def test_interpreter_without_pytorch_that_was_asked_for_is_refused(tmp_path):
    config = make_config(frameworks=("tfamp", "torch"))
    config.torch_python = str(tmp_path / "no_such_python")
    with pytest.raises(errors.RunError, match="no_such_python"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@quickly
def test_other_pytorch_is_measured_anew_and_nothing_else(
    tmp_path, monkeypatch, torch_is_there
):
    config = make_config(frameworks=("tfamp", "torch"), seeds=1)
    run(config, tmp_path)
    versions = lambda python: ({"torch": "10.0"}, "")  # noqa: E731
    monkeypatch.setattr(exchange, "torch_versions", versions)
    made, lines = run(config, tmp_path)
    anew = [line for line in lines if "measured before" not in line]
    assert len(anew) == 6 and all(", torch, " in line for line in anew)
    assert made.peers == {"torch": "10.0"}
    config.tasks.tiny.frameworks = ("tfamp",)  # Nor without it.
    _, lines = run(config, tmp_path)
    assert all("measured before" in line for line in lines)


@quickly
def test_peak_below_what_cells_reach_and_uncounted_operations_are_told(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PEAK", "1e9")
    made, _ = run(make_config(frameworks=("tfamp",)), tmp_path)
    (note,) = [note for note in made.notes if "too low" in note]
    assert "tiny: float32, batch 8" in note and "calibration.json" in note
    assert not any("it reaches" in reason for reason in made.advice.reasons)
    assert "tiny: of the operations, a made-up one is not counted." in made.notes


@quickly
def test_operations_are_known_though_the_cell_that_counted_is_not_asked_for(tmp_path):
    config = make_config(frameworks=("tfamp",))
    run(config, tmp_path)
    config.tasks.tiny.modes = ("mixed_bfloat16",)
    made, _ = run(config, tmp_path)
    assert made.rows[0].distance.flops == 1e9
    assert made.advice.headline.startswith("No advice")


@quickly
def test_killed_accuracy_run_begins_anew(tmp_path):
    """Its clock would go on with the seconds of another machine."""
    config = make_config(frameworks=("tfamp",), seeds=1)
    run(config, tmp_path)
    killed = tmp_path / "accuracy/tiny/float32/seed0"
    run_files.write_config(config.tasks.tiny.config, killed)
    (killed / "result.json").unlink()
    (killed / "backup").mkdir()
    (tmp_path / "cells/accuracy-tiny-float32-seed0.json").unlink()
    _, lines = run(config, tmp_path)
    assert sum(not line.endswith("(measured before)") for line in lines) == 1
    assert not (killed / "backup").exists()


@quickly
def test_accuracy_run_that_fails_is_told_and_the_others_count(tmp_path, monkeypatch):
    config = make_config(frameworks=("tfamp",), seeds=2)
    config.time_to_accuracy.tiny.modes = ("float32", "mixed_bfloat16", "tf32")
    made, _ = run(config, tmp_path)
    failed = [(each.mode, each.seed) for each in made.accuracy_runs if each.failed]
    assert sorted(failed) == [("tf32", 0), ("tf32", 1)]
    assert len(made.accuracy_runs) == 6
    assert made.accuracy_rows[1].ratio is not None


@quickly
def test_folder_of_other_settings_is_refused_and_overwrite_deletes_it(tmp_path):
    folder = tmp_path / "run"
    config = make_config(frameworks=("tfamp",), seeds=1)
    run(config, folder)
    other = make_config(frameworks=("tfamp",), seeds=1)
    other.tasks.tiny.config.optimizer.learning_rate = 0.5
    with pytest.raises(errors.RunError, match="other settings"):
        run(other, folder)
    foreign = folder / "accuracy/tiny/float32/seed0/mine.txt"
    foreign.write_text("mine")
    with pytest.raises(errors.RunError, match="mine.txt"):
        run_files.delete_run(folder)
    foreign.unlink()
    for mode in MODES[:2]:  # What the trainer writes first.
        own = folder / "accuracy/tiny" / mode / "seed0"
        run_files.write_config(config.tasks.tiny.config, own)
    run_files.delete_run(folder)
    assert not folder.exists()
