"""Folders that the tfamp of 2026-11-27 wrote: runs resume, benchmarks continue.

`tests/golden/jobs` is what these commands left under `runs/`, on an AMD EPYC with
TensorFlow 2.21.0 and Keras 3.15.1, without what is not read again (reports, events):

    tfamp train cnn/digits --tiny --job=train --config.epochs=2   (killed after epoch 1)
    tfamp train cnn/digits --tiny
    tfamp train cnn/digits --tiny --job=train_benchmark
    tfamp train cnn/digits --tiny --find_batch_size --memory_limit_mb=3000
    tfamp benchmark --tiny

`own_batches` and `own_benchmark` are those of the calls in `OWN`. The names of the
folders are digests of the settings, so that the same commands find them.
"""

import json
import pathlib
import shutil

import pytest
import workers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = "train cnn/digits --tiny"
# What a figure holds for besides the machine: the user's function, PyTorch's versions.
OF_THE_TRIAL = {"function", "peers"}
OWN = """
import tfamp

batches = {"limit": "3GiB", "max_batch_size": 16, "workdir": "own_batches"}
print(tfamp.find_batch_size("own:build", **batches))
timed = {"repeats": 2, "steps": 2, "warmup": 1, "workdir": "own_benchmark"}
modes = "float32", "mixed_bfloat16"
print(tfamp.benchmark_model("own:build", modes, **timed))
"""
FRESH = """
import tfamp

given = {"frameworks": ("tfamp",), "repeats": 1, "steps": 1, "warmup": 1}
tfamp.benchmark_model("own:build", ("float32",), **given, workdir="fresh")
"""


def run(folder, *arguments):
    done = workers.run_python(*arguments, cwd=folder)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What figures of this machine hold for, from a script and from a command."""
    command = "-m tfamp benchmark --workload=own:build --tiny --modes=float32"
    found = {}
    for name, arguments in {
        "script": ("-c", FRESH),
        "command": (*command.split(), "--workdir=fresh"),
    }.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(GOLDEN / "own.py", folder)
        run(folder, *arguments)
        (file,) = folder.glob("fresh/cells/*.json")
        found[name] = json.loads(file.read_text())["identity"]
    return found


@pytest.fixture
def folder(tmp_path):
    """A copy of the folders, to go on in."""
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "jobs").rename(tmp_path / "runs")
    return tmp_path


@pytest.fixture
def measured_here(folder, here):
    """The same, as if this machine had measured all of it."""
    for file in folder.rglob("cells/*.json"):
        figures = json.loads(file.read_text())
        held = figures["identity"]
        now = here["command" if (folder / "runs") in file.parents else "script"]
        assert held.keys() - OF_THE_TRIAL == now.keys() - OF_THE_TRIAL
        assert held["schema_version"] == now["schema_version"]
        figures["identity"] = {
            name: value if name in OF_THE_TRIAL else now[name]
            for name, value in held.items()
        }
        file.write_text(json.dumps(figures))
    return folder


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_killed_run_resumes_after_its_last_epoch(folder):
    (file,) = folder.glob("runs/digits-tiny-train-*/metrics.jsonl")
    before = rows(file)
    job = "--job=train --config.epochs=2"
    said = run(folder, "-m", "tfamp", *TINY.split(), *job.split())
    assert "resumed after epoch 1: 1 of 2 epochs" in said
    after = rows(file)
    assert after[: len(before)] == before  # Nothing was trained again.
    epochs = [row for row in after if row["kind"] == "epoch"]
    assert [row["epoch"] for row in epochs] == [1, 2]
    # As the run that was not killed; its first epoch had 2.378. A CPU without bfloat16
    # computes in float32: 2.325.
    assert epochs[1]["loss"] == pytest.approx(2.341031551361084, rel=1e-2)


def test_a_finished_run_is_evaluated(folder):
    (file,) = folder.glob("runs/digits-tiny-train-*/metrics.jsonl")
    command = f"train --job=evaluate --workdir={file.parent}"
    assert "best.weights.h5" in run(folder, "-m", "tfamp", *command.split())


def test_a_comparison_is_read_and_not_trained_again(folder):
    said = run(folder, "-m", "tfamp", *TINY.split())
    assert said.count("(finished before)") == 2
    assert "float32         10.81    2.3232" in said


@pytest.mark.parametrize(
    ("command", "told", "count"),
    [
        (f"{TINY} --job=train_benchmark", "(measured before)", 2),
        ("benchmark --tiny", "(measured before)", 6),
        (f"{TINY} --find_batch_size --memory_limit_mb=3000", "(measured before)", 3),
    ],
)
def test_a_benchmark_goes_on_without_measuring_again(
    command, told, count, measured_here
):
    said = run(measured_here, "-m", "tfamp", *command.split())
    assert said.count(told) == count
    assert said.count("repeat ") + said.count("accuracy, seed") in (0, count)


def test_measurements_of_a_users_function_are_not_repeated(measured_here):
    said = run(measured_here, "-c", OWN)
    assert said.count(", batch ") == 3 and said.count(", repeat ") == 8
    assert said.count("(measured before)") == 3 + 8
