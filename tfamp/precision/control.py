"""`enable`, `disable` and `status`: one call that composes the mechanisms."""

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import keras
from absl import logging

from tfamp import hardware, modes
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.kernels import bias_gradient, keras_kernels, row_gradients
from tfamp.loss_scaling import optimizer_settings
from tfamp.precision import (
    enable_request,
    layer_policies,
    mode_choice,
    policy,
    training_hooks,
)


class Status(NamedTuple):
    """What was asked for and what is in force; `print` it.

    Attributes:
      requested: Mode given to `enable`, "auto" included; None if not enabled.
      effective: Mode in force, or the name of a dtype policy that is no mode's. With
        a graph rewrite: float32 until a training step has shown the rewrite.
      reason: Why this mode, and why it differs from the requested one if it does.
      device: The devices that the decision is about.
      dtype_policy: Name of Keras' global dtype policy.
      overrides: The modes of single layers, or "none".
      tensor_float_32: Whether float32 matrix work may use TF32.
      loss_scaling: Whether, and how, `compile` adds loss scaling.
      graph_rewrite: What is asked of Grappler's rewrite, and what was seen of it.
      bias_gradients: Whether bfloat16 bias gradients are summed rightly.
      embedding_gradients: Whether rows of one index are summed before they are squared.
      fused_kernels: What runs as fused kernels in 16-bit training on a CPU.
    """

    requested: str | None
    effective: str
    reason: str
    device: str
    dtype_policy: str
    overrides: str
    tensor_float_32: bool
    loss_scaling: str
    graph_rewrite: str
    bias_gradients: str
    embedding_gradients: str
    fused_kernels: str

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
    dtype_policy: keras.dtype_policies.DTypePolicy
    overrides: Mapping[str, str]
    resolver: layer_policies.Resolver | None
    scaling: Mapping[str, Any] | Literal[False]
    rewrite: graph_rewrite.Rewrite | None
    fused_kernels: bool
    before: "_Before"


class _Before(NamedTuple):
    """The globals before the first `enable`."""

    precision: policy.PrecisionState
    rewrite: Any


_session: _Session | None = None


def enable(
    mode: str = "auto",
    *,
    overrides: Mapping[str, str] | None = None,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    graph_rewrite: bool | Mapping[str, Any] | None = None,
    fused_kernels: bool = True,
    on_unsupported: Literal["raise", "warn"] = "raise",
) -> Status:
    """Sets the precision of models built from now on, and says why.

    Sets Keras' global dtype policy and TensorFlow's TF32 flag. From then on
    `model.compile("adam", ...)` gets loss scaling wherever a float16 layer trains,
    in an unchanged script. A `LossScaleOptimizer` that the user passes is never
    wrapped again. Layers built before keep their precision (a warning names them).
    Bias gradients in bfloat16 are summed rightly, which TensorFlow does not do on a
    CPU, and the rows of an embedding's gradient before optimizers square them, which
    Keras does not do. Calling it again changes the mode; `disable` restores what stood
    before the first call. Keras' policy belongs to a thread: enable and disable in the
    thread that builds the models.

    A model that trains float16 layers with an optimizer that does not scale the loss
    gets a warning that names the layers: one whose own `compile` keeps optimizers to
    itself, say, or that creates such layers after `compile`.

    Args:
      mode: "auto" for the fastest mode that is safe on this host, or "float32",
        "tf32", "mixed_bfloat16", "mixed_float16".
      overrides: Modes of single layers: a dict from a regular expression that
        matches a layer's whole path ("head" in a functional model, "model/head" in a
        subclassed or sequential one) to a mode. Checked when a model is compiled, or
        first trained if it is built later: a pattern that matches no layer raises
        `OverrideError` there. Models built before, and copies that `set_precision`
        makes, are not asked.
      loss_scale: Keywords of `LossScaleOptimizer` as a dict, or False for no loss
        scaling at all. None: the defaults.
      graph_rewrite: True: Keras' policy stays float32, and Grappler rewrites graphs to
        the 16-bit format that `mode` names. The first training step of a model shows
        whether it did. A dict: the same, with keywords of `enable_graph_rewrite`.
        None: True if the environment
        variable `TF_ENABLE_AUTO_MIXED_PRECISION` or
        `TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE` is 1, which TensorFlow 2 itself
        does not read.
      fused_kernels: Whether a mixed mode's dropout, GELU, SiLU, layer normalization
        and Adam update run as one compiled kernel each, in graphs on a CPU without
        XLA. They compute in float32 and round once; dropout drops the share that is
        asked for, but other elements than Keras would with the same seed. The modes
        float32 and tf32 have Keras' own, and so have exported models that call no
        layer with `training=True`.
      on_unsupported: "raise", or "warn" to fall back to the nearest supported mode.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the mode is unknown, a setting makes no sense, the policy and the
        rewrite are both asked for, or the mode is not supported here
        (`UnsupportedModeError`). Nothing is changed then.

    Example:
      print(tfamp.enable(overrides={"head": "float32"}))
    """
    request = enable_request.check(
        _rewrites(),
        mode,
        overrides,
        loss_scale,
        graph_rewrite,
        fused_kernels,
        on_unsupported,
    )
    return _enable(request, warn_about_layers=True)


def _rewrites():
    """Whether the graph rewrite in force is the session's own."""
    active = graph_rewrite.active()
    return active is not None and _session is not None and _session.rewrite is active


def _enable(request: enable_request.Request, warn_about_layers: bool):
    global _session
    chosen, reason, rewrite = _choose(request)
    dtype_policy, resolver = keras.dtype_policies.get(chosen.policy), None
    if request.overrides:
        resolver = layer_policies.Resolver(chosen, request.overrides)
        dtype_policy = resolver.policy
    if warn_about_layers:
        _warn_about_built_layers(chosen)
    outer, now = _session, _read()
    before = now
    if outer is not None:
        first = outer.before
        before = first if _rewrites() else first._replace(rewrite=now.rewrite)
    try:
        policy.write(policy.PrecisionState(dtype_policy, chosen.tensor_float_32))
        _session = _Session(
            requested=request.mode,
            mode=chosen,
            reason=reason,
            dtype_policy=dtype_policy,
            overrides=request.overrides,
            resolver=resolver,
            scaling=request.scaling,
            rewrite=_set_rewrite(rewrite),
            fused_kernels=request.fused_kernels
            and rewrite is None
            and _is_mixed(chosen, request.overrides),
            before=before,
        )
        refresh_hooks()
    except BaseException:
        _restore(outer, now)
        raise
    described = status()
    logging.info("tfamp.enable:\n%s", described)
    return described


def _choose(request):
    """Returns the mode, why, and the rewrite, if one is asked for."""
    if request.rewrite is None:
        return *mode_choice.resolve_mode(request.mode, request.on_unsupported), None
    dtype, reason = mode_choice.resolve_rewrite(
        request.rewrite.dtype, request.on_unsupported
    )
    if dtype is None:
        return modes.get_mode("float32"), reason, None
    mixed = modes.get_mode(f"mixed_{dtype}")
    rewrite = dataclasses.replace(request.rewrite, dtype=dtype)
    return mixed._replace(policy="float32"), reason, rewrite


def _is_mixed(chosen, overrides):
    """Whether any layer computes in 16 bits."""
    return any(
        modes.get_mode(name).compute_format in ("bfloat16", "float16")
        for name in (chosen.name, *overrides.values())
    )


def _set_rewrite(config):
    if config is not None:
        return graph_rewrite.enable(config)
    if _session is not None and _rewrites():
        graph_rewrite.restore(_session.before.rewrite)
    return None


def disable() -> None:
    """Restores exactly what stood before the first `enable`; idempotent.

    Models that were built or compiled in between keep their precision and their
    optimizer. What was traced keeps its bias gradients; a model that trains for the
    first time afterwards has TensorFlow's.
    """
    if _session is None:
        return
    before = _session.before
    if not _rewrites():  # One that `enable_graph_rewrite` switched on is not ours.
        before = before._replace(rewrite=graph_rewrite.snapshot())
    _restore(None, before)


@contextlib.contextmanager
def enabled(mode: str = "auto", **keywords: Any) -> Iterator[Status]:
    """Scopes `enable`: afterwards all is as before, an earlier `enable` included.

    Args:
      mode: As for `enable`.
      **keywords: As for `enable`.

    Yields:
      The `Status`.
    """
    outer, state = _session, _read()
    try:
        # Layers built before are meant to keep their precision: no warning.
        request = enable_request.check(_rewrites(), mode, **keywords)
        yield _enable(request, warn_about_layers=False)
    finally:
        _restore(outer, state)


def _read():
    return _Before(policy.read(), graph_rewrite.snapshot())


def _restore(session, state):
    """Goes back to a session, or to none, and to the globals as they were then."""
    global _session
    rewrite_changed = graph_rewrite.active() is not state.rewrite.active
    changed, _session = rewrite_changed or _session is not session, session
    if rewrite_changed:
        graph_rewrite.restore(state.rewrite)
    policy.write(state.precision)
    if changed:
        refresh_hooks()


def refresh_hooks() -> None:
    """Installs, or removes, what goes with the session and the rewrite in force."""
    training_hooks.forget_report()
    if _session is None and graph_rewrite.active() is None:
        training_hooks.remove()
        bias_gradient.remove()
        row_gradients.remove()
        keras_kernels.remove()
    else:
        scaling, resolver = {}, None
        if _session is not None:
            scaling, resolver = _session.scaling, _session.resolver
        training_hooks.install(scaling, resolver)
        bias_gradient.install()
        row_gradients.install()
        if _session is not None and _session.fused_kernels:
            keras_kernels.install()
        else:
            keras_kernels.remove()


def end_rewrite() -> None:
    """Ends the graph rewrite, whoever asked for it; `disable` does not revive it."""
    global _session
    graph_rewrite.disable()
    if _session is not None:
        _session = _session._replace(rewrite=None)
    refresh_hooks()


def status() -> Status:
    """Returns what is requested, what is in force, and why they differ."""
    devices = hardware.read_devices()
    state = policy.read()
    effective = _effective_mode(state, devices)
    reason, scaling = _outside(state), "as stock Keras does"
    if _session is None and graph_rewrite.active() is not None:
        # Without a session the hooks have the defaults.
        scaling = _describe_scaling(modes.get_mode(f"mixed_{_rewrite_dtype()}"), {})
    if _session is not None:
        wanted = _session.mode
        scaling = _describe_scaling(wanted, _session.scaling)
        change = _change(_session, state)
        reason = change or _session.reason
        if not change and _session.rewrite is None:
            effective = wanted.name
    if graph_rewrite.active() is not None and _seen_rewrite():
        effective = f"mixed_{_seen_rewrite()}"
    return Status(
        requested=_session.requested if _session else None,
        effective=effective,
        reason=reason,
        device=hardware.device_label(devices),
        dtype_policy=state.dtype_policy.name,
        overrides=_describe_overrides(),
        tensor_float_32=state.tensor_float_32,
        loss_scaling=scaling,
        graph_rewrite=_describe_rewrite(),
        bias_gradients=(
            "summed rightly in bfloat16"
            if bias_gradient.installed()
            else "TensorFlow's: wrong in bfloat16 on a CPU without XLA"
        ),
        embedding_gradients=(
            "rows of one index summed first"
            if row_gradients.installed()
            else "Keras': rows of one index squared apart"
        ),
        fused_kernels=_describe_kernels(),
    )


def _outside(state):
    """Why this precision, where `enable` was not called."""
    name = state.dtype_policy.name
    if name in ("float16", "bfloat16"):
        return (
            f"tfamp.enable() was not called; pure {name} loses updates smaller than "
            f"half an epsilon of a weight: use mixed_{name}"
        )
    return "tfamp.enable() was not called"


def _change(session, state):
    """What was changed after `enable`; empty if nothing was."""
    wanted, found = session.dtype_policy, state.dtype_policy
    if found.name != wanted.name:  # Keras 3.15 cannot compare two maps.
        return (
            f"the global dtype policy was changed from {wanted.name} to {found.name} "
            "after enable()"
        )
    if state.tensor_float_32 != session.mode.tensor_float_32:
        return "the TF32 flag was changed after enable()"
    return ""


def _effective_mode(state, devices):
    tf32 = state.tensor_float_32 and hardware.format_support("tf32", devices).supported
    name = state.dtype_policy.name
    return "tf32" if name == "float32" and tf32 else name


def _describe_overrides():
    patterns = _session.overrides if _session else {}
    return ", ".join(f"{p!r}: {m}" for p, m in patterns.items()) or "none"


def _rewrite_dtype():
    active = graph_rewrite.active()
    return active.dtype if active is not None else None


def _seen_rewrite():
    """The format that a training step was seen to be rewritten to; None if not."""
    seen = training_hooks.last_report()
    return seen.effective if seen is not None else None


def _describe_rewrite():
    active, seen = graph_rewrite.active(), training_hooks.last_report()
    if active is None:
        return "off"
    if seen is None:
        return f"{active.dtype} requested ({active.reason}); no training step seen yet"
    return str(seen)


def _describe_kernels():
    if not keras_kernels.installed():
        return "off"
    if not keras_kernels.usable():
        return "none: for graphs on one CPU"
    return f"{', '.join(keras_kernels.NAMES)} (in graphs without XLA)"


def _describe_scaling(mode, scaling):
    if scaling is False:
        return "off, as asked"
    config = optimizer_settings.check_keywords(**scaling)
    kind = "dynamic" if config.dynamic else "static"
    described = f"{kind} from {config.initial_scale:g}"
    if mode.needs_loss_scale:
        return f"{described}, added by compile()"
    return f"not needed by {mode.name}; {described} where a float16 layer trains"


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
