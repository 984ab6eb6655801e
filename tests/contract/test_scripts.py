"""The scripts' command line: errors in one line, exit code 1, nothing left behind."""

import pathlib
import re

import helpers
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
KEPT = "--tiny --workdir=kept --overwrite"
# Script and arguments: what the one line says.
BAD = {
    "train_cnn --config.epochz=3": 'Did you mean "epochs"',
    "train_cnn --config.model.zz=3": "field of the configuration. Received: 'zz'",
    "train": "Expected: --config=FILE, or a name as in `tfamp train cnn/digits`",
    "train_cnn --config=nope.py": "does not exist. Received: 'nope.py'",
    "train_cnn --config.data.name=mnisty --job=train": "config.data.name='mnisty'",
    "train_cnn --config.precision.loss_scale.backoff_factor=2 --tiny": "factor=2",
    "train_cnn --tiny --workdir=/dev/null/x": "--workdir",
    "train_cnn --seeds=0": "--seeds=0",
    "train_cnn --job=train_benchmark --benchmark_batch_sizes=8,many": "'8,many'",
    "train_cnn --benchmark_steps=5": "--job=train_benchmark",
    "train_cnn --find_batch_size --job=train": "Received: --job",
    "train_cnn --memory_limit_mb=500": "belongs to --find_batch_size",
    "train_cnn --find_batch_size --max_batch_size=7": "max_batch_size=7",
    "train_bert --job=inference_benchmark --benchmark_modes=mixed_x": "'mixed_float16'",
    "train_cnn stray": "stray",
    f"benchmark --config={CONFIGS}/cnn/digits.py": "must name a benchmark's",
    "train_cnn --config.batch_size=0 --verbosity=0": "batch_size must be",
    "formats --value=1,x": "'x'",
    f"train_cnn {KEPT} --config.precision.mode=x": "Unknown precision mode",
    f"train_cnn {KEPT} --job=train --seeds=3": "belongs to --job=compare",
    f"train_cnn {KEPT} --config.optimizer.name=lamb": "'lamb'",
    f"train_cnn {KEPT} --config.optimizer.accumulation_steps=99": "accumulation",
    f"train_bert {KEPT} --job=train_benchmark --preset=/nowhere": "folder /nowhere",
    f"train_bert --config={CONFIGS}/bert/tweets.py --data_dir=absent": "absent",
    f"train_cnn --config={CONFIGS}/cnn/mnist.py --manual_dir=absent": "absent",
    f"train_bert --config={CONFIGS}/bert/tweets.py --config.data_dir=absent": "/absent",
    "train_bert --preset=no_such_preset --tiny": "no_such_preset",
    f"train_unet --config={CONFIGS}/unet/dsb2018.py --data_dir=absent": "images and",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "kept").mkdir()
    (folder / "kept/.tfamp-comparison").write_text("")
    return folder


def run(folder, script, *arguments):
    (done,) = helpers.run_scripts([(ROOT / f"scripts/{script}.py", arguments, folder)])
    return done


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_and_exit_code_1(command, folder):
    done = run(folder, *command.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert BAD[command] in line
    assert (folder / "kept/.tfamp-comparison").exists()  # Nothing was deleted.


@pytest.mark.parametrize("script", ["train", "train_bert", "benchmark", "doctor"])
def test_help_has_the_configuration(script, folder):
    assert re.search(r"^ +--config\b", run(folder, script, "--help").stdout, re.M)


def test_verbosity_shows_the_traceback(folder):
    done = run(folder, "train_cnn", "--config.precision.mode=x", "--verbosity=1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "Unknown precision mode" in done.stderr


def test_tiny_comparison_prints_the_table_and_is_not_repeated(folder):
    first, again = (
        run(folder, "train_cnn", "--tiny", "--workdir=run") for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    # Not a terminal: a line an epoch, and no bar that is drawn over.
    assert not set("\r\b\x1b\u2501") & set(first.stdout + first.stderr)
    assert sum("s/step - " in line for line in lines) == 2
    head = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    assert "steps/s" in lines[head] and "skipped steps" in lines[head]
    assert lines[head + 2].startswith("float32")
    assert lines[head + 3].startswith("mixed_")
    # Each run under its heading; and of embeddings nothing, as a CNN has none.
    epochs = [i for i, line in enumerate(lines) if "s/step - " in line]
    modes = [lines[head + i].split()[0] for i in (2, 3)]
    assert [lines[i - 1] for i in epochs] == [f"{mode}, seed 0:" for mode in modes]
    assert "embeddings" not in first.stdout
    written = {path.name for path in (folder / "run").iterdir()}
    assert {"export", "report.md", "comparison.png"} <= written
    assert again.returncode == 0
    assert again.stdout == "\n".join([*lines[head:], ""])


def test_preset_takes_the_settings_of_fine_tuning_and_flags_win(folder):
    """A run's default folder is named after its settings."""
    given = f"--config={CONFIGS}/bert/csv.py", "--preset=bert", "--job=evaluate"
    tuned = "--config.epochs=3", "--config.optimizer.learning_rate=5e-5"
    found = [
        re.findall(r"No run found in '(.*?)'", run(folder, "train_bert", *flags).stderr)
        for flags in (given, (*given, *tuned), (*given, "--config.epochs=2"))
    ]
    assert found[0] == found[1] != found[2] and all(found)


# ---- scripts/formats.py ----

FORMATS = ["float64", "float32", "tf32", "float16", "bfloat16"]
FORMATS += ["float8_e4m3fn", "float8_e5m2"]


def test_without_arguments_it_shows_every_format(folder):
    done = run(folder, "formats")
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == FORMATS
    assert ["float16", "16", "2", "65504"] in [row[:4] for row in rows]
    assert ["tf32", "19", "4"] in [row[:3] for row in rows]


def test_values_show_what_each_format_makes_of_each(folder):
    values = "--value=1e-7,70000", "--value=-inf", "--value=-0.5"
    done = run(folder, "formats", *values)
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line.split() for line in done.stdout.splitlines()]
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert len(found) == 4 * len(FORMATS)
    assert found["70000", "float16"] == ["inf", "inf", "overflow"]
    assert found["70000", "bfloat16"] == ["70144", "0.0021", "rounded"]
    assert found["1e-7", "float8_e5m2"] == ["0", "1", "underflow"]
    assert found["1e-7", "float16"][2] == "subnormal"
    assert found["-inf", "float8_e4m3fn"] == ["nan", "nan", "overflow"]
    assert found["-0.5", "float8_e4m3fn"] == ["-0.5", "0", "exact"]
