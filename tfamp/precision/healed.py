"""Layers whose numbers float16 cannot hold, found in one batch and set to float32.

```
a step was skipped, and its loss was not finite, or its gradients at any scale
weights that have diverged? The batch in float32 is not finite? It is not precision
layers whose numbers in float32 are beyond float16's largest: float32
run the batch in 16 bits: layers that make infinity or NaN of finite numbers: float32
    (of what a layer computes from others in it: those, too)
and again, as these hand on larger numbers, until all are finite
```
Layers in a healed one keep their precision. `rules` has healed layers float32 in every
plan of the model.
"""

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import errors, records
from tfamp.facts import formats, modes, user_code
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import calls, structure
from tfamp.loss_scaling import train_steps
from tfamp.precision import assigned, described, overrides, plan, rules
from tfamp.updates import saved_values

_LARGEST = formats.float_format("float16").max
_LARGEST_WEIGHT = _LARGEST**0.5  # Beyond it, a weight times its own size overflows.
_ROUNDS = 8


class _Numbers(NamedTuple):
    """What a call of a layer took and made.

    Attributes:
      owner: The layer.
      is_finite: Whether all that it made is finite.
      largest: The largest magnitude of the finite numbers that it took and made.
      lost: The layers whose finite numbers it made infinite or NaN, and itself.
    """

    owner: keras.Operation
    is_finite: bool
    largest: float
    lost: list[keras.layers.Layer]


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
                exact = _run(model, batch)
            is_finite = all(each.is_finite for each in exact)
            overflows = _search(undo, model, batch, exact) if is_finite else {}
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
        _tell(model, f"{_elsewhere(is_finite)} {facts}.")
        return False
    _tell_healed(model, inputs, overflows, assigns)
    everything = plan.Plan(model, modes.get_mode("mixed_float16"))
    if lost := described.unsaved(everything) if assigns else "":
        user_code.log(lost)
    return assigns


def _search(undo, model, batch, exact):
    """Returns {layer: largest magnitude}; they are float32 until `undo` ends."""
    largest: dict[Any, float] = {}
    for each in exact:
        largest[each.owner] = max(largest.get(each.owner, 0.0), each.largest)
    healed = {x for x, y in largest.items() if y > _LARGEST and _can_heal(x)}
    for _ in range(_ROUNDS):
        rows = {id(x): ("float32", rules.healed_by(largest[x])) for x in healed}
        for place in structure.walk(model):  # Keras runs those by that one's precision.
            for holder in place.holders:
                if holder.layer in healed and rules.follows(place.layer, holder.layer):
                    rows[id(place.layer)] = "float32", f"follows {holder.layer.name!r}"
        undo.enter_context(assigned.assign(model, rows))
        low = _run(model, batch)
        more = {layer for each in low for layer in each.lost if _can_heal(layer)}
        if not more - healed:  # What is left, no layer makes.
            break
        healed |= more
    return {layer: largest[layer] for layer in largest if layer in healed}


def _can_heal(owner):
    graph = structure.is_functional(owner) or isinstance(owner, keras.Sequential)
    is_layer = isinstance(owner, keras.layers.Layer) and not graph
    return is_layer and owner.compute_dtype == "float16"


def _run(model, batch):
    """Returns the `_Numbers` of each call in a training step, which is undone."""
    makers: list[list] = []
    own_step = train_steps.HOOKS.scales(model)  # Its model need not have a `call`.
    argument = batch if own_step else keras.utils.unpack_x_y_sample_weight(batch)[0]

    def run(argument):
        with tf.GradientTape() as tape:
            recorder = calls.Recorder(model, tape)
            with recorder.installed(is_stateless=not own_step):
                if own_step:
                    model.train_step(argument)
                else:
                    model(argument, training=True)
        leaves = {
            x.ref(): call.owner
            for call in recorder.calls
            if isinstance(call.owner, keras.layers.Layer) and not call.children
            for x in calls.floats(call.outputs)
        }
        measured = [_measure(x, leaves) for x in recorder.calls if x.results]
        makers.extend(owners for owners, _ in measured)
        return [numbers for _, numbers in measured]

    traced = tf.function(run, autograph=False).get_concrete_function(argument)
    before = saved_values.SavedValues(traced.captured_inputs)
    try:
        measured = traced(argument)
    finally:
        before.restore()
    return [
        _Numbers(owners[0][0], bool(is_finite), float(largest), _lost(owners, begins))
        for owners, (is_finite, begins, largest) in zip(makers, measured, strict=True)
    ]


def _measure(call, leaves):
    """Returns whose numbers are in each result of a call, and what is said of them.

    That is: whether all are finite, which results alone are not, and the largest.
    """
    sources = [_sources(x, call, leaves) for x in call.results]
    owners = [
        [call.owner, *(leaves[x.ref()] for x in each if x.ref() in leaves)]
        for each in sources
    ]
    begins = [
        tf.logical_and(_is_finite(took), tf.logical_not(_is_finite([x])))
        for x, took in zip(call.results, sources, strict=True)
    ]
    largest = _largest_of([*call.inputs, *call.results])
    return owners, (_is_finite(call.results), tf.stack(begins), largest)


def _lost(owners, begins):
    pairs = zip(owners, begins.numpy().tolist(), strict=True)
    return [layer for layers, is_lost in pairs if is_lost for layer in layers]


def _sources(tensor, call, leaves):
    """Returns what a tensor is computed from in a call: layers' results, arguments."""
    is_layer = isinstance(call.owner, keras.layers.Layer)
    if is_layer and not call.children:
        return call.inputs
    sources, visited = [], set()
    queue = [tensor] if is_layer else calls.floats(call.sources)
    stops = {x.ref() for x in calls.floats(call.arguments)} | leaves.keys()
    while queue:
        each = queue.pop()
        if each.ref() not in visited:
            visited.add(each.ref())
            sources += [each] * (each.ref() in stops)
            queue += [] if each.ref() in stops else each.op.inputs
    return sources


def _is_finite(tensors):
    holds = [
        tf.reduce_all(tf.math.is_finite(x)) for x in tensors if x.dtype.is_floating
    ]
    return tf.reduce_all(tf.stack(holds)) if holds else tf.constant(True)


def _largest_of(tensors):
    sizes = [tf.abs(tf.cast(x, "float32")) for x in tensors]
    finite = [tf.where(tf.math.is_finite(x), x, 0.0) for x in sizes]
    return tf.reduce_max([0.0, *map(tf.reduce_max, finite)])


# ---- What is said ----


def _tell(model, why):
    user_code.warn(
        f"Model '{model.name}': a training step was skipped because its loss or its "
        f"gradients are infinite or NaN. {why}"
    )


def _elsewhere(is_finite):
    if not is_finite:
        return "Precision is not the cause, as they are not finite in float32 either."
    rest = "what computes the loss, which should be in float32"
    if graph_rewrite.active() is not None:
        rest = "what the graph rewrite computes in float16, which is not seen here"
    return (
        f"The numbers of its layers are finite: look at the targets, and at {rest}. "
        "If those are right, gradients may need a smaller loss scale: lower its "
        "`min_scale`."
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


def _tell_healed(model, inputs, overflows, assigns):
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
        f"Model '{model.name}': numbers beyond float16's largest, {_LARGEST:g}, made "
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
