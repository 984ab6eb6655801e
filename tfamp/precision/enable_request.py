"""The arguments of `enable`, checked before anything is changed."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import keras

from tfamp import errors, modes
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.loss_scaling import optimizer_settings

ON_UNSUPPORTED = ("raise", "warn")
_FLOAT32_MODES = ("float32", "tf32")


class Request(NamedTuple):
    """The arguments of `enable`, checked and copied."""

    mode: str
    overrides: Mapping[str, str]
    scaling: Mapping[str, Any] | Literal[False]
    rewrite: graph_rewrite.RewriteConfig | None
    fused_kernels: bool
    on_unsupported: Literal["raise", "warn"]


def _check_backend():
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise errors.UnsupportedModeError(
            f"tfamp works with Keras' tensorflow backend. Received: {backend!r}. "
            "Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


def check(
    own_rewrite: bool,
    mode: str,
    overrides: Mapping[str, str] | None = None,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    graph_rewrite: bool | Mapping[str, Any] | None = None,
    fused_kernels: bool = True,
    on_unsupported: Literal["raise", "warn"] = "raise",
) -> Request:
    """Checks the arguments of `enable` and copies what the caller may change.

    Args:
      own_rewrite: Whether a graph rewrite in force is an earlier `enable`'s.
      mode: As for `enable`.
      overrides: As for `enable`.
      loss_scale: As for `enable`.
      graph_rewrite: As for `enable`.
      fused_kernels: As for `enable`.
      on_unsupported: As for `enable`.

    Returns:
      A `Request`.

    Raises:
      ValueError: If arguments make no sense, alone or together; TypeError if of
        another type; UnsupportedModeError for another Keras backend.
    """
    _check_backend()
    if on_unsupported not in ON_UNSUPPORTED:
        raise ValueError(
            f"`on_unsupported` must be one of {ON_UNSUPPORTED}. "
            f"Received: on_unsupported={on_unsupported!r}."
        )
    _check_scaling(loss_scale)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(
            "`overrides` must be a dict from pattern to mode. "
            f"Received: overrides={overrides!r}."
        )
    if not isinstance(fused_kernels, bool):
        raise TypeError(
            "`fused_kernels` must be True or False. "
            f"Received: fused_kernels={fused_kernels!r}."
        )
    rewrite = _rewrite_config(own_rewrite, mode, graph_rewrite)
    if rewrite is not None and overrides:
        raise ValueError(
            "The graph rewrite knows no layers, so `overrides` have no meaning with "
            f"it. Received: overrides={overrides!r} and graph_rewrite="
            f"{graph_rewrite!r}. Keep operations in float32 by "
            "graph_rewrite={'denylist_add': [...]}, or use the dtype policy."
        )
    return Request(
        mode=mode,
        overrides=dict(overrides or {}),
        scaling=False if loss_scale is False else dict(loss_scale or {}),
        rewrite=rewrite,
        fused_kernels=fused_kernels,
        on_unsupported=on_unsupported,
    )


def _check_scaling(scaling):
    if scaling is None or scaling is False:
        return
    if not isinstance(scaling, Mapping):
        raise TypeError(
            "`loss_scale` must be a dict of LossScaleOptimizer keywords, False or "
            f"None. Received: loss_scale={scaling!r}."
        )
    optimizer_settings.check_keywords(**scaling)


def _rewrite_config(own, mode, given):
    """Returns the rewrite that is asked for, by argument or environment, or None."""
    if graph_rewrite.active() is not None and not own and not given:
        if given is False or mode not in _FLOAT32_MODES:
            raise ValueError(
                "enable_graph_rewrite() is in force, and TensorFlow accepts a mixed "
                "dtype policy beside it and silently undoes float32 layers. Received: "
                f"mode={mode!r}, graph_rewrite={given!r}. Call "
                "tfamp.disable_graph_rewrite() first, or ask for both by "
                "tfamp.enable(mode, graph_rewrite=True)."
            )
        return None
    if given is None:
        given = graph_rewrite.requested_by_environment() and _follows_environment(mode)
    if given is False:
        return None
    if given is not True and not isinstance(given, Mapping):
        raise TypeError(
            "`graph_rewrite` must be True, False, None or a dict of keywords of "
            f"`enable_graph_rewrite`. Received: graph_rewrite={given!r}."
        )
    keywords = {} if given is True else dict(given)
    if "dtype" in keywords:
        raise ValueError(
            "`mode` names the rewrite's format. Received: graph_rewrite with "
            f"dtype={keywords['dtype']!r}. Leave it out."
        )
    known = [field.name for field in dataclasses.fields(graph_rewrite.RewriteConfig)]
    unknown = sorted(keywords.keys() - set(known))
    if unknown:
        raise TypeError(
            "Unknown keywords for the graph rewrite. Received: graph_rewrite with "
            f"{', '.join(map(repr, unknown))}. Expected some of "
            f"{', '.join(known[1:])}."
        )
    return graph_rewrite.RewriteConfig(dtype=_rewrite_dtype(mode), **keywords)


def _rewrite_dtype(mode):
    if mode == "auto":
        return "auto"
    chosen = modes.get_mode(mode)
    if mode in _FLOAT32_MODES:
        raise ValueError(
            "`mode` names the format that graphs are rewritten to: 'auto', "
            f"'mixed_bfloat16' or 'mixed_float16'. Received: mode={mode!r} with "
            "graph_rewrite=True."
        )
    return chosen.compute_format


def _follows_environment(mode):
    """Whether the environment's request for a rewrite goes with the mode."""
    if mode == "auto":
        return True
    if mode in _FLOAT32_MODES:
        warnings.warn(
            f"TF_ENABLE_AUTO_MIXED_PRECISION asks for the graph rewrite, and mode="
            f"{mode!r} for none: there is none.",
            stacklevel=5,
        )
        return False
    modes.get_mode(mode)
    raise ValueError(
        "The environment variable TF_ENABLE_AUTO_MIXED_PRECISION or "
        "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE asks for the graph rewrite, and "
        f"mode={mode!r} for a mixed dtype policy; together they undo float32 layers. "
        "Unset the variable, or pass graph_rewrite=True (the rewrite alone) or "
        "graph_rewrite=False (the policy alone)."
    )
