"""A job's folder: one job's alone, and nobody else's files are deleted."""

import pytest

from tfamp import errors
from tfamp.training import (
    compare,
    run_files,
    step_benchmark,
    train_and_evaluate,
)
from tfamp.training.tasks import images

BENCHMARK = step_benchmark.Settings("train", modes=("float32",))


def make_config():
    config = images.get_config()
    config.name, config.data.name = "tiny", "digits"
    config.data.image_size = 8
    config.precision.mode = "mixed_bfloat16"
    return config


def leave_run(folder):
    """What a run leaves that was killed at its start."""
    folder.mkdir(parents=True)
    run_files.write_config(make_config(), folder)


def leave_benchmark(folder):
    """The same of a benchmark."""
    folder.mkdir()
    settings = step_benchmark.identity(make_config(), BENCHMARK)
    run_files.write_config(settings, folder)
    (folder / "cells").mkdir()
    (folder / "cells/train-float32-batch8-xla_auto-repeat0.json.tmp").write_text("")


def leave_comparison(folder):
    """The same of a comparison."""
    leave_run(folder / "float32/seed0")
    (folder / "mixed_bfloat16/seed0").mkdir(parents=True)


FOLDERS = {
    "run": leave_run,
    "benchmark": leave_benchmark,
    "comparison": leave_comparison,
}
JOBS = {
    "run": lambda folder: train_and_evaluate(make_config(), folder),
    "benchmark": lambda folder: step_benchmark.run(make_config(), folder, BENCHMARK),
    "comparison": lambda folder: compare.compare(make_config(), folder),
}


@pytest.mark.parametrize(
    ("kind", "job"), [(a, b) for a in FOLDERS for b in JOBS if a != b]
)
def test_folder_of_another_job_is_refused_and_left_as_it_is(kind, job, tmp_path):
    folder = tmp_path / "run"
    FOLDERS[kind](folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(errors.RunError, match=f"holds a {kind}; this job writes a"):
        JOBS[job](folder)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", FOLDERS)
def test_overwrite_deletes_what_a_kill_left_of_a_job(kind, tmp_path):
    FOLDERS[kind](tmp_path / "run")
    run_files.delete_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "files",
    [
        ["report.md"],
        ["report.md", "export/thesis.txt", "float32/seed0/"],
        ["config.yaml", "backup/thesis.txt"],
        ["float32/seed0/config.yaml", "float32/seed0/backup/thesis.txt"],
        ["float32/seed0/result.json"],
    ],
    ids=" ".join,
)
def test_overwrite_deletes_no_folder_whose_settings_are_not_a_runs(files, tmp_path):
    for file in files:
        path = tmp_path / "mine" / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not file.endswith("/"):
            path.write_text("task: thesis")
    with pytest.raises(errors.RunError, match="deletes only folders of runs"):
        run_files.delete_run(tmp_path / "mine")
    assert all((tmp_path / "mine" / file).exists() for file in files)
