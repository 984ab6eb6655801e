r"""float32, bfloat16 by dtype policy and by graph rewrite, with and without XLA.

    python benchmarks/rewrite_vs_policy.py

Trains three networks (dense, convolutional, transformer) on one batch with Adam, in
every variant, in one process: rounds are interleaved and medians reported, as ratios
to float32 traced the same way. Beside each ratio stands the loss after all rounds, and
for the rewrite what it converted. About 6 minutes on two cores; `--quick` takes a
third of the rounds.
"""

import contextlib
import functools
import json
import pathlib
import statistics
import time
import warnings

import environment
import keras
import numpy as np
from absl import app, flags, logging

import tfamp

FLAGS = flags.FLAGS
layers = keras.layers


def mlp():
    """Three dense layers of 1024 units, batch 512."""
    body = [layers.Dense(1024, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *body, head(10)]), (512, 1024)


def conv():
    """Three 3x3 convolutions of 64 channels with normalization, batch 64."""
    body = [
        make()
        for _ in range(3)
        for make in (
            functools.partial(layers.Conv2D, 64, 3, padding="same"),
            layers.BatchNormalization,
            layers.ReLU,
        )
    ]
    shape = (32, 32, 64)
    pooled = layers.GlobalAveragePooling2D()
    return keras.Sequential([keras.Input(shape), *body, pooled, head(10)]), (64, *shape)


def transformer():
    """Four transformer layers of width 512, 128 tokens, batch 16."""
    inputs = x = keras.Input((128, 512))
    for _ in range(4):
        attended = layers.MultiHeadAttention(8, 64)(x, x)
        x = layers.LayerNormalization()(x + attended)
        inner = layers.Dense(512)(layers.Dense(2048, "gelu")(x))
        x = layers.LayerNormalization()(x + inner)
    outputs = head(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), (16, 128, 512)


def head(classes):
    """Float32 logits."""
    return layers.Dense(classes, dtype="float32")


NETWORKS = {
    "MLP": (mlp, 30),
    "conv net": (conv, 15),
    "transformer": (transformer, 9),
}
# Variant: how its model is built and compiled, and how its steps run.
VARIANTS = {
    "float32": functools.partial(tfamp.policy_scope, "float32"),
    "policy, plain Keras": functools.partial(tfamp.policy_scope, "mixed_bfloat16"),
    "policy, tfamp": functools.partial(tfamp.policy_scope, "mixed_bfloat16"),
    "rewrite, tfamp": functools.partial(tfamp.graph_rewrite_scope, "bfloat16"),
}


class Variant:
    """A compiled model in one precision, and its times."""

    def __init__(self, network, name, xla):
        self.name, self.xla, self.times = name, xla, []
        self.converted = ""
        keras.utils.set_random_seed(0)
        with self.precision():
            self.model, shape = NETWORKS[network][0]()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=xla)
            self.batch = example(shape)
            self.loss = self.step()
            if name.startswith("rewrite"):
                self.converted = tfamp.status().graph_rewrite

    @contextlib.contextmanager
    def precision(self):
        """What the model is built, traced and run under."""
        if self.name == "policy, tfamp":
            tfamp.enable("mixed_bfloat16")
        try:
            with VARIANTS[self.name]():
                yield
        finally:
            tfamp.disable()

    def step(self):
        """Trains on the batch once; returns the loss."""
        return float(self.model.train_on_batch(*self.batch))

    def timed(self):
        """Trains on the batch once and notes the time."""
        # A policy counts when the step is traced, the rewrite whenever one runs.
        rewritten = self.name.startswith("rewrite")
        with self.precision() if rewritten else contextlib.nullcontext():
            start = time.perf_counter()
            self.loss = self.step()
            self.times.append(time.perf_counter() - start)


def example(shape):
    """Returns a batch whose labels can be learned."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, shape[0])
    x = random.standard_normal(shape, np.float32)
    x[..., 0] = labels.reshape(-1, *[1] * (len(shape) - 2)) / 10
    return x, labels


def main(_):
    """Prints the table of each network."""
    logging.set_verbosity(logging.ERROR)
    # XLA bypasses the rewrite; that is what its row shows.
    warnings.simplefilter("ignore")
    rows = []
    for network in NETWORKS:
        rows += measure(network)
        print(table([row for row in rows if row["network"] == network]), flush=True)
    if FLAGS.output:
        described = environment.describe("python benchmarks/rewrite_vs_policy.py")
        report = {"schema_version": 1, "environment": described, "rows": rows}
        pathlib.Path(FLAGS.output).write_text(json.dumps(report, indent=2) + "\n")


def measure(network):
    """Returns the rows of one network, timed round by round."""
    variants = [Variant(network, n, xla) for xla in (False, True) for n in VARIANTS]
    rounds = NETWORKS[network][1]
    for _ in range(rounds // 3 if FLAGS.quick else rounds):
        for variant in variants:
            variant.timed()
    medians = {(v.xla, v.name): statistics.median(v.times) for v in variants}
    return [
        {
            "network": network,
            "xla": v.xla,
            "variant": v.name,
            "milliseconds": round(medians[v.xla, v.name] * 1e3, 2),
            "speed_up": round(medians[v.xla, "float32"] / medians[v.xla, v.name], 3),
            "loss": v.loss,
            "converted": v.converted,
        }
        for v in variants
    ]


def table(rows):
    """Returns rows as a Markdown table."""
    lines = [
        f"\n{rows[0]['network']}: {NETWORKS[rows[0]['network']][0].__doc__}\n",
        "| traced as | variant | ms | speed-up | last loss | rewrite |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        cells = [
            "XLA" if row["xla"] else "graph",
            row["variant"],
            f"{row['milliseconds']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['loss']:.4f}",
            row["converted"] or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    flags.DEFINE_bool("quick", False, "A third of the rounds.")
    flags.DEFINE_string("output", "", "JSON file to write the figures to.")
    app.run(main)
