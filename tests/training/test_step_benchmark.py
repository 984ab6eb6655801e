"""Benchmark jobs: planned, measured in processes of their own, resumed, reported."""

import json
import sys

import pytest

from tfamp import errors
from tfamp.training import (
    app,
    base_config,
    benchmark_cell,
    benchmark_inputs,
    bert_config,
    run_files,
    step_benchmark,
)

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
figures = {"seconds": [0.1] * request["steps"], "first_step_seconds": 1.0,
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
    config = base_config.get_cnn_config()
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


def test_overwrite_deletes_no_benchmark_with_foreign_files(tmp_path):
    (tmp_path / "run/cells").mkdir(parents=True)
    (tmp_path / "run/cells/thesis.txt").write_text("years of work")
    with pytest.raises(errors.RunError, match="thesis.txt"):
        run_files.delete_run(tmp_path / "run")


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


def test_training_cell_takes_the_steps_of_fit():
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
    request = benchmark_cell.to_request(config, cell, 1, 1, tmp_path / "figures.json")
    with pytest.raises(SystemExit, match="ValueError: .*'imagenet'"):
        benchmark_cell.serve(request)
    assert not (tmp_path / "figures.json").exists()
