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

_FLOAT32_MODES = ("float32", "tf32")


def _option(default, expected, holds, error=TypeError, compare=True):
    """Returns a field of `Options`: `holds` says whether a value is as expected."""
    check = {"expected": expected, "holds": holds, "error": error}
    return dataclasses.field(default=default, metadata=check, compare=compare)


def _flag(default):
    return _option(default, "True or False", lambda x: isinstance(x, bool))


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `enable`, which says what they are; each is checked by itself.

    Those that `Settings` has in another form are not compared.

    Raises:
      TypeError: If a value is of another type. ValueError: If it is none of the names.
    """

    mode: str = "auto"
    overrides: Mapping[str, str] | None = dataclasses.field(default=None, compare=False)
    loss_scale: Mapping[str, Any] | Literal[False] | None = _option(
        None,
        "a dict of LossScaleOptimizer keywords, False or None",
        lambda x: x is False or isinstance(x, Mapping | None),
        compare=False,
    )
    graph_rewrite: bool | Mapping[str, Any] | None = _option(
        None,
        "True, False, None or a dict of keywords of `enable_graph_rewrite`",
        lambda x: isinstance(x, bool | Mapping | None),
        compare=False,
    )
    fused_kernels: bool | None = _option(
        None, "True, False or None", lambda x: isinstance(x, bool | None)
    )
    float32_outputs: bool = _flag(True)
    sum_embedding_gradients: bool = _flag(False)
    on_unsupported: Literal["raise", "warn"] = _option(
        "raise",
        "one of ('raise', 'warn')",
        lambda x: x in ("raise", "warn"),
        ValueError,
        compare=False,
    )
    remat: Sequence[str] | None = dataclasses.field(default=None, compare=False)
    optimizer_state: Literal["float32", "bfloat16", "8bit"] = "float32"
    weights: Literal["float32", "bfloat16"] = _option(
        "float32",
        "'float32' or 'bfloat16'",
        lambda x: x in ("float32", "bfloat16"),
        ValueError,
    )
    xla_flags: bool = _flag(True)
    heal: bool = _flag(True)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, check = getattr(self, field.name), field.metadata
            if check and not check["holds"](value):
                raise check["error"](
                    f"`{field.name}` must be {check['expected']}. "
                    f"Received: {field.name}={value!r}."
                )
        low_bit.check_state(self.optimizer_state)


class Settings(NamedTuple):
    """What the arguments of `enable` mean on this host.

    Attributes:
      options: The arguments.
      mode: The mode of all layers. Under a graph rewrite its policy is float32's.
      reason: Why this mode.
      overrides: The modes of single layers.
      remat: Patterns of layers that are computed again in the backward pass.
      scaling: Settings of the loss scale, or False for none.
      rewrite: Settings of the graph rewrite, or None.
    """

    options: Options
    mode: modes.Mode
    reason: str
    overrides: overriding.Overrides
    remat: tuple[str, ...]
    scaling: rule.LossScaleConfig | Literal[False]
    rewrite: switch.RewriteConfig | None

    @property
    def is_mixed(self) -> bool:
        """Whether any layer computes in 16 bits by its dtype policy."""
        return any(mode.policy != "float32" for mode in self._modes)

    @property
    def fuses_updates(self) -> bool:
        """Whether optimizers' updates are compiled, where that is known to pay."""
        option = self.options.fused_kernels
        default = self.is_mixed or self.mode.name != "float32"
        return default if option is None else option

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


# Without `enable`. A graph rewrite alone scales the loss as `enable` does.
OFF = Settings(
    Options(xla_flags=False),
    modes.get_mode("float32"),
    "tfamp.enable() was not called",
    overrides=(),
    remat=(),
    scaling=rule.LossScaleConfig(),
    rewrite=None,
)


def parse(options: Options, own_rewrite: bool) -> Settings:
    """Decides for this host what the arguments of `enable` mean; sets nothing.

    But TensorFlow reads where to keep XLA's programs.

    Args:
      options: The arguments.
      own_rewrite: Whether a graph rewrite in force is an earlier `enable`'s.

    Raises:
      ValueError: As `enable`.
    """
    scaling = options.loss_scale
    if scaling is not False:
        scaling = rule.LossScaleConfig.from_keywords(scaling or {})
    if options.mode != "auto":
        modes.get_mode(options.mode)  # Before a wrong name has looked for devices.
    if options.xla_flags:
        xla_cache.start()  # What follows looks for devices.
    rewrite = rewrite_request(own_rewrite, options.mode, options.graph_rewrite)
    if rewrite is None:
        mode, reason = resolve_mode(options.mode, options.on_unsupported)
    elif options.overrides:
        raise ValueError(
            "The graph rewrite does not see layers and cannot apply `overrides`. "
            f"Received: overrides={options.overrides!r} and graph_rewrite="
            f"{options.graph_rewrite!r}. Keep operations in float32 by "
            "graph_rewrite={'denylist_add': [...]}, or use the dtype policy."
        )
    else:
        dtype, reason = resolve_rewrite(rewrite.dtype, options.on_unsupported)
        mode = modes.get_mode(f"mixed_{dtype}" if dtype else "float32")
        mode = mode._replace(policy="float32")
        rewrite = dataclasses.replace(rewrite, dtype=dtype) if dtype else None
    if options.weights == "bfloat16" and mode.policy != "mixed_bfloat16":
        raise ValueError(
            "Weights are stored in bfloat16 where layers compute in it. Received: "
            f"weights='bfloat16' with the mode {mode.name!r}. Use mixed_bfloat16."
        )
    overrides = overriding.parse(mode, options.overrides)
    remat = overriding.parse_remat(options.remat)
    return Settings(options, mode, reason, overrides, remat, scaling, rewrite)


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
      ValueError: As `enable`; TypeError for unknown keywords.
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
