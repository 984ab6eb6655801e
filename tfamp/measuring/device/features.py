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
        draw = np.random.default_rng(0)
        x = draw.normal(size=(rows, width)).astype("float32")
        watch = _Losses()
        model.fit(x, x[:, :10].argmax(1), rows, epochs=20, verbose=0, callbacks=[watch])
        status = control.status()
        in_force = (
            status.graph_rewrite if keywords.get("graph_rewrite") else status.reason
        )
        return {"losses": watch.losses, "seconds": watch.seconds, "in_force": in_force}


class _Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses, self.seconds, self._start = [], [], 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(float((logs or {})["loss"]))
        self.seconds.append(time.perf_counter() - self._start)
