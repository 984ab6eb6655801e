"""`enable`, `disable` and `status`: one call that composes the mechanisms."""

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import keras
from absl import logging

from tfamp import (
    errors,
    graph_rewrite,
    hardware,
    keras_hooks,
    model_structure,
    modes,
    optimizer,
    optimizer_settings,
    policy,
)

ON_UNSUPPORTED = ("raise", "warn")


class Status(NamedTuple):
    """What was asked for and what is in force; `print` it.

    Attributes:
      requested: Mode given to `enable`, "auto" included; None if not enabled.
      effective: Mode in force, or the name of a dtype policy that is no mode's.
      reason: Why this mode, and why it differs from the requested one if it does.
      device: The devices that the decision is about.
      dtype_policy: Name of Keras' global dtype policy.
      tensor_float_32: Whether float32 matrix work may use TF32.
      loss_scaling: Whether, and how, `compile` adds loss scaling.
    """

    requested: str | None
    effective: str
    reason: str
    device: str
    dtype_policy: str
    tensor_float_32: bool
    loss_scaling: str

    def __str__(self):
        rows = [
            (name.replace("_", " "), value)
            for name, value in zip(self._fields, self, strict=True)
        ]
        return "\n".join(f"{name + ':':<17}{value}" for name, value in rows)


class _Session(NamedTuple):
    """What `enable` did: for `status`, and for `disable` to undo."""

    requested: str
    mode: modes.Mode
    reason: str
    scaling: Mapping[str, Any] | Literal[False]
    before: policy.PrecisionState


_session: _Session | None = None


def enable(
    mode: str = "auto",
    *,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    on_unsupported: Literal["raise", "warn"] = "raise",
) -> Status:
    """Sets the precision of models built from now on, and says why.

    Sets Keras' global dtype policy and TensorFlow's TF32 flag. From then on
    `model.compile("adam", ...)` gets loss scaling wherever a float16 layer trains,
    in an unchanged script. A `LossScaleOptimizer` that the user passes is never
    wrapped again. Layers built before keep their precision (a warning names them).
    Calling it again changes the mode; `disable` restores what stood before the
    first call. Keras' policy belongs to a thread: enable and disable in the thread
    that builds the models.

    A model that trains float16 layers with an optimizer that does not scale the loss
    gets a warning that names the layers: one whose own `compile` keeps optimizers to
    itself, say, or that creates such layers after `compile`.

    Args:
      mode: "auto" for the fastest mode that is safe on this host, or "float32",
        "tf32", "mixed_bfloat16", "mixed_float16".
      loss_scale: Keywords of `LossScaleOptimizer` as a dict, or False for no loss
        scaling at all. None: the defaults.
      on_unsupported: "raise", or "warn" to fall back to the nearest supported mode.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the mode is unknown, a setting makes no sense, or the mode is
        not supported here (`UnsupportedModeError`). Nothing is changed then.

    Example:
      print(tfamp.enable())
    """
    return _enable(mode, loss_scale, on_unsupported, warn_about_layers=True)


def _enable(mode, loss_scale, on_unsupported, warn_about_layers):
    global _session
    _check_backend()
    _check_arguments(loss_scale, on_unsupported)
    chosen, reason = resolve_mode(mode, on_unsupported)
    if warn_about_layers:
        _warn_about_built_layers(chosen)
    # A copy: the caller's dict may change.
    scaling = False if loss_scale is False else dict(loss_scale or {})
    before = _session.before if _session else policy.read()
    _install_hooks(scaling)
    policy.apply(chosen)
    _session = _Session(mode, chosen, reason, scaling, before)
    now = status()
    logging.info("tfamp.enable:\n%s", now)
    return now


def disable() -> None:
    """Restores exactly what stood before the first `enable`; idempotent.

    Models that were built or compiled in between keep their precision and their
    optimizer.
    """
    global _session
    keras_hooks.remove()
    if _session is not None:
        policy.write(_session.before)
        _session = None


@contextlib.contextmanager
def enabled(
    mode: str = "auto",
    *,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    on_unsupported: Literal["raise", "warn"] = "raise",
) -> Iterator[Status]:
    """Scopes `enable`: afterwards all is as before, an earlier `enable` included.

    Args:
      mode: As for `enable`.
      loss_scale: As for `enable`.
      on_unsupported: As for `enable`.

    Yields:
      The `Status`.
    """
    global _session
    outer, state = _session, policy.read()
    try:
        # Layers built before are meant to keep their precision: no warning.
        yield _enable(mode, loss_scale, on_unsupported, warn_about_layers=False)
    finally:
        disable()
        policy.write(state)
        if outer is not None:
            _install_hooks(outer.scaling)
            _session = outer


def status() -> Status:
    """Returns what is requested, what is in force, and why they differ."""
    devices = hardware.read_devices()
    state = policy.read()
    effective = _effective_mode(state, devices)
    if _session is None:
        reason, scaling = "tfamp.enable() was not called", "as stock Keras does"
    else:
        reason, wanted = _session.reason, _session.mode
        scaling = _describe_scaling(wanted, _session.scaling)
        if state.dtype_policy.name != wanted.policy:
            reason = (
                f"the global dtype policy was changed from {wanted.policy} to "
                f"{state.dtype_policy.name} after enable()"
            )
        elif state.tensor_float_32 != wanted.tensor_float_32:
            reason = "the TF32 flag was changed after enable()"
        else:
            effective = wanted.name
    return Status(
        requested=_session.requested if _session else None,
        effective=effective,
        reason=reason,
        device=hardware.device_label(devices),
        dtype_policy=state.dtype_policy.name,
        tensor_float_32=state.tensor_float_32,
        loss_scaling=scaling,
    )


def _effective_mode(state, devices):
    tf32 = state.tensor_float_32 and hardware.format_support("tf32", devices).supported
    name = state.dtype_policy.name
    return "tf32" if name == "float32" and tf32 else name


def resolve_mode(
    mode: str, on_unsupported: Literal["raise", "warn"] = "raise"
) -> tuple[modes.Mode, str]:
    """Returns the mode that `enable` would set on this host, and why; sets nothing.

    Args:
      mode: As for `enable`.
      on_unsupported: As for `enable`.

    Returns:
      (`Mode`, reason).

    Raises:
      ValueError: As `enable`.
    """
    devices = hardware.read_devices()
    if mode == "auto":
        decision = hardware.choose_mode(devices)
        return modes.get_mode(decision.mode), decision.reason
    chosen = modes.get_mode(mode)
    support = hardware.format_support(chosen.compute_format, devices)
    if support.supported:
        if not support.fast and mode != "float32":
            logging.warning("%s: no speed-up is expected: %s.", mode, support.reason)
        return chosen, f"asked for; {support.reason}"
    if on_unsupported == "raise":
        auto = hardware.choose_mode(devices).mode
        raise errors.UnsupportedModeError(
            f"Unsupported precision mode. Received: mode={mode!r} on "
            f"{hardware.device_label(devices)}: {support.reason}. Use mode='auto' "
            f"(here {auto!r}), or on_unsupported='warn' for the nearest mode."
        )
    nearest = _nearest_mode(chosen, devices)
    reason = f"{mode} is not supported: {support.reason}; {nearest} is the nearest"
    warnings.warn(reason, stacklevel=5)
    return modes.get_mode(nearest), reason


def _nearest_mode(chosen, devices):
    """The other 16-bit mode where it runs, else float32."""
    if chosen.name == "mixed_float16":
        if hardware.format_support("bfloat16", devices).supported:
            return "mixed_bfloat16"
    return "float32"


def _install_hooks(scaling):
    def transform(model, given):
        if scaling is False or not needs_loss_scale(model):
            return given
        return optimizer.wrap_optimizer(given, **scaling)

    def check(model):
        if scaling is not False:
            _warn_about_unscaled_optimizers(model)

    keras_hooks.install(transform, check)


def needs_loss_scale(model: keras.Model) -> bool:
    """Whether a float16 layer is in the model, or graphs are rewritten to float16."""
    return bool(_float16_layers(model)) or graph_rewrite.float16_requested()


def _float16_layers(model):
    return [
        layer
        for layer in model_structure.flatten_layers(model)
        if layer.compute_dtype == "float16"
    ]


def _warn_about_unscaled_optimizers(model):
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
        f"{', '.join(unscaled)}. Pass an optimizer to `compile`, which is wrapped "
        "there, or wrap it by `tfamp.wrap_optimizer`; in a `train_step` of your own "
        "differentiate `optimizer.scale_loss(loss)`. `loss_scale=False` in "
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


def _describe_scaling(mode, scaling):
    if scaling is False:
        return "off, as asked"
    config = optimizer_settings.check_keywords(**scaling)
    kind = "dynamic" if config.dynamic else "static"
    described = f"{kind} from {config.initial_scale:g}"
    if mode.needs_loss_scale:
        return f"{described}, added by compile()"
    return f"not needed by {mode.name}; {described} where a float16 layer trains"


def _check_backend():
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise errors.UnsupportedModeError(
            f"tfamp works with Keras' tensorflow backend. Received: {backend!r}. "
            "Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


def _check_arguments(scaling, on_unsupported):
    if on_unsupported not in ON_UNSUPPORTED:
        raise ValueError(
            f"`on_unsupported` must be one of {ON_UNSUPPORTED}. "
            f"Received: on_unsupported={on_unsupported!r}."
        )
    if scaling is None or scaling is False:
        return
    if not isinstance(scaling, Mapping):
        raise TypeError(
            "`loss_scale` must be a dict of LossScaleOptimizer keywords, False or "
            f"None. Received: loss_scale={scaling!r}."
        )
    optimizer_settings.check_keywords(**scaling)


def _warn_about_built_layers(chosen):
    if chosen.policy == keras.config.dtype_policy().name:
        return
    if _layers_with_other_policy(chosen):
        gc.collect()  # Only now: most calls find nothing, and this is slow.
    left = _layers_with_other_policy(chosen)
    if left:
        names = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        warnings.warn(
            f"{len(left)} layers were built before tfamp.enable() and keep their "
            f"dtype policy: {names}. Call tfamp.enable() before building the model.",
            stacklevel=4,
        )


def _layers_with_other_policy(chosen):
    """Names of living layers with weights that do not follow the mode."""
    layers = [o for o in gc.get_objects() if issubclass(type(o), keras.layers.Layer)]
    return sorted(
        layer.name
        for layer in layers
        if layer.weights and layer.dtype_policy.name != chosen.policy
    )
