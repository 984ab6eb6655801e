"""What else has code of its own on a GPU: float8 and the graph rewrite."""

from typing import Any

import keras
import numpy as np

from tfamp.measuring.benchmark import measure
from tfamp.precision import control

layers = keras.layers


def train(mode: str, keywords: dict[str, Any], xla: bool, tiny: bool) -> dict[str, Any]:
    """Trains a network of dense layers with `enable`'s keywords.

    Args:
      mode: As of `enable`.
      keywords: Others.
      xla: Whether XLA compiles the step.
      tiny: Whether it is small.

    Returns:
      Plain data: losses and seconds of each step; in_force: what `status` says of it.
    """
    width, rows = (32, 64) if tiny else (2048, 4096)
    with control.enabled(mode, on_unsupported="warn", **keywords):
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(width, "gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=xla)
        x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
        watch = measure.Stopwatch()
        fit = {"epochs": 20, "verbose": 0, "callbacks": [watch]}  # Of one step.
        model.fit(x, x[:, :10].argmax(1), rows, **fit)
        status = control.status()
        rewritten = keywords.get("graph_rewrite")
        return {
            "losses": watch.losses,
            "seconds": watch.seconds,
            "in_force": status.graph_rewrite if rewritten else status.reason,
        }
