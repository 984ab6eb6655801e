"""Which dtype TensorFlow's graph rewrite can have on which device: pure functions."""

from collections.abc import Mapping, Sequence

from tfamp import errors, hardware

FLOAT16_CPU_FLAGS = ("amx_fp16", "avx_ne_convert")
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ISA_WITHOUT_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
_ISA_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
_SLOW = "expect it slower than float32 (0.38 times its speed, measured)"


def choose_dtype(
    dtype: str,
    devices: Sequence[hardware.DeviceDescription],
    environ: Mapping[str, str],
) -> tuple[str, str]:
    """Returns the dtype that graphs can be rewritten to here; a pure function.

    TensorFlow rewrites to float16 on GPUs of capability 7.0 or more (and on a few
    CPUs), and to bfloat16 on CPUs through oneDNN only. Elsewhere it does nothing.

    Args:
      dtype: "auto", "bfloat16" or "float16".
      devices: The host's devices; CPUs count only where there is nothing else, and
        the least capable decides.
      environ: Environment variables.

    Returns:
      The dtype, and the reason. It begins with "warning:" if the dtype can be had but
      is expected to be slower than float32.

    Raises:
      ValueError: If the dtype is another; UnsupportedModeError: if that rewrite has
        no effect here, or ends the process.
    """
    if dtype not in ("auto", "bfloat16", "float16"):
        raise ValueError(
            "`dtype` must be 'auto', 'bfloat16' or 'float16'. "
            f"Received: dtype={dtype!r}."
        )
    devices = [d for d in devices if d.kind != "CPU"] or list(devices)
    kinds = {device.kind for device in devices}
    if not devices or "TPU" in kinds:
        raise _refusal(dtype, f"{hardware.device_label(devices)} has none")
    if "GPU" in kinds:
        return _for_gpus(dtype, devices)
    return _for_cpu(dtype, devices[0], environ)


def _refusal(dtype, why, advice="Train in float32, or in another of tfamp's modes."):
    what = "a graph rewrite" if dtype == "auto" else f"the {dtype} graph rewrite"
    return errors.UnsupportedModeError(
        f"TensorFlow cannot apply {what} here: {why}. {advice}"
    )


def _for_gpus(dtype, gpus):
    if dtype == "bfloat16":
        label = hardware.device_label(gpus)
        why = f"it is for CPUs only and leaves the operations of {label} in float32"
        advice = 'Use the dtype policy: tfamp.enable("mixed_bfloat16").'
        raise _refusal(dtype, why, advice)
    support = hardware.format_support("float16", gpus)
    if support.fast:
        return "float16", support.reason
    versions = [d.compute_capability or hardware.FP16_TENSOR_CORES for d in gpus]
    if dtype == "auto" or min(versions) < hardware.FP16_TENSOR_CORES:
        raise _refusal(dtype, support.reason)
    return "float16", f"warning: {support.reason}; expect no gain over float32"


def _for_cpu(dtype, cpu, environ):
    bfloat16 = hardware.describe_support(cpu)["bfloat16"]
    if not cpu.onednn:
        advice = "Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        raise _refusal(dtype, f"oneDNN is off ({bfloat16.reason})", advice)
    if dtype == "float16":
        native = [flag for flag in FLOAT16_CPU_FLAGS if flag in cpu.cpu_flags]
        if not native:
            why = f"no GPU is there, and no {' or '.join(FLOAT16_CPU_FLAGS)}"
            raise _refusal(dtype, why)
        return "float16", f"native float16 ({', '.join(native)}) through oneDNN"
    fast, reason = bfloat16.fast, bfloat16.reason
    cap = next((environ[name] for name in _ISA_VARIABLES if environ.get(name)), "")
    if cap.upper() in _ISA_WITHOUT_AVX512:
        why = f"oneDNN is held to {cap}, where bfloat16 ends the process"
        raise _refusal(dtype, why, f"Unset {' and '.join(_ISA_VARIABLES)} first.")
    if cap.upper() in _ISA_WITHOUT_BF16:
        fast, reason = False, f"oneDNN is held to {cap}"
    if fast:
        return "bfloat16", reason
    if dtype == "auto":
        raise _refusal(dtype, f"{reason}: {_SLOW}")
    return "bfloat16", f"warning: {reason}: {_SLOW}"
