"""Which optimizers scale the loss: wrapping them, and who trains without."""

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.facts import names, user_code
from tfamp.loss_scaling import train_steps
from tfamp.loss_scaling.loss_scale_optimizer import LossScaleOptimizer


def wrap_optimizer(optimizer, **loss_scale_keywords):
    """Gives an optimizer loss scaling unless it has it already; idempotent.

    Args:
      optimizer: A Keras optimizer, or its name. A `LossScaleOptimizer`, ours or
        stock Keras', is returned as it is.
      **loss_scale_keywords: Keywords of `LossScaleOptimizer`.

    Returns:
      An optimizer that scales the loss.
    """
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    keywords = {"name": "loss_scale_optimizer", **loss_scale_keywords}
    return LossScaleOptimizer(optimizer, **keywords)


def needs_loss_scale(model: keras.Model) -> bool:
    """Whether a float16 layer is in the model, or graphs are rewritten to float16."""
    options = tf.config.optimizer.get_experimental_options()
    return bool(options.get("auto_mixed_precision")) or bool(_float16_layers(model))


def _float16_layers(model):
    return [x for x in names.flatten_layers(model) if x.compute_dtype == "float16"]


def warn_about_unscaled_optimizers(model: keras.Model) -> None:
    """Names the float16 layers that train without loss scaling, and with what."""
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
        "the model is built, or wrap it by `tfamp.wrap_optimizer` and differentiate "
        "`optimizer.scale_loss(loss)`; `loss_scale=False` in `tfamp.enable` says that "
        "none is wanted.",
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
    found = {}
    for name, value in held:
        for each in keras.tree.flatten(value):
            scaled = isinstance(each, keras.optimizers.LossScaleOptimizer)
            if isinstance(each, keras.optimizers.Optimizer) and not scaled:
                found.setdefault(id(each), f"{name} ({each.name})")
    return list(found.values())
