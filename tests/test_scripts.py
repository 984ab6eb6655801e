"""The scripts' command line: errors in one line, exit code 1, nothing left behind."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "arguments", "phrase"),
    [
        ("train_cnn.py", ["--config.epochz=3"], 'Did you mean "epochs"'),
        ("train_cnn.py", ["--config.precision.mode=mixed_fp16"], "'mixed_float16'"),
        ("train_cnn.py", ["--config.precision.mode=tf32"], "TF32 needs an NVIDIA GPU"),
        (
            "train_cnn.py",
            ["--config.precision.loss_scale.backoff_factor=2", "--tiny"],
            "backoff_factor=2",
        ),
        ("train_cnn.py", ["--tiny", "--workdir=/dev/null/x"], "--workdir"),
        ("train_cnn.py", ["--job=serve"], "--job=serve"),
        ("train_cnn.py", ["--seeds=0"], "--seeds=0"),
        ("train_cnn.py", ["stray"], "stray"),
        (
            "train_bert.py",
            [f"--config={ROOT}/configs/bert/tweets.py", "--data_dir=absent"],
            "absent",
        ),
        ("train_bert.py", ["--preset=no_such_preset", "--tiny"], "no_such_preset"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_1(script, arguments, phrase, tmp_path):
    done = run(script, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert phrase in line
    assert done.stdout == ""


def test_verbosity_shows_the_traceback(tmp_path):
    done = run(
        "train_cnn.py", "--config.precision.mode=x", "--verbosity=1", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "Unknown precision mode" in done.stderr


def test_tiny_comparison_prints_the_table_and_resumes(tmp_path):
    first = run("train_cnn.py", "--tiny", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    assert "speed-up" in lines[head] and "skipped steps" in lines[head]
    assert lines[head + 2].startswith("float32")
    assert lines[head + 3].startswith("mixed_")
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"export", "report.md", "comparison.png"} <= {
        p.name for p in folder.iterdir()
    }
    again = run("train_cnn.py", "--tiny", cwd=tmp_path)
    assert again.returncode == 0
    assert again.stdout == first.stdout
