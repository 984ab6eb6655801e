"""One's own task by name, and one's own model in several modes."""

import json
import pathlib
import shutil
import subprocess
import sys
import zipfile

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import training

TASK = """
import keras
import numpy as np
import tensorflow as tf

from tfamp import training


def get_config():
    config = training.get_config()
    config.name = "planes"
    config.task = "my_task.py:create"
    config.model.width = 8
    config.tiny.limit_examples = 0
    return config


def create(config):
    points = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))
    return training.Task(
        train=whole.take(96),
        validation=whole.skip(96).take(32),
        test=whole.skip(128),
        build_model=lambda: keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(config.model.width, "relu"),
             keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description="points beside a plane",
        predict=predict,
        assets={"sides.json": '["below", "above"]'},
    )


def predict(model, rows, folder):
    points = rows[["a", "b", "c", "d"]].astype("float32")
    above = model.predict(points.to_numpy(), verbose=0).argmax(axis=1)
    return rows[[]].assign(side=[("below", "above")[each] for each in above])


def wrong(config):
    return {"train": []}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The commands of docs/own_task.md, in a folder that holds the task alone."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_task.py").write_text(TASK)
    points = np.random.default_rng(1).normal(size=(9, 4))
    rows = [",".join(map(str, point)) for point in points]
    (folder / "rows.csv").write_text("\n".join(["a,b,c,d", *rows]))
    (folder / "lacks.csv").write_text("a,b,d\n1,2,4\n")
    script = helpers.ROOT / "scripts/train.py"
    asked = {
        "compare": ["--workdir=run"],
        "benchmark": ["--job=train_benchmark", "--tiny"],
        "wrong": ["--config.task=my_task.py:wrong", "--job=train"],
        "absent": ["--config.task=my_task:nothing_here.x", "--job=train"],
        # Then of the run of two epochs and two more.
        "two": ["--job=train", "--config.epochs=2", "--workdir=chain"],
        "four": ["--job=train", "--config.epochs=4", "--workdir=chain"],
        "at_once": ["--job=train", "--config.epochs=4", "--workdir=once"],
        "evaluate": ["--job=evaluate", "--workdir=chain", "--config.eval_batch_size=5"],
        "predict": ["--job=predict", "--workdir=chain", "--input=rows.csv"],
        "lacks": ["--job=predict", "--workdir=chain", "--input=lacks.csv"],
        "export": ["--job=export", "--workdir=chain"],
        "no_run": ["--job=evaluate", "--workdir=run"],
        "overwrite": ["--job=export", "--workdir=once", "--overwrite"],
        "other": ["--job=evaluate", "--workdir=once", "--config.batch_size=16"],
        "default": ["--job=evaluate", "--config.epochs=7"],
    }
    # Without --config: the settings are those of the run, or there are none.
    bare = {
        "none": ["--tiny"],
        "recorded_scores": ["--workdir=once", "--job=evaluate"],
        "recorded_rows": ["--workdir=once", "--job=predict", "--input=rows.csv"],
        "recorded_export": ["--workdir=once", "--job=export"],
        "no_folder": ["--job=export"],
        "no_file": ["--workdir=once", "--job=evaluate", "--config.eval_batch_size=5"],
    }
    given = [
        (script, ["--config=my_task.py", *rest], folder) for rest in asked.values()
    ]
    given += [(script, rest, folder) for rest in bare.values()]
    asked |= bare
    return folder, dict(zip(asked, helpers.run_scripts(given), strict=True))


def test_a_task_of_one_s_own_is_compared_and_exported(ran):
    folder, done = ran
    compared = done["compare"]
    assert compared.returncode == 0, compared.stderr
    assert "points beside a plane" in compared.stdout
    assert "mixed_bfloat16 minus float32" in compared.stdout
    files = {path.name for path in (folder / "run").iterdir()}
    assert {"comparison.png", "report.md", "export", "float32"} <= files
    served = tf.saved_model.load(folder / "run/export")
    assert served.serve(tf.zeros((3, 4))).shape == (3, 2)
    for beside in ("export/assets.extra", "float32/seed0"):
        assert (folder / "run" / beside / "sides.json").read_text().endswith('e"]')


def test_a_task_of_one_s_own_is_timed_on_its_own_batches(ran):
    done = ran[1]["benchmark"]
    assert done.returncode == 0, done.stderr
    assert "| mixed_bfloat16 |" in done.stdout
    assert "throughput mode (examples/s)" in done.stdout


def test_a_run_in_two_parts_is_scored_predicts_and_is_exported_as_one(ran):
    folder, done = ran
    for job in ("two", "four", "at_once", "evaluate", "predict", "export"):
        assert done[job].returncode == 0, done[job].stderr
    assert "resumed after epoch 2" in done["four"].stderr
    chain, once = (training.read_run(folder / name) for name in ("chain", "once"))
    losses = [[row["loss"] for row in run.epochs] for run in (chain, once)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert chain.config == once.config and chain.config.model.width == 8
    assert chain.result.scores == once.result.scores
    found = json.loads((folder / "chain/evaluation.json").read_text())
    assert found["weights"] == "best.weights.h5"
    assert found["scores"] == pytest.approx(once.result.scores)
    assert found["test_loss"] == pytest.approx(once.result.test_loss)
    assert "test accuracy" in done["evaluate"].stdout
    model = keras.models.load_model(folder / "once/model.keras")
    rows = np.loadtxt(folder / "rows.csv", delimiter=",", skiprows=1, dtype="float32")
    above = model.predict(rows, verbose=0).argmax(axis=1)
    answers = (folder / "chain/predicted.csv").read_text().splitlines()[1:]
    sides = [("below", "above")[each] for each in above]
    assert [line.split(",")[4] for line in answers] == sides
    served = tf.saved_model.load(folder / "chain/export")
    expected = tfamp.set_precision(model, "float32")(rows)
    np.testing.assert_allclose(served.serve(rows), expected, rtol=1e-5, atol=1e-6)
    assert (folder / "chain/export/assets.extra/sides.json").exists()
    # A file names what it needs, and `import tfamp` knows it.
    code = "import tfamp, keras; print(keras.models.load_model('once/model.keras'))"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def test_a_run_needs_no_config_for_what_is_done_with_it(ran):
    folder, done = ran
    for job in ("recorded_scores", "recorded_rows", "recorded_export"):
        assert done[job].returncode == 0, done[job].stderr
    found = json.loads((folder / "once/evaluation.json").read_text())
    assert found["scores"] == pytest.approx(
        training.read_run(folder / "once").result.scores
    )
    predicted = [
        (folder / run / "predicted.csv").read_text() for run in ("once", "chain")
    ]
    assert predicted[0] == predicted[1]
    assert (folder / "once/export/saved_model.pb").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong", "my_task.py:wrong must return a tfamp.training.Task. Received: dict"),
        ("absent", "Function not found"),
        (
            "lacks",
            "KeyError: \"['c'] not in index\" (in predict, my_task.py, line 38). "
            "lacks.csv has the columns 'a', 'b', 'd'",
        ),
        ("none", "no --config. Expected: --config=FILE, or"),
        ("no_folder", "or --workdir=FOLDER of a run."),
        ("no_file", "--config.eval_batch_size also needs --config=FILE."),
        (
            "no_run",
            "No run found in 'run'. Expected --workdir=FOLDER, one of run/float32/",
        ),
        ("overwrite", "--overwrite belongs to a job that trains"),
        ("other", "other settings (batch_size: 32 -> 16)"),
        ("default", "No run found in 'runs/planes-train-"),
    ],
)
def test_what_is_no_task_is_told_in_one_line(ran, name, words):
    done = ran[1][name]
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert words in line


def test_a_name_stands_for_a_packaged_configuration(monkeypatch, capsys):
    from tfamp import __main__ as command

    made = []
    monkeypatch.setattr(command, "_run_script", lambda name: made.append(sys.argv[:]))
    for given in (["train", "cnn/digits", "--tiny"], ["train", "bert/sst2:tiny"]):
        monkeypatch.setattr(sys, "argv", ["tfamp", *given])
        command.main()
    (name, config, tiny), (_, sized) = made
    assert (name, tiny) == ("tfamp train", "--tiny")
    file = pathlib.Path(config.removeprefix("--config="))
    assert file.read_text() == (helpers.ROOT / "configs/cnn/digits.py").read_text()
    assert sized.endswith("bert/sst2.py:tiny")
    monkeypatch.setattr(sys, "argv", ["tfamp", "train", "cnn/digitz"])
    with pytest.raises(SystemExit, match=r"'cnn/digitz'.*cnn/digits") as refused:
        command.main()
    assert "benchmark/" not in str(refused.value)
    monkeypatch.setattr(sys, "argv", ["tfamp", "benchmark", "gpu"])
    command.main()
    assert made[-1][1].endswith("configs/benchmark/gpu.py")


def test_a_wheel_holds_the_configurations(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", "tests", "results", "*.egg-info", "runs")
    shutil.copytree(helpers.ROOT, source, symlinks=True, ignore=ignored)
    # In a process of its own: setuptools changes many of Python's globals.
    code = f"import setuptools.build_meta as m; m.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as wheel:
        files = set(wheel.namelist())
        (entry,) = [x for x in files if x.endswith("entry_points.txt")]
        assert b"tfamp = tfamp.__main__:main" in wheel.read(entry)
    own = {
        f"tfamp/{x.relative_to(helpers.ROOT)}"
        for x in (helpers.ROOT / "configs").rglob("*.py")
    }
    assert own and own <= files and "tfamp/measuring/benchmark/page.html.j2" in files


# ---- compare_modes ----

X = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
PARTS = {"train": (X[:80], Y[:80]), "test": (X[80:], Y[80:])}


def build():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)],
        name="mine",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def compare(**settings):
    settings = {"epochs": 2, **PARTS, **settings}
    return training.compare_modes(build, **settings)


def test_own_model_in_two_modes_gives_a_table_and_a_picture(tmp_path, capfd):
    before = keras.config.dtype_policy().name
    found = compare(workdir=tmp_path, validation=PARTS["test"])
    said = capfd.readouterr().out.splitlines()
    assert keras.config.dtype_policy().name == before
    assert "1 of 2: float32, seed 0" in said
    assert "2 of 2: mixed_bfloat16, seed 0 (about 1 min left)" in said
    text = found.to_text()
    assert "test accuracy" in text and "mixed_bfloat16 minus float32" in text
    assert {"comparison.png", "report.md"} <= {x.name for x in tmp_path.iterdir()}
    first, second = found.results
    assert first.final_loss == pytest.approx(second.final_loss, abs=0.02)
    assert first.final_loss != second.final_loss
    # The float32 run is what Keras does without tfamp.
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(*PARTS["train"], epochs=2, verbose=0)
    score = model.evaluate(*PARTS["test"], verbose=0, return_dict=True)
    assert first.score == pytest.approx(score["accuracy"])
    assert first.test_loss == pytest.approx(score["loss"], rel=1e-6)
    again = compare(workdir=tmp_path, validation=PARTS["test"])
    assert again.results == found.results  # Read, not repeated.
    assert capfd.readouterr().out.count("(finished before)") == 2
    others = {"epochs": 3}, {"test": (X[90:], Y[90:])}, {"train": (X[:70], Y[:70])}
    for other in others:
        with pytest.raises(tfamp.RunError, match=f"other settings.*{[*other][0]}"):
            compare(workdir=tmp_path, **other)
    with pytest.raises(tfamp.RunError, match="other settings.*build"):
        training.compare_modes(lambda: build(), workdir=tmp_path, epochs=2, **PARTS)


def test_models_at_the_chance_level_say_so(capsys):
    ones = X[80:], np.ones((40, 1), "int32")  # A constant answer is right.
    found = compare(test=ones, epochs=1, modes=("float32",))
    assert (found.results[0].chance, found.results[0].at_chance) == (1.0, True)
    assert "test accuracy of float32 with seed 0 is at the chance" in found.to_text()
    # Beside the epochs that Keras prints.
    assert capsys.readouterr().out.startswith("1 of 1: float32, seed 0\n3/3 - ")


def test_errors_are_told_apart_from_scores():
    def regression():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        return model

    data = tf.data.Dataset.from_tensor_slices((X, X.sum(1))).batch(16)
    found = training.compare_modes(regression, data, test=data, epochs=1, verbose=0)
    assert found.results[0].errors == ["mean_absolute_error"]
    assert found.results[0].chance is None  # Of an accuracy alone.
    assert "% of mean_absolute_error" in found.to_text()


def test_a_kerashub_task_takes_its_strings(tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    texts = np.array(["good film", "bad film", "film good", "film bad"] * 8)
    labels = np.array([1, 0, 1, 0] * 8)

    def classifier():
        tokenizer = keras_hub.tokenizers.BertTokenizer(vocabulary=words, lowercase=True)
        preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
            tokenizer, sequence_length=8
        )
        backbone = keras_hub.models.BertBackbone(len(words), 1, 2, 8, 16, 0.0, 8)
        model = keras_hub.models.BertTextClassifier(
            backbone, num_classes=2, preprocessor=preprocessor
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    found = training.compare_modes(
        classifier, (texts, labels), test=(texts, labels), verbose=0
    )
    modes = [each.mode for each in found.results]
    assert modes == ["float32", "mixed_bfloat16"]
    first, second = found.results
    assert first.final_loss == pytest.approx(second.final_loss, abs=0.05)


def once():
    yield from [PARTS["train"]]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"train": once()}, ValueError, "`train` can be iterated only once"),
        ({"test": None}, ValueError, "to be scored on"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"modes": ("float32", "float32")}, ValueError, "each once"),
        ({"modes": ()}, ValueError, "each once"),
        ({"modes": ("float31",)}, ValueError, "float31"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(settings, error, words):
    with pytest.raises(error, match=words):
        compare(**settings)


def test_a_model_that_is_not_compiled_is_refused(tmp_path):
    with pytest.raises(TypeError, match="compiled: False"):
        training.compare_modes(
            lambda: keras.Sequential([keras.layers.Dense(1)]),
            PARTS["train"],
            test=PARTS["test"],
            verbose=0,
        )
    with pytest.raises(tfamp.RunError, match="not empty"):
        (tmp_path / "mine.txt").write_text("")
        compare(workdir=tmp_path)
