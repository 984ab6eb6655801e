"""Says, when an epoch of `fit` ends, that most of its steps were skipped.

Without it a model whose every step overflows shows a healthy progress bar. The counters
are read between epochs: no step waits for them.
"""

import warnings
import weakref

from tfamp.keras_patches import hooks
from tfamp.loss_scaling.loss_scale_optimizer import LossScaleOptimizer

_SEARCH = 8  # A sound model may skip so many at first, while its scale falls.
# History, of which each `fit` has one -> (steps, skipped) when it and its epoch began.
_counts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _on_train_begin(original):
    def on_train_begin(history, logs=None):
        original(history, logs)
        now = _read(history.model)
        _counts[history] = now and (now, now)

    return on_train_begin


def _on_epoch_end(original):
    def on_epoch_end(history, epoch, logs=None):
        original(history, epoch, logs)
        counts, now = _counts.get(history), _read(history.model)
        if counts is None or now is None:
            return
        first, before = counts
        _counts[history] = first, now
        steps, skipped = now[0] - before[0], now[1] - before[1]
        if 2 * skipped > steps and now[1] - first[1] >= _SEARCH:
            del _counts[history]  # Once for each `fit`.
            _warn(history.model, steps, skipped)

    return on_epoch_end


def _read(model):
    """Returns how many steps an optimizer has tried, and how many it has skipped."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        return None
    # `numpy` reads one replica's, which all have.
    skipped = int(optimizer.skipped_steps.numpy())
    return int(optimizer.iterations.numpy()) + skipped, skipped


def _warn(model, steps, skipped):
    scale = float(model.optimizer.dynamic_scale.numpy())
    warnings.warn(
        f"Model '{model.name}': {skipped} of the {steps} training steps of this epoch"
        f" were skipped, because gradients were not finite; the loss scale is {scale:g}"
        " now. If that does not end, numbers overflow before the loss: look for"
        " constants beyond 65504, such as masks of -1e9, name the layer in"
        " overrides={...: 'float32'}, or train in mixed_bfloat16."
        " tfamp.LossScaleMonitor names the variables, and tfamp.compare_precision the"
        " layer where it begins.",
        stacklevel=3,
    )


HOOKS = hooks.HookGroup(on_train_begin=_on_train_begin, on_epoch_end=_on_epoch_end)
