"""The steps that benchmarks time: those of `fit`, one after another."""

import time
from collections.abc import Callable
from typing import Any

import keras

from tfamp.training import callbacks, tasks, trainer


def training_step(
    model: keras.Model, config, source: tasks.Synthetic, steps: int
) -> Callable[[], dict[str, Any]]:
    """Compiles a model as a run does and returns the function of its next step.

    It calls the function that `fit` calls, and reads the loss: without that a GPU would
    still be at work when the clock stops. With `config.optimizer.accumulation_steps` a
    step is a whole window of so many batches: only then does each hold an update of the
    weights.

    Args:
      model: A built model; compiled in place.
      config: The configuration; its optimizer, loss scaling and `jit_compile` count.
      source: Batches, loss and metrics.
      steps: How many steps there will be, for the learning-rate schedule.

    Returns:
      A function of no argument; returns the logs, means since `reset_metrics`.
    """
    window = config.optimizer.accumulation_steps
    trainer.compile_model(model, config, window * steps, source.loss, source.metrics())
    model.make_train_function()
    batches = iter(source.batches)

    def step():
        for _ in range(window):
            logs = model.train_function(batches)
        float(logs["loss"])
        return logs

    return step


def timed(step: Callable, count: int) -> tuple[list[float], Any]:
    """Returns the seconds of so many steps, and what the last one returned."""
    seconds, result = [], None
    for _ in range(count):
        start = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def scaling(optimizer) -> tuple[int | None, float | None]:
    """Returns (skipped steps, loss scale) of an optimizer; None of what it has not.

    Keras' own loss scaling counts no skipped steps.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None, None
    skipped = getattr(optimizer, "skipped_steps", None)
    count = None if skipped is None else int(callbacks.read_number(skipped))
    return count, callbacks.read_number(optimizer.dynamic_scale)
