"""Runs what a GPU should show first, in ten minutes, and writes one page.

    python scripts/gpu_plan.py --output=runs/gpu_plan
    python scripts/gpu_plan.py --tiny

In turn: what the machine is, the invariants of loss scaling, whether XLA fuses
attention by cuDNN, then speed beside PyTorch, and memory
(`configs/benchmark/gpu.py:plan`). What does not fit into the time is named, and left
out. `--tiny` runs its small form on any machine, whose figures say nothing of a GPU.
"""

import pathlib
import subprocess
import sys
import time

import quiet_start  # noqa: F401  Before all that imports TensorFlow.
import tensorflow as tf
from absl import app, flags

from tfamp import tables
from tfamp.facts import hardware

ROOT = pathlib.Path(__file__).parents[1]
OUTPUT = flags.DEFINE_string("output", "runs/gpu_plan", "Folder for the results.")
MINUTES = flags.DEFINE_float("minutes", 10, "Time limit of the whole plan, in minutes.")
TINY = flags.DEFINE_bool("tiny", False, "Run small models only, as a check.")
ATTENTION = flags.DEFINE_bool(
    "attention", False, "Only report how XLA compiles attention."
)
INVARIANTS = "tests/contract/test_optimizer_properties.py"
BENCHMARKS = {
    "speed": ("bert_base", "mnist_wide"),
    "memory": (
        *("blocks_kept", "blocks_again", "blocks_one", "attention"),
        *("slots_float32", "slots_8bit", "slots_8bit_weights_bfloat16"),
    ),
}


def steps(folder):
    """Returns {what: the arguments of its command}."""
    timed = {
        what: [
            "scripts/benchmark.py",
            "--config=configs/benchmark/gpu.py:plan",
            f"--workdir={folder / what}",
            f"--tasks={','.join(tasks)}",
            *(["--tiny"] if TINY.value else []),
        ]
        for what, tasks in BENCHMARKS.items()
    }
    return {
        "machine": ["scripts/doctor.py", f"--output={folder / 'machine.md'}"],
        "loss scaling": [
            *("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"),
            *(INVARIANTS, "-k", "Adam"),
        ],
        "attention by cuDNN": [__file__, "--attention"],
        **timed,
    }


def fused_attention():
    """Returns what XLA calls for attention, as its compiled program names it."""

    def attention(query, key, value):
        scores = tf.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), value)

    compiled = tf.function(attention, jit_compile=True)
    given = [tf.ones((2, 512, 8, 64), tf.bfloat16)] * 3
    text = compiled.experimental_get_compiler_ir(*given)(stage="optimized_hlo")
    if "__cudnn$fmha" in text:
        return "one call of cuDNN's fused attention (__cudnn$fmha)"
    return "no call of cuDNN's fused attention: products and a softmax"


def main(argv):
    """Runs each step in its own process."""
    if ATTENTION.value:
        print(fused_attention())
        return
    folder = pathlib.Path(OUTPUT.value).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rows, end = [], time.monotonic() + 60 * MINUTES.value
    for what, arguments in steps(folder).items():
        start = time.monotonic()
        log = folder / f"{what.replace(' ', '_')}.txt"
        print(f"{what} ({(end - start) / 60:.1f} min left)", flush=True)
        rows.append({"step": what, **run(arguments, log, end - start)})
        rows[-1] |= {"seconds": f"{time.monotonic() - start:.0f}", "log": log.name}
    form = "tiny: no figure here describes a GPU" if TINY.value else "whole"
    page = [
        f"# Measurements on {hardware.device_label(hardware.read_devices())}",
        f"{time.strftime('%Y-%m-%d')}, {form}; TensorFlow {tf.__version__}; "
        f"`python scripts/gpu_plan.py {' '.join(sys.argv[1:])}`",
        tables.of_dicts(rows),
        *reports(folder),
    ]
    (folder / "README.md").write_text("\n\n".join(page) + "\n")
    print(f"open {folder / 'README.md'}")


def run(arguments, log, seconds):
    """Runs a step; returns its result, and its last line."""
    if seconds <= 0:
        log.write_text("")
        return {"result": "skipped: out of time", "last line": ""}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
            result = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            result = "stopped: out of time"
    lines = log.read_text(errors="replace").strip().splitlines()
    return {"result": result, "last line": lines[-1] if lines else ""}


def reports(folder):
    """Returns the benchmarks' tables, as far as there are any."""
    files = [folder / what / "report.md" for what in BENCHMARKS]
    return [file.read_text() for file in files if file.exists()]


if __name__ == "__main__":
    app.run(main)
