"""The configuration that every task starts from; files in `configs/` are deltas."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import config_dict

from tfamp import checks
from tfamp.training import precision_config

STRATEGIES = ("none", "mirrored", "multi_worker_mirrored")


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults shared by every task.

    Returns:
      A `ConfigDict`. Tasks fill in `task`, `data` and `model`; `tiny` holds what
      `apply_tiny` overrides so that one step runs in seconds.
    """
    config = config_dict.ConfigDict()
    config.name = ""  # Names the run's folder.
    config.task = ""  # A key of `tasks.TASKS`.
    config.data_dir = ""  # Folder of prepared (TFDS) or local data; "": default.
    config.manual_dir = ""  # Folder with a TFDS data set's original files.
    config.seed = 0
    config.epochs = 3
    config.batch_size = 32  # Of all replicas together, as is the next.
    config.eval_batch_size = 256
    # Share of the training data that selects the best checkpoint; 0: nothing is split
    # off, and the weights after the last epoch are what counts.
    config.validation_fraction = 0.1
    config.limit_examples = 0  # 0: all. Else the first so many of each split.
    # None: as Keras decides (XLA on a GPU, none on a CPU).
    config.jit_compile = config_dict.placeholder(bool)
    # Data-parallel replicas: "none"; "mirrored", on all GPUs, or on all logical CPU
    # devices where there is none; "multi_worker_mirrored", on the devices of all
    # processes that the environment variable TF_CONFIG names.
    config.strategy = "none"
    config.optimizer = _optimizer()
    config.precision = _precision()
    config.data = config_dict.ConfigDict({"name": ""})
    config.data.cache = True  # Keep the examples in memory after the first epoch.
    config.model = config_dict.ConfigDict({"name": ""})
    # What float32 has of its own in comparisons and benchmarks, say the batch size that
    # fits into memory. None: the same.
    config.float32 = config_dict.ConfigDict(
        {
            "batch_size": config_dict.placeholder(int),
            "learning_rate": config_dict.placeholder(float),
        }
    )
    # Whether a comparison has runs of the mixed mode without loss scaling, too.
    config.compare_unscaled = False
    config.tiny = config_dict.ConfigDict(
        {"epochs": 1, "batch_size": 8, "limit_examples": 40}
    )
    return config


def _optimizer():
    """Adam or AdamW with an optional warm-up and decay."""
    optimizer = config_dict.ConfigDict()
    optimizer.name = "adam"  # "sgd", "adam" or "adamw".
    optimizer.learning_rate = 1e-3
    optimizer.schedule = "constant"  # "constant", "linear" or "cosine" decay to 0.
    optimizer.warmup_fraction = 0.0  # Share of all steps with linear warm-up.
    optimizer.epsilon = 1e-7  # Of Adam and AdamW; Keras' default, BERT's is 1e-6.
    # Of AdamW and SGD, apart from the gradient and times the learning rate; none on
    # biases and normalization.
    optimizer.weight_decay = 0.0
    optimizer.momentum = 0.9  # Of SGD.
    optimizer.nesterov = False  # Of SGD.
    optimizer.clip_global_norm = 0.0  # 0: no clipping. Done after unscaling.
    # Batches whose gradients are averaged for one update of the weights.
    optimizer.accumulation_steps = 1
    return optimizer


def _precision():
    """The mode and the loss scale's settings, as `LossScaleOptimizer` names them."""
    precision = config_dict.ConfigDict()
    precision.mode = "auto"
    # Modes of single layers: pairs of (pattern of the layer's whole path, mode).
    precision.overrides = ()
    # True: the policy stays float32 and graphs are rewritten to the format that `mode`
    # names. None: as the environment variable TF_ENABLE_AUTO_MIXED_PRECISION says.
    precision.graph_rewrite = config_dict.placeholder(bool)
    # One compiled kernel each for dropout, GELU and others in the mixed modes; see
    # `tfamp.enable`.
    precision.fused_kernels = True
    # Of TensorFlow's kernels; None leaves each as it is. See `switches`.
    precision.deterministic = config_dict.placeholder(bool)
    precision.cudnn_autotune = config_dict.placeholder(bool)
    precision.float16_accumulation = config_dict.placeholder(str)  # "float32"/"float16"
    # Skip and count steps whose gradients are not finite in the modes without loss
    # scaling, too.
    precision.finite_guard = False
    precision.loss_scale = config_dict.ConfigDict()
    # False: float16 trains without loss scaling, to see what that does.
    precision.loss_scale.enabled = True
    precision.loss_scale.initial_scale = 2.0**15
    precision.loss_scale.growth_interval = 2000
    precision.loss_scale.growth_factor = 2.0
    precision.loss_scale.backoff_factor = 0.5
    precision.loss_scale.hysteresis = 1
    precision.loss_scale.min_scale = 2.0**-14
    precision.loss_scale.max_scale = config_dict.placeholder(float)
    precision.loss_scale.dynamic = True
    precision.loss_scale.schedule = _growth_interval_schedule()
    return precision


def _growth_interval_schedule():
    """What moves the growth interval: fields of `growth_interval`'s classes."""
    schedule = config_dict.ConfigDict()
    # "constant" (`growth_interval` throughout), "piecewise" or "geometric".
    schedule.name = "constant"
    schedule.boundaries = (1,)  # Piecewise; it has no use for `growth_interval`.
    schedule.intervals = (100, 2000)
    # Geometric. None: `growth_interval`, brought within the two bounds.
    schedule.initial = config_dict.placeholder(int)
    schedule.lengthen = 2.0
    schedule.shorten = 0.75
    schedule.min_interval = 100
    schedule.max_interval = 2**14
    return schedule


def _are_pairs(values):
    pairs = [tuple(v) for v in values if isinstance(v, list | tuple)]
    strings = all(isinstance(text, str) for pair in pairs for text in pair)
    return (
        len(pairs) == len(values)
        and all(len(pair) == 2 for pair in pairs)
        and strings
        and len(dict(pairs)) == len(pairs)
    )


def _are_counts(values):
    return all(checks.is_integer(value) and value >= 1 for value in values)


def _rise(values):
    return _are_counts(values) and list(values) == sorted(set(values))


# Of `precision.loss_scale.schedule`; as below.
_SCHEDULE_RULES = {
    "name": (
        f"one of {precision_config.SCHEDULES}",
        lambda v: v in precision_config.SCHEDULES,
    ),
    "boundaries": ("a rising tuple of integers of at least 1", _rise),
    "intervals": ("a tuple of integers of at least 1", _are_counts),
    "initial": ("at least 1", lambda v: v >= 1),
    "lengthen": ("in [1, 2**53]", lambda v: 1 <= v <= 2**53),
    "shorten": ("in (0, 1]", lambda v: 0 < v <= 1),
    "min_interval": ("at least 1", lambda v: v >= 1),
    "max_interval": ("in [1, 2**53]", lambda v: 1 <= v <= 2**53),
}
# Field -> what it must satisfy, in words and as a predicate.
_RULES = {
    "epochs": ("at least 1", lambda v: v >= 1),
    "batch_size": ("at least 1", lambda v: v >= 1),
    "eval_batch_size": ("at least 1", lambda v: v >= 1),
    "float32.batch_size": ("at least 1", lambda v: v >= 1),
    "float32.learning_rate": ("positive and finite", lambda v: 0 < v < math.inf),
    "strategy": (f"one of {STRATEGIES}", lambda v: v in STRATEGIES),
    "limit_examples": ("0 (all) or at least 2", lambda v: v == 0 or v >= 2),
    "seed": ("at least 0", lambda v: v >= 0),
    "validation_fraction": ("in [0, 1)", lambda v: 0 <= v < 1),
    "optimizer.learning_rate": ("positive and finite", lambda v: 0 < v < math.inf),
    "optimizer.warmup_fraction": ("in [0, 1]", lambda v: 0 <= v <= 1),
    "optimizer.weight_decay": ("finite, at least 0", lambda v: 0 <= v < math.inf),
    "optimizer.momentum": ("in [0, 1)", lambda v: 0 <= v < 1),
    "optimizer.clip_global_norm": ("finite, at least 0", lambda v: 0 <= v < math.inf),
    "optimizer.epsilon": ("positive and finite", lambda v: 0 < v < math.inf),
    "optimizer.accumulation_steps": ("at least 1", lambda v: v >= 1),
    "data.image_size": ("at least 4", lambda v: v >= 4),
    "data.sequence_length": ("at least 3", lambda v: v >= 3),
    "data.test_fraction": ("in (0, 1)", lambda v: 0 < v < 1),
    "data.doc_stride": ("at least 1", lambda v: v >= 1),
    "data.max_query_length": ("at least 1", lambda v: v >= 1),
    "data.max_answer_length": ("at least 1", lambda v: v >= 1),
    "data.n_best_size": ("at least 1", lambda v: v >= 1),
    "model.dropout": ("in [0, 1)", lambda v: 0 <= v < 1),
    "model.pooling": ("'cls' or 'mean'", lambda v: v in ("cls", "mean")),
    "model.num_layers": ("at least 1", lambda v: v >= 1),
    "model.num_heads": ("at least 1", lambda v: v >= 1),
    "model.hidden_dim": ("at least 1", lambda v: v >= 1),
    "model.intermediate_dim": ("at least 1", lambda v: v >= 1),
    "model.max_sequence_length": ("at least 3", lambda v: v >= 3),
    "model.vocabulary_size": ("at least 5, the special tokens", lambda v: v >= 5),
    "model.dense": ("at least 0", lambda v: v >= 0),
    "model.blocks": (
        "a tuple of tuples of channels, each at least 1",
        lambda v: all(isinstance(b, tuple) and min(b, default=0) >= 1 for b in v),
    ),
    "model.widths": ("a tuple of integers of at least 1", _are_counts),
    "model.blocks_per_stage": ("a tuple of integers of at least 1", _are_counts),
    "label_smoothing": ("in [0, 1)", lambda v: 0 <= v < 1),
    "precision.float16_accumulation": (
        'None, "float32" or "float16"',
        lambda v: v in ("float32", "float16"),
    ),
    "precision.overrides": (
        "a tuple of pairs (pattern, mode), each pattern once",
        _are_pairs,
    ),
    "precision.loss_scale.growth_interval": ("at least 1", lambda v: v >= 1),
    **{f"precision.loss_scale.schedule.{k}": v for k, v in _SCHEDULE_RULES.items()},
}


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense."""
    wrong = broken_rules(config, _RULES)
    if unknown := set(config.float32) - set(get_config().float32):
        wrong.append(
            f"config.float32 has {', '.join(sorted(unknown))}. Expected "
            f"{', '.join(get_config().float32)}."
        )
    wrong += _encoder_errors(config.model) if not wrong else []
    if config.strategy in STRATEGIES[1:] and config.optimizer.accumulation_steps > 1:
        wrong.append(
            "Keras 3.15 cannot accumulate gradients under a strategy. Received: "
            f"config.strategy={config.strategy!r} and config.optimizer."
            f"accumulation_steps={config.optimizer.accumulation_steps}. Expected "
            "accumulation_steps=1 or strategy='none'."
        )
    if not any("loss_scale" in line for line in wrong):
        wrong += _schedule_errors(config)
    if wrong:
        raise ValueError(" ".join(wrong))


def broken_rules(
    config: config_dict.ConfigDict,
    rules: Mapping[str, tuple[str, Callable[[Any], bool]]],
    prefix: str = "config",
) -> list[str]:
    """Returns what is wrong with a configuration, a sentence or two for each field.

    Args:
      config: The configuration; fields that are missing or None are not looked at.
      rules: Field, with dots -> what it must satisfy, in words and as a predicate.
      prefix: What a user calls the configuration.
    """
    wrong = []
    for field, (words, holds) in rules.items():
        part: Any = config
        for name in field.split("."):
            part = part.get(name) if part is not None else None
        if part is not None and not holds(part):
            wrong.append(f"{prefix}.{field} must be {words}. Received: {part!r}.")
    return wrong


def _encoder_errors(model):
    """What is wrong between the sizes of a new encoder."""
    heads, width = model.get("num_heads"), model.get("hidden_dim")
    if None in (heads, width) or model.get("preset") or width % heads == 0:
        return []
    return [
        "config.model.hidden_dim must be a multiple of config.model.num_heads. "
        f"Received: hidden_dim={width}, num_heads={heads}."
    ]


def _schedule_errors(config):
    """What is wrong between the fields of the growth interval's schedule."""
    try:
        precision_config.loss_scale_keywords(config.precision.loss_scale)
    except (TypeError, ValueError) as e:
        return [f"config.precision.loss_scale.schedule: {e}"]
    return []


def apply_tiny(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy with the overrides of `config.tiny`: a run of seconds."""
    small = config.copy_and_resolve_references()
    small.update(config.tiny.to_dict())
    small.float32.batch_size = None  # A size of its own would not be tiny.
    small.name = f"{config.name}-tiny"
    return small
