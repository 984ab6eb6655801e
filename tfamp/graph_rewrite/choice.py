"""Which dtype TensorFlow's graph rewrite can have on which device: pure functions.

It rewrites to float16 on GPUs of capability 7.0 or more, and to bfloat16 on CPUs
through oneDNN. Elsewhere it does nothing.
"""

from collections.abc import Mapping, Sequence

from tfamp import errors
from tfamp.facts import hardware

_KINDS = {"float16": "GPU", "bfloat16": "CPU"}
_CPU_CAP = "ONEDNN_MAX_CPU_ISA"
_CAPS_WITHOUT_BF16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),  # Ends the process.
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


def choose_dtype(
    dtype: str,
    devices: Sequence[hardware.DeviceDescription],
    environ: Mapping[str, str],
) -> tuple[str, str]:
    """Returns the dtype that graphs can be rewritten to on a host.

    Args:
      dtype: "auto", "bfloat16" or "float16".
      devices: The host's devices.
      environ: Environment variables.

    Returns:
      The dtype, and the reason. It begins with "warning:" if the dtype can be had but
      is not expected to be faster than float32.

    Raises:
      ValueError: If the dtype is another; UnsupportedModeError: if that rewrite has
        no effect here, or ends the process.
    """
    if dtype not in ("auto", *_KINDS):
        raise ValueError(
            "`dtype` must be 'auto', 'bfloat16' or 'float16'. "
            f"Received: dtype={dtype!r}."
        )
    targets = hardware.training_devices(devices)
    on_gpu = any(device.kind == "GPU" for device in targets)
    best = "float16" if on_gpu else "bfloat16"
    chosen = best if dtype == "auto" else dtype
    _, _, fast, reason = hardware.format_support(chosen, devices)
    obstacles = [_obstacle(chosen, device, environ) for device in targets] or [reason]
    if not fast:
        reason = f"warning: {reason}"
        reason += "" if on_gpu else "; expect 0.4 to 0.8 times float32's speed"
        obstacles += [reason] * (dtype == "auto")
    if any(obstacles):
        raise errors.UnsupportedModeError(
            f"TensorFlow cannot rewrite graphs here (requested: {dtype}): "
            f"{next(filter(None, obstacles))}. Use another mode, or the dtype policy."
        )
    return chosen, reason


def _obstacle(dtype, device, environ):
    """Why graphs cannot be rewritten to a dtype on a device; empty if they can."""
    if device.kind != _KINDS[dtype]:
        return f"{dtype} is for {_KINDS[dtype]}s only; this device is {device.label}"
    if device.kind == "GPU":
        old = (device.compute_capability or (9, 9)) < hardware.FP16_TENSOR_CORES
        return hardware.describe_support(device)["float16"].reason if old else ""
    if not device.onednn:
        return (
            "oneDNN is off. Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported"
        )
    cap = environ.get(_CPU_CAP, "")
    held = cap.upper() in _CAPS_WITHOUT_BF16
    return f"oneDNN is limited to {cap}. Unset {_CPU_CAP} first" if held else ""
