"""What a newcomer gets wrong is answered in one line: what, and what to do."""

import os
import pathlib
import subprocess
import sys

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import training

ROOT = pathlib.Path(__file__).parents[2]


# ---- Commands: without TensorFlow, which takes seconds ----

OWN = """
from tfamp import training

def get_config():
    return training.get_config()
"""


@pytest.fixture(scope="module")
def without_tensorflow(tmp_path_factory):
    """A folder to work in; whatever imports TensorFlow there fails."""
    folder = tmp_path_factory.mktemp("quick")
    for name in ("tensorflow", "keras", "numpy"):
        (folder / f"{name}.py").write_text("raise SystemExit('it was imported')")
    (folder / "my_task.py").write_text("")
    (folder / "own.py").write_text(OWN)
    return folder


def command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfamp", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "tfamp train cnn/digits"),
        ("help", "tfamp train cnn/digits"),
        ("--version", f"tfamp {tfamp.__version__}\n"),
        ("train --help", "--seeds: Number of seeds to compare over"),
        ("doctor --help", "--simulate: Report on another device"),
        ("gpu-report --help", "--minutes: Time limit"),
        ("train cnn/digits --help", "--seeds: Number of seeds to compare over"),
    ],
)
def test_help_is_quick(without_tensorflow, arguments, words):
    done = command(without_tensorflow, *arguments.split())
    assert words in done.stdout and done.stderr == ""


COMMANDS = {
    "trian": "see `tfamp --help`. Did you mean 'train'?",
    "training": "Unknown command. Received: 'training'. Expected one of status, tr",
    "--job=train": "Unknown command. Received: '--job=train'",
    "train cnn/digit": "unet/oxford_iiit_pet. Did you mean 'cnn/digits'?",
    "train my_task.py": "Received: 'my_task.py'. Expected --config=FILE, or one of",
    "benchmark cnn/digits": "Received: 'cnn/digits'. Expected --config=FILE, or one of",
    "train --config=my_tsk.py": "does not exist. Received: 'my_tsk.py'",
    "train cnn/digits --overwrit": "flag 'overwrit'. Did you mean: overwrite",
    "train cnn/digits --config.epohcs=3": "Received: 'epohcs'. Did you mean ",
    "train lm/docstrings --config.epohcs=3": "Received: 'epohcs'. Did you mean ",
    "train unet/dsb2018 --config.model.nam=x": "Received: 'nam'. Did you mean ",
    "train tabular/rossmann --config.data.nam=x": "Received: 'nam'. Did you mean ",
    "train bert/squad --config.data.nam=x": "Received: 'nam'. Did you mean ",
    "train bert/mrpc --config.data.nam=x": "Received: 'nam'. Did you mean ",
    "train --config=own.py --config.epohcs=3": "Received: 'epohcs'. Did you mean ",
    "train cnn/digits --config.epochs=three": "--config.epochs=three: invalid literal",
    "train cnn/digits --config.precision.overrides.head=float3": "one tuple of pairs "
    "(pattern, mode). Received: '--config.precision.overrides.head=float3'. Expected "
    """--config.precision.overrides="(('head', 'float3'),)".""",
    "train cnn/digits --epochs=3": "'epochs'. Expected a flag of --help; a field of "
    "the configuration is set by --config.epochs=VALUE",
    "train cnn/digits --job=trian": "--job=trian: value should be one of <compare|tr",
    "train cnn/digits --seeds=0": "flag --seeds=0: 0 is not a positive integer",
    "train cnn/digits --seeds=two": "--seeds=two: invalid literal for int()",
    "train --memory_limit_mb=2GiB": "--memory_limit_mb=2GiB: invalid literal",
    "benchmark --modez=float32": "flag 'modez'. Did you mean: modes",
    "doctor --simulat=a100": "flag 'simulat'. Did you mean: simulate",
    "status now": "`tfamp status` takes no arguments. Received: ['now']",
    "train": "No configuration. Received: no --config. Expected: --config=FILE, or a n",
    "train --job=evaluate": "or --workdir=FOLDER of a run",
    "train --job=evaluate --workdir=none": "No run found in 'none'. Expected --workdir",
    "train cnn/digits --job=train --seeds=3": "--seeds belongs to --job=compare",
    "train --job=predict --workdir=run": "--job=predict needs --input, a .csv, .tsv",
    "train --config=my_task.py": "'my_task.py:get_config'. Expected a function in",
    "benchmark --workload=my_task.py:build": "Function not found. Received: 'my_task",
    "gpu-report --minutes=-1": "--minutes=-1: -1.0 is not a non-negative number",
    "gpu-report --parts=time,numeric": "Unknown parts. Received: numeric. Expected som",
    "doctor --simulate=a1000": "'cpu-avx2'. Did you mean 'a100'?",
    "train cnn/digits --config.optimizer.name=adm": "name must be one of ('sgd', 'ada",
    "train cnn/digits --config.epochs=0": "config.epochs must be at least 1. Received",
    "train cnn/digits --config.precision.mode=fp16": "Did you mean 'mixed_float16'?",
    "train cnn/digits --config.optimizer.lr=1": "Received: 'lr'. Expected one of config"
    ".optimizer: accumulation_steps, ",
    "train cnn/digits --config.learning_rate=1": "Received: 'learning_rate'. Did you "
    "mean config.optimizer.learning_rate?",
    "train cnn/digits --config.foo=1": "Received: 'foo'. Expected one of config: batch",
    "train cnn/digits --mode=float32": "is set by --config.precision.mode=VALUE",
    "train cnn/digits --precision=float32": "A training has --config.precision.mode.",
    "train --config=cnn/digits": "Expected no flag for it: `tfamp train cnn/digits`.",
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_mistyped_command_is_told_at_once(without_tensorflow, arguments):
    done = command(without_tensorflow, *arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and COMMANDS[arguments] in line


# ---- Functions: before any work ----

SCRIPT = """
raise SystemExit("it was imported")

from somewhere import imported, other as renamed


def build(batch_size):
    helper = batch_size


if True:
    chosen = build
"""
TOOLS = {
    "benchmark_model": tfamp.benchmark_model,
    "fit_memory": lambda name: tfamp.fit_memory(name, batch_size=8),
    "find_batch_size": tfamp.find_batch_size,
    "rehearse": lambda name: tfamp.rehearse(name, 8),
    "config.task": lambda name: training.train_and_evaluate(task_of(name), "run"),
}
NAMES = {
    "my_script:buidl": "'my_script:buidl'. Expected one that .*_script.py has: build",
    "my_script.py:train": "'my_script.py:train'. Expected one that .* has: build",
    "my_script:helper": "Function not found. Received: 'my_script:helper'",
    "my_scrip:build": "not found: there is no module 'my_scrip' here or on Python's",
    "my_scrip.py:build": "not found: there is no file .*/my_scrip.py. Received: 'my_",
    "my_script": "Received: 'my_script'. Expected 'module:function'",
    "empty:build": "'empty:build'. Expected a function in .*/empty.py, which has none",
    "broken.py:build": "broken.py cannot be read as Python: .*broken.py, line 1",
}


def task_of(name):
    config = training.get_config()
    config.task = name
    return config


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    (tmp_path / "my_script.py").write_text(SCRIPT)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("tool", TOOLS)
def test_a_function_that_is_not_there_is_an_error_before_any_work(scripts, tool):
    for name, words in NAMES.items():
        with pytest.raises(ValueError, match=words) as caught:
            TOOLS[tool](name)
        assert "\n" not in str(caught.value), name


def test_what_a_file_binds_at_its_top_level_is_there(scripts):
    for name in ("build", "imported", "renamed", "chosen"):
        with pytest.raises(SystemExit, match="it was imported"):
            training.train_and_evaluate(task_of(f"my_script:{name}"), "run")


def local(batch_size):
    def build():
        return None

    return build


CALLS = {
    "a lambda": (lambda: tfamp.benchmark_model(lambda: None), "at the top level of"),
    "a function in one": (
        lambda: tfamp.find_batch_size(local(8)),
        "at the top level of a file, which each process imports. Received: <function",
    ),
    "no batch size": (
        lambda: tfamp.fit_memory(local),
        "Received: '.*test_first_hour:local', and no batch_size. Expected one: batch",
    ),
    "none to rehearse": (lambda: tfamp.rehearse(local), "and no batch_size"),
    "a limit": (
        lambda: tfamp.fit_memory(local, "2 gigs", batch_size=8),
        "limit='2 gigs'. Expected for example '2GiB'",
    ),
    "GiB as bytes": (lambda: tfamp.fit_memory(local, 2, batch_size=8), "limit=2. Exp"),
    "a device": (lambda: tfamp.rehearse(local, 8, device="h900"), "'h900'"),
    "a mode": (lambda: tfamp.enable("fp16"), "fp16.*mixed_float16"),
    "a mode of several": (
        lambda: tfamp.find_batch_size(local, modes=["float17"]),
        "mode='float17'",
    ),
    "one mode for several": (
        lambda: tfamp.find_batch_size(local, modes="float32"),
        "a sequence of names. Received: modes='float32'. Expected modes=\\('float32',",
    ),
    "one mode to compare": (
        lambda: training.compare_modes(local, DATA, test=DATA, modes="float32"),
        "a sequence of names. Received: modes='float32'",
    ),
    "a model to compare": (
        lambda: training.compare_modes(made(), DATA, test=DATA),
        "`build` must be a function without arguments .* Received: Sequential",
    ),
    "no rows": (
        lambda: tfamp.compare_precision(made(), X[:0], "mixed_bfloat16"),
        "`inputs` must be a batch .*, with a row or more in each. Received: ndarray, "
        "of shapes: \\(0, 2\\)",
    ),
    "a dataset": (
        lambda: tfamp.compare_precision(made(), BATCHES, "mixed_bfloat16"),
        "Of a dataset pass next\\(iter\\(dataset\\)\\)",
    ),
    "targets for a mode": (
        lambda: tfamp.compare_precision(made(), tf.ones((2, 2)), tf.ones((2, 1))),
        "Unknown precision mode. Received: mode=a EagerTensor. Expected one of",
    ),
    "targets for a mode of a search": (
        lambda: tfamp.search_precision(made(), [X], tf.ones((2, 1))),
        "Unknown precision mode. Received: mode=a EagerTensor. Expected one of",
    ),
    "a dataset to measure": (
        lambda: tfamp.memory(made(), BATCHES),
        "`batch` must be a batch of arrays .* Received: _BatchDataset",
    ),
    "an array of batches": (
        lambda: tfamp.search_precision(made(), X, "mixed_bfloat16"),
        "`data` must be batches: .* Received: ndarray",
    ),
    "a tolerance": (
        lambda: tfamp.search_precision(made(), [X] * 4, tolerance=-1),
        "`tolerance` must not be negative. Received: tolerance=-1",
    ),
    "a batch size": (
        lambda: tfamp.audit(made(), batch_size="32"),
        "`batch_size` must be an integer",
    ),
    "a rewrite": (
        lambda: tfamp.audit(made(), rewrite="fp16"),
        "`rewrite` must be 'bfloat16', 'float16' or None. Received: 'fp16'",
    ),
    "layers": (
        lambda: tfamp.NumericsMonitor(layers="("),
        "`layers` must be a regular expression .* Received: layers='\\('",
    ),
    "a folder": (
        lambda: tfamp.NumericsMonitor(log_dir=__file__),
        "`log_dir` must be a folder. Received: file",
    ),
    "a model to fit": (
        lambda: tfamp.fit_memory(made(), "2GiB", batch_size=8),
        "must be at the top level of a file, .* Received: <Sequential",
    ),
    "one mode to measure": (
        lambda: tfamp.benchmark_model(local, modes="float32"),
        "a sequence of names. Received: modes='float32'",
    ),
    "a mistyped mode": (lambda: tfamp.enable("mixed_bfloat61"), "mean 'mixed_bfloat16"),
    "a keyword of the scale": (
        lambda: tfamp.enable(loss_scale={"growth_intervall": 3}),
        "Did you mean 'growth_interval'?",
    ),
    "a keyword of the optimizer": (
        lambda: tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_sclae=8),
        "`initial_sclae`. .* Did you mean 'initial_scale'?",
    ),
    "inputs of another width": (
        lambda: tfamp.compare_precision(made(), X[:, :1], "mixed_bfloat16"),
        "`inputs` must have the shapes .* Received: .8, 1.. Expected: .None, 2..",
    ),
    "fewer targets than inputs": (
        lambda: tfamp.compare_precision(made(), X, "mixed_bfloat16", targets=X[:3, :1]),
        "as many targets .* Received: 8 rows of inputs, 3 rows of targets.",
    ),
    "a batch of another width": (
        lambda: tfamp.memory(made(), (X[:, :1], X[:, :1])),
        "`batch` must have the shapes that 'sequential.*' takes",
    ),
    "a batch with fewer targets": (
        lambda: tfamp.memory(made(), (X, X[:3, :1])),
        "Received: 8 rows of inputs, 3 rows of targets",
    ),
    "a batch without targets": (
        lambda: tfamp.memory(made(), X),
        "`batch` needs targets: .* Expected \\(inputs, targets\\)",
    ),
    "a model for a path": (
        lambda: tfamp.export("exported", made()),
        "`path` must be that of a folder or file. Received: Sequential",
    ),
    "a file for a folder": (
        lambda: tfamp.export(made(), "model.onnx"),
        "Received: path='model.onnx'. Expected a folder, or format='onnx'.",
    ),
    "a file of Keras for a folder": (
        lambda: tfamp.export_float32(made(), "model.keras"),
        "Expected a folder, or `model.save\\(path\\)`.",
    ),
    "no rows to train": (
        lambda: training.compare_modes(made, (X[:0], X[:0, :1]), test=DATA),
        "`train` must have a row or more. Received: \\(0, 2\\), \\(0, 1\\)",
    ),
    "no batches to train": (
        lambda: training.compare_modes(made, BATCHES.take(0), test=DATA),
        "`train` must have a row or more. Received: .* 0 batches",
    ),
    "a share": (lambda: tfamp.NumericsMonitor(max_lost="5%"), "`max_lost` must be a n"),
}
X = np.ones((8, 2), "float32")
DATA = X, X[:, :1]
BATCHES = tf.data.Dataset.from_tensor_slices(DATA).batch(4)


def made():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_batch_without_targets_is_one_of_a_step_of_ones_own():
    class Reconstructs(models.OwnStep):
        def train_step(self, x):
            return super().train_step((x, x))

    model = Reconstructs([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd")
    assert tfamp.memory(model, X).batch_size == len(X)


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_told_in_one_line(case):
    call, words = CALLS[case]
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


# ---- Files ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
    return path.read_bytes()


DAMAGES = {
    "empty": (lambda whole: b"", "a file of 0 bytes, no whole zip archive"),
    "cut short": (lambda whole: whole[:2000], "2,000 bytes, no whole zip archive"),
    "text": (lambda whole: b"not a model", "11 bytes, no whole zip archive"),
    "zeros within": (
        lambda whole: whole[:-3000] + b"\xff" * 64 + whole[-2936:],
        "whose part model.weights.h5 is damaged",
    ),
    "another archive": (
        lambda whole: b"PK\x05\x06" + bytes(18),
        "22 bytes, without config.json and model.weights.h5",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_told_as_such(saved, tmp_path, damage):
    spoil, words = DAMAGES[damage]
    (tmp_path / "corrupt.keras").write_bytes(spoil(saved))
    with pytest.raises(ValueError, match=f"corrupt.keras' is not.*{words}") as caught:
        tfamp.load_model(tmp_path / "corrupt.keras")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="File not found"):
        tfamp.load_model(tmp_path / "absent.keras")


# ---- A task's own functions ----

TASK = """
import os
import signal

import keras
import numpy as np
import tensorflow as tf

from tfamp import training


def get_config():
    config = training.get_config()
    config.name, config.task = "own", "my_task.py:create"
    config.data.fault = ""
    if os.environ.get("FAULT") == "get_config":
        config.lock()
        config.epohcs = 5
    if os.environ.get("FAULT") == "value":
        config.epochs = int("many")
    if os.environ.get("FAULT") == "dict":
        return {"epochs": 3}
    return config


def create(config):
    if config.data.fault == "create":
        return {}["speed"]
    if config.data.fault == "train":
        return training.Task(None, None, None, len, None, len, "nothing")
    if config.data.fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, config.data.fault))
    x = np.zeros((40, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0]))

    def build_model():
        width = 3 if config.data.fault != "build" else 5
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
        model(x)
        return model

    def augment(x, y, seed):
        return {"x": x}["y"], y

    def loss(y, outputs):
        return undefined * outputs

    return training.Task(
        train=data, validation=None, test=data, build_model=build_model,
        loss=loss if config.data.fault == "loss" else keras.losses.MeanSquaredError(),
        metrics=lambda: [keras.metrics.MeanAbsoluteError(name="mae")],
        description="zeros",
        augment=augment if config.data.fault == "augment" else None,
    )
"""
FAULTS = {
    "create": "KeyError: 'speed' (in create, my_task.py, line 28)",
    "build": "(in build_model, my_task.py, line 39)",
    "loss": "NameError: name 'undefined' is not defined (in loss, my_task.py, line 46)",
    "train": "Task.train must be a tf.data.Dataset. Received: NoneType from ",
    "augment": 'my_task.py", line 43, in augment',
}
CONFIGS = {
    "get_config": '"epohcs" does not exist',
    "dict": "Unknown field of the configuration. Received: data.",
    "value": "ValueError: invalid literal for int() with base 10: 'many' (in get_con",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    (folder / "my_task.py").write_text(TASK)
    return folder


def run(folder, *arguments):
    script = ROOT / "scripts/train.py"
    given = ["--config=my_task.py", "--job=train", "--config.batch_size=8", *arguments]
    (done,) = helpers.run_scripts([(script, given, folder)])
    return done


@pytest.mark.parametrize("fault", [*FAULTS, *CONFIGS])
def test_an_error_in_own_code_names_function_and_file(folder, monkeypatch, fault):
    monkeypatch.setenv("FAULT", fault)
    done = run(folder, f"--config.data.fault={fault}", f"--workdir={fault}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert {**FAULTS, **CONFIGS}[fault] in line
    assert line.endswith("(--verbosity=1 shows the traceback)")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_before_the_first_step_says_what_it_does(folder, name, code):
    done = run(folder, f"--config.data.fault={name}", f"--workdir={name}")
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == (
        f"{name}: stopped; the same command goes on from what is saved, or starts "
        "again if nothing is"
    )
