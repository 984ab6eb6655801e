r"""Writes the golden files of tests/contract/test_checkpoint.py.

Run with the oldest Keras that is supported: newer ones read the files of older ones.

    python tests/data/make_golden.py

Each file is what one kind of program leaves after the same six steps of training,
one of them with an infinite loss: a model of nine weights and its Adam, in
mixed_float16, without loss scaling, with stock Keras' (named or wrapped by Keras),
and with tfamp's. `golden.json` has the versions, what each state must be, and the
loss of the next step. Layouts: `.keras`, `.weights.h5`, `tf.train.Checkpoint`.
"""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfamp

FOLDER = pathlib.Path(__file__).parent
SCALE, INTERVAL = 64.0, 4
OPTIMIZERS = {
    "bare": lambda: keras.optimizers.Adam(0.1),
    "stock": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), SCALE, INTERVAL
    ),
    "auto": lambda: keras.optimizers.Adam(0.1),
    "tfamp": lambda: tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), SCALE, INTERVAL, hysteresis=2
    ),
}


def batch(step):
    """Returns inputs and targets of a step; the loss of step 2 is infinite."""
    random = np.random.default_rng(step)
    x = random.normal(size=(4, 2)).astype("float32")
    return x, x[:, :1] * (np.inf if step == 2 else 1.0)


def train(model, steps):
    """Returns the losses of the steps; before Keras 3.15 they would be averages."""

    def step_alone(step):
        model.reset_metrics()
        return float(model.train_on_batch(*batch(step)))

    return [step_alone(step) for step in steps]


def build(kind):
    """Returns a compiled model of one kind, under the global dtype policy."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(2, activation="tanh", name="first"),
        keras.layers.Dense(1, dtype="float32", name="second"),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers], name="golden")
    model.compile(OPTIMIZERS[kind](), "mse", auto_scale_loss=kind == "auto")
    return model


def main():
    """Writes the files."""
    keras.config.set_dtype_policy("mixed_float16")
    golden = {"keras": keras.__version__, "tensorflow": tf.__version__, "kinds": {}}
    for kind in OPTIMIZERS:
        model = build(kind)
        # Without loss scaling the infinite loss would destroy the weights.
        train(model, [0, 1, 3, 4, 5] if kind == "bare" else range(6))
        model.save(FOLDER / f"{kind}.keras")
        model.save_weights(FOLDER / f"{kind}.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.write(str(FOLDER / f"{kind}.checkpoint"))
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        golden["kinds"][kind] = {
            "iterations": int(inner.iterations),
            "moments": float(sum(np.abs(v).sum() for v in inner.variables[2:])),
            "scale": float(getattr(model.optimizer, "dynamic_scale", 0.0)),
            "tracker": int(getattr(model.optimizer, "step_counter", 0)),
            "skipped_steps": int(getattr(model.optimizer, "skipped_steps", 0)),
            "next_loss": train(model, [6, 7]),
        }
    text = json.dumps(golden, indent=2)
    (FOLDER / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
