"""The configuration that every task starts from; files in `configs/` are deltas.

And what its `precision` part is to the library: keywords.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import config_dict

from tfamp import checks
from tfamp.loss_scaling import growth_schedules, rule
from tfamp.precision import settings as precision_settings
from tfamp.training import optimizers

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


def _one_of(names):
    return f"one of {names}", lambda v: v in names


# What fields must satisfy, in words and as a predicate. A field is here if what is
# wrong with it would be told late, after data were read or an epoch trained, or never.
_GROUPS = (
    (
        ("at least 1", lambda v: v >= 1),
        "epochs batch_size eval_batch_size float32.batch_size "
        "optimizer.accumulation_steps data.doc_stride data.max_query_length "
        "data.max_answer_length data.n_best_size model.num_layers model.num_heads "
        "model.hidden_dim model.intermediate_dim",
    ),
    (
        ("in [0, 1)", lambda v: 0 <= v < 1),
        "validation_fraction label_smoothing model.dropout",
    ),
    (
        ("positive and finite", lambda v: 0 < v < math.inf),
        "float32.learning_rate optimizer.learning_rate optimizer.epsilon",
    ),
    (
        ("finite, at least 0", lambda v: 0 <= v < math.inf),
        "optimizer.weight_decay optimizer.clip_global_norm seed model.dense",
    ),
    (("in [0, 1]", lambda v: 0 <= v <= 1), "optimizer.warmup_fraction"),
    (("in (0, 1)", lambda v: 0 < v < 1), "data.test_fraction"),
    (("0 (all) or at least 2", lambda v: v == 0 or v >= 2), "limit_examples"),
    (
        ("at least 3", lambda v: v >= 3),
        "data.sequence_length model.max_sequence_length",
    ),
    (("at least 4", lambda v: v >= 4), "data.image_size"),
    (("at least 5, the special tokens", lambda v: v >= 5), "model.vocabulary_size"),
    (
        ("a tuple of integers of at least 1", _are_counts),
        "model.widths model.blocks_per_stage",
    ),
    (
        (
            "a tuple of tuples of integers of at least 1",
            lambda v: all(map(_are_counts, v)),
        ),
        "model.blocks",
    ),
    (_one_of(STRATEGIES), "strategy"),
    (_one_of(optimizers.NAMES), "optimizer.name"),
    (_one_of(optimizers.SCHEDULES), "optimizer.schedule"),
    (_one_of(("cls", "mean")), "model.pooling"),
    (_one_of(("float32", "float16")), "precision.float16_accumulation"),
    (
        ("a tuple of pairs (pattern, mode), each pattern once", _are_pairs),
        "precision.overrides",
    ),
)
_RULES = {field: each for each, fields in _GROUPS for field in fields.split()}


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense."""
    wrong = broken_rules(config, _RULES)
    if unknown := set(config.float32) - set(get_config().float32):
        wrong.append(
            f"config.float32 has {', '.join(sorted(unknown))}. Expected "
            f"{', '.join(get_config().float32)}."
        )
    heads, width = config.model.get("num_heads"), config.model.get("hidden_dim")
    if not wrong and heads and width and not config.model.get("preset"):
        if width % heads:
            wrong.append(
                "config.model.hidden_dim must be a multiple of config.model.num_heads. "
                f"Received: hidden_dim={width}, num_heads={heads}."
            )
    if config.strategy in STRATEGIES[1:] and config.optimizer.accumulation_steps > 1:
        wrong.append(
            "Keras 3.15 cannot accumulate gradients under a strategy. Received: "
            f"config.strategy={config.strategy!r} and config.optimizer."
            f"accumulation_steps={config.optimizer.accumulation_steps}. Expected "
            "accumulation_steps=1 or strategy='none'."
        )
    try:
        keywords = loss_scale_keywords(config.precision.loss_scale)
        rule.LossScaleConfig.from_keywords(keywords)
    except (TypeError, ValueError) as e:
        wrong.append(f"config.precision.loss_scale: {e}")
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


def apply_tiny(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy with the overrides of `config.tiny`: a run of seconds."""
    small = config.copy_and_resolve_references()
    small.update(config.tiny.to_dict())
    small.float32.batch_size = None  # A size of its own would not be tiny.
    small.name = f"{config.name}-tiny"
    return small


# ---- The precision part ----


def enable_keywords(settings: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the keywords of `tfamp.enable` beside the mode.

    Args:
      settings: The `precision` part of a configuration.
    """
    keywords = loss_scale_keywords(settings.loss_scale)
    return {
        "overrides": dict(settings.overrides),
        "graph_rewrite": settings.graph_rewrite,
        "fused_kernels": settings.fused_kernels,
        "loss_scale": keywords if settings.loss_scale.enabled else False,
    }


def settle_rewrite(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy in which no graph rewrite is left to the environment.

    So that a run's folder tells whether graphs were rewritten.

    Args:
      config: A configuration.

    Raises:
      ValueError: If the environment asks for a rewrite, and the mode for a policy.
    """
    settled = config.copy_and_resolve_references()
    if settled.precision.graph_rewrite is None:
        mode = settled.precision.mode
        request = precision_settings.rewrite_request(False, mode, None)
        settled.precision.graph_rewrite = request is not None
    return settled


def kernel_keywords(settings: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the keywords of `switches.scope`.

    Args:
      settings: The `precision` part of a configuration.
    """
    names = ("deterministic", "cudnn_autotune", "float16_accumulation")
    return {name: settings[name] for name in names}


def loss_scale_keywords(settings: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns keywords of `LossScaleOptimizer`, the schedule as an object.

    Args:
      settings: The `precision.loss_scale` part of a configuration.

    Raises:
      ValueError: If the schedule makes no sense; TypeError if of another type.
    """
    keywords = settings.to_dict()
    del keywords["enabled"]
    given = keywords.pop("schedule")
    if given["name"] == "piecewise":
        keywords["growth_interval"] = growth_schedules.PiecewiseGrowthInterval(
            given["boundaries"], given["intervals"]
        )
    elif given["name"] == "geometric":
        bounds = given["min_interval"], given["max_interval"]
        initial = given["initial"]
        if initial is None:
            initial = min(max(keywords["growth_interval"], bounds[0]), bounds[1])
        keywords["growth_interval"] = growth_schedules.GeometricGrowthInterval(
            initial, given["lengthen"], given["shorten"], *bounds
        )
    elif given["name"] != "constant":
        raise ValueError(
            "`schedule.name` must be 'constant', 'piecewise' or 'geometric'. Received: "
            f"{given['name']!r}."
        )
    return keywords
