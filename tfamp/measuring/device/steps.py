"""Training steps of one model in one mode: prepared at once, timed in turns.

And what TensorFlow's profiler saw a GPU do in them: kernels by time, and launches.
"""

import collections
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import names
from tfamp.measuring import process_memory
from tfamp.measuring.benchmark import measure
from tfamp.measuring.device import networks
from tfamp.precision import control, policy

WARMUP = 4
_SKIPPED = 2  # Steps that begin an epoch, and start the data.
_MOST = 15  # Kernels of a profile that are kept.
_NAME = 120  # Characters of a kernel's name.


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
        return {"profile": read_profile(pathlib.Path(folder), 3)}


def _in_force(side, mode):
    if side == "tfamp":
        return control.enabled(mode, on_unsupported="warn")
    return policy.policy_scope(mode)


# ---- Profiles ----


def read_profile(folder: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """Returns the figures of a profile; None where it saw no GPU.

    Args:
      folder: Of `tf.profiler.experimental.start`.
      steps: How many there were.

    Returns:
      Plain data of a step: busy, the milliseconds in which the GPU did something;
      launches; kernels, those that took most: [name, milliseconds, times]. How long it
      waits is no part of it: with the profiler a launch takes longer.
    """
    kind = names.resolve("tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace")
    for file in folder.rglob("*.xplane.pb") if kind else ():
        for plane in kind.FromString(file.read_bytes()).planes:
            if plane.name.startswith("/device:GPU") and (events := _events(plane)):
                return _summary(events, steps)
    return None


def _events(plane):
    """[(name, begin, end)] in picoseconds, of all streams, in order."""
    return sorted(
        (
            (plane.event_metadata[event.metadata_id].name, begin, begin + length)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if (length := event.duration_ps) >= 0
            and (begin := 1000 * line.timestamp_ns + event.offset_ps) >= 0
        ),
        key=lambda each: each[1],
    )


def _summary(events, steps):
    busy, until = 0, events[0][1]
    spent: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    for name, begin, end in events:
        busy += max(0, end - max(begin, until))
        until = max(until, end)
        spent[name[:_NAME]] += end - begin
        times[name[:_NAME]] += 1
    return {
        "busy": busy / 1e9 / steps,
        "launches": len(events) / steps,
        "kernels": [
            [name, ps / 1e9 / steps, times[name] / steps]
            for name, ps in spent.most_common(_MOST)
        ],
    }
