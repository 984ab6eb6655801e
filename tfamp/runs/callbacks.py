"""Keras callbacks: records of the run, exact resumption, per-epoch random seeds."""

import json
import math
import pathlib
import time
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import names
from tfamp.runs import results, run_files

CURVE_POINTS = 200  # Points of the loss curve and of the loss-scale timeline.
_EVERY = 10.0  # Seconds from one line of progress to the next.


class EpochSeeds(keras.callbacks.Callback):
    """Makes the random numbers of each epoch depend on the seed and epoch alone.

    Keras does not save the state of `SeedGenerator`s (dropout), so without this a
    resumed run would draw other numbers than the uninterrupted one. Replicas of a
    strategy would all draw the same; here each has its own numbers.
    """

    def __init__(self, steps_per_epoch: int):
        super().__init__()
        self.steps_per_epoch = steps_per_epoch

    def on_train_begin(self, logs=None):
        """Finds the generators' states."""
        states = [v for v in self.model.variables if v.name == "seed_generator_state"]

        def move(epoch):
            context = tf.distribute.get_replica_context()
            earlier = epoch * context.num_replicas_in_sync
            first = (earlier + context.replica_id_in_sync_group) * self.steps_per_epoch
            for state in states:
                seed = state.value[0]
                state.assign(tf.stack([seed, tf.cast(first, seed.dtype)]))

        self._move = _on_replicas(self.model, move)

    def on_epoch_begin(self, epoch, logs=None):
        """Moves each generator's counter to where the replica's epoch starts."""
        self._move(tf.constant(epoch))


class ReplicaStatistics(keras.callbacks.Callback):
    """Averages the moving statistics of normalization layers over the replicas.

    Keras 3.15 lets each replica keep its own: an evaluation would mix them, and a
    checkpoint hold the first one's. Without a strategy this does nothing.
    """

    def on_train_begin(self, logs=None):
        """Finds what the layers that train move besides their weights."""
        layers = names.flatten_layers(self.model)
        frozen = {id(w) for x in layers if not x.trainable for w in x.weights}
        moving = [
            weight.value
            for weight in self.model.non_trainable_weights
            if "float" in weight.dtype and id(weight) not in frozen
        ]

        def average():
            context = tf.distribute.get_replica_context()
            local = [tf.convert_to_tensor(weight) for weight in moving]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
            for weight, mean in zip(moving, means, strict=True):
                weight.assign(mean)

        self._average = lambda: None
        if moving and self.model.distribute_strategy.num_replicas_in_sync > 1:
            self._average = _on_replicas(self.model, average)

    def on_test_begin(self, logs=None):
        """Averages before the validation."""
        self._average()

    def on_epoch_end(self, epoch, logs=None):
        """Averages where there is no validation, before the epoch is saved."""
        self._average()


def _on_replicas(model, function):
    """Returns a function that runs another on each replica of the model's strategy."""
    strategy = model.distribute_strategy
    return tf.function(lambda *args: strategy.run(function, args), autograph=False)


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


def _steps_done(model, batch):
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
        done = _steps_done(self.model, batch)
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


class ProgressLines(keras.callbacks.Callback):
    """Logs the progress every 10 seconds, for output that goes to a file.

    Args:
      report: Function that takes a line.
      steps_per_epoch: Batches of an epoch.
      epochs: Epochs of the whole run.
    """

    def __init__(
        self, report: Callable[[str], object], steps_per_epoch: int, epochs: int
    ):
        super().__init__()
        self.report = report
        self.steps_per_epoch, self.total = steps_per_epoch, steps_per_epoch * epochs
        self._line_time, self._start = time.perf_counter(), None

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch starts."""
        self._before = epoch * self.steps_per_epoch

    def on_train_batch_end(self, batch, logs=None):
        """Logs the step, the loss, the speed and the time left."""
        step, now = self._before + _steps_done(self.model, batch), time.perf_counter()
        if self._start is None:  # After the first call, which traces and compiles.
            self._start = step, now
        elif self._is_due(now):
            first, start = self._start
            seconds = (now - start) / (step - first)  # Of a step, validation included.
            self.report(
                f"step {step} of {self.total}: loss {float(logs['loss']):.4g}, "
                f"{1 / seconds:.3g} steps/s, {(self.total - step) * seconds / 60:.1f} "
                "min left"
            )

    def on_test_begin(self, logs=None):
        """Lets a short evaluation pass without a line."""
        self._tested = time.perf_counter()

    def on_test_batch_end(self, batch, logs=None):
        """Logs the batch of a long evaluation."""
        now = time.perf_counter()
        if now - self._tested >= _EVERY and self._is_due(now):
            self.report(f"evaluation: batch {batch + 1}")

    def _is_due(self, now):
        due = now - self._line_time >= _EVERY
        self._line_time = now if due else self._line_time
        return due


class BestWeights(keras.callbacks.Callback):
    """Keeps the weights of the best epoch, safe against a kill at any instant.

    Of equal scores the first counts; one that is no number is never the best.

    Args:
      path: File to write, ending in ".weights.h5"; replaced in one step.
      metric: Name of the score of the validation split.
      epochs: Logs of the epochs before a resumption.
      lower: Whether a lower score is better.
    """

    def __init__(
        self, path: pathlib.Path, metric: str, epochs: list[dict], lower: bool = False
    ):
        super().__init__()
        self.path, self.monitor = path, f"val_{metric}"
        self._sign = -1 if lower else 1
        scores = [row[self.monitor] for row in epochs]
        signed = [self._sign * score for score in scores if score is not None]
        self._best = max(signed, default=-math.inf)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the weights if the epoch is the best one."""
        score = self._sign * logs[self.monitor]
        if score > self._best:  # False for NaN.
            self._best = score
            run_files.check_room(self.model, self.path)
            with run_files.replaced(self.path) as new:
                self.model.save_weights(new)
