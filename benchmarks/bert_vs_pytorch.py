r"""A BERT training step: plain Keras, tfamp and PyTorch, side by side.

    python benchmarks/bert_vs_pytorch.py --output=FOLDER
    python benchmarks/bert_vs_pytorch.py --torch_python=OTHER_VENV/bin/python
    python benchmarks/bert_vs_pytorch.py --ablate
    python benchmarks/bert_vs_pytorch.py --device=gpu

An encoder of 6 layers of 384 (12 heads, 1536, 30,522 tokens, exact GELU, dropout 0.1
also of the attention) with a classification head, batch 16, 128 random tokens, AdamW
with clipping: KerasHub's and transformers', from the same random weights. Each cell of
each round is a fresh process, and rounds are interleaved; medians over the steps after
a warm-up. Beside each speed stand the losses of the first steps without dropout, which
must agree; `--rounds=0` shows those alone. About 12 minutes on two cores.

Needs `pip install "tfamp[bench]"`; PyTorch may be in an environment of its own (on a
CPU `pip install torch --index-url https://download.pytorch.org/whl/cpu`). Without it
its cells are left out, with the reason.
"""

import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import bert_cells
import environment
import numpy as np
from absl import app, flags

from tfamp.benchmark import exchange

FLAGS = flags.FLAGS
CELLS_FILE = pathlib.Path(bert_cells.__file__)
ENCODER = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
MODES = ("float32", "tf32", "mixed_bfloat16", "mixed_float16")
# (framework, mode, XLA); on a CPU float16 is slow and XLA computes in float32.
CPU_CELLS = [
    ("keras", "float32", False),
    ("keras", "mixed_bfloat16", False),
    ("tfamp", "mixed_bfloat16", False),
    ("torch", "float32", False),
    ("torch", "mixed_bfloat16", False),
]
GPU_CELLS = [
    *itertools.product(("keras", "tfamp"), MODES, (False, True)),
    *itertools.product(("torch",), MODES, (False,)),
]
BASE, PEER = ("keras", "float32"), ("torch", "mixed_bfloat16")
# The gradients of embeddings as the trainer of tfamp gives them to the optimizer; Keras
# 3.15 takes the squares of rows of one token apart, and so learns otherwise.
SUMMED = "rows summed"
# What a cell does without, or otherwise.
ABLATIONS = {
    "as it is": {},
    SUMMED: {"sum_rows": True},
    "no dropout": {"dropout": 0.0},
    "ReLU for GELU": {"activation": "relu"},
    "SGD for AdamW": {"optimizer": "sgd"},
    "all three": {"dropout": 0.0, "activation": "relu", "optimizer": "sgd"},
}


def main(_):
    """Measures all cells, and prints and writes the tables."""
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(pathlib.Path(folder))
        report = measure(make_cells(folder))
    text = to_markdown(report)
    print(text)
    if FLAGS.output:
        target = pathlib.Path(FLAGS.output)
        target.mkdir(parents=True, exist_ok=True)
        (target / "figures.json").write_text(json.dumps(report, indent=2) + "\n")
        (target / "report.md").write_text(text)


def make_cells(folder):
    """Returns the settings of each cell."""
    cells = GPU_CELLS if FLAGS.device == "gpu" else CPU_CELLS
    changes = ABLATIONS if FLAGS.ablate else {"as it is": {}}
    made = [
        {
            "framework": framework,
            "mode": mode,
            "xla": xla,
            "variant": variant,
            "dropout": 0.1,
            "activation": "gelu",
            "optimizer": "adamw",
            "sum_rows": False,
            "folder": folder,
            "hidden_dim": ENCODER["hidden_size"],
            "vocabulary_size": ENCODER["vocab_size"],
            "batch_size": FLAGS.batch_size,
            "length": FLAGS.length,
            "threads": FLAGS.threads,
            "device": FLAGS.device,
            "steps": FLAGS.steps,
            "warmup": FLAGS.warmup,
            "torch_fused": FLAGS.torch_fused,
            "torch_attention": FLAGS.torch_attention,
        }
        | change
        for (framework, mode, xla) in cells
        for variant, change in changes.items()
        if framework == "keras" or variant != SUMMED  # The others do it anyway.
    ]
    return [cell for cell in made if re.search(FLAGS.cells, name_of(cell))]


def name_of(cell):
    """Returns, for example, "tfamp mixed_bfloat16 XLA, no dropout"."""
    name = f"{cell['framework']} {cell['mode']}{' XLA' if cell['xla'] else ''}"
    return name if cell["variant"] == "as it is" else f"{name}, {cell['variant']}"


def write_encoder(folder):
    """Writes a Hugging Face folder with random weights, which both sides load."""
    from safetensors import numpy as safetensors

    config = {"model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2}
    (folder / "config.json").write_text(json.dumps(config | ENCODER))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    safetensors.save_file(
        dict(encoder_weights()), folder / "model.safetensors", {"format": "pt"}
    )


def encoder_weights():
    """Yields (name, array) of Hugging Face's BertModel, as BERT is initialized."""
    random = np.random.default_rng(0)
    hidden, inner = ENCODER["hidden_size"], ENCODER["intermediate_size"]

    def dense(name, rows, columns):
        kernel = random.normal(0, 0.02, (rows, columns))
        yield f"{name}.weight", kernel.astype("float32")
        if "embeddings" not in name:
            yield f"{name}.bias", np.zeros(rows, "float32")

    def norm(name):
        yield f"{name}.LayerNorm.weight", np.ones(hidden, "float32")
        yield f"{name}.LayerNorm.bias", np.zeros(hidden, "float32")

    rows = ENCODER["vocab_size"], ENCODER["max_position_embeddings"], 2
    for name, count in zip(("word", "position", "token_type"), rows, strict=True):
        yield from dense(f"embeddings.{name}_embeddings", count, hidden)
    yield from norm("embeddings")
    for index in range(ENCODER["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from dense(f"{layer}.attention.{part}", hidden, hidden)
        yield from norm(f"{layer}.attention.output")
        yield from dense(f"{layer}.intermediate.dense", inner, hidden)
        yield from dense(f"{layer}.output.dense", hidden, inner)
        yield from norm(f"{layer}.output")
    yield from dense("pooler.dense", hidden, hidden)


# ---- Measuring ----


def measure(cells):
    """Returns the report: environment and a row for each cell."""
    missing = ""
    if any(cell["framework"] == "torch" for cell in cells):
        _, missing = exchange.torch_versions(FLAGS.torch_python)
    rows = [
        {"cell": cell, "seconds": [], "losses": None, "failed": ""} for cell in cells
    ]
    for row in rows:
        if row["cell"]["framework"] == "torch":
            row["failed"] = missing
    # First without dropout, whose random numbers differ between the frameworks.
    for row in rows:
        if row["cell"]["variant"] in ("as it is", SUMMED):
            run_into(row, {"job": "parity", "dropout": 0.0}, "losses")
    for number in range(FLAGS.rounds):
        for row in rows:
            run_into(row, {"job": "speed"}, f"round {number + 1} of {FLAGS.rounds}")
    command = "python benchmarks/bert_vs_pytorch.py " + " ".join(
        f"--{name}={FLAGS[name].value}" for name in SHOWN if FLAGS[name].present
    )
    described = environment.describe(command.strip())
    versions = [row.pop("versions", {}) for row in rows]
    described |= {k: v for found in versions for k, v in found.items()}
    described |= {"threads": FLAGS.threads, "rounds": FLAGS.rounds}
    described |= {"steps": FLAGS.steps, "device": FLAGS.device}
    return {
        "schema_version": 1,
        "environment": described,
        "rows": [figures(row, rows) for row in rows],
    }


def run_into(row, changes, what):
    """Runs a cell in a fresh process and adds its figures to its row."""
    if row["failed"]:
        return
    print(f"{name_of(row['cell'])}: {what}", file=sys.stderr, flush=True)
    cell = row["cell"] | changes
    python = FLAGS.torch_python if cell["framework"] == "torch" else sys.executable
    threads = str(cell["threads"])
    done = subprocess.run(
        [python, str(CELLS_FILE), json.dumps(cell)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": threads, "KERAS_BACKEND": "tensorflow"},
    )
    if done.returncode:
        reason = last_line(done.stderr)
        killed = done.returncode == -9
        row["failed"] = "killed (out of memory?)" if killed else reason
        return
    found = json.loads(done.stdout.splitlines()[-1])
    if changes["job"] == "parity":
        row["losses"] = found["losses"]
    row["seconds"] += found.get("seconds", [])
    row |= {k: v for k, v in found.items() if k not in ("losses", "seconds")}


def last_line(text):
    """Returns the last line of an error message."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


# ---- The report ----


def figures(row, rows):
    """Returns the figures of a row, as ratios to those of other rows too."""
    cell = row["cell"]
    seconds = row["seconds"]
    median = statistics.median(seconds) if seconds else None
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [None] * 3
    base, peer = (reference(rows, cell, key) for key in (BASE, PEER))
    return {
        "cell": name_of(cell),
        **{k: cell[k] for k in ("framework", "mode", "xla", "variant")},
        "milliseconds": milliseconds(median),
        "quartiles": [milliseconds(quartiles[0]), milliseconds(quartiles[2])],
        "timed_steps": len(seconds),
        "sequences_per_second": median and round(cell["batch_size"] / median, 1),
        "to_pytorch_bfloat16": ratio(median, peer),
        "speed_up_over_keras_float32": ratio(base, median),
        "losses": row["losses"],
        "loss_difference": loss_difference(row, rows),
        **{
            key: row.get(key)
            for key in ("peak_mib", "skipped_steps", "tensor_float_32")
        },
        "failed": row["failed"],
    }


def reference(rows, cell, key):
    """Returns the median of a framework and mode, without XLA, in the same variant."""
    for row in rows:
        other = row["cell"]
        same = other["variant"] == cell["variant"] and not other["xla"]
        if (other["framework"], other["mode"]) == key and same and row["seconds"]:
            return statistics.median(row["seconds"])
    return None


def loss_difference(row, rows):
    """Returns the largest difference from PyTorch's float32 losses, else Keras'."""
    for framework in ("torch", "keras"):
        for other in rows:
            key = other["cell"]["framework"], other["cell"]["mode"]
            if key == (framework, "float32") and other["losses"] and row["losses"]:
                pairs = zip(row["losses"], other["losses"], strict=True)
                return max(abs(a - b) for a, b in pairs)
    return None


def milliseconds(seconds):
    """Returns seconds as milliseconds."""
    return seconds and round(seconds * 1e3, 2)


def ratio(above, below):
    """Returns a quotient; None if a part is missing."""
    return round(above / below, 3) if above and below else None


ABOUT = ("cpu", "cores", "gpus", "threads", "tensorflow", "keras")
ABOUT += ("torch", "transformers")
NOTE = """
To PyTorch bf16: below 1 is faster. Loss - fp32: the largest difference from PyTorch's
(else Keras') float32 in the first steps, without dropout.
"""
COLUMNS = {
    "ms/step": ("milliseconds", "{:.0f}"),
    "quartiles": ("quartiles", "{0[0]:.0f} to {0[1]:.0f}"),
    "sequences/s": ("sequences_per_second", "{:.1f}"),
    "to PyTorch bf16": ("to_pytorch_bfloat16", "{:.2f}"),
    "over Keras fp32": ("speed_up_over_keras_float32", "{:.2f}x"),
    "peak MiB": ("peak_mib", "{:d}"),
    "skipped": ("skipped_steps", "{:d}"),
    "loss - fp32": ("loss_difference", "{:.1e}"),
}


def to_markdown(report):
    """Returns the report as Markdown."""
    about = report["environment"]
    found = [f"{name} {about[name]}" for name in ABOUT if name in about]
    lines = [
        "# A BERT training step in Keras, tfamp and PyTorch\n",
        f"`{about['command']}`; {', '.join(found)}; {about['rounds']} interleaved "
        f"rounds of {about['steps']} steps, medians.\n",
        f"| cell | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for row in report["rows"]:
        if not row["failed"]:
            cells = [show(row[key], form) for key, form in COLUMNS.values()]
            lines.append(f"| {row['cell']} | {' | '.join(cells)} |")
    lines.append(NOTE)
    for row in report["rows"]:
        if row["losses"]:
            losses = ", ".join(f"{loss:.5f}" for loss in row["losses"])
            lines.append(f"- first losses of {row['cell']}: {losses}")
        if row["failed"]:
            lines.append(f"- {row['cell']}: not measured: {row['failed']}")
    return "\n".join(lines) + "\n"


def show(value, form):
    """Formats a value; "-" if there is none."""
    known = value is not None and value != [None, None]
    return form.format(value) if known else "-"


SHOWN = ("device", "ablate", "cells", "batch_size", "length", "rounds", "steps")

if __name__ == "__main__":
    flags.DEFINE_enum("device", "cpu", ("cpu", "gpu"), "What to measure on.")
    flags.DEFINE_bool("ablate", False, "Also without dropout, GELU, AdamW.")
    flags.DEFINE_string("cells", "", "Regular expression: measure only these cells.")
    flags.DEFINE_integer("batch_size", 16, "Sequences of a step.", lower_bound=1)
    flags.DEFINE_integer("length", 128, "Tokens of a sequence.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Processes of each cell.", lower_bound=0)
    flags.DEFINE_integer("steps", 10, "Timed steps of each.", lower_bound=1)
    flags.DEFINE_integer("warmup", 3, "Steps before those.", lower_bound=0)
    flags.DEFINE_integer("threads", os.cpu_count(), "Intra-op threads of each.")
    flags.DEFINE_string("torch_python", sys.executable, "Interpreter with PyTorch.")
    flags.DEFINE_bool("torch_fused", False, "PyTorch's fused AdamW.")
    flags.DEFINE_enum("torch_attention", "sdpa", ("sdpa", "eager"), "transformers'.")
    flags.DEFINE_string("output", "", "Folder for figures.json and report.md.")
    app.run(main)
