"""Which optimizers scale the loss: wrapping them, and warnings about their steps."""

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.facts import names, user_code
from tfamp.loss_scaling import retried_steps, train_steps
from tfamp.loss_scaling.loss_scale_optimizer import LossScaleOptimizer


def wrap_optimizer(optimizer, **loss_scale_keywords):
    """Adds loss scaling to an optimizer unless it has it already.

    Args:
      optimizer: A Keras optimizer, or its name. A `LossScaleOptimizer`, tfamp's or
        Keras', is returned unchanged.
      **loss_scale_keywords: Keywords of `LossScaleOptimizer`.

    Returns:
      An optimizer that scales the loss.
    """
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    keywords = {"name": "loss_scale_optimizer"} | loss_scale_keywords
    return LossScaleOptimizer(optimizer, **keywords)


def needs_loss_scale(model: keras.Model) -> bool:
    """Whether a model has a float16 layer, or graphs are rewritten to float16."""
    options = tf.config.optimizer.get_experimental_options()
    return bool(options.get("auto_mixed_precision")) or bool(_float16_layers(model))


def _float16_layers(model):
    return [x for x in names.flatten_layers(model) if x.compute_dtype == "float16"]


def warn_about_unscaled_optimizers(model: keras.Model) -> None:
    """Warns of float16 layers that train without loss scaling, by name."""
    scales = train_steps.HOOKS.scales(model)  # All of them, by itself.
    unscaled = needs_loss_scale(model) and not scales and _unscaled_optimizers(model)
    if not unscaled:
        return
    trained = [x for x in _float16_layers(model) if x.trainable and x.weights]
    # A model that holds such layers would say the same once more.
    names = [layer.path for layer in trained if not isinstance(layer, keras.Model)]
    user_code.warn(
        f"Model '{model.name}' trains in float16 without loss scaling, so that small "
        f"gradients become 0: {errors.examples(names) or 'the graph rewrite'}. Without "
        f"it: {', '.join(unscaled)}. Pass the optimizer to `compile` again, now that "
        "the model is built, or wrap it with `tfamp.wrap_optimizer` and differentiate "
        "`optimizer.scale_loss(loss)`. To train without loss scaling, pass "
        "`loss_scale=False` to `tfamp.enable`.",
    )


def _unscaled_optimizers(model):
    """Attributes of the model and its layers that hold unscaled optimizers."""
    held = [("optimizer", model.optimizer)]
    for layer in names.flatten_layers(model):
        start = "" if layer is model else f"{layer.name}."
        # With an underscore: Keras' and TensorFlow's lists of the same objects.
        held += [
            (start + name, value)
            for name, value in vars(layer).items()
            if not name.startswith(("_", "self_"))
        ]
    unscaled = {}
    for name, value in held:
        for each in keras.tree.flatten(value):
            scaled = isinstance(each, keras.optimizers.LossScaleOptimizer)
            if isinstance(each, keras.optimizers.Optimizer) and not scaled:
                unscaled.setdefault(id(each), f"{name} ({each.name})")
    return list(unscaled.values())


# ---- Steps that are skipped ----

_SEARCH = 8  # A sound model may skip so many at first, while its scale falls.


def watch_steps(model: keras.Model, heal: retried_steps.Heal) -> None:
    """Has the first steps of a `fit` retried, and warns, once, if most are skipped.

    Without the warning, a model whose every step overflows shows a healthy progress
    bar. The counters are read between epochs, so that no step waits for them. The hook
    is the `History` that Keras creates for each `fit`, which sees the end of every
    epoch whatever callbacks the user passes.

    Args:
      model: The model.
      heal: As for `retried_steps.watch`, which is asked now and between epochs.
    """
    retried_steps.watch(model, heal)
    history, first = getattr(model, "history", None), _read_steps(model)
    if history is None or first is None or "on_epoch_end" in vars(history):
        return
    original, before = history.on_epoch_end, first

    def on_epoch_end(epoch, logs=None):
        nonlocal before
        original(epoch, logs)
        now = _read_steps(model) or before
        steps, skipped = now[0] - before[0], now[1] - before[1]
        before = now
        are_most = 2 * skipped > steps and now[1] - first[1] >= _SEARCH
        retried_steps.watch(model, heal, skips_most=are_most)
        if are_most:
            on_train_end()
            _warn_of_skipped(model, steps, skipped)

    def on_train_end(logs=None):
        vars(history).pop("on_epoch_end", None)
        vars(history).pop("on_train_end", None)

    history.on_epoch_end, history.on_train_end = on_epoch_end, on_train_end


def _read_steps(model) -> tuple[int, int] | None:
    """Returns how many steps an optimizer has tried, and how many it has skipped."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        return None
    # `numpy` reads one replica's, which all have.
    skipped = int(optimizer.skipped_steps.numpy())
    return train_steps.updates(optimizer) + skipped, skipped


def _warn_of_skipped(model, steps, skipped):
    optimizer = model.optimizer
    scale = float(optimizer.dynamic_scale.numpy())
    advice = (
        "If this continues, numbers overflow on the way to the loss, or back: look "
        "for constants beyond 65504, such as masks of -1e9, and for raw inputs and "
        "targets, name the layer in overrides={...: 'float32'}, or train in "
        "mixed_bfloat16. "
        "tfamp.LossScaleMonitor names the variables, and tfamp.compare_precision the "
        "layer where it begins."
        if int(optimizer.consecutive_skipped_steps.numpy())
        else "The last step was not skipped, so the scale has settled. To start from "
        "it and skip no steps: tfamp.enable(..., "
        f"loss_scale={{'initial_scale': {scale:g}}})."
    )
    user_code.warn(
        f"Model '{model.name}': {skipped} of the {steps} training steps of this epoch "
        "were skipped, because gradients were not finite; the loss scale is "
        f"{scale:g} now. {advice}"
    )
