"""Says, when an epoch of `fit` ends, that most of its steps were skipped.

Without it a model whose every step overflows shows a healthy progress bar. The counters
are read between epochs: no step waits for them.
"""

import keras

from tfamp.facts import user_code
from tfamp.loss_scaling import large_inputs, train_steps
from tfamp.loss_scaling.loss_scale_optimizer import LossScaleOptimizer

_SEARCH = 8  # A sound model may skip so many at first, while its scale falls.


def watch(model: keras.Model) -> None:
    """Has the `fit` that a model is in say so; once, when an epoch of it ends.

    By the history that Keras makes for each `fit`: it is told of the end of epochs,
    whatever callbacks the user passes.
    """
    history, first = getattr(model, "history", None), _read(model)
    if history is None or first is None or "on_epoch_end" in vars(history):
        return
    original, before = history.on_epoch_end, first

    def on_epoch_end(epoch, logs=None):
        nonlocal before
        original(epoch, logs)
        now = _read(model) or before
        steps, skipped = now[0] - before[0], now[1] - before[1]
        before = now
        large = large_inputs.describe(model.optimizer) if skipped else ""
        if large or (2 * skipped > steps and now[1] - first[1] >= _SEARCH):
            on_train_end()
            _warn(model, steps, skipped, large)

    def on_train_end(logs=None):
        vars(history).pop("on_epoch_end", None)
        vars(history).pop("on_train_end", None)

    history.on_epoch_end, history.on_train_end = on_epoch_end, on_train_end


def _read(model) -> tuple[int, int] | None:
    """Returns how many steps an optimizer has tried, and how many it has skipped."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        return None
    # `numpy` reads one replica's, which all have.
    skipped = int(optimizer.skipped_steps.numpy())
    return train_steps.updates(optimizer) + skipped, skipped


def _warn(model, steps, skipped, large):
    optimizer = model.optimizer
    scale = float(optimizer.dynamic_scale.numpy())
    advice = large or (
        "If that does not end, numbers overflow before the loss: look for constants "
        "beyond 65504, such as masks of -1e9, name the layer in overrides={...: "
        "'float32'}, or train in mixed_bfloat16. tfamp.LossScaleMonitor names the "
        "variables, and tfamp.compare_precision the layer where it begins."
        if int(optimizer.consecutive_skipped_steps.numpy())
        else "The last step was not: the scale is found. To begin with it, and lose no "
        f"steps: tfamp.enable(..., loss_scale={{'initial_scale': {scale:g}}})."
    )
    user_code.warn(
        f"Model '{model.name}': {skipped} of the {steps} training steps of this epoch "
        "were skipped, because gradients were not finite; the loss scale is "
        f"{scale:g} now. {advice}"
    )
