"""Whether a model needs loss scaling, and which optimizers leave it out."""

import warnings

import keras

from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import model_structure


def needs_loss_scale(model: keras.Model) -> bool:
    """Whether a float16 layer is in the model, or graphs are rewritten to float16."""
    return bool(_float16_layers(model)) or graph_rewrite.float16_requested()


def _float16_layers(model):
    return [
        layer
        for layer in model_structure.flatten_layers(model)
        if layer.compute_dtype == "float16"
    ]


def warn_about_unscaled_optimizers(model: keras.Model) -> None:
    """Names the float16 layers that train without loss scaling, and with what."""
    unscaled = _unscaled_optimizers(model) if needs_loss_scale(model) else []
    if not unscaled:
        return
    trained = [x for x in _float16_layers(model) if x.trainable and x.weights]
    # A model that holds such layers would say the same once more.
    names = [layer.path for layer in trained if layer is not model]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    warnings.warn(
        f"Model '{model.name}' trains in float16 without loss scaling, so that small "
        f"gradients become 0: {shown or 'the graph rewrite'}. Without it: "
        f"{', '.join(unscaled)}. Pass the optimizer to `compile` again, now that "
        "the model is built: it is wrapped there; or wrap it by "
        "`tfamp.wrap_optimizer`. In a `train_step` of your own differentiate"
        " `optimizer.scale_loss(loss)`. `loss_scale=False` in "
        "`tfamp.enable` says that none is wanted.",
        stacklevel=4,
    )


def _unscaled_optimizers(model):
    """Attributes of the model that hold optimizers without loss scaling."""
    # Names with an underscore are Keras' and TensorFlow's lists of the same objects.
    held = {n: v for n, v in vars(model).items() if not n.startswith(("_", "self_"))}
    found = {}
    for name, value in {"optimizer": model.optimizer, **held}.items():
        values = value.values() if isinstance(value, dict) else value
        several = isinstance(value, list | tuple | dict)
        for each in values if several else [value]:
            if _is_unscaled(each):
                found.setdefault(id(each), f"{name} ({each.name})")
    return list(found.values())


def _is_unscaled(value):
    return isinstance(value, keras.optimizers.Optimizer) and not isinstance(
        value, keras.optimizers.LossScaleOptimizer
    )
