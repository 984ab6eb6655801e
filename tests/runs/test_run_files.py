"""A job's folder: one job's alone, and nobody else's files are touched."""

import subprocess
import sys

import points
import pytest

import tfamp
from tfamp.runs import compare, results, run_files
from tfamp.training import train_and_evaluate

JOBS = {
    "run": lambda folder: train_and_evaluate(points.make_config(), folder),
    "benchmark": lambda folder: run_files.open_folder(None, folder, "benchmark"),
    "comparison": lambda folder: compare.compare(points.make_config(), folder),
}


@pytest.mark.parametrize("kind", JOBS)
def test_folder_of_another_job_is_refused_and_overwrite_deletes_it(kind, tmp_path):
    """Of one that was killed at its start."""
    folder = run_files.open_folder(None, tmp_path / "run", kind)
    before = sorted(folder.rglob("*"))
    for job in JOBS.keys() - {kind}:
        with pytest.raises(
            tfamp.RunError, match=f"holds a {kind}; this job writes a {job}"
        ):
            JOBS[job](folder)
    assert sorted(folder.rglob("*")) == before
    (folder / "float32/seed0").mkdir(parents=True)
    (folder / "float32/seed0/notes.txt").write_text("")
    (folder / "config.yaml").write_text("")
    run_files.delete_run(folder)
    run_files.delete_run(folder)  # There is none: nothing to do.
    assert not folder.exists()


@pytest.mark.parametrize("file", ["thesis.txt", "float32/seed0/config.yaml"])
def test_folder_that_no_job_has_made_is_neither_written_nor_deleted(tmp_path, file):
    path = tmp_path / "mine" / file
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    for job in JOBS.values():
        with pytest.raises(tfamp.RunError, match="is not empty"):
            job(tmp_path / "mine")
    with pytest.raises(tfamp.RunError, match="deletes only folders of runs"):
        run_files.delete_run(tmp_path / "mine")
    assert [p for p in (tmp_path / "mine").rglob("*") if p.is_file()] == [path]


def test_folder_in_an_object_store_is_refused_with_what_works():
    with pytest.raises(tfamp.RunError, match="local or mounted.*BackupAndRestore"):
        run_files.open_folder(None, "gs://bucket/run")


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tfamp.RunError, match="--workdir"):
        train_and_evaluate(points.make_config(), tmp_path / "file" / "run")


@pytest.mark.parametrize("where", ["current", "link"])
def test_overwrite_spares_the_current_directory_and_links(tmp_path, monkeypatch, where):
    folder = run_files.open_folder(None, tmp_path / "run")
    if where == "link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    else:
        (folder / "tensorboard").mkdir()
        monkeypatch.chdir(folder / "tensorboard")
    with pytest.raises(tfamp.RunError, match="current directory, one above it, or a l"):
        run_files.delete_run(folder)
    assert (tmp_path / "run/.tfamp-run").exists()


def test_folder_that_another_process_works_in_is_refused(tmp_path):
    folder = run_files.open_folder(None, tmp_path / "run")
    program = (
        "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(folder / ".tfamp-lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        for job in (JOBS["run"], run_files.delete_run):
            with pytest.raises(tfamp.RunError, match="Another process is working"):
                job(folder)
        assert {p.name for p in folder.iterdir()} == {".tfamp-lock", ".tfamp-run"}
        other.communicate("")
    assert JOBS["run"](folder).mode == "float32"


def test_result_of_another_version_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "result.json").write_text('{"joules": 7}')
    with pytest.raises(tfamp.RunError, match=r"result.json.*joules"):
        results.read_result(tmp_path)
