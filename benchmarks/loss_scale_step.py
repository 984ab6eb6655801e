r"""Cost of loss scaling: stock Keras' LossScaleOptimizer and tfamp's, side by side.

    python benchmarks/loss_scale_step.py

Applies given gradients to 25 million parameters in 128 variables (the shapes of
eight transformer layers), and trains a network of dense layers, with SGD and Adam,
as a graph and compiled by XLA. Rounds are interleaved and medians reported, as
ratios to the plain inner optimizer traced the same way and to the plain one that XLA
compiles. Peak memory is that of a fresh process for each row. About 8 minutes on two
cores; `--quick` leaves memory out and halves the rounds.
"""

import functools
import itertools
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

import environment
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tfamp

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 30, "Timed calls of each row.", lower_bound=3)
flags.DEFINE_bool("quick", False, "Half the rounds, no memory column.")
flags.DEFINE_string("output", "", "JSON file to write the figures to.")
flags.DEFINE_string("peak_of", "", "Measure one row's memory; used by the parent.")

WIDTH, LAYERS, BATCH = 512, 8, 32
LAYER_SHAPES = [
    *[(WIDTH, WIDTH), (WIDTH,)] * 4,
    *[(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)],
    *[(WIDTH,), (WIDTH,)] * 2,
]
OPTIMIZERS = {
    "SGD": functools.partial(keras.optimizers.SGD, 1e-3),
    "Adam": functools.partial(keras.optimizers.Adam, 1e-3),
}
SCALING = {
    "plain": lambda optimizer: optimizer,
    "stock Keras": keras.optimizers.LossScaleOptimizer,
    "tfamp": tfamp.LossScaleOptimizer,
}
MEMORY_STEPS = 5


def main(_):
    """Prints a table for each workload and optimizer."""
    logging.set_verbosity(logging.ERROR)
    if FLAGS.peak_of:
        workload, optimizer, scaling, xla = json.loads(FLAGS.peak_of)
        step = WORKLOADS[workload](optimizer, scaling, xla)
        for _ in range(MEMORY_STEPS):
            step()
        print(peak_resident_kib() / 1024)
        return
    rows = []
    for workload, optimizer in itertools.product(WORKLOADS, OPTIMIZERS):
        rows += measure(workload, optimizer)
        print(table([row for row in rows if row["workload"] == workload][-6:]))
    if FLAGS.output:
        described = environment.describe("python benchmarks/loss_scale_step.py")
        report = {"schema_version": 1, "environment": described, "rows": rows}
        pathlib.Path(FLAGS.output).write_text(json.dumps(report, indent=2) + "\n")


def measure(workload, optimizer):
    """Returns the six rows of one workload and optimizer, timed round by round."""
    keys = list(itertools.product((False, True), SCALING))
    steps = {}
    for xla, scaling in keys:
        steps[xla, scaling] = WORKLOADS[workload](optimizer, scaling, xla)
        steps[xla, scaling]()  # Traces and compiles.
    times = {key: [] for key in keys}
    for _ in range(FLAGS.rounds // 2 if FLAGS.quick else FLAGS.rounds):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            times[key].append(time.perf_counter() - start)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return [
        {
            "workload": workload,
            "optimizer": optimizer,
            "scaling": scaling,
            "xla": xla,
            "milliseconds": round(medians[xla, scaling] * 1e3, 2),
            "to_plain": round(medians[xla, scaling] / medians[xla, "plain"], 3),
            "to_plain_xla": round(medians[xla, scaling] / medians[True, "plain"], 3),
            "peak_mib": None
            if FLAGS.quick
            else peak(workload, optimizer, scaling, xla),
        }
        for xla, scaling in keys
    ]


def peak(*row):
    """Returns the peak resident memory of one row in a fresh process, in MiB."""
    command = [sys.executable, __file__, f"--peak_of={json.dumps(row)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(float(done.stdout.split()[-1]))


def peak_resident_kib():
    """Returns this process' peak resident memory, in KiB."""
    # Not `getrusage`: on Linux a child starts with its parent's peak.
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1])


def given_gradients(optimizer, scaling, xla):
    """Returns a function that applies constant gradients: the optimizer alone."""
    shapes = LAYER_SHAPES * LAYERS
    random = np.random.default_rng(0)
    values = [random.standard_normal(shape, np.float32) for shape in shapes]
    grads = [tf.constant(value) for value in values]
    variables = [keras.Variable(value) for value in values]
    made = SCALING[scaling](OPTIMIZERS[optimizer]())
    made.build(variables)
    step = tf.function(lambda grads: made.apply(grads, variables), jit_compile=xla)
    return functools.partial(step, grads)


def training_step(optimizer, scaling, xla):
    """Returns a function that trains a network of dense layers on one batch."""
    layers = [
        keras.layers.Dense(units, activation="relu")
        for units in [4 * WIDTH, WIDTH] * LAYERS
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    made = SCALING[scaling](OPTIMIZERS[optimizer]())
    made.build(model.trainable_variables)
    x = tf.random.stateless_normal([BATCH, WIDTH], seed=[0, 0])

    @tf.function(jit_compile=xla)
    def step(x):
        with tf.GradientTape() as tape:
            loss = made.scale_loss(tf.reduce_mean(tf.square(model(x) - x)))
        grads = tape.gradient(loss, model.trainable_variables)
        made.apply(grads, model.trainable_variables)

    return functools.partial(step, x)


WORKLOADS = {"given gradients": given_gradients, "training step": training_step}


def table(rows):
    """Returns rows as a Markdown table."""
    workload, optimizer = rows[0]["workload"], rows[0]["optimizer"]
    lines = [
        f"\n{workload}, {optimizer}\n",
        "| traced as | optimizer | ms | to plain | to plain under XLA | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            "XLA" if row["xla"] else "graph",
            row["scaling"],
            f"{row['milliseconds']:.1f}",
            f"{row['to_plain']:.2f}",
            f"{row['to_plain_xla']:.2f}",
            "-" if row["peak_mib"] is None else str(row["peak_mib"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
