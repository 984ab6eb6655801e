"""The scripts' command line: errors in one line, exit code 1, nothing left behind."""

import pathlib

import helpers
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = ("train_cnn.py", ["--tiny", "--workdir=run"])
VERBOSE = ("train_cnn.py", ["--config.precision.mode=x", "--verbosity=1"])
KEPT = ["--tiny", "--workdir=kept", "--overwrite"]
# Script, arguments, and what the one line says.
BAD = [
    ("train_cnn.py", ["--config.epochz=3"], 'Did you mean "epochs"'),
    ("train_cnn.py", ["--config=nope.py"], "no file for --config. Received: 'nope.py'"),
    (
        "train_cnn.py",
        ["--config.data.name=mnisty", "--job=train"],
        "config.data.name='mnisty'",
    ),
    ("train_cnn.py", ["--config.precision.mode=mixed_fp16"], "'mixed_float16'"),
    (
        "train_cnn.py",
        ["--config.precision.loss_scale.backoff_factor=2", "--tiny"],
        "backoff_factor=2",
    ),
    ("train_cnn.py", ["--tiny", "--workdir=/dev/null/x"], "--workdir"),
    ("train_cnn.py", ["--job=serve"], "--job=serve"),
    ("train_cnn.py", ["--seeds=0"], "--seeds=0"),
    (
        "train_cnn.py",
        ["--job=train_benchmark", "--benchmark_batch_sizes=8,many"],
        "'8,many'",
    ),
    ("train_cnn.py", ["--benchmark_steps=5"], "--job=train_benchmark"),
    ("train_cnn.py", ["--find_batch_size", "--job=train"], "Received: --job"),
    ("train_cnn.py", ["--memory_limit_mb=500"], "belongs to --find_batch_size"),
    ("train_cnn.py", ["--find_batch_size", "--max_batch_size=7"], "max_batch_size=7"),
    (
        "train_cnn.py",
        [*KEPT, "--find_batch_size", "--config.optimizer.name=lamb"],
        "'lamb'",
    ),
    (
        "train_bert.py",
        ["--job=inference_benchmark", "--benchmark_modes=mixed_fp16"],
        "'mixed_float16'",
    ),
    ("train_cnn.py", ["stray"], "stray"),
    (
        "benchmark.py",
        [f"--config={ROOT / 'configs/cnn/digits.py'}"],
        "--config must name a benchmark's",
    ),
    ("train_cnn.py", ["--config.batch_size=0", "--verbosity=0"], "batch_size must be"),
    (
        "train_cnn.py",
        [*KEPT, "--config.precision.mode=x"],
        "Unknown precision mode",
    ),
    (
        "train_cnn.py",
        [*KEPT, "--job=train", "--seeds=3"],
        "--seeds belongs to --job=compare",
    ),
    ("train_cnn.py", [*KEPT, "--config.optimizer.name=lamb"], "'lamb'"),
    (
        "train_cnn.py",
        [*KEPT, "--config.optimizer.accumulation_steps=99"],
        "accumulation_steps",
    ),
    (
        "train_bert.py",
        [*KEPT, "--job=train_benchmark", "--preset=/nowhere"],
        "There is no folder /nowhere",
    ),
    (
        "train_bert.py",
        [f"--config={ROOT}/configs/bert/tweets.py", "--data_dir=absent"],
        "absent",
    ),
    ("train_bert.py", ["--preset=no_such_preset", "--tiny"], "no_such_preset"),
    (
        "train_unet.py",
        [f"--config={ROOT}/configs/unet/dsb2018.py", "--data_dir=absent"],
        "a folder of images and masks",
    ),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """How each command ended: dict from its text; `--tiny` twice, in one folder."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "kept").mkdir()
    (folder / "kept/.tfamp-comparison").write_text("")
    commands = [*((script, given) for script, given, _ in BAD), VERBOSE, TINY, TINY]
    cases = [(ROOT / "scripts" / script, given, folder) for script, given in commands]
    results = helpers.run_scripts(cases)
    named = {str(command): [] for command in commands}
    for command, result in zip(commands, results, strict=True):
        named[str(command)].append(result)
    return folder, named


@pytest.mark.parametrize(
    ("script", "arguments", "phrase"),
    BAD,
    ids=lambda value: str(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_1(script, arguments, phrase, finished):
    ((code, stdout, stderr),) = finished[1][str((script, arguments))]
    assert code == 1
    assert "Traceback" not in stderr
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert phrase in line
    assert stdout == ""


def test_command_that_cannot_run_deletes_nothing(finished):
    assert (finished[0] / "kept/.tfamp-comparison").exists()


def test_verbosity_shows_the_traceback(finished):
    ((code, _, stderr),) = finished[1][str(VERBOSE)]
    assert code == 1
    assert "Traceback" in stderr and "Unknown precision mode" in stderr


def test_tiny_comparison_prints_the_table_and_is_not_repeated(finished):
    folder, named = finished
    first, again = named[str(TINY)]
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    assert "steps/s" in lines[head] and "skipped steps" in lines[head]
    assert lines[head + 2].startswith("float32")
    assert lines[head + 3].startswith("mixed_")
    written = {path.name for path in (folder / "run").iterdir()}
    assert {"export", "report.md", "comparison.png"} <= written
    assert again.returncode == 0
    assert again.stdout == "\n".join([*lines[head:], ""])
