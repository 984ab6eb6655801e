"""Measures one cell, in the process that was started for it."""

import math
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from ml_collections import config_dict

from tfamp.measuring import process_memory, training_steps, workloads
from tfamp.measuring.benchmark import cell_modes, cells
from tfamp.precision import control, policy
from tfamp.runs import trainer

# Outputs kept to tell the modes apart: enough for an error, small in a file.
_OUTPUTS = 1024


def measure(
    plain: Mapping[str, Any],
    cell: cells.Cell,
    job: str,
    seed: int,
    steps: int,
    warmup: int,
) -> dict[str, Any]:
    """Times the steps of `fit` or `predict`, their results read back.

    Args:
      plain: The cell's task as dicts; see `cells.get_task`.
      cell: The cell.
      job: "train" or "inference".
      seed: Of the first weights and, for a configuration, of the batches.
      steps: Steps that are timed, each of them a whole window of accumulation.
      warmup: Steps before them, the first one included.

    Returns:
      Plain data:
        seconds: of each timed step;
        examples: of a step;
        first_step_seconds: of the first step, tracing and compilation included;
        losses: of all steps; None where not finite;
        outputs: of inference, up to 1024 numbers of the first timed step;
        skipped_steps, loss_scale: None without loss scaling;
        host_bytes: peak memory of the process, less what it held before the model;
        device_bytes: the same of the first GPU; None without;
        xla, tensor_float_32, note: what was in force;
        unit, description, parameters.
    """
    task, before = config_dict.ConfigDict(plain), process_memory.peak_host()
    with _in_force(task, cell, seed):
        keras.utils.set_random_seed(seed)
        count = warmup + steps
        workload = _workload(task, cell, job, seed, count)
        model = workload.model
        window = _window(model) if job == "train" else 1
        watch = _SingleSteps()
        quiet = {"verbose": 0, "callbacks": [watch]}
        if job == "train":
            every = count * window
            model.fit(workload.batches, steps_per_epoch=every, shuffle=False, **quiet)
        else:
            model.predict(workload.batches, steps=count, **quiet)
        note, tf32 = _note(cell), policy.read().tensor_float_32
    return {
        **_figures(watch, window, warmup),
        "examples": workload.examples * window,
        **training_steps.scaling(model, count),
        "host_bytes": process_memory.peak_host() - before,
        "device_bytes": process_memory.peak_device(),
        "xla": bool(model.jit_compile),
        "tensor_float_32": tf32,
        "note": note,
        "unit": workload.unit,
        "description": workload.description,
        "parameters": model.count_params(),
    }


def _figures(watch, window, warmup):
    """What the stopwatch saw, of whole windows."""
    seconds, losses = (
        [sum(each[i : i + window]) for i in range(0, len(each), window)]
        for each in (watch.seconds, watch.losses)
    )
    return {
        "seconds": seconds[warmup:],
        "first_step_seconds": seconds[0],
        "losses": [loss / window if math.isfinite(loss) else None for loss in losses],
        "outputs": watch.outputs[warmup] if watch.outputs else None,
    }


def _in_force(task, cell, seed):
    """Returns the scope of the cell's precision."""
    mode, rewrite = cell_modes.VARIANTS[cell.mode]
    if cell.framework == "keras":
        return policy.policy_scope(mode)
    if task.config is not None:
        return trainer.enabled(cells.config_of(task, cell, seed).precision)
    keywords = {"graph_rewrite": bool(rewrite), "sum_embedding_gradients": True}
    # In every mode, so that what differs is precision.
    return control.enabled(mode, fused_kernels=True, **keywords)


def _note(cell):
    """What is in force, after the steps."""
    if cell.framework == "keras":
        return "plain Keras: its policy set by hand, its own loss scaling"
    status, (_, rewrite) = control.status(), cell_modes.VARIANTS[cell.mode]
    kernels = status.fused_kernels
    fused = "" if kernels == "off" else f"fused kernels: {kernels}"
    parts = status.reason, status.graph_rewrite if rewrite else "", fused
    return "; ".join(filter(None, parts))


def _workload(task, cell, job, seed, steps) -> workloads.Workload:
    """The model, compiled, and its batches."""
    if task.config is None:
        names = "batch_size", "sequence_length"
        sizes = {name: size for name in names if (size := getattr(cell, name))}
        arguments = {**task.arguments.to_dict(), **sizes}
        return workloads.from_function(task.function, arguments, cell.jit)
    return workloads.from_config(cells.config_of(task, cell, seed), steps, job)


def _window(model):
    """Batches of an update of the weights: only a whole window of them has one."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return optimizer.gradient_accumulation_steps or 1


class Stopwatch(keras.callbacks.Callback):
    """Times each step of `fit`; its loss has been read then, so that a GPU is done.

    Attributes:
      starts: When each step began.
      seconds: What each took.
      losses: As Keras logs them: running means of an epoch.
    """

    def __init__(self):
        super().__init__()
        self.starts, self.seconds, self.losses = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, batch, logs=None):
        """Reads the loss, and stops the clock."""
        self.losses.append(float((logs or {})["loss"]))
        self.seconds.append(time.perf_counter() - self.starts[-1])


class _SingleSteps(Stopwatch):
    """Has the loss of each step alone, and times `predict`, too."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()
        super().on_train_batch_begin(batch)

    on_predict_batch_begin = Stopwatch.on_train_batch_begin

    def on_predict_batch_end(self, batch, logs=None):
        outputs = [np.ravel(x) for x in keras.tree.flatten((logs or {})["outputs"])]
        self.seconds.append(time.perf_counter() - self.starts[-1])
        sample = np.concatenate(outputs)[:_OUTPUTS].astype("float64")
        self.outputs.append([x if math.isfinite(x) else None for x in sample.tolist()])
