"""A user's model from end to end, in real processes; what resumes and what fails."""

import contextlib
import io
import json
import re

import helpers
import pytest

import tfamp
from tfamp.facts import hardware
from tfamp.measuring import torch_peer, workloads
from tfamp.measuring.benchmark import cells, runner
from tfamp.precision import control

SCRIPT = """
import keras, numpy as np, tensorflow as tf

def build(batch_size=8, fail=""):
    body = [keras.layers.Dense(32, "relu"), keras.layers.Dense(3, dtype="float32")]
    model = keras.Sequential([keras.Input((16,)), *body])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model.compile(optimizer, loss, metrics=["accuracy"])
    if keras.config.dtype_policy().name == fail:
        raise ValueError("not in " + fail)
    x = np.random.default_rng(0).normal(size=(40, 16)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(-1)))
    return model, data.batch(batch_size, drop_remainder=True)
"""
COUNTS = {"repeats": 2, "steps": 3, "warmup": 2}
MODES = ("float32", "mixed_bfloat16")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def measured(script, tmp_path_factory):
    """The folder, the report, and what was said."""
    folder, said = tmp_path_factory.mktemp("run"), io.StringIO()
    keywords = {"frameworks": ("tfamp", "keras"), "workdir": folder, **COUNTS}
    with contextlib.redirect_stderr(said):
        made = tfamp.benchmark_model(f"{script}:build", MODES, **keywords)
    lines = [x for x in said.getvalue().splitlines() if "still running" not in x]
    return folder, made, lines


def test_every_cell_has_its_figures(measured):
    _, made, said = measured
    assert [row.cell.column for row in made.rows] == [
        *MODES,
        *(f"keras {mode}" for mode in MODES),
    ]
    for row in made.rows:
        assert row.repeats == 2 and row.examples == 16  # Two batches an update.
        assert row.loss > 0 and row.memory > 0 and row.speed_up.mean > 0
    base, mixed, plain, _ = made.rows
    assert abs(plain.loss_difference.mean) < 1e-5
    assert 0 < abs(mixed.loss_difference.mean) < 0.1
    assert "requested" in mixed.note and "plain Keras" in plain.note
    assert len(said) == 8 and said[0].startswith("1 of 8: build: float32")
    assert said[1].endswith("(about 1 min left)")


def test_files_are_written_and_complete(measured):
    folder, made, _ = measured
    assert (folder / "report.md").read_text() == str(made)
    assert "<svg" in (folder / "report.html").read_text()
    stored = json.loads((folder / "benchmark.json").read_text())
    assert {"date", "commit", "versions", "machine"} <= stored["machine"].keys()
    assert re.fullmatch(r"([0-9a-f]{12}(-dirty)?)?", stored["machine"]["commit"])
    assert len(stored["rows"]) == 4


def make_config(script, modes=MODES, **fields):
    config = helpers.configured(cells, **{"name": "build", **COUNTS, **fields})
    config.tasks.build = cells.get_task(f"{script}:build")
    config.tasks.build.update({"modes": modes, "frameworks": ("tfamp",)})
    return config


def test_same_command_measures_only_what_is_missing(measured, script, capsys):
    folder = measured[0]
    damaged = next(folder.glob("cells/*tfamp-mixed*repeat1.json"))
    damaged.write_text("{")
    runner.run(make_config(script), folder)
    said = [x for x in capsys.readouterr().err.splitlines() if " of 4: " in x]
    again = [line for line in said if "measured before" in line]
    assert len(said) == 4 and len(again) == 3
    script.write_text(script.read_text() + "\n")  # Other code has other figures.
    runner.run(make_config(script, repeats=1), folder)
    said = capsys.readouterr().err
    assert "1 of 2: " in said and "measured before" not in said


def test_failed_cells_are_rows_with_their_reason(script, tmp_path):
    config = make_config(script, repeats=1)
    with config.unlocked():
        config.tasks.build.arguments = {"fail": "mixed_bfloat16"}
    base, mixed = runner.run(config, tmp_path).rows
    assert not base.failed
    assert mixed.failed.startswith("ValueError: not in mixed_bfloat16 (in build, ")
    assert "not in mixed_bfloat16" in (tmp_path / "report.html").read_text()


def test_inference_is_measured_by_predict(script, tmp_path):
    config = make_config(script, job="inference", repeats=1)
    base, mixed = runner.run(config, tmp_path).rows
    assert base.output_error == 0 and 0 < mixed.output_error < 0.05
    assert base.loss is None and mixed.rate > 0


def test_what_cannot_be_measured_is_refused_before_any_work(measured, script, tmp_path):
    with pytest.raises(ValueError, match="module:function"):
        tfamp.benchmark_model("absent:build", workdir=tmp_path / "a")
    config = helpers.configured(cells, name="some", torch_python="/bin/false")
    config.tasks.digits = cells.get_task(workloads.load("configs/cnn/digits.py"))
    with pytest.raises(tfamp.RunError, match="cannot import PyTorch"):
        runner.run(config, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(tfamp.RunError, match="other settings"):
        runner.run(make_config(script, steps=4), measured[0])


def test_a_report_without_figures_is_an_error(script):
    """Here of a process beyond its memory."""
    few = {"modes": ("float32",), "repeats": 1}
    config = make_config(script, memory_limit_mb=100, **few)  # Less than TensorFlow.
    words = "Every cell of the benchmark failed. The.*the limit is 100 MiB"
    with pytest.raises(tfamp.RunError, match=words):
        runner.run(config, None)  # Keeps nothing.


def test_another_interpreter_gets_none_of_the_flags_that_enable_sets(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho "{\\"flags\\": \\"${XLA_FLAGS-none}\\"}"\n')
    other.chmod(0o755)
    with hardware.simulated(hardware.DEVICES["h100"]), control.enabled("float32"):
        assert torch_peer.versions(str(other)) == ({"flags": "none"}, "")
