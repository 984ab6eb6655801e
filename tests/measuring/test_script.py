"""`scripts/benchmark.py` itself, and the benchmark jobs of a training script."""

import json

import helpers
import pytest

SCRIPT = """
import keras, numpy as np, tensorflow as tf

def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x = np.ones((16, 8), "float32")
    return model, tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
"""
ONE = ["--modes=float32"]
COMMANDS = {
    "suite": ("benchmark.py", ["--tiny", "--tasks=digits", "--workdir=suite"]),
    "own": (
        "benchmark.py",
        ["--workload=my_script:build", *ONE, "--tiny", "--workdir=own"],
    ),
    "job": ("train_cnn.py", ["--job=inference_benchmark", "--tiny", "--workdir=job"]),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "my_script.py").write_text(SCRIPT)
    cases = [(helpers.ROOT / "scripts" / s, a, folder) for s, a in COMMANDS.values()]
    results = helpers.run_scripts(cases)
    return folder, dict(zip(COMMANDS, results, strict=True))


def stored(finished, name):
    done = finished[1][name]
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((finished[0] / name / "benchmark.json").read_text())


def test_suite_has_steps_and_a_time_to_accuracy(finished):
    found = stored(finished, "suite")
    assert [row["mode"] for row in found["rows"]] == ["float32", "mixed_bfloat16"]
    assert not any(row["failed"] for row in found["rows"])
    assert [row["seeds"] for row in found["accuracy"]] == [1, 1]
    assert not any(row["failed"] for row in found["accuracy"])
    done = finished[1]["suite"]
    assert "## Time to accuracy" in done.stdout and "report.html" in done.stderr
    page = (finished[0] / "suite/report.html").read_text()
    assert page.count("<svg") == 3 and "as fast as float32" in page


def test_a_users_own_model_is_measured(finished):
    found = stored(finished, "own")
    assert set(found["answers"]) == {"build"}
    assert found["machine"]["command"].endswith("--tiny --workdir=own")
    assert [row["repeats"] for row in found["rows"]] == [1]


def test_jobs_of_a_training_script_have_the_published_tables(finished):
    assert len(stored(finished, "job")["rows"]) == 2
    report = (finished[0] / "job/report.md").read_text()
    assert "batch size (mode, FP32)" in report and "latency 90 % (ms)" in report
    assert report in finished[1]["job"].stdout
