"""`set_precision`: another precision for a built model, its weights kept."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
from absl import logging

from tfamp import modes
from tfamp.precision import (
    float32_config,
    layer_policies,
    model_structure,
    policy,
    precision_plan,
    rebuild,
)

ConversionError = precision_plan.ConversionError
_SHOWN = 5
# Why each layer made here has its policy; by layer, so that no model is changed.
_reasons: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class LayerPrecision(NamedTuple):
    """A row of `describe`: a layer's path, its dtype policy's name, and why."""

    path: str
    policy: str
    reason: str


class _Rules(rebuild.Float32Rules):
    """Copies layers into the policies of a plan."""

    error = ConversionError
    keeps_classes = True

    def __init__(self, mode, plan):
        self.goal = f"in {mode.name}"
        self.policy = mode.policy
        self._plan = plan

    def config(self, operation, config):
        if not isinstance(operation, keras.layers.Layer):
            return config  # A cast in the graph is part of what the model computes.
        planned = self._plan.get(id(operation))
        name = planned.policy if planned and planned.policy else self.policy
        return float32_config.with_policy(config, name)

    def input_dtype(self, name):
        # Keras declares 16 bits where it guesses; a wider input loses nothing.
        return "float32" if name in ("float16", "bfloat16") else name

    def constant(self, value):
        return value


def set_precision(
    model: keras.Model,
    mode: str,
    overrides: Mapping[str, str] | None = None,
    *,
    sample_inputs: Any = None,
) -> keras.Model:
    """Returns a copy of a model in another precision, with the same weights.

    For models that are built, trained or loaded; the given one is not changed, and no
    global is (TF32 is the process's: for "tf32" and "float32" set it by
    `tfamp.enable`). Variables are float32 in every mode; 16-bit ones are widened,
    which is exact. What applies to a layer is, in this order:

        the override that matches its path
        the override of the nearest layer or model around it
        float32, if it computes or passes on an output, or a softmax
        the mode; in a layer that makes others itself, what it gives them

    `describe` says which, and so does the log. Softmax inside attention layers has
    their precision. The copy is not compiled, unless its class compiles itself:
    compile it as the original was (the state of its optimizer is not taken along).
    Layers shared inside the model stay shared, frozen ones frozen. A functional or
    sequential model of a class of its own keeps it where the class can be made from
    its configuration.

    A saved file of the copy holds the precision of the layers that the model's
    configuration names. Those that a class makes itself (inside attention layers, in
    models of a class of its own) get what their class gives them when it is loaded:
    the log warns of them; call `set_precision` again after loading.

    Train the copy under `tfamp.enable`: without it, bias gradients in bfloat16 are
    TensorFlow's, which are wrong on a CPU, and float16 gets no loss scaling of ours.

    Args:
      model: A built `keras.Model`; functional, sequential or subclassed.
      mode: "float32", "tf32", "mixed_bfloat16" or "mixed_float16".
      overrides: {pattern: mode}; a pattern is a regular expression that matches the
        whole path of a layer of the given model (`describe(model)` lists them).
      sample_inputs: A batch that a subclassed model takes, where the shapes that
        Keras recorded do not suffice to build it.

    Returns:
      The new model.

    Raises:
      OverrideError: If overrides are malformed, match no layer or contradict one
        another; with all problems and the known paths.
      ValueError: If there is no such mode, or the model is not built.
      ConversionError: If a layer is quantized, cannot be made from its configuration,
        does not take the weights, or fixes the dtype of a variable.

    Example:
      model = tfamp.set_precision(model, "mixed_bfloat16", {"encoder/.*": "float32"})
    """
    chosen = modes.get_mode(mode)
    _check_model(model)
    rebuild.check_not_quantized(model, ConversionError, "Convert the model")
    plan = precision_plan.Plan(model, chosen, overrides, sample_inputs).rows()
    with _policy_alone(chosen), rebuild.copying(model):
        copy = _copy(model, _Rules(chosen, plan), plan, sample_inputs)
    _check_variables(copy)
    _log(copy, chosen)
    return copy


def describe(model: keras.Model) -> list[LayerPrecision]:
    """Returns the path, the policy and its reason, if known, of each layer.

    Args:
      model: A built model; one made by `set_precision` knows its reasons.

    Returns:
      A row for each layer that computes in floats, those inside others included.
    """
    return [
        LayerPrecision(
            path, layer.dtype_policy.name, _reasons.get(layer, "as it was made")
        )
        for layer, path in precision_plan.paths(model)
    ]


# ---- The copy ----


def _copy(model, rules, plan, sample_inputs):
    copier = rebuild.Copier(rules)
    copy = copier.copy(model)
    _build(copy, model, sample_inputs)
    pairs = copier.pairs()
    made = [new for _, new in pairs if new.dtype_policy is keras.config.dtype_policy()]
    changed = _assign(pairs, plan, rules.policy)
    if changed:
        with rebuild.explained(
            model, f"cannot be called {rules.goal}", ConversionError
        ):
            model_structure.refresh_dtypes(copy)
    copier.copy_weights()
    # A file is mostly loaded under Keras' default, float32.
    _tell_unsaved(copy, changed if rules.policy == "float32" else changed + made)
    return copy


def _build(copy, model, sample_inputs):
    advice = "cannot be built from the shapes that Keras recorded; pass `sample_inputs`"
    with rebuild.explained(model, advice, ConversionError):
        if sample_inputs is not None:
            copy(sample_inputs, training=False)
        elif not copy.built:
            # Keras itself would leave the model's name out of its layers' paths.
            with model_structure.own_scope(copy):
                copy.build_from_config(model.get_build_config())
            copy.built = True  # As Keras does when it loads a model.


def _assign(pairs, plan, default) -> list[keras.layers.Layer]:
    """Gives each copied layer its planned policy; returns those that had another."""
    changed = []
    for old, new in pairs:
        planned, given = plan.get(id(old)), new.dtype_policy.name
        if planned is None:
            continue
        _reasons[new] = planned.reason
        if planned.policy in (None, given):
            continue
        if planned.inherited and given != default:
            _reasons[new] = "fixed by the class of the layer around it"
            continue
        new.dtype_policy = planned.policy
        changed.append(new)
    return changed


def _tell_unsaved(copy, layers):
    """Logs which of these layers a file of the copy would not hold."""
    ids = set(map(id, layers))
    unsaved = {
        id(layer)
        for layer, holder in model_structure.unsaved_layers(copy)
        if id(layer) in ids and not layer_policies.passes_on(holder, layer)
    }
    paths = [path for x, path in precision_plan.paths(copy) if id(x) in unsaved]
    if paths:
        layer_policies.warn_of_unsaved(paths)


@contextlib.contextmanager
def _policy_alone(mode) -> Iterator[None]:
    """Scopes the dtype policy of this thread; the TF32 flag is the process's."""
    before = policy.read()
    plain = keras.dtype_policies.get(mode.policy)
    try:
        policy.write(before._replace(dtype_policy=plain))
        yield
    finally:
        policy.write(before)


# ---- Checks and the log ----


def _check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {type(model).__name__}."
        )
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built, so it has no weights to keep. Call it "
            "on a batch first, or build it under `tfamp.enable` or "
            "`tfamp.policy_scope`."
        )


def _check_variables(model):
    wrong = [
        f"{v.path} ({v.dtype})"
        for v in model.variables
        if keras.backend.is_float_dtype(v.dtype) and v.dtype != "float32"
    ]
    if wrong:
        raise ConversionError(
            "Variables are float32 in every mode. Received variables whose dtype is "
            f"fixed by the classes of their layers: {rebuild.listed(wrong)}. Let "
            "`add_weight` take the layer's dtype."
        )


def _log(model, mode):
    rows = describe(model)
    others = [row for row in rows if row.policy != mode.policy]
    lines = [f"  {row.path}: {row.policy} ({row.reason})" for row in others[:_SHOWN]]
    if others[_SHOWN:]:
        lines.append(f"  and {len(others) - _SHOWN} more")
    logging.info(
        "set_precision: %d layers, %d of them not %s%s",
        len(rows),
        len(others),
        mode.policy,
        "".join(f"\n{line}" for line in lines),
    )
