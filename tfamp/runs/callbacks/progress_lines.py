"""Lines on the progress of a run whose output goes to a file."""

import time
from collections.abc import Callable

import keras

from tfamp.runs.callbacks import recorder

_EVERY = 10.0  # Seconds from one line to the next.


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
        step = self._before + recorder.steps_done(self.model, batch)
        now = time.perf_counter()
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
