"""A Keras callback that shows the loss scale and stops a run that cannot go on."""

import warnings
import weakref
from typing import Any, Literal

import keras
from absl import logging

from tfamp import checks, errors
from tfamp.loss_scaling import optimizer, overflow_counts

ON_EXHAUSTED = ("raise", "warn", "ignore")
# Training functions traced with counts -> those, and the optimizer they belong to:
# the next `fit`, with whatever monitor, need not trace them again.
_traced: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


class LossScaleMonitor(keras.callbacks.Callback):
    """Logs the loss scale, skipped steps, and which gradients were not finite.

    Adds to Keras' logs, so that the progress bar, `History`, and the callbacks that
    come after this one (`TensorBoard`, `CSVLogger`) have them too:

    - `loss_scale` and `skipped_steps` (so far), of every epoch and, as of the last
      reading, of every batch;
    - in an epoch with skipped steps, `inf/<variable>` and `nan/<variable>`: how many
      elements of the first few variables' gradients were not finite in the last
      skipped step before a reading. Also a line in absl's log.

    Reads from the device every `every` steps and at the end of an epoch, never
    inside a step. The counts of each variable exist only in training with this
    callback, cost nothing in a step that is not skipped, and are in no checkpoint.

    Args:
      on_exhausted: "raise", "warn" or "ignore": what to do when `patience` steps in
        a row were skipped and the scale cannot fall further: it is at `min_scale`,
        or static. Nothing was lost: skipped steps change no weight.
      patience: Int >= 1. From 2**15 to the default floor of 2**-14 the scale takes
        29 skipped steps, so the default is well beyond.
      every: Int >= 1. Steps between two readings.
      variables: Int >= 0. How many variables to name.

    Raises:
      ValueError: If a setting makes no sense.
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
        if on_exhausted not in ON_EXHAUSTED:
            raise ValueError(
                f"`on_exhausted` must be one of {ON_EXHAUSTED}. "
                f"Received: on_exhausted={on_exhausted!r}."
            )
        checks.check_count("patience", patience)
        checks.check_count("every", every)
        if not checks.is_integer(variables) or variables < 0:
            raise ValueError(
                "`variables` must be an integer of at least 0. "
                f"Received: variables={variables!r}."
            )
        self.on_exhausted, self.patience = on_exhausted, patience
        self.every, self.variables = every, variables
        self._optimizer: optimizer.LossScaleOptimizer | None = None
        self._counts: overflow_counts.OverflowCounts | None = None

    def on_train_begin(self, logs=None):
        """Starts counting; a training step traced before is traced again."""
        found = self.model.optimizer
        if not isinstance(found, optimizer.LossScaleOptimizer):
            logging.warning(
                "LossScaleMonitor: nothing to show, for the optimizer is %s. Call "
                "tfamp.enable() before compile, or use tfamp.wrap_optimizer.",
                type(found).__name__,
            )
            self._optimizer = None
            return
        self._optimizer = found
        self._batch, self._warned, self._epochs = 0, False, []
        self._latest, self._named, self._counts = self._read(), {}, None
        if not found.built and self.model.built:
            found.build(self.model.trainable_variables)
        self._start_counting()

    def _start_counting(self):
        found = self._optimizer
        if found is None or not found.built:
            return  # Keras builds some models while it traces their first step.
        function = self.model.train_function
        self._counts = _traced_with(function, found)
        if self._counts is None:
            self._counts = found.create_overflow_counts()
            self.model.make_train_function(force=True)
            _traced[self.model.train_function] = self._counts, weakref.ref(found)
        found.count_overflows(self._counts)

    def on_train_end(self, logs=None):
        """Stops counting; gives each list of `History` a value for each epoch."""
        if self._optimizer is None:
            return
        self._optimizer.count_overflows(None)
        history = self.model.history.history
        for name in {name for epoch in self._epochs for name in epoch}:
            history[name] = [epoch.get(name, 0) for epoch in self._epochs]

    def on_epoch_begin(self, epoch, logs=None):
        """Counts batches and names variables anew."""
        self._batch, self._named = 0, {}

    def on_train_batch_end(self, batch, logs=None):
        """Reads every so many steps; adds the latest reading to the logs."""
        if self._optimizer is None:
            return
        if self._counts is None:
            self._start_counting()
        if batch + 1 - self._batch >= self.every:
            self._batch = batch + 1
            self._look()
        if logs is not None:
            logs.update(self._latest)

    def on_epoch_end(self, epoch, logs=None):
        """Reads, and adds the epoch's readings to the logs."""
        if self._optimizer is None:
            return
        self._look()
        if logs is not None:
            logs.update(self._latest)
            logs.update(self._named)
        self._epochs.append(self._named)

    def _read(self):
        found = self._optimizer
        return {
            # Not `loss_scale`: reading that counts as a loop that scales by itself.
            "loss_scale": float(found.dynamic_scale.numpy()),
            "skipped_steps": int(found.skipped_steps.numpy()),
        }

    def _look(self):
        before, self._latest = self._latest, self._read()
        skipped = self._latest["skipped_steps"] - before["skipped_steps"]
        if skipped <= 0:
            return
        overflows = self._counts.read() if self._counts else []
        for overflow in overflows[: self.variables]:
            if overflow.infs:
                self._named[f"inf/{overflow.variable}"] = overflow.infs
            if overflow.nans:
                self._named[f"nan/{overflow.variable}"] = overflow.nans
        logging.info(  # A growth too far is how the scale is found: no warning.
            "%d step(s) skipped since the last reading; the loss scale is %g; not "
            "finite in the last of them: %s.",
            skipped,
            self._latest["loss_scale"],
            _describe(overflows, self.variables),
        )
        self._check_exhausted(overflows)

    def _check_exhausted(self, overflows):
        found = self._optimizer
        skipped = int(found.consecutive_skipped_steps.numpy())
        stuck = not found.dynamic or self._latest["loss_scale"] <= found.min_scale
        if self.on_exhausted == "ignore" or not stuck or skipped < self.patience:
            return
        message = _explain(found, self._latest["loss_scale"], skipped, overflows)
        if self.on_exhausted == "raise":
            found.count_overflows(None)  # Keras ends no training after an error.
            raise errors.LossScaleExhaustedError(message)
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=2)


def _traced_with(function, found) -> overflow_counts.OverflowCounts | None:
    counts, owner = _traced.get(function, (None, None)) if function else (None, None)
    return counts if owner is not None and owner() is found else None


def _describe(overflows: list[overflow_counts.Overflow], limit: int) -> str:
    shown = [
        f"{each.variable} ({each.infs} inf, {each.nans} NaN)"
        for each in overflows[:limit]
    ]
    more = len(overflows) - len(shown)
    return ", ".join(shown + [f"{more} more variable(s)"] * (more > 0)) or "unknown"


def _explain(found, scale, skipped, overflows):
    where = f"at its floor of {scale:g}" if found.dynamic else f"static at {scale:g}"
    advice = (
        "Every gradient of the loss is NaN or infinite at any scale: look for bad "
        "values in the data, a division by 0 or a logarithm of 0, or a learning rate "
        "that made the weights diverge."
        if overflows and all(each.nans for each in overflows)
        else "Try a lower learning rate or gradient clipping, `dtype='float32'` for "
        "the layers named here, a lower `min_scale`, or mixed_bfloat16, which has "
        "float32's range."
    )
    return (
        f"The loss scale is {where}, and the last {skipped} steps were skipped since "
        f"gradients were not finite: {_describe(overflows, 5)}. {advice} No weight "
        "was changed by a skipped step."
    )
