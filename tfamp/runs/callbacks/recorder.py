"""The record of a run: its loss over time, and a line for each epoch."""

import json
import math
import pathlib
import time
import types
from typing import Any

import keras
import tensorflow as tf

from tfamp.runs import results, run_files

CURVE_POINTS = 200  # Points of the loss curve and of the loss-scale timeline.


class _FiniteMean(keras.metrics.Mean):
    """The mean of those training losses that are finite, and how many were not.

    One that is not would make the mean of the whole epoch NaN. A step's loss counts on
    all replicas or on none. In validations and tests it is Keras' mean.
    """

    training = False  # Read while a step is traced.
    nonfinite: Any

    def update_state(self, values, sample_weight=None):
        if not self.training:
            return super().update_state(values, sample_weight)
        ops = keras.ops
        lost = ops.cast(ops.any(~ops.isfinite(values)), "float32")
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync > 1:
            lost = context.all_reduce(tf.distribute.ReduceOp.SUM, lost)
        finite = lost == 0
        self.nonfinite.assign_add(ops.where(finite, 0.0, 1.0))
        weight = ops.ones_like(values) if sample_weight is None else sample_weight
        values = ops.where(finite, values, ops.zeros_like(values))
        super().update_state(values, ops.where(finite, weight, ops.zeros_like(weight)))

    def reset_state(self):
        super().reset_state()
        if self.training:  # Not before the validation of the epoch.
            self.nonfinite.assign(0.0)

    def result(self):
        none = keras.ops.logical_and(self.count == 0, self.nonfinite > 0)
        return keras.ops.where(none, math.nan, super().result())


def _watch_losses(model):
    """Has Keras' mean of the loss leave out what is not finite, and returns it."""
    for metric in model.metrics:
        if type(metric) is keras.metrics.Mean and metric.name == "loss":
            metric.__class__ = _FiniteMean
            with model.distribute_strategy.scope():
                metric.nonfinite = metric.add_variable(
                    (), "zeros", "float32", aggregation="mean", name="nonfinite"
                )
            return metric
    # The loss of a `train_step` that does without.
    return types.SimpleNamespace(nonfinite=0, reset_state=lambda: None)


def steps_done(model: keras.Model, batch: int) -> int:
    """Returns how many steps of an epoch are done.

    Keras 3.10 tells `on_train_batch_end` the first step of a call, 3.15 the last.
    """
    size = model.steps_per_execution
    return (batch // size + 1) * size


class Recorder(keras.callbacks.Callback):
    """Appends to `metrics.jsonl`: the loss over time, and a line for each epoch.

    Adds `loss_scale`, `growth_interval` and `skipped_steps` to the logs of an epoch
    where the optimizer has them, so that every later callback sees them. Reads from
    the device only every `every` steps.

    Lines: {"kind": "step", "step", "loss" (mean since the line before),
    "loss_scale", "growth_interval", "skipped_steps"} and {"kind": "epoch", "epoch",
    "loss", "nonfinite_losses", the metrics, "steps_per_second", "seconds"}. Steps and
    epochs count from 1. Losses are means of the finite ones, unless the model has a
    `train_step` that does without Keras' own mean. Numbers that are not finite are
    written as null.

    "seconds" is the time in training and validation since the start of the run, writing
    of files left out; a resumed run goes on with the epoch it resumes after. The first
    epoch of a process has "first_step_seconds", too: its part up to the end of the
    first step, which traces and compiles. "steps_per_second" leaves that and the
    validation out; null for epochs of one call of the training function. A line of a
    step comes at the end of the call that it is in.
    """

    def __init__(
        self,
        path: pathlib.Path,
        steps_per_epoch: int | None = None,
        every: int | None = None,
    ):
        super().__init__()
        self.path, self.steps_per_epoch, self.every = path, steps_per_epoch, every

    def on_train_begin(self, logs=None):
        """Reads how long the epochs before a resumption took."""
        # None where the data do not know.
        self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
        total = (self.steps_per_epoch or 1) * self.params["epochs"]
        self.every = self.every or max(1, total // CURVE_POINTS)
        self._step = 0
        rows = run_files.read_metrics(self.path.parent, "epoch")
        self._seconds = rows[-1]["seconds"] if rows else 0.0
        self._traced = False
        self._tracker = _watch_losses(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock and the running mean anew."""
        self._epoch = epoch
        self._before, self._sum, self._count = self._step, 0.0, 0
        self._tracker.training = True
        self._tracker.reset_state()
        # And when the first and last call ended, and the steps of the first.
        self._times, self._first, self._logs = [time.perf_counter()], None, {}

    def state(self) -> dict[str, Any]:
        """Returns what a backup holds of this callback; "step" are those so far."""
        return {
            "step": self._step,
            "before": self._before,
            "sum": self._sum,
            "count": self._count,
            "logs": {name: float(value) for name, value in self._logs.items()},
            "seconds": self._seconds + time.perf_counter() - self._times[0],
        }

    def set_state(self, state: dict[str, Any], within: bool) -> None:
        """Resumes from a backup, within an epoch or at the start of one."""
        self._step = self._before = state["step"]
        if within:
            self._before, self._seconds = state["before"], state["seconds"]
            self._sum, self._count = state["sum"], state["count"]
            self._logs = state["logs"]

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss and the loss scale now and then, and when the epoch ends."""
        done = steps_done(self.model, batch)
        if self.steps_per_epoch:  # A last call may be cut short.
            done = min(done, self.steps_per_epoch)
        before, self._step = self._step, self._before + done
        if self._step // self.every > before // self.every:
            count = done - self._nonfinite()
            total = float(logs["loss"]) * count if count else 0.0  # A running mean.
            new = count - self._count
            loss = (total - self._sum) / new if new else math.nan
            self._sum, self._count = total, count
            self._write("step", step=self._step, loss=loss, **self._scaling())
        self._logs = dict(logs)
        first = self._first is None
        self._first = done if first else self._first
        if first or done == self.steps_per_epoch:
            float(logs["loss"])  # Waits for the device, which may lag behind.
            self._times.append(time.perf_counter())

    def on_test_begin(self, logs=None):
        """Keeps the validation's loss unchanged."""
        self._tracker.training = False

    def on_train_end(self, logs=None):
        """Keeps the loss of later evaluations unchanged."""
        self._tracker.training = False

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's line. The device is idle: the last loss has been read."""
        start, *ends = self._times
        self._seconds += time.perf_counter() - start
        times = {"steps_per_second": None, "seconds": self._seconds}
        if len(ends) > 1:
            steps = self._step - self._before - self._first
            times["steps_per_second"] = steps / (ends[1] - ends[0])
        if ends and not self._traced:
            self._traced, times["first_step_seconds"] = True, ends[0] - start
        if not ends:  # Stopped in the validation, and gone on there.
            logs.update({k: v for k, v in self._logs.items() if k not in logs})
        lost = {"nonfinite_losses": self._nonfinite()}
        logs.update(self._scaling())
        self._write("epoch", epoch=epoch + 1, **logs, **lost, **times)
        logs.update(lost if any(lost.values()) else {})

    def _nonfinite(self):
        """How many losses of this epoch were not finite; reads from the device."""
        return int(keras.ops.convert_to_numpy(self._tracker.nonfinite))

    def _scaling(self):
        optimizer = self.model.optimizer
        values = {
            "loss_scale": getattr(optimizer, "dynamic_scale", None),
            "growth_interval": getattr(optimizer, "current_growth_interval", None),
            "skipped_steps": getattr(optimizer, "skipped_steps", None),
        }
        # `float` fails under a strategy.
        as_number = keras.ops.convert_to_numpy
        return {k: float(as_number(v)) for k, v in values.items() if v is not None}

    def _write(self, kind, **values):
        clean = {k: results.json_number(v) for k, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **clean}) + "\n")
