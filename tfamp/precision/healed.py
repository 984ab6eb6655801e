"""Layers whose numbers float16 cannot hold, found in one batch and set to float32.

```
a step was skipped, and its loss was not finite, or its gradients at any scale
weights that have diverged? The batch in float32 is not finite? It is not precision
layers whose numbers in float32 are beyond float16's largest: float32
run the batch in 16 bits: layers that make infinity or NaN of finite numbers: float32
    (of what a layer computes from others in it: those, too)
and again, as these hand on larger numbers, until all are finite
all were? Layers whose gradients in float32 are beyond float16's largest: float32
```
Layers in a healed one keep their precision. `rules` has healed layers float32 in every
plan of the model.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfamp import errors, records
from tfamp.facts import formats, modes, user_code
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import structure
from tfamp.loss_scaling import layer_numbers
from tfamp.precision import assigned, described, overrides, plan, rules

_LARGEST = formats.float_format("float16").max
_LARGEST_WEIGHT = _LARGEST**0.5  # Beyond it, a weight times its own size overflows.
_ROUNDS = 8


def heal(model: keras.Model, batch: Any, assigns: bool) -> bool:
    """Sets layers that overflow float16 to float32, and says which, or why not.

    Args:
      model: A model that trains, and whose last step was skipped.
      batch: The batch of that step, as `train_step` takes it.
      assigns: Whether to set them, and not only to say which they are.

    Returns:
      Whether it has set any; then the model has forgotten its training function.
    """
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if why := _not_precision(model):
        _tell(model, why)
        return False
    facts = _describe_batch(inputs, targets)
    with assigned.EXCLUSIVE, contextlib.ExitStack() as undo:
        try:
            with assigned.float32(model):
                exact = layer_numbers.run(model, batch)
            is_finite = all(each.is_finite for each in exact)
            what, overflows = "numbers", {}
            if is_finite:
                overflows = _search(undo, model, batch, exact)
            if is_finite and not overflows:
                what, overflows = "gradients", _search_gradients(undo, model, batch)
                is_finite = overflows is not None
        except Exception as error:  # Code of the user's layers may raise anything.
            user_code.log(
                f"Model '{model.name}': the loss or gradients of a step are infinite "
                "or NaN; it cannot be run on the batch, to see where that begins "
                f"({type(error).__name__}). Name the layer in overrides."
            )
            return False
        if overflows and assigns:
            undo.pop_all()  # They stay.
            for layer, largest in overflows.items():
                records.of(layer).overflow = largest
    if not overflows:
        _tell(model, f"{_elsewhere(model, is_finite)} {facts}.")
        return False
    _tell_healed(model, inputs, what, overflows, assigns)
    everything = plan.Plan(model, modes.get_mode("mixed_float16"))
    if lost := described.unsaved(everything) if assigns else "":
        user_code.log(lost)
    return assigns


def _search(undo, model, batch, exact):
    """Returns {layer: largest magnitude}; they are float32 until `undo` ends."""
    largest = layer_numbers.by_owner((each.owner, each.largest) for each in exact)
    healed = _beyond(largest)
    for _ in range(_ROUNDS):
        undo.enter_context(_assign(model, {x: largest[x] for x in healed}))
        low = layer_numbers.run(model, batch)
        more = {layer for each in low for layer in each.lost if _can_heal(layer)}
        if not more - healed:  # What is left, no layer makes.
            break
        healed |= more
    return {layer: largest[layer] for layer in largest if layer in healed}


def _search_gradients(undo, model, batch):
    """Returns {layer: largest magnitude} as `_search` does, of gradients.

    None if they are not finite in float32 either.
    """
    with assigned.float32(model):
        largest = layer_numbers.largest_gradients(model, batch)
    if largest is None:
        return None
    healed = {x: largest[x] for x in _beyond(largest)}
    undo.enter_context(_assign(model, healed))
    return healed


def _beyond(largest):
    return {x for x, y in largest.items() if y > _LARGEST and _can_heal(x)}


def _assign(model, healed):
    """Scopes float32 in layers, given with their largest numbers."""
    rows = {id(x): ("float32", rules.healed_by(y)) for x, y in healed.items()}
    for place in structure.walk(model):  # Keras runs those by that one's precision.
        for holder in place.holders:
            if holder.layer in healed and rules.follows(place.layer, holder.layer):
                rows[id(place.layer)] = "float32", f"follows {holder.layer.name!r}"
    return assigned.assign(model, rows)


def _can_heal(owner):
    graph = structure.is_functional(owner) or isinstance(owner, keras.Sequential)
    is_layer = isinstance(owner, keras.layers.Layer) and not graph
    return is_layer and owner.compute_dtype == "float16"


# ---- What is said ----


def _tell(model, why):
    user_code.warn(
        f"Model '{model.name}': a training step was skipped because its loss or its "
        f"gradients are infinite or NaN. {why}"
    )


def _elsewhere(model, is_finite):
    if not is_finite:
        return "Precision is not the cause, as they are not finite in float32 either."
    rest = "what computes the loss, which should be in float32"
    if graph_rewrite.active() is not None:
        rest = "what the graph rewrite computes in float16, which is not seen here"
    bound = "min_scale" if model.optimizer.config.dynamic else "initial_scale"
    return (
        f"The numbers of its layers are finite: look at the targets, and at {rest}. "
        "If those are right, gradients may need a smaller loss scale: lower its "
        f"`{bound}`."
    )


def _not_precision(model):
    """Returns what the weights say; empty if they are none of a run that diverged."""
    for layer in structure.layers(model):
        low = layer.compute_dtype == "float16"
        for weight in structure.own_weights(layer):
            largest = _largest(weight.value) if weight.trainable else 0.0
            if not largest <= (_LARGEST_WEIGHT if low else _LARGEST):
                return (
                    "Precision is not the cause: training has diverged, weight "
                    f"{weight.path!r} is {largest:g}."
                )
    return ""


def _tensors(nested):
    flat = tf.nest.flatten(nested, expand_composites=True)
    return [tf.convert_to_tensor(x) for x in flat if x is not None]


def _largest(x):
    """Returns the largest magnitude of a tensor; NaN if it has one."""
    return float(tf.reduce_max(tf.abs(tf.cast(x, "float32")))) if tf.size(x) else 0.0


def _describe_batch(inputs, targets):
    parts = []
    for name, nested in (("x", inputs), ("y", targets)):
        floats = [
            tf.cast(x, "float32") for x in _tensors(nested) if x.dtype.is_floating
        ]
        if floats:
            lost = sum(int(tf.math.count_nonzero(tf.math.is_nan(x))) for x in floats)
            largest = max(_largest(tf.where(tf.math.is_nan(x), 0.0, x)) for x in floats)
            parts.append(f"{name} has {lost} NaN, its largest number is {largest:g}")
    return "; ".join(parts) or "the batch has no floating numbers"


def _tell_healed(model, inputs, what, overflows, assigns):
    places = {x.layer: x.path for x in structure.walk(model)}
    named = {
        places[x]: y for x, y in overflows.items() if not isinstance(x, keras.Model)
    }
    shown = [f"{path!r} (up to {largest:g})" for path, largest in named.items()]
    patterns = {overrides.pattern_of(model, path): "float32" for path in named}
    start = (
        " To have them in float32 from the start: tfamp.enable(..., "
        f"overrides={patterns})."
    )
    done = "They compute in float32 from now on, and the batch is taken again"
    user_code.warn(
        f"Model '{model.name}': {what} beyond float16's largest, {_LARGEST:g}, made "
        "its loss or gradients infinite or NaN, in "
        f"{errors.examples(shown) or 'its inputs'}. "
        f"{done if assigns else 'Nothing is changed (heal=False)'}."
        f"{start if named else ''}{_describe_inputs(model, inputs)}"
    )


def _describe_inputs(model, inputs):
    """Returns what to say of inputs that float16 cannot hold; empty if all fit."""
    flat = _tensors(inputs)
    names = [x.name for x in getattr(model, "inputs", None) or ()]
    names = sorted(inputs) if isinstance(inputs, dict) else names
    if len(names) != len(flat) or "keras_tensor" in str(names):
        names = [f"input {i}" for i in range(len(flat))]
    peaks = [_largest(x) if x.dtype.is_floating else 0.0 for x in flat]
    large = [
        f"{x!r} up to {y:g}" for x, y in zip(names, peaks, strict=True) if y > _LARGEST
    ]
    if not large:
        return ""
    return (
        f" Inputs beyond float16: {errors.examples(large)}. Or scale them, by a "
        "Normalization layer before all others."
    )
