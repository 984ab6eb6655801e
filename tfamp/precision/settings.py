"""The arguments of `enable`, parsed once, and what they mean on this host."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tfamp import errors
from tfamp.facts import hardware, modes, user_code, xla_cache
from tfamp.graph_rewrite import choice, switch
from tfamp.loss_scaling import rule
from tfamp.precision import overrides as overriding
from tfamp.storage import low_bit

_ON_UNSUPPORTED = ("raise", "warn")
_FLOAT32_MODES = ("float32", "tf32")


class Settings(NamedTuple):
    """The arguments of `enable`, checked, copied, and decided for this host.

    Attributes:
      requested: The mode requested, "auto" included.
      mode: The mode of all layers. Under a graph rewrite its policy is float32's.
      reason: Why this mode.
      overrides: The modes of single layers.
      remat: Patterns of layers that are computed again in the backward pass.
      scaling: Settings of the loss scale, or False for none.
      rewrite: Settings of the graph rewrite, or None.
      fused_kernels: Whether updates and layers are compiled into fewer kernels; None:
        in every mode but float32.
      float32_outputs: Whether a model returns outputs of 16 bits as float32.
      sum_embedding_gradients: Whether rows of one index are summed first.
      optimizer_state: How slots of optimizers are stored: one of `low_bit.STATES`.
      weights: How weights are stored: "float32" or "bfloat16".
      xla_flags: Whether XLA's flags and its programs on disk are wanted on a GPU.
      heal: Whether layers that overflow float16 in training are set to float32.
    """

    requested: str
    mode: modes.Mode
    reason: str
    overrides: overriding.Overrides
    scaling: rule.LossScaleConfig | Literal[False]
    rewrite: switch.RewriteConfig | None
    fused_kernels: bool | None
    float32_outputs: bool
    sum_embedding_gradients: bool
    remat: tuple[str, ...]
    optimizer_state: str
    weights: str
    xla_flags: bool
    heal: bool

    @property
    def is_mixed(self) -> bool:
        """Whether any layer computes in 16 bits by its dtype policy."""
        return any(mode.policy != "float32" for mode in self._modes)

    @property
    def fuses_updates(self) -> bool:
        """Whether optimizers' updates are compiled, where that is known to pay."""
        default = self.is_mixed or self.mode.name != "float32"
        return default if self.fused_kernels is None else self.fused_kernels

    @property
    def fuses_layers(self) -> bool:
        """Whether layers are, too: the graph rewrite does not look into kernels."""
        return self.fuses_updates and self.rewrite is None

    @property
    def has_float16(self) -> bool:
        """Whether any layer computes in float16, by its policy or by the rewrite."""
        return any(mode.compute_format == "float16" for mode in self._modes)

    @property
    def _modes(self):
        return (self.mode, *(each.mode for each in self.overrides))


def parse(
    own_rewrite: bool,
    mode: str,
    overrides: Mapping[str, str] | None = None,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    graph_rewrite: bool | Mapping[str, Any] | None = None,
    fused_kernels: bool | None = None,
    float32_outputs: bool = True,
    sum_embedding_gradients: bool = False,
    on_unsupported: Literal["raise", "warn"] = "raise",
    remat: Sequence[str] | None = None,
    optimizer_state: str = "float32",
    weights: str = "float32",
    xla_flags: bool = True,
    heal: bool = True,
) -> Settings:
    """Checks the arguments of `enable` and decides for this host.

    It changes nothing, but TensorFlow reads where to keep XLA's programs.

    `own_rewrite`: whether a graph rewrite in force is an earlier `enable`'s. All
    others, and what is raised, as of `enable`.
    """
    if xla_flags is True:
        xla_cache.start()  # What follows looks for devices.
    if on_unsupported not in _ON_UNSUPPORTED:
        raise ValueError(
            f"`on_unsupported` must be one of {_ON_UNSUPPORTED}. "
            f"Received: on_unsupported={on_unsupported!r}."
        )
    if not isinstance(fused_kernels, bool | None):
        raise TypeError(
            "`fused_kernels` must be True, False or None. Received: "
            f"fused_kernels={fused_kernels!r}."
        )
    flags = {
        "float32_outputs": float32_outputs,
        "sum_embedding_gradients": sum_embedding_gradients,
        "xla_flags": xla_flags,
        "heal": heal,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"`{name}` must be True or False. Received: {name}={value!r}."
            )
    low_bit.check_state(optimizer_state)
    scaling = _scaling(loss_scale)
    rewrite = rewrite_request(own_rewrite, mode, graph_rewrite)
    if rewrite is not None and overrides:
        raise ValueError(
            "The graph rewrite does not see layers and cannot apply `overrides`. "
            f"Received: overrides={overrides!r} and graph_rewrite="
            f"{graph_rewrite!r}. Keep operations in float32 by "
            "graph_rewrite={'denylist_add': [...]}, or use the dtype policy."
        )
    if rewrite is None:
        chosen, reason = resolve_mode(mode, on_unsupported)
    else:
        dtype, reason = resolve_rewrite(rewrite.dtype, on_unsupported)
        chosen = modes.get_mode(f"mixed_{dtype}" if dtype else "float32")
        chosen = chosen._replace(policy="float32")
        rewrite = dataclasses.replace(rewrite, dtype=dtype) if dtype else None
    _check_weights(weights, chosen)
    parsed = overriding.parse(chosen, overrides)
    again = overriding.parse_remat(remat)
    return Settings(
        mode,
        chosen,
        reason,
        parsed,
        scaling,
        rewrite,
        fused_kernels,
        **flags,
        remat=again,
        optimizer_state=optimizer_state,
        weights=weights,
    )


def _check_weights(weights, mode):
    if weights not in ("float32", "bfloat16"):
        raise ValueError(
            f"`weights` must be 'float32' or 'bfloat16'. Received: weights={weights!r}."
        )
    if weights == "bfloat16" and mode.policy != "mixed_bfloat16":
        raise ValueError(
            "Weights are stored in bfloat16 where layers compute in it. Received: "
            f"weights='bfloat16' with the mode {mode.name!r}. Use mixed_bfloat16."
        )


def _scaling(loss_scale):
    if loss_scale is False:
        return False
    if not isinstance(loss_scale, Mapping | None):
        raise TypeError(
            "`loss_scale` must be a dict of LossScaleOptimizer keywords, False or "
            f"None. Received: loss_scale={loss_scale!r}."
        )
    return rule.LossScaleConfig.from_keywords(loss_scale or {})


# ---- The mode ----


def resolve_mode(
    mode: str, on_unsupported: Literal["raise", "warn"] = "raise"
) -> tuple[modes.Mode, str]:
    """Returns the mode that `enable` would set on this host, and why; sets nothing.

    Args:
      mode: As for `enable`.
      on_unsupported: As for `enable`.

    Raises:
      ValueError: As `enable`.
    """
    devices = hardware.read_devices()
    for sentence in hardware.missing_code(devices):
        user_code.warn(sentence)
    auto = hardware.choose_mode(devices)
    if mode == "auto":
        return modes.get_mode(auto.mode), auto.reason
    chosen = modes.get_mode(mode)
    support = hardware.format_support(chosen.fastest_format, devices)
    if support.supported:
        if not support.fast and mode != "float32":
            user_code.log(f"{mode}: no speed-up is expected: {support.reason}.")
        return chosen, f"requested; {support.reason}"
    if on_unsupported == "raise":
        raise errors.UnsupportedModeError(
            f"Unsupported precision mode. Received: mode={mode!r} on "
            f"{hardware.device_label(devices)}: {support.reason}. Use mode='auto' "
            f"(here {auto.mode!r}), or on_unsupported='warn' for the nearest mode."
        )
    bfloat16 = hardware.format_support("bfloat16", devices).supported
    other = mode == "mixed_float16" and bfloat16
    nearest = "mixed_bfloat16" if other else "float32"
    reason = f"{mode} is not supported: {support.reason}; {nearest} is the nearest"
    user_code.warn(reason)
    return modes.get_mode(nearest), reason


# ---- The graph rewrite ----


def resolve_rewrite(
    dtype: str, on_unsupported: Literal["raise", "warn"] = "raise"
) -> tuple[str | None, str]:
    """Returns the format that graphs would be rewritten to on this host, and why.

    Args:
      dtype: "auto", "bfloat16" or "float16".
      on_unsupported: "raise", or "warn" for no rewrite where it has no effect here.

    Returns:
      ("bfloat16", "float16" or None, reason).

    Raises:
      UnsupportedModeError: If the rewrite is not supported here.
    """
    try:
        return choice.choose_dtype(dtype, hardware.read_devices(), os.environ)
    except errors.UnsupportedModeError as error:
        if on_unsupported == "raise":
            raise
        user_code.warn(f"No graph rewrite: {error}")
        return None, f"no graph rewrite: {error}"


def rewrite_request(
    own: bool, mode: str, graph_rewrite: bool | Mapping[str, Any] | None
) -> switch.RewriteConfig | None:
    """Returns the rewrite requested by argument or environment, or None.

    Args:
      own: Whether a graph rewrite in force is an earlier `enable`'s.
      mode: As for `enable`.
      graph_rewrite: The argument `graph_rewrite` of `enable`.

    Raises:
      ValueError: As `enable`; TypeError for other types and unknown keywords.
    """
    if switch.active() is not None and not own and not graph_rewrite:
        if graph_rewrite is False or mode not in _FLOAT32_MODES:
            raise ValueError(
                "enable_graph_rewrite() is in force, and TensorFlow accepts a mixed "
                "dtype policy beside it and silently undoes float32 layers. Received: "
                f"mode={mode!r}, graph_rewrite={graph_rewrite!r}. Call "
                "tfamp.disable_graph_rewrite() first, or request the rewrite by "
                "tfamp.enable(mode, graph_rewrite=True)."
            )
        return None
    if graph_rewrite is None:
        graph_rewrite = _by_environment(mode)
    if graph_rewrite is False:
        return None
    if graph_rewrite is not True and not isinstance(graph_rewrite, Mapping):
        raise TypeError(
            "`graph_rewrite` must be True, False, None or a dict of keywords of "
            f"`enable_graph_rewrite`. Received: graph_rewrite={graph_rewrite!r}."
        )
    keywords = {} if graph_rewrite is True else dict(graph_rewrite)
    if mode in _FLOAT32_MODES or "dtype" in keywords:
        raise ValueError(
            "`mode` names the format that graphs are rewritten to: 'auto', "
            f"'mixed_bfloat16' or 'mixed_float16'. Received: mode={mode!r} with "
            f"graph_rewrite={graph_rewrite!r}."
        )
    dtype = mode if mode == "auto" else modes.get_mode(mode).compute_format
    return switch.RewriteConfig.from_keywords(dtype, keywords)


def _by_environment(mode):
    """Whether the environment asks for a rewrite, where the mode goes with one."""
    is_requested = switch.requested_by_environment()
    if not is_requested or mode == "auto":
        return is_requested
    asks = (
        "The environment variable TF_ENABLE_AUTO_MIXED_PRECISION or "
        "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE requests the graph rewrite, and "
        f"mode={mode!r} requests "
    )
    if modes.get_mode(mode).policy == "float32":
        user_code.warn(f"{asks}none: graphs are not rewritten.")
        return False
    raise ValueError(
        f"{asks}a mixed dtype policy; together they undo float32 layers. "
        "Unset the variable, or pass graph_rewrite=True (the rewrite alone) or "
        "graph_rewrite=False (the policy alone)."
    )
