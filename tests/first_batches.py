"""The losses of the first 20 batches, where the loss is a sum: a table and a picture.

    python tests/first_batches.py results/first_batches

for a VAE, a detector and a siamese network in the forms of keras.io's examples, on
made-up images, in three modes; and in mixed_float16 with Keras' own LossScaleOptimizer.
"""

import json
import pathlib
import sys

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfamp

BATCHES, BATCH = 20, 16
RUNS = ("float32", "mixed_bfloat16", "mixed_float16", "Keras' own scale")
RNG = np.random.default_rng(0)
PATTERNS = RNG.uniform(size=(8, 32, 32, 1)).astype("float32")
LABELS = RNG.integers(0, 8, BATCHES * BATCH)
IMAGES = PATTERNS[LABELS] * RNG.uniform(0.5, 1.0, (len(LABELS), 1, 1, 1))
IMAGES = IMAGES.astype("float32")
layers = keras.layers


def encoder(units):
    conv = dict(strides=2, padding="same", activation="relu")
    body = [layers.Conv2D(16, 3, **conv), layers.Conv2D(32, 3, **conv)]
    return keras.Sequential([keras.Input((32, 32, 1)), *body, layers.Flatten(), units])


class Vae(keras.Model):
    """The sum over pixels, and the divergence, as in keras.io's VAE."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(layers.Dense(16))
        self.decoder = keras.Sequential(
            [keras.Input((8,)), layers.Dense(64, "relu"), layers.Dense(1024)]
        )

    def train_step(self, images):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(images, training=True), 2, 1)
            noise = tf.random.stateless_normal(tf.shape(mean), seed=[1, 2])
            decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            pixels = tf.reshape(images, (-1, 1024))
            lost = tf.nn.sigmoid_cross_entropy_with_logits(pixels, decoded)
            kl = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
            loss = tf.reduce_mean(tf.reduce_sum(lost, 1) + tf.reduce_sum(kl, 1))
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def detector():
    """A grid of boxes; squares are summed over the grid and the batch, as in YOLO."""
    model = encoder(layers.Dense(4 * 4 * 5))
    weights = np.array([5.0, 5.0, 5.0, 5.0, 1.0] * 16, "float32")
    model.compile(loss=lambda y, p: tf.reduce_sum(weights * (y - p) ** 2))
    return model


class Siamese(keras.Model):
    """Triplets and a margin; the loss of a batch is the sum of its triplets'."""

    def __init__(self):
        super().__init__()
        self.embedding = encoder(layers.Dense(32))

    def train_step(self, triplets):
        with tf.GradientTape() as tape:
            anchor, same, other = (self.embedding(x, training=True) for x in triplets)
            near = tf.reduce_sum((anchor - same) ** 2, 1)
            far = tf.reduce_sum((anchor - other) ** 2, 1)
            loss = tf.reduce_sum(tf.maximum(near - far + 50.0, 0.0))
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def compiled(model):
    model.compile()
    return model


BOXES = RNG.uniform(0, 32, (8, 80)).astype("float32")[LABELS]
OTHERS = PATTERNS[(LABELS + 1) % 8]
MODELS = {
    "VAE": (lambda: compiled(Vae()), (IMAGES,)),
    "detector": (detector, (IMAGES, BOXES)),
    "siamese network": (
        lambda: compiled(Siamese()),
        ((IMAGES, PATTERNS[LABELS], OTHERS),),
    ),
}


def losses(name, run):
    """Returns the loss of each batch, and the optimizer."""
    keras.utils.set_random_seed(0)
    make, data = MODELS[name]
    own = run == RUNS[-1]
    tfamp.enable("mixed_float16" if own else run, on_unsupported="warn")
    try:
        model, found = make(), []
        optimizer = keras.optimizers.Adam(1e-3)
        if own:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, loss=model.loss)
        data = data[0] if len(data) == 1 else data
        batches = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
        each = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: model.reset_metrics(),
            on_train_batch_end=lambda batch, logs: found.append(float(logs["loss"])),
        )
        model.fit(batches, verbose=0, callbacks=[each])
        return found, model.optimizer
    finally:
        tfamp.disable()


def main(folder):
    """Writes `losses.json`, `report.md` and `losses.png` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, curves = [], {}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for axis, name in zip(axes, MODELS, strict=True):
        for run, style in zip(RUNS, ("-", "--", ":", "-"), strict=True):
            found, optimizer = losses(name, run)
            curves[f"{name}, {run}"] = found
            scaled = hasattr(optimizer, "retried_steps")
            counts = int(optimizer.skipped_steps) if scaled else None
            retried = optimizer.retried_steps if scaled else None
            ends = [float(f"{x:.4g}") for x in (found[7], found[15], found[-1])]
            rows.append([name, run, *ends, counts, retried])
            axis.plot(range(1, BATCHES + 1), found, style, label=run)
        axis.set(title=name, xlabel="batch", ylabel="loss", yscale="log")
    axes[-1].legend(fontsize="small")
    figure.savefig(folder / "losses.png", dpi=110)
    header = ["model", "run", "batch 8", "batch 16", "batch 20", "skipped", "retried"]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(map(str, row))} |" for row in lines)
    (folder / "report.md").write_text(f"# The first 20 batches\n\n{table}\n")
    (folder / "losses.json").write_text(json.dumps(curves, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
