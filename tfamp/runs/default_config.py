"""The configuration that every task starts from, and what each field must satisfy.

Files in `configs/` are deltas. Nothing here imports TensorFlow: a mistyped field, or a
value that breaks a rule, is told at once on the command line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from tfamp import checks
from tfamp.facts import modes


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults shared by every task.

    Returns:
      A `ConfigDict`. Tasks fill in `task`, `data` and `model`; `tiny` holds what
      `apply_tiny` overrides so that one step runs in seconds.
    """
    return config_dict.ConfigDict(
        {
            "name": "",  # Names the run's folder.
            # A function that returns a `tfamp.training.Task`: a recipe's, such as
            # "tfamp.recipes.images:create", or a custom one, "module:function" or
            # "path/file.py:function".
            "task": "",
            "data_dir": "",  # Prepared (TFDS) or local data; "": the default folder.
            "manual_dir": "",  # Folder with a TFDS data set's original files.
            "seed": 0,
            "epochs": 3,
            "batch_size": 32,  # Of all replicas together, as is the next.
            "eval_batch_size": 256,
            # Share of the training data that selects the best checkpoint; 0: nothing is
            # split off, and the weights after the last epoch are what counts.
            "validation_fraction": 0.1,
            "limit_examples": 0,  # 0: all. Else the first so many of each split.
            # None: as Keras decides (XLA on a GPU, none on a CPU).
            "jit_compile": config_dict.placeholder(bool),
            # Batches in one call of the compiled function; callbacks, signals and
            # progress wait for its end. What an epoch's steps cannot be divided by is
            # lowered, see `environment.json`.
            "steps_per_execution": 1,
            # Data-parallel replicas: "none"; "mirrored", on all GPUs, or on all logical
            # CPU devices where there is none; "multi_worker_mirrored", on the devices
            # of all processes that the environment variable TF_CONFIG names.
            "strategy": "none",
            # Of the last: bytes of gradients that are sent together, while others are
            # still computed. 0: all at once, at the end.
            "bytes_per_pack": 0,
            "optimizer": _optimizer(),
            "precision": _precision(),
            # Cache: keep the examples in memory after the first epoch.
            "data": {"name": "", "cache": True},
            "model": {"name": ""},
            # What float32 has of its own in comparisons and benchmarks, say the batch
            # size that fits into memory. None: the same.
            "float32": {
                "batch_size": config_dict.placeholder(int),
                "learning_rate": config_dict.placeholder(float),
            },
            # Whether a comparison has runs of the mixed mode without loss scaling, too.
            "compare_unscaled": False,
            "tiny": {"epochs": 1, "batch_size": 8, "limit_examples": 40},
        }
    )


def _optimizer():
    """Adam with an optional warm-up and decay."""
    return {
        "name": "adam",  # "sgd", "adam" or "adamw".
        "learning_rate": 1e-3,
        "schedule": "constant",  # "constant", "linear" or "cosine" decay to 0.
        "warmup_fraction": 0.0,  # Share of all steps with linear warm-up.
        "epsilon": 1e-7,  # Of Adam and AdamW; Keras' default, BERT's is 1e-6.
        # Of AdamW and SGD, apart from the gradient and times the learning rate; none on
        # biases and normalization.
        "weight_decay": 0.0,
        "momentum": 0.9,  # Of SGD.
        "nesterov": False,  # Of SGD.
        "clip_global_norm": 0.0,  # 0: no clipping. Done after unscaling.
        # Batches whose gradients are averaged for one update of the weights.
        "accumulation_steps": 1,
    }


def _precision():
    """The mode and the loss scale's settings, as `LossScaleOptimizer` names them."""
    return {
        "mode": "auto",
        # Modes of single layers: pairs of (pattern of the layer's whole path, mode).
        "overrides": (),
        # True: the policy stays float32 and graphs are rewritten to the format that
        # `mode` names. None: as TF_ENABLE_AUTO_MIXED_PRECISION (environment) says.
        "graph_rewrite": config_dict.placeholder(bool),
        # Updates and small operators compiled into few programs; see `tfamp.enable`.
        # None: in every mode but float32; a comparison has them in all of its modes.
        "fused_kernels": config_dict.placeholder(bool),
        # Patterns of layers that are computed again in the backward pass, and how slots
        # of the optimizer, and weights, are stored; see `tfamp.enable`.
        "remat": (),
        "optimizer_state": "float32",
        "weights": "float32",
        # Of TensorFlow's kernels; None leaves each as it is. See `switches`.
        "deterministic": config_dict.placeholder(bool),
        "cudnn_autotune": config_dict.placeholder(bool),
        "float16_accumulation": config_dict.placeholder(str),  # "float32"/"float16"
        # Skip and count steps whose gradients are not finite in the modes without loss
        # scaling, too.
        "finite_guard": False,
        # Steps from one to the next of which a `NumericsMonitor` tells what 16 bits
        # lose; 0 for none.
        "numerics": 0,
        "loss_scale": {
            # False: float16 trains without loss scaling, to see what that does.
            "enabled": True,
            "initial_scale": 2.0**15,
            "growth_interval": 2000,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "hysteresis": 1,
            "min_scale": 2.0**-14,
            "max_scale": config_dict.placeholder(float),
            "dynamic": True,
            # What moves the growth interval: fields of `growth_interval`'s classes.
            "schedule": {
                # "constant" (`growth_interval` throughout), "piecewise" or "geometric".
                "name": "constant",
                "boundaries": (1,),  # Piecewise, which ignores `growth_interval`.
                "intervals": (100, 2000),
                # Geometric. None: `growth_interval`, brought within the two bounds.
                "initial": config_dict.placeholder(int),
                "lengthen": 2.0,
                "shorten": 0.75,
                "min_interval": 100,
                "max_interval": 2**14,
            },
        },
    }


# ---- What each field must satisfy ----

STRATEGIES = ("none", "mirrored", "multi_worker_mirrored")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("sgd", "adam", "adamw")


def _are_pairs(values):
    try:
        once = len(dict(values)) == len(values)
        return once and all(isinstance(text, str) for pair in values for text in pair)
    except (TypeError, ValueError):
        return False


def _are_counts(values):
    return all(checks.is_integer(value) and value >= 1 for value in values)


def _at_least(least):
    return f"at least {least}", lambda v: v >= least


def one_of(names: Sequence[str]) -> tuple[str, Callable[[Any], bool]]:
    """Returns the rule that a field is one of some names; see `broken_rules`."""
    return f"one of {names}", lambda v: v in names


_SHARE = "in [0, 1)", lambda v: 0 <= v < 1
_POSITIVE = "positive and finite", lambda v: 0 < v < math.inf
_NOT_NEGATIVE = "finite, at least 0", lambda v: 0 <= v < math.inf
_PAIRS = "a tuple of pairs (pattern, mode), each pattern once", _are_pairs
_COUNTS = "a tuple of integers of at least 1", _are_counts
_BLOCKS = (
    "a tuple of tuples of integers of at least 1",
    lambda v: all(map(_are_counts, v)),
)
# What fields must satisfy, as text and as a predicate. A field is here if an error in
# it would be reported late, after data were read or an epoch trained, or never.
_GROUPS = {
    "epochs batch_size eval_batch_size steps_per_execution "
    "float32.batch_size optimizer.accumulation_steps "
    "data.doc_stride data.max_query_length data.max_answer_length data.n_best_size "
    "model.num_layers model.num_heads model.hidden_dim "
    "model.intermediate_dim": _at_least(1),
    "data.sequence_length model.max_sequence_length": _at_least(3),
    "data.image_size": _at_least(4),
    "model.vocabulary_size": _at_least(5),  # The special tokens.
    "limit_examples": ("0 (all) or at least 2", lambda v: v == 0 or v >= 2),
    "validation_fraction label_smoothing model.dropout": _SHARE,
    "data.test_fraction": ("in (0, 1)", lambda v: 0 < v < 1),
    "optimizer.warmup_fraction": ("in [0, 1]", lambda v: 0 <= v <= 1),
    "float32.learning_rate optimizer.learning_rate optimizer.epsilon": _POSITIVE,
    "optimizer.weight_decay optimizer.clip_global_norm seed bytes_per_pack "
    "model.dense": _NOT_NEGATIVE,
    "model.widths model.blocks_per_stage": _COUNTS,
    "model.blocks": _BLOCKS,
    "strategy": one_of(STRATEGIES),
    "optimizer.name": one_of(OPTIMIZERS),
    "optimizer.schedule": one_of(SCHEDULES),
    "data.on_bad_rows": one_of(("raise", "skip")),
    "model.pooling": one_of(("cls", "mean")),
    "precision.float16_accumulation": one_of(("float32", "float16")),
    "precision.weights": one_of(("float32", "bfloat16")),
    "precision.loss_scale.schedule.name": one_of(
        ("constant", "piecewise", "geometric")
    ),
    "precision.overrides": _PAIRS,
}
RULES = {field: rule for fields, rule in _GROUPS.items() for field in fields.split()}


def check_values(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value breaks its rule.

    Args:
      config: A configuration, also one that the rules of `RULES` know little of.
    """
    check(config, RULES)
    precision = config.get("precision") or {}
    mode = precision.get("mode") or "auto"
    if mode != "auto" and not precision.get("graph_rewrite"):
        modes.get_mode(mode)


def check(
    config: config_dict.ConfigDict,
    rules: Mapping[str, tuple[str, Callable[[Any], bool]]],
) -> None:
    """Raises ValueError, naming all fields at once, if one breaks its rule.

    Args:
      config, rules: As of `broken_rules`.
    """
    if wrong := broken_rules(config, rules):
        raise ValueError(" ".join(wrong))


def broken_rules(
    config: config_dict.ConfigDict,
    rules: Mapping[str, tuple[str, Callable[[Any], bool]]],
    prefix: str = "config",
) -> list[str]:
    """Returns what is wrong with a configuration, a sentence or two for each field.

    Args:
      config: The configuration; fields that are missing or None are not looked at.
      rules: Field, with dots -> what it must satisfy, as text and as a predicate.
      prefix: What a user calls the configuration.
    """
    wrong = []
    for field, (words, holds) in rules.items():
        part: Any = config
        for name in field.split("."):
            part = part.get(name) if isinstance(part, config_dict.ConfigDict) else None
        if part is not None and not holds(part):
            wrong.append(f"{prefix}.{field} must be {words}. Received: {part!r}.")
    return wrong
