"""Which precision mode a request comes to on this host, and why."""

import os
import warnings
from typing import Literal

from absl import logging

from tfamp import errors, hardware, modes
from tfamp.graph_rewrite import switch as graph_rewrite


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
        return graph_rewrite.choose_dtype(dtype, hardware.read_devices(), os.environ)
    except errors.UnsupportedModeError as error:
        if on_unsupported == "raise":
            raise
        warnings.warn(f"No graph rewrite: {error}", stacklevel=5)
        return None, f"no graph rewrite: {error}"
