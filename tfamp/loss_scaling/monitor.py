"""A Keras callback that shows the loss scale and stops a run that cannot go on."""

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from absl import logging

from tfamp import checks, errors
from tfamp.facts import user_code
from tfamp.loss_scaling import loss_scale_optimizer


class OverflowCounts:
    """Counts of the last skipped step, on the device; never part of a checkpoint.

    An object of a plain class, which neither Keras nor TensorFlow looks into.
    """

    def __init__(self, size: int):
        """Creates the counts of `size` variables under the current strategy."""
        self._names: list[str] = []
        self._counts = tf.Variable(
            tf.zeros([size, 2], tf.int64),
            trainable=False,
            # Each replica has its own, and all have the same gradients.
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def record(self, grads: Sequence, variables: Sequence, finite) -> None:
        """Counts the gradients of these variables, of which some may be None.

        Not where `finite`, a bool [], says that the step was none to count.
        """
        self._names = [getattr(v, "path", v.name) for v in variables]
        missing = self._counts.shape[0] - len(variables)
        counts = tf.stack([_count(grad) for grad in grads])
        counts = tf.pad(counts, [[0, missing], [0, 0]])
        self._counts.assign(tf.where(finite, self._counts.read_value(), counts))

    def read(self) -> dict[str, tuple[int, int]]:
        """Returns {path: (infs, NaNs)} of the gradients that were not finite."""
        counts = self._counts.numpy()[: len(self._names)].tolist()
        return {
            k: (v[0], v[1]) for k, v in zip(self._names, counts, strict=True) if any(v)
        }


def _count(grad):
    if grad is None:
        return tf.zeros([2], tf.int64)
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    kinds = tf.math.is_inf(values), tf.math.is_nan(values)
    return tf.stack([tf.math.count_nonzero(kind) for kind in kinds])


class LossScaleMonitor(keras.callbacks.Callback):
    """Logs the loss scale, skipped steps, and the variables whose gradients overflow.

    It adds these to Keras' logs, where the progress bar, `History`, and callbacks later
    in the list (`TensorBoard`, `CSVLogger`) find them:

    - `loss_scale` and `skipped_steps` (so far), for every epoch and, as of the last
      reading, for every batch;
    - in an epoch with skipped steps, `inf/<variable>` and `nan/<variable>`: how many
      elements of the gradients of the first few variables were not finite, in the last
      skipped step before a reading. absl's log has them as a line, too.

    It reads from the device every `every` steps and at the end of an epoch, never
    within a step. Counting starts with the first training that has this callback. It
    costs nothing in a step that is not skipped, and is not part of checkpoints.

    Args:
      on_exhausted: "raise", "warn" or "ignore". What to do after `patience` skipped
        steps in a row if the loss scale cannot fall further, because it is at
        `min_scale` or static. No training is lost: skipped steps change no weight.
      patience: Int >= 1. Falling from 2**15 to the default floor of 2**-14 takes 29
        skipped steps, so the default is well beyond.
      every: Int >= 1. Steps between two readings.
      variables: Int >= 0. How many variables to name in Keras' logs.

    Raises:
      ValueError: If a setting is invalid.
      LossScaleExhaustedError: From `fit`, with `on_exhausted="raise"`.

    Example:
      model.fit(x, y, callbacks=[tfamp.LossScaleMonitor()])
    """

    def __init__(
        self,
        on_exhausted: Literal["raise", "warn", "ignore"] = "raise",
        patience: int = 100,
        *,
        every: int = 100,
        variables: int = 3,
    ):
        super().__init__()
        if on_exhausted not in ("raise", "warn", "ignore"):
            raise ValueError(
                "`on_exhausted` must be 'raise', 'warn' or 'ignore'. "
                f"Received: on_exhausted={on_exhausted!r}."
            )
        checks.check_count("patience", patience)
        checks.check_count("every", every)
        checks.check_count("variables", variables, smallest=0)
        self.on_exhausted, self.patience = on_exhausted, patience
        self.every, self.variables = every, variables
        self._optimizer: Any = None

    def on_train_begin(self, logs=None):
        """Starts counting; a training step that was traced before is traced again."""
        optimizer = self.model.optimizer
        scaled = isinstance(optimizer, loss_scale_optimizer.LossScaleOptimizer)
        self._optimizer = optimizer if scaled else None
        if not scaled:
            logging.warning(
                "LossScaleMonitor has nothing to record: the optimizer is %s. Call "
                "tfamp.enable() before compile, or use tfamp.wrap_optimizer.",
                type(optimizer).__name__,
            )
            return
        self._warned, self._epochs = False, []
        self._latest = self._read()
        if not optimizer.built and self.model.built:
            optimizer.build(self.model.trainable_variables)
        self._start_counting()

    def _start_counting(self):
        optimizer = self._optimizer
        if optimizer.overflow_counts is None and optimizer.built:
            with self.model.distribute_strategy.scope():
                optimizer.overflow_counts = OverflowCounts(
                    len(self.model.trainable_variables)
                )
            self.model.make_train_function(force=True)

    def on_train_end(self, logs=None):
        """Completes the lists of `History` to one value for each epoch."""
        if self._optimizer is not None:
            self.model.history.history |= {
                name: [epoch.get(name, 0) for epoch in self._epochs]
                for epoch in self._epochs
                for name in epoch
            }

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the batch count and the variables that are named."""
        self._read_at, self._named = 0, {}

    def on_train_batch_end(self, batch, logs=None):
        """Reads every `every` steps and adds the latest reading to the logs."""
        if self._optimizer is None:
            return
        self._start_counting()  # Keras builds some models while it traces a step.
        if batch + 1 - self._read_at >= self.every:
            self._read_at = batch + 1
            self._look()
        if logs is not None:
            logs.update(self._latest)

    def on_epoch_end(self, epoch, logs=None):
        """Reads, and adds the readings of the epoch to the logs."""
        if self._optimizer is None:
            return
        self._look()
        self._epochs.append(self._named)
        if logs is not None:
            logs.update(self._latest | self._named)

    def _read(self):
        return {
            # Not `loss_scale`: reading that counts as a loop that scales by itself.
            "loss_scale": float(self._optimizer.dynamic_scale.numpy()),
            "skipped_steps": int(self._optimizer.skipped_steps.numpy()),
        }

    def _look(self):
        before, self._latest = self._latest["skipped_steps"], self._read()
        skipped = self._latest["skipped_steps"] - before
        if skipped <= 0:
            return
        counts = self._optimizer.overflow_counts
        overflows = {} if counts is None else counts.read()
        self._named |= {
            f"{kind}/{path}": count
            for path in list(overflows)[: self.variables]
            for kind, count in zip(("inf", "nan"), overflows[path], strict=True)
            if count
        }
        logging.info(  # A growth too far is how the scale is found: no warning.
            "%d step(s) skipped since the last reading; the loss scale is %g; not "
            "finite in the last of them: %s.",
            skipped,
            self._latest["loss_scale"],
            _describe(overflows),
        )
        self._check_exhausted(overflows)

    def _check_exhausted(self, overflows):
        optimizer, scale = self._optimizer, self._latest["loss_scale"]
        skipped = int(optimizer.consecutive_skipped_steps.numpy())
        static = not optimizer.config.dynamic
        stuck = static or scale <= optimizer.config.min_scale
        if self.on_exhausted == "ignore" or not stuck or skipped < self.patience:
            return
        where = f"static at {scale:g}" if static else f"at its floor of {scale:g}"
        advice = (
            "Every gradient has NaN at any scale: look for bad values in the data, a "
            "division by 0 or a logarithm of 0, or weights that diverged."
            if overflows and all(nans for _, nans in overflows.values())
            else "Try a lower learning rate, gradient clipping, a lower `min_scale`, "
            "`dtype='float32'` for these layers, or mixed_bfloat16."
        )
        message = (
            f"The loss scale is {where}, and the last {skipped} steps were skipped "
            f"because gradients were not finite: {_describe(overflows)}. {advice} No "
            "weight was changed by a skipped step."
        )
        if self.on_exhausted == "raise":
            raise errors.LossScaleExhaustedError(message)
        if not self._warned:
            self._warned = True
            user_code.warn(message)


def _describe(overflows):
    counts = (f"{k} ({infs} inf, {nans} NaN)" for k, (infs, nans) in overflows.items())
    return errors.examples(counts) or "unknown"
