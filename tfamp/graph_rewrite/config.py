"""What may be asked of the graph rewrite, and which dtype it can have where.

The decisions are pure functions of a `RewriteConfig`, of devices and of environment
variables; `graph_rewrite` reads and writes the real ones.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from tfamp import errors, hardware
from tfamp.graph_rewrite import lists as rewrite_lists

PREFIX = rewrite_lists.PREFIX
DTYPES = ("auto", "bfloat16", "float16")
LEVELS = ("TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY", "UNSAFE_FORCE_ALL")
# TensorFlow reads a variable as a bool in these spellings, in any case.
TRUE, FALSE = ("1", "true"), ("0", "false")
# TensorFlow 2.21 ends the process if one of these is not a bool.
BOOLEANS = tuple(
    PREFIX + name for name in ("SIMULATE_GPU", "IGNORE_PERFORMANCE", "EMULATE_FP16")
)
# In bfloat16 on a CPU, TensorFlow 2.21 adds up bias gradients in bfloat16 (up to 92 %
# wrong), and rounds losses and metrics.
FLOAT32_OPS = ("BiasAddGrad", "Mean", "Sum")
FLOAT16_CPU_FLAGS = ("amx_fp16", "avx_ne_convert")
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ISA_WITHOUT_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
_ISA_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
_SLOW = "expect it slower than float32 (0.38 times its speed, measured)"


@dataclasses.dataclass(frozen=True)
class RewriteConfig:
    """What is asked of the graph rewrite.

    Attributes:
      dtype: "bfloat16" (CPU), "float16" (GPU), or "auto" for what this host runs fast.
      level: None for TensorFlow's normal painting; "TENSOR_CORES_ONLY": only what is
        on the allow list; "TREAT_INFER_AS_DENY"; "UNSAFE_FORCE_ALL": everything, in
        float16 on a GPU only.
      allowlist_add: Operations to convert always. This and the next are names of
        operations, as any iterable or as one string with commas.
      allowlist_remove: Operations not to convert for their own sake.
      inferlist_add: Operations to convert where their inputs are converted.
      inferlist_remove: Operations not to convert for their inputs' sake.
      denylist_add: Operations to keep in float32, and what follows from them.
      denylist_remove: Operations that need not be kept in float32.
      clearlist_add: Operations that go with their neighbors.
      clearlist_remove: Operations that do not go with their neighbors.
      float32_ops: Operations taken off each list that would convert them: by default
        bias gradients, losses and metrics. () for TensorFlow's own painting.
      log_path: Folder for TensorFlow's dumps of each graph, made if it is missing.
    """

    dtype: str = "auto"
    level: str | None = None
    allowlist_add: tuple[str, ...] = ()
    allowlist_remove: tuple[str, ...] = ()
    inferlist_add: tuple[str, ...] = ()
    inferlist_remove: tuple[str, ...] = ()
    denylist_add: tuple[str, ...] = ()
    denylist_remove: tuple[str, ...] = ()
    clearlist_add: tuple[str, ...] = ()
    clearlist_remove: tuple[str, ...] = ()
    float32_ops: tuple[str, ...] = FLOAT32_OPS
    log_path: str | None = None

    def __post_init__(self):
        problems = []
        if self.dtype not in DTYPES:
            problems.append(_not_one_of("dtype", self.dtype, DTYPES))
        if self.level is not None and self.level not in LEVELS:
            problems.append(_not_one_of("level", self.level, (None, *LEVELS)))
        if (self.level, self.dtype) == ("UNSAFE_FORCE_ALL", "bfloat16"):
            problems.append(force_all_problem("level"))
        for name in (*_list_fields(), "float32_ops"):
            try:
                ops = rewrite_lists.split_names(getattr(self, name))
            except (AttributeError, TypeError):
                problems.append(_not_names(name, getattr(self, name)))
            else:
                object.__setattr__(self, name, ops)
        try:
            self._expand_log_path()
        except TypeError:
            problems.append(_not_one_of("log_path", self.log_path, (None, "a folder")))
        if problems:
            raise ValueError("\n".join(problems))

    def _expand_log_path(self):
        if self.log_path == "":  # It would be the working directory.
            raise TypeError("empty")
        if self.log_path is not None:
            path = str(pathlib.Path(self.log_path).expanduser())
            object.__setattr__(self, "log_path", path)

    def changes(self) -> list[rewrite_lists.Change]:
        """Returns the changes of the lists that are asked for."""
        return [
            rewrite_lists.Change(name, end == "add", ops, f"{name}_{end}")
            for name in rewrite_lists.LISTS
            for end in ("add", "remove")
            if (ops := getattr(self, f"{name}_{end}"))
        ]


def _list_fields():
    return [
        f"{name}_{end}" for name in rewrite_lists.LISTS for end in ("add", "remove")
    ]


def _not_one_of(name, value, expected):
    return (
        f"`{name}` must be one of {', '.join(map(repr, expected))}. "
        f"Received: {name}={value!r}."
    )


def _not_names(name, value):
    return (
        f"`{name}` must be names of operations, in an iterable or in a string with "
        f"commas. Received: {name}={value!r}."
    )


def force_all_problem(source: str) -> str:
    """Returns why everything cannot be forced into bfloat16."""
    return (
        f"`{source}` is UNSAFE_FORCE_ALL, with which TensorFlow gives up a rewrite by "
        "oneDNN. Use TREAT_INFER_AS_DENY or none; `allowlist_add` converts more."
    )


def read_bool(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Reads an environment variable as TensorFlow does.

    Raises:
      ValueError: If it is set to something else.
    """
    value = environ.get(name)
    if value is None:
        return default
    if value.lower() not in TRUE + FALSE:
        raise ValueError(
            f"The environment variable {name} must be one of "
            f"{', '.join(TRUE + FALSE)}, or unset. Received: {value!r}."
        )
    return value.lower() in TRUE


# ---- Which dtype ----


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
      UnsupportedModeError: If that rewrite has no effect here, or ends the process.
    """
    if dtype not in DTYPES:
        raise ValueError(_not_one_of("dtype", dtype, DTYPES))
    devices = [d for d in devices if d.kind != "CPU"] or list(devices)
    kinds = {device.kind for device in devices}
    if not devices or "TPU" in kinds:
        raise _refusal(dtype, f"{hardware.device_label(devices)} has none", "")
    if "GPU" in kinds:
        return _for_gpus(dtype, devices, environ)
    return _for_cpu(dtype, devices[0], environ)


def _refusal(dtype, why, advice):
    what = "a graph rewrite" if dtype == "auto" else f"the {dtype} graph rewrite"
    advice = advice or "Train in float32, or in another of tfamp's modes."
    return errors.UnsupportedModeError(
        f"TensorFlow cannot apply {what} here: {why}. {advice}"
    )


def _for_gpus(dtype, gpus, environ):
    if dtype == "bfloat16":
        raise _refusal(
            dtype,
            "it is for CPUs only and leaves the operations of "
            f"{hardware.device_label(gpus)} in float32",
            'Use the dtype policy: tfamp.enable("mixed_bfloat16").',
        )
    support = hardware.format_support("float16", gpus)
    if support.fast:
        return "float16", support.reason
    if dtype == "auto":
        advice = 'Train in float32, or see tfamp.enable("auto").'
        raise _refusal(dtype, support.reason, advice)
    known = [d.compute_capability for d in gpus if d.compute_capability is not None]
    weak = [version for version in known if version < hardware.FP16_TENSOR_CORES]
    if weak and not _ignores_performance(environ):
        raise _refusal(
            dtype,
            support.reason,
            "Train in float32; for the numbers alone, start with the environment "
            f"variable {PREFIX}IGNORE_PERFORMANCE=1.",
        )
    return "float16", f"warning: {support.reason}; expect no gain over float32"


def _ignores_performance(environ):
    return environ.get(f"{PREFIX}IGNORE_PERFORMANCE", "").lower() in TRUE


def _for_cpu(dtype, cpu, environ):
    if not cpu.onednn:
        native = hardware.describe_support(cpu)["bfloat16"].reason
        why = "oneDNN is off" + (f" ({native})" if "oneDNN" not in native else "")
        raise _refusal(
            dtype, why, "Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        )
    if dtype == "float16":
        return _float16_on_cpu(cpu)
    cap = next((environ[v] for v in _ISA_VARIABLES if environ.get(v)), "")
    if cap.upper() in _ISA_WITHOUT_AVX512:
        raise _refusal(
            dtype,
            f"oneDNN is held to {cap}, where bfloat16 ends the process",
            f"Unset {' and '.join(_ISA_VARIABLES)} before start.",
        )
    support = hardware.describe_support(cpu)["bfloat16"]
    if cap.upper() in _ISA_WITHOUT_BF16:
        support = support._replace(fast=False, reason=f"oneDNN is held to {cap}")
    if support.fast:
        return "bfloat16", support.reason
    if dtype == "auto":
        raise _refusal(
            dtype,
            f"{support.reason}: {_SLOW}",
            "Train in float32; asking for bfloat16 by name insists.",
        )
    return "bfloat16", f"warning: {support.reason}: {_SLOW}"


def _float16_on_cpu(cpu):
    native = [flag for flag in FLOAT16_CPU_FLAGS if flag in cpu.cpu_flags]
    if native:
        return "float16", f"native float16 ({', '.join(native)}) through oneDNN"
    advice = "Ask for bfloat16, which this CPU computes natively."
    if not hardware.describe_support(cpu)["bfloat16"].fast:
        advice = "Train in float32."
    flags = " or ".join(FLOAT16_CPU_FLAGS)
    raise _refusal(
        "float16", f"{cpu.label} has no {flags}, and no GPU is there", advice
    )
