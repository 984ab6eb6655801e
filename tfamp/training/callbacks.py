"""Keras callbacks: records of the run, exact resumption, per-epoch random seeds."""

import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.training import run_files


class EpochSeeds(keras.callbacks.Callback):
    """Makes the random numbers of each epoch depend on the seed and epoch alone.

    Keras does not save the state of `SeedGenerator`s (dropout), so without this a
    resumed run would draw other numbers than the uninterrupted one. Replicas of a
    strategy would all draw the same; here each has numbers of its own.
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
        layers = self.model._flatten_layers()
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

        one = self.model.distribute_strategy.num_replicas_in_sync == 1
        needless = one or not moving
        self._average = None if needless else _on_replicas(self.model, average)

    def on_test_begin(self, logs=None):
        """Averages before the validation."""
        if self._average is not None:
            self._average()


def _on_replicas(model, function):
    """Returns a function that runs another on each replica of the model's strategy."""
    strategy = model.distribute_strategy
    return tf.function(lambda *args: strategy.run(function, args), autograph=False)


class Recorder(keras.callbacks.Callback):
    """Appends to `metrics.jsonl`: the loss over time, and a line for each epoch.

    Adds `loss_scale`, `growth_interval` and `skipped_steps` to the logs of an epoch
    where the optimizer has them, so that every later callback sees them. Reads from
    the device only every `every` steps.

    Lines: {"kind": "step", "step", "loss" (mean since the line before),
    "loss_scale", "growth_interval", "skipped_steps"} and {"kind": "epoch", "epoch",
    "loss", the metrics, "steps_per_second", "seconds"}. Steps and epochs count from 1.
    Numbers that are not finite are written as null.

    "seconds" is the time in training and validation since the start of the run, writing
    of files left out; a resumed run goes on from the epoch it resumes after. The first
    epoch of a process has "first_step_seconds", too: its part up to the end of the
    first step, which traces and compiles.
    """

    def __init__(self, path: pathlib.Path, steps_per_epoch: int, every: int):
        super().__init__()
        self.path = path
        self.steps_per_epoch = steps_per_epoch
        self.every = every

    def on_train_begin(self, logs=None):
        """Reads how long the epochs before a resumption took."""
        rows = run_files.read_metrics(self.path.parent, "epoch")
        self._seconds = rows[-1]["seconds"] if rows else 0.0
        self._traced = False

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock and the running mean anew."""
        self._epoch = epoch
        self._sum, self._count = 0.0, 0
        self._times = []  # When the first and the last step had ended.
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss and the loss scale now and then, and when the epoch ends."""
        step = self._epoch * self.steps_per_epoch + batch + 1
        if step % self.every == 0:
            total = float(logs["loss"]) * (batch + 1)  # Keras logs a running mean.
            loss = (total - self._sum) / (batch + 1 - self._count)
            self._sum, self._count = total, batch + 1
            self._write("step", step=step, loss=loss, **self._scaling())
        if batch in (0, self.steps_per_epoch - 1):
            float(logs["loss"])  # Waits for the device, which may lag behind.
            self._times.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's line."""
        clock = self._clock()
        logs = {} if logs is None else logs
        logs.update(self._scaling())
        speed = self._steps_per_second()
        self._write("epoch", epoch=epoch + 1, **logs, steps_per_second=speed, **clock)

    def _clock(self):
        """Times up to now. The last step's loss has been read: the device is idle."""
        self._seconds += time.perf_counter() - self._start
        clock = {"seconds": self._seconds}
        if not self._traced:
            clock["first_step_seconds"] = self._times[0] - self._start
        self._traced = True
        return clock

    def _steps_per_second(self):
        """Over the epoch, its first step and the validation left out."""
        if len(self._times) < 2:
            return None
        return (self.steps_per_epoch - 1) / (self._times[1] - self._times[0])

    def _scaling(self):
        optimizer = self.model.optimizer
        values = {"loss_scale": getattr(optimizer, "dynamic_scale", None)}
        values["growth_interval"] = getattr(optimizer, "current_growth_interval", None)
        values["skipped_steps"] = getattr(optimizer, "skipped_steps", None)
        return {k: read_number(v) for k, v in values.items() if v is not None}

    def _write(self, kind, **values):
        clean = {k: json_number(v) for k, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **clean}) + "\n")


def read_number(variable) -> float:
    """Returns a scalar variable's value; `float` fails under a strategy."""
    return float(keras.ops.convert_to_numpy(variable))


def json_number(value):
    """Returns a number as JSON can hold it: None where it is not finite."""
    if value is None or isinstance(value, int):
        return value
    value = float(value)
    return value if abs(value) < float("inf") else None  # NaN compares false


class ProgressLines(keras.callbacks.Callback):
    """Tells of the progress every 15 seconds, for output that goes to a file.

    Args:
      report: Function that takes a line.
      steps_per_epoch: Batches of an epoch.
      epochs: Epochs of the whole run.
      every: Seconds from one line to the next; a line comes at the end of a step.
    """

    def __init__(
        self,
        report: Callable[[str], object],
        steps_per_epoch: int,
        epochs: int,
        every: float = 15.0,
    ):
        super().__init__()
        self.report, self.every = report, every
        self.steps_per_epoch, self.total = steps_per_epoch, steps_per_epoch * epochs
        self._told, self._start = time.perf_counter(), None

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch starts."""
        self._before = epoch * self.steps_per_epoch

    def on_train_batch_end(self, batch, logs=None):
        """Tells the step, the loss, the speed and the time left."""
        step, now = self._before + batch + 1, time.perf_counter()
        if self._start is None:  # After the first step, which traces and compiles.
            self._start = step, now
        elif self._is_due():
            first, start = self._start
            seconds = (now - start) / (step - first)  # Of a step, validation included.
            self.report(
                f"step {step} of {self.total}: loss {float(logs['loss']):.4g}, "
                f"{1 / seconds:.3g} steps/s, {(self.total - step) * seconds / 60:.1f} "
                "min left"
            )

    def on_test_batch_end(self, batch, logs=None):
        """Tells the batch of a long evaluation."""
        if self._is_due():
            self.report(f"evaluation: batch {batch + 1}")

    def _is_due(self):
        due = time.perf_counter() - self._told >= self.every
        if due:
            self._told = time.perf_counter()
        return due


class BestWeights(keras.callbacks.ModelCheckpoint):
    """Keras' checkpoint of the best epoch, safe against a kill at any instant.

    Args:
      path: File to write, ending in ".weights.h5"; replaced in one step.
      metric: Name of the score of the validation split.
      epochs: Logs of the epochs before a resumption.
      lower: Whether a lower score is better.
    """

    def __init__(
        self, path: pathlib.Path, metric: str, epochs: list[dict], lower: bool = False
    ):
        monitor, best = f"val_{metric}", min if lower else max
        worst = math.inf if lower else -math.inf
        known = [row[monitor] for row in epochs if row[monitor] is not None]
        super().__init__(
            path.with_name(f"new-{path.name}"),
            monitor=monitor,
            mode=best.__name__,
            save_best_only=True,
            save_weights_only=True,
            # Keras takes a first score that is no number for the best of all.
            initial_value_threshold=best([worst, *known]),
        )
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        """Writes the weights if the epoch is the best one."""
        run_files.check_room(self.model, self.path)
        super().on_epoch_end(epoch, logs)
        if os.path.exists(self.filepath):
            os.replace(self.filepath, self.path)


class AtomicBackup(keras.callbacks.Callback):
    """The state after each epoch on disk, safe against a kill at any instant.

    Keras' `BackupAndRestore` writes the weights in place and the epoch after them, so
    a kill in between leaves a torn file, or weights that do not belong to the epoch.
    Here a new folder is written, which then takes the old one's place.

    Args:
      folder: Where the backup is kept.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self.folder = folder
        self._new = folder.with_name(folder.name + ".new")
        self._old = folder.with_name(folder.name + ".old")

    def restore(self, model: keras.Model) -> int:
        """Loads the last backup into a compiled model and its optimizer.

        Returns:
          The number of finished epochs; 0 if there is no backup.

        Raises:
          RunError: If the backup cannot be read.
        """
        if not self.folder.exists() and self._old.exists():
            os.replace(self._old, self.folder)  # Killed between two renames.
        if not self.folder.exists():
            return 0
        try:
            finished = json.loads((self.folder / _EPOCH).read_text())
            model.load_weights(self.folder / _WEIGHTS)
            return finished["finished_epochs"]
        except (KeyError, OSError, TypeError, ValueError) as e:
            raise errors.RunError(
                f"The backup in {str(self.folder)!r} is damaged. Received: {e}. Delete "
                "that folder to train from the first epoch on, or pass --overwrite."
            ) from e

    def on_epoch_end(self, epoch, logs=None):
        """Writes the backup and puts it in place."""
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir(parents=True)
        run_files.check_room(self.model, self._new)
        self.model.save_weights(self._new / _WEIGHTS)
        text = json.dumps({"finished_epochs": epoch + 1})
        (self._new / _EPOCH).write_text(text)
        shutil.rmtree(self._old, ignore_errors=True)
        if self.folder.exists():
            os.replace(self.folder, self._old)
        os.replace(self._new, self.folder)
        shutil.rmtree(self._old, ignore_errors=True)

    def delete(self) -> None:
        """Removes the backup once the run's result is on disk."""
        for folder in (self.folder, self._new, self._old):
            shutil.rmtree(folder, ignore_errors=True)


# Of a backup.
_WEIGHTS, _EPOCH = "latest.weights.h5", "epoch.json"
