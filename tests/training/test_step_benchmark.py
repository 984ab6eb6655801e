"""Benchmark jobs: planned, measured in processes of their own, resumed, reported."""

import importlib.metadata
import inspect
import json
import platform
import subprocess
import sys

import keras
import pytest

from tfamp import errors
from tfamp.precision import control
from tfamp.training import (
    app,
    benchmark_cell,
    benchmark_inputs,
    benchmark_process,
    bert_config,
    child_process,
    run_files,
    step_benchmark,
    trainer,
)
from tfamp.training.tasks import images

LENGTH = 16
MODES = ("float32", "mixed_bfloat16")
# Stands for the process of a cell: writes figures, or ends as the mode says.
STAND_IN = """
import json, os, sys
request = json.load(sys.stdin)
mode = request["cell"]["mode"]
if mode == "tf32":
    sys.exit("first line\\nValueError: no TF32 here")
if mode == "mixed_float16":
    os.kill(os.getpid(), 9)
if os.environ.get("FAILS") and request["output"].endswith(os.environ["FAILS"]):
    sys.exit("ValueError: " + 1000 * "long " + "hint")
figures = {"seconds": [0.1] * request["steps"], "first_step_seconds": 1.0,
           "identity": request["identity"], "batches_per_step": 1,
           "loss": 0.5, "skipped_steps": None, "loss_scale": None, "mode": mode,
           "reason": "asked for", "tensor_float_32": False, "xla": False,
           "graph_rewrite": "", "host_bytes": None, "device_bytes": None,
           "parameters": 7, "description": "stand-in"}
open(request["output"], "w").write(json.dumps(figures))
"""
COMMAND = (sys.executable, "-S", "-c", STAND_IN)


def make_texts(task="text_classification"):
    config = bert_config.get_bert_config()
    config.name, config.task = "tiny", task
    config.model.update(config.tiny.model)
    config.data.sequence_length = LENGTH
    config.batch_size = 4
    return config


def make_images():
    config = images.get_config()
    config.name, config.data.name = "tiny", "digits"
    config.data.image_size = 8
    config.model.update(config.tiny.model)
    return config


def ask(job="train", **fields):
    defaults = {"modes": MODES, "steps": 2, "warmup": 1, "repeats": 1}
    return step_benchmark.Settings(job, **{**defaults, **fields})


# ---- The plan ----


def test_cells_are_all_combinations_with_the_modes_next_to_each_other():
    settings = ask(batch_sizes=(1, 2), sequence_lengths=(8,), jit=("off", "on"))
    cells = step_benchmark.plan(make_texts(), settings)
    assert [cell[1:] for cell in cells[:3]] == [
        ("float32", 1, 8, "off"),
        ("mixed_bfloat16", 1, 8, "off"),
        ("float32", 2, 8, "off"),
    ]
    assert len(cells) == 8 and len({cell.key for cell in cells}) == 8


def test_cells_by_default_are_those_of_the_configuration():
    config = make_texts()
    config.precision.mode = "mixed_float16"
    cells = step_benchmark.plan(config, ask(modes=()))
    assert [(c.mode, c.batch_size, c.sequence_length, c.jit) for c in cells] == [
        ("float32", 4, LENGTH, "auto"),
        ("mixed_float16", 4, LENGTH, "auto"),
    ]
    config.jit_compile = True
    assert step_benchmark.plan(config, ask())[0].jit == "on"


def test_float32_has_the_batch_size_of_its_own_runs_unless_sizes_are_asked_for():
    config = make_images()
    config.batch_size, config.float32.batch_size = 10, 6
    modes = ("float32", "tf32", "mixed_float16")
    cells = step_benchmark.plan(config, ask(modes=modes))
    assert [(cell.mode, cell.batch_size) for cell in cells] == [
        ("float32", 6),
        ("tf32", 6),
        ("mixed_float16", 10),
    ]
    cells = step_benchmark.plan(config, ask(modes=modes, batch_sizes=(4,)))
    assert {cell.batch_size for cell in cells} == {4}
    config.float32.batch_size = 0
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        step_benchmark.plan(config, ask())


def test_speed_up_of_different_batch_sizes_is_of_examples(tmp_path):
    config = make_texts()
    config.batch_size, config.float32.batch_size = 10, 4
    report = step_benchmark.run(config, tmp_path, ask(), command=COMMAND)
    base, mixed = report.rows  # Each has steps of 0.1 seconds.
    assert (base.throughput, mixed.throughput) == (40, 100)
    assert mixed.speed_up == 2.5 and mixed.error is None
    (note,) = [line for line in report.notes if "batches of different sizes" in line]
    first, _ = report.tables()
    cells = dict(zip(*first, strict=True))
    assert cells["batch size (mode, FP32)"] == "10, 4"
    assert cells["throughput FP32 (sequences/s)"] == "40.00"
    assert cells["loss minus FP32's"] == "not compared"
    same = step_benchmark.run(
        config, tmp_path, ask(batch_sizes=(4, 10)), command=COMMAND
    )
    assert [row.error for row in same.rows] == [0, 0, 0, 0]
    assert note not in same.notes


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (make_texts, {"modes": ("fp16",)}, "mixed_float16"),
        (make_texts, {"jit": ("maybe",)}, "maybe"),
        (make_texts, {"batch_sizes": (8, 0)}, "batch_sizes"),
        (make_images, {"sequence_lengths": (8,)}, "Only texts"),
    ],
    ids=["mode", "jit", "batch size", "length of images"],
)
def test_settings_that_make_no_sense_are_refused_before_any_work(
    make, fields, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        step_benchmark.run(make(), tmp_path / "run", ask(**fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.preset": "/nowhere"}, "There is no folder /nowhere"),
        ({"data.sequence_length": 1}, "sequence_length must be at least 3"),
        ({"optimizer.name": "lamb"}, "'lamb'"),
        ({"optimizer.schedule": "step"}, "'step'"),
        ({"task": "chess"}, "chess"),
    ],
    ids=["preset", "length", "optimizer", "schedule", "task"],
)
def test_model_that_no_cell_could_build_is_refused_before_any_work(
    changes, message, tmp_path
):
    config = make_texts()
    config.update_from_flattened_dict(changes)
    with pytest.raises((ValueError, errors.DataError), match=message):
        step_benchmark.run(config, tmp_path / "run", ask(), command=COMMAND)
    assert not (tmp_path / "run").exists()


def test_asked_lengths_are_checked_each():
    with pytest.raises(ValueError, match="sequence_length must be at least 3"):
        step_benchmark.plan(make_texts(), ask(sequence_lengths=(LENGTH, 1)))


def test_folder_does_not_depend_on_what_no_cell_uses():
    config, other = make_texts(), make_texts()
    other.data_dir, other.epochs, other.eval_batch_size = "elsewhere", 9, 7
    first, second = (step_benchmark.identity(each, ask()) for each in (config, other))
    assert app.default_workdir(first) == app.default_workdir(second)


def test_benchmark_of_several_replicas_is_refused():
    config = make_texts()
    config.strategy = "mirrored"
    with pytest.raises(ValueError, match="one device"):
        step_benchmark.plan(config, ask())


# ---- Its execution ----


def test_repeats_are_interleaved_and_failures_stop_nothing(tmp_path):
    said = []
    modes = ("float32", "tf32", "mixed_float16", "mixed_bfloat16")
    report = step_benchmark.run(
        *(make_texts(), tmp_path, ask(modes=modes, repeats=2)),
        report=said.append,
        command=COMMAND,
    )
    order = [line for line in said if line.startswith("cell ")]
    assert [line.split(",")[0] for line in order] == [
        *(f"cell {i} of 8: {mode}" for i, mode in enumerate(modes, 1)),
        "cell 5 of 8: float32",
        "cell 8 of 8: mixed_bfloat16",
    ]
    assert "  40.00 sequences/s, 100.0 ms a step, first step 1.0 s" in said
    failed = {row.mode: row.failed for row in report.rows}
    assert failed["tf32"] == "ValueError: no TF32 here"
    assert "memory" in failed["mixed_float16"]
    assert (failed["float32"], failed["mixed_bfloat16"]) == ("", "")
    stored = json.loads((tmp_path / "benchmark.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert stored["settings"]["repeats"] == 2
    assert (tmp_path / "report.md").read_text() == report.to_markdown()


def test_interrupted_benchmark_goes_on_with_the_cells_that_are_left(tmp_path):
    def interrupt(line):
        if line.startswith("cell 2"):
            raise KeyboardInterrupt

    def run(settings, report=lambda line: None):
        return step_benchmark.run(make_texts(), tmp_path, settings, report, COMMAND)

    def stamps():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}

    with pytest.raises(KeyboardInterrupt):
        run(ask(), interrupt)
    first = stamps()
    assert len(first) == 1 and not (tmp_path / "report.md").exists()
    run(ask())
    second = stamps()
    assert len(second) == 2 and second.items() >= first.items()
    run(ask(repeats=2, batch_sizes=(4, 8)))  # More of it: all there is counts.
    third = stamps()
    assert len(third) == 8 and third.items() >= second.items()
    with pytest.raises(errors.RunError, match="benchmark.steps: 2 -> 3"):
        run(ask(steps=3))
    run_files.delete_run(tmp_path)
    assert not tmp_path.exists()


def rerun(folder, **fields):
    """Runs cells with the stand-in; returns what was said of each, and the report."""
    said = []
    report = step_benchmark.run(
        make_texts(), folder, ask(**fields), said.append, COMMAND
    )
    return [line for line in said if line.startswith("cell ")], report


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, file: patch.setenv("TF_ENABLE_ONEDNN_OPTS", "0"),
        lambda patch, file: patch.setattr(platform, "platform", lambda: "elsewhere"),
        lambda patch, file: patch.setattr(
            importlib.metadata, "version", lambda package: "99"
        ),
        lambda patch, file: file.write_text("{"),
        lambda patch, file: file.write_text("[1]"),
        lambda patch, file: file.write_text('{"seconds": [9.0]}'),
    ],
    ids=["oneDNN", "platform", "versions", "cut short", "a list", "older"],
)
def test_cell_of_another_environment_or_a_damaged_one_is_measured_anew(
    change, tmp_path, monkeypatch
):
    modes = ("float32",)
    first, before = rerun(tmp_path, modes=modes)
    again, _ = rerun(tmp_path, modes=modes)
    assert [line.endswith("(measured before)") for line in first + again] == [
        False,
        True,
    ]
    (file,) = (tmp_path / "cells").iterdir()
    change(monkeypatch, file)
    anew, after = rerun(tmp_path, modes=modes)
    assert not anew[0].endswith("(measured before)")
    assert after.rows == before.rows


def test_repeats_before_a_failure_count_and_the_reason_is_told_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FAILS", "repeat1.json")
    _, report = rerun(tmp_path, modes=("float32",), repeats=3)
    assert (report.rows[0].failed, report.rows[0].throughput) == ("", 40)
    (note,) = [line for line in report.notes if "1 of 3 repeats" in line]
    assert note.endswith("long hint")


def test_process_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_process, "TIME_LIMIT", 0.2)
    command = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    reason = benchmark_process.run("", tmp_path / "figures.json", command)
    assert reason == "ended after 0.2 s without figures"


# A parent that starts a child, which is to end with it and then waits.
PARENT = """
import os, subprocess, sys
child = "parent, code = int(sys.argv[1]), sys.argv[2]; exec(code); end_with(parent)"
child = "import contextlib, ctypes, os, signal, sys; " + child
child += "; print('ready', flush=True); import time; time.sleep(60)"
subprocess.run([sys.executable, "-S", "-c", child, sys.argv[1] or str(os.getpid()),
                sys.argv[2]])
"""


def start_parent(told):
    source = inspect.getsource(child_process.end_with)
    return subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT, told, source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_cell_ends_with_the_process_that_asked():
    parent = start_parent("")
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    # The end of the pipe, which the child has, too: in time only if it is gone.
    assert parent.communicate(timeout=30) == ("", "")


def test_cell_whose_asker_has_ended_meanwhile_measures_nothing():
    stdout, stderr = start_parent("1").communicate(timeout=30)
    assert (stdout, stderr) == ("", "the process that asked has ended\n")


def test_benchmark_without_any_figures_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_process, "_COMMAND", COMMAND)
    with pytest.raises(errors.RunError, match=r"failed.*no TF32 here"):
        app.run_job("train_benchmark", make_texts(), tmp_path, 1, ask(modes=("tf32",)))
    assert "no TF32 here" in (tmp_path / "report.md").read_text()


# Files of a folder that nobody but its owner may delete, and what is told of it.
FOREIGN = {
    "cells of a biologist": (["cells/train-images/2019/a.tif"], "cells"),
    "a folder": (
        ["config.yaml", "cells/train-a-repeat0.json/a.tif"],
        "train-a-repeat0",
    ),
    "a table": (["config.yaml", "cells/train-labels.csv"], "train-labels.csv"),
}


@pytest.mark.parametrize(("files", "told"), FOREIGN.values(), ids=FOREIGN.keys())
def test_overwrite_deletes_no_benchmark_with_foreign_files(files, told, tmp_path):
    for file in files:
        path = tmp_path / "run" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    if "config.yaml" in files:
        settings = step_benchmark.identity(make_texts(), ask())
        run_files.write_config(settings, tmp_path / "run")
    with pytest.raises(errors.RunError, match=told):
        run_files.delete_run(tmp_path / "run")
    assert all((tmp_path / "run" / file).exists() for file in files)


def test_job_runs_real_processes_and_prints_the_table(tmp_path):
    config = make_images()
    config.model.dropout = 0.0
    text = app.run_job("train_benchmark", config, tmp_path, benchmark=ask())
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert "throughput FP32 (images/s)" in lines[0]
    assert "mixed_bfloat16" in lines[2] and "failed" not in text
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == list(MODES)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=2**-6)
    assert rows[0]["host_bytes"] > 2**26


@pytest.mark.parametrize("job", ["train_benchmark", "inference_benchmark"])
def test_several_seeds_belong_to_the_comparison(job, tmp_path):
    with pytest.raises(ValueError, match="--seeds=2"):
        app.run_job(job, make_texts(), tmp_path, seeds=2)


# ---- A cell, in this process ----


def measure(config, job, mode, length=LENGTH, jit="off"):
    cell = benchmark_cell.Cell(job, mode, 2, length, jit)
    return benchmark_cell.measure(config, cell, steps=3, warmup=2)


def fit_losses(config, count):
    """The loss of each batch in a `fit` over the batches of a cell."""
    losses = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(float(logs["loss"]) * (batch + 1) - sum(losses))

    with control.enabled("float32"):
        keras.utils.set_random_seed(config.seed)
        synthetic = benchmark_inputs.create(config)
        model = synthetic.build_model()
        trainer.compile_model(model, config, count, synthetic.loss, synthetic.metrics())
        model.fit(
            synthetic.batches,
            steps_per_epoch=count,
            callbacks=[Losses()],
            shuffle=False,
            verbose=0,
        )
    return losses


@pytest.mark.parametrize("window", [1, 3])
def test_training_cell_takes_the_steps_of_fit(window):
    config = make_images()
    config.batch_size, config.optimizer.accumulation_steps = 2, window
    config.jit_compile = False
    found = measure(config, "train", "float32", None)
    expected = fit_losses(config, 5 * window)[2 * window :]
    assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert (len(found["seconds"]), found["batches_per_step"]) == (3, window)


def test_training_cell_scales_the_loss():
    found = measure(make_texts(), "train", "mixed_float16")
    assert len(found["seconds"]) == 3
    assert found["first_step_seconds"] > max(found["seconds"])
    assert (found["mode"], found["loss_scale"]) == ("mixed_float16", 2.0**15)
    assert found["skipped_steps"] == 0 and found["loss"] > 0
    assert found["xla"] is False


@pytest.mark.parametrize(
    ("task", "size"),
    [("text_classification", 2 * 2), ("question_answering", 2 * 2 * LENGTH)],
)
def test_outputs_are_those_of_float32_up_to_the_format(task, size):
    found = (measure(make_texts(task), "inference", mode) for mode in MODES)
    base, other = (each["outputs"] for each in found)
    assert len(base) == size
    scale = max(map(abs, base))
    # A bfloat16 keeps 8 bits; each of a few layers rounds.
    assert other == pytest.approx(base, abs=8 * 2**-8 * scale)
    assert other != base


def test_cell_says_whether_xla_ran():
    found = measure(make_images(), "inference", "float32", None, "on")
    assert found["xla"] is True


def test_new_encoder_has_the_positions_that_the_length_needs():
    config = make_texts()
    longer = config.model.max_sequence_length + 8
    found = measure(config, "inference", "float32", length=longer)
    more = 8 * config.model.hidden_dim
    plain = measure(config, "inference", "float32")
    assert found["parameters"] == plain["parameters"] + more
    assert config.model.max_sequence_length == longer - 8  # The argument is as it was.


def test_batches_are_the_same_in_every_mode_and_full():
    config = make_texts()
    features, labels = next(iter(benchmark_inputs.create(config).batches))
    again, _ = next(iter(benchmark_inputs.create(config).batches))
    assert features["token_ids"].shape == (4, LENGTH) and labels.shape == (4,)
    assert bool((features["token_ids"] == again["token_ids"]).numpy().all())
    assert features["padding_mask"].numpy().min() == 1


def test_request_brings_the_configuration_over_and_errors_back(tmp_path):
    config = make_images()
    config.data.name = "imagenet"
    cell = benchmark_cell.Cell("train", "float32", 2, None, "auto")
    request = benchmark_cell.to_request(
        config, cell, 1, 1, tmp_path / "figures.json", {}
    )
    with pytest.raises(SystemExit, match="ValueError: .*'imagenet'"):
        child_process.serve(request, benchmark_cell.serve)
    assert not (tmp_path / "figures.json").exists()
