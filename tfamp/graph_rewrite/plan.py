"""What a request for the graph rewrite comes to on this host, and what is against it.

Reads globals and writes none. TensorFlow accepts all that is refused here: it ignores
the request without a word, or ends the process.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfamp import errors, hardware
from tfamp.graph_rewrite import lists as rewrite_lists
from tfamp.graph_rewrite.config import (
    BOOLEANS,
    FLOAT32_OPS,
    LEVELS,
    PREFIX,
    RewriteConfig,
    choose_dtype,
    force_all_problem,
    read_bool,
)

__all__ = ["FLOAT32_OPS", "PREFIX", "RewriteConfig", "choose_dtype", "read_bool"]

# NVIDIA's TensorFlow 1 reads these two; TensorFlow 2 reads neither.
FLAGS = (
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE",
)
DEAD_VARIABLE = "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING"
LEVEL, LOG_PATH = PREFIX + "LEVEL", PREFIX + "LOG_PATH"
# JSON of the values that tfamp has replaced: a child process inherits the variables,
# and is not to take them for the user's wish.
REPLACED = "TFAMP_GRAPH_REWRITE_REPLACED"
VARIABLES = (*FLAGS, REPLACED, LEVEL, LOG_PATH, *rewrite_lists.variable_names())
TOGGLES = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
OLD_TOGGLE = "auto_mixed_precision_mkl"  # Another name of the one for bfloat16.
MIN_NODES = "min_graph_nodes"
_DEFAULT_MIN_NODES = 4  # TensorFlow 2.21's.


class Plan(NamedTuple):
    """What a request comes to, before anything is changed.

    Attributes:
      dtype: "bfloat16" or "float16".
      reason: Why this dtype.
      warnings: What the user should know, one sentence each.
      environ: Environment variable to value, None to unset it, for `VARIABLES`.
    """

    dtype: str
    reason: str
    warnings: tuple[str, ...]
    environ: dict[str, str | None]


def make_plan(
    config: RewriteConfig,
    devices: Sequence[hardware.DeviceDescription],
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> Plan:
    """Returns what a request comes to.

    Args:
      config: A `RewriteConfig`.
      devices: The devices to decide for.
      environ: Environment variables, without what tfamp set.
      options: Grappler's options.

    Returns:
      A `Plan`.

    Raises:
      UnsupportedModeError: If the rewrite has no effect on these devices.
      ValueError: If something else stands against it; the message has all reasons.
    """
    error, dtype, reason = None, config.dtype, ""
    try:
        dtype, reason = choose_dtype(config.dtype, devices, environ)
    except errors.UnsupportedModeError as refusal:
        error = refusal
    level = config.level or environ.get(LEVEL) or None
    merged, unread = _merge_lists(config, environ, _list_mode(dtype, devices))
    problems = [
        *([str(error)] if error else []),
        *_policy_problems(),
        *_option_problems(options),
        *_bool_problems(environ),
        *_level_problems(level, dtype, "level" if config.level else LEVEL),
        *merged.problems,
    ]
    if problems:
        kind = errors.UnsupportedModeError if error else ValueError
        raise kind(_join(problems))
    notes = [
        *([reason] if reason.startswith("warning:") else []),
        *unread,
        *merged.notes,
        *_level_notes(level, dtype),
        *_dead_notes(environ),
    ]
    variables = {
        **dict.fromkeys(FLAGS, "1"),
        LEVEL: level,
        LOG_PATH: config.log_path or environ.get(LOG_PATH) or None,
        **merged.environ,
    }
    replaced = {k: environ.get(k) for k, v in variables.items() if v != environ.get(k)}
    variables[REPLACED] = json.dumps(replaced, sort_keys=True)
    return Plan(dtype, reason, tuple(notes), variables)


def find_obstacles(
    dtype: str,
    devices: Sequence[hardware.DeviceDescription],
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> list[str]:
    """Returns what stops a rewrite to `dtype` as options and variables now stand."""
    found = _option_problems(options)
    names = [TOGGLES[dtype], *([OLD_TOGGLE] if dtype == "bfloat16" else [])]
    if not any(options.get(name) for name in names):
        found.append(f"TensorFlow's option {names[0]!r} is off.")
    if options.get(MIN_NODES, 0) > _DEFAULT_MIN_NODES:
        found.append(f"TensorFlow skips graphs below {MIN_NODES}={options[MIN_NODES]}.")
    try:
        choose_dtype(dtype, devices, environ)
    except errors.UnsupportedModeError as error:
        found.append(str(error))
    found += _level_problems(environ.get(LEVEL), dtype, LEVEL)
    config = RewriteConfig(float32_ops=())
    merged, _ = _merge_lists(config, environ, _list_mode(dtype, devices))
    return [*found, *merged.problems]


def _join(problems):
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n- {problem}" for problem in problems)
    return f"The graph rewrite cannot be enabled, for {len(problems)} reasons:{lines}"


def _policy_problems():
    policy = keras.config.dtype_policy()
    members = [policy]
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        members += policy.values()
    low = {p.name: p.compute_dtype for p in members if p.compute_dtype != "float32"}
    if not low:
        return []
    names = ", ".join(f"{name!r} (computes in {low[name]})" for name in low)
    return [
        f"Keras' global dtype policy must compute in float32. Received: {names}. "
        "TensorFlow accepts a mixed policy and the graph rewrite together, and undoes "
        'float32 layers then. Call keras.config.set_dtype_policy("float32") first, or '
        "leave the graph rewrite."
    ]


def _option_problems(options):
    if not options.get("disable_meta_optimizer"):
        return []
    return [
        "TensorFlow's graph optimizers are switched off. Call tf.config.optimizer."
        "set_experimental_options({'disable_meta_optimizer': False}) first."
    ]


def _bool_problems(environ):
    problems = []
    for name in (*FLAGS, *BOOLEANS):
        try:
            read_bool(environ, name)
        except ValueError as error:
            ends = " TensorFlow ends the process over it." if name in BOOLEANS else ""
            problems.append(str(error) + ends)
    return problems


def _level_problems(level, dtype, source):
    if not level:
        return []
    if level.upper() not in LEVELS:
        return [f"`{source}` must be one of {', '.join(LEVELS)}. Received: {level!r}."]
    if level.upper() == "UNSAFE_FORCE_ALL" and dtype == "bfloat16":
        return [force_all_problem(source)]
    return []


def _level_notes(level, dtype):
    if (level or "").upper() == "TENSOR_CORES_ONLY" and dtype == "bfloat16":
        return ["The level TENSOR_CORES_ONLY has no effect on a rewrite to bfloat16."]
    return []


def _dead_notes(environ):
    if DEAD_VARIABLE not in environ:
        return []
    return [f"{DEAD_VARIABLE} is set; nothing in TensorFlow 2 reads it."]


def _list_mode(dtype, devices):
    gpu = any(device.kind == "GPU" for device in devices)
    return "float16_cpu" if dtype == "float16" and not gpu else dtype


def _merge_lists(config, environ, mode):
    """Returns the merged lists, and a line if they could not be checked."""
    modes, unread = rewrite_lists.installed()
    changes = [*rewrite_lists.changes_of_environment(environ), *config.changes()]
    # An unsupported "auto" has no lists: only the names are checked then.
    base = (modes or {}).get(mode)
    merged = rewrite_lists.merge(base, changes, config.float32_ops)
    notes = [] if modes else [f"{unread}: changes of them are not checked."]
    return merged, notes
