"""Training steps of one model in one mode: prepared at once, timed in turns."""

import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.measuring import process_memory
from tfamp.measuring.benchmark import measure
from tfamp.measuring.device import networks, profiles
from tfamp.precision import control, policy

WARMUP = 4
_SKIPPED = 2  # Steps that begin an epoch, and start the data.


def steps(
    name: str,
    side: str,
    mode: str,
    jit: bool,
    sizes: networks.Sizes,
    rounds: int,
    count: int,
) -> Iterator[dict[str, Any]]:
    """Yields figures of one model.

    What its first steps cost; the seconds of each round; and a profile of three steps,
    which is {} without a GPU.

    Args:
      name: Of `networks.NAMES`.
      side: "tfamp"; "keras" for stock Keras, with the policy of the mode.
      mode: A precision mode.
      jit: Whether XLA compiles the step.
      sizes: Of the model.
      rounds: How often it is timed.
      count: Steps of a round.
    """
    start = time.perf_counter()
    with _in_force(side, mode):
        keras.utils.set_random_seed(0)
        model, batches = networks.build(name, sizes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(networks.optimizer(name), loss, jit_compile=jit)
        gpu = process_memory.peak_device(again=True) is not None

        def fit(steps, *callbacks):
            watch = measure.Stopwatch()
            callbacks = [watch, *callbacks]
            model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
            return watch

        watch = fit(WARMUP)
        yield {
            "build_seconds": watch.starts[0] - start,
            "first_step_seconds": watch.seconds[0],
            "device_bytes": process_memory.peak_device(),
            "status": str(control.status()) if side == "tfamp" else "",
        }
        for _ in range(rounds):
            watch = fit(count + _SKIPPED)
            yield {"seconds": watch.seconds[_SKIPPED:], "loss": watch.losses[-1]}
        yield _profiled(fit) if gpu else {}


def _profiled(fit):
    with tempfile.TemporaryDirectory() as folder:
        start = lambda batch, logs=None: (  # noqa: E731
            tf.profiler.experimental.start(folder) if batch == _SKIPPED else None
        )
        begin = keras.callbacks.LambdaCallback(on_train_batch_begin=start)
        try:
            fit(3 + _SKIPPED, begin)
        finally:
            tf.profiler.experimental.stop()
        return {"profile": profiles.read(pathlib.Path(folder), 3)}


def _in_force(side, mode):
    if side == "tfamp":
        return control.enabled(mode, on_unsupported="warn")
    return policy.policy_scope(mode)
