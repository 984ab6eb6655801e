"""What else has code of its own on a GPU: float8 and the graph rewrite."""

import time
from typing import Any

import keras
import numpy as np

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
        starts, ends = [], []
        watch = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: starts.append(time.perf_counter()),
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()),
        )
        fit = {"epochs": 20, "verbose": 0, "callbacks": [watch]}
        losses = model.fit(x, x[:, :10].argmax(1), rows, **fit).history["loss"]
        status = control.status()
        rewritten = keywords.get("graph_rewrite")
        return {
            "losses": list(map(float, losses)),
            "seconds": [end - start for start, end in zip(starts, ends, strict=True)],
            "in_force": status.graph_rewrite if rewritten else status.reason,
        }
