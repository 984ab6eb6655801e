"""What a configuration must satisfy, and copies of it as flags and presets ask."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from tfamp import checks
from tfamp.loss_scaling import growth_schedules, rule
from tfamp.precision import settings as precision_settings
from tfamp.runs import optimizers
from tfamp.runs.default_config import get_config
from tfamp.storage import low_bit

STRATEGIES = ("none", "mirrored", "multi_worker_mirrored")


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
    "optimizer.name": one_of(optimizers.NAMES),
    "optimizer.schedule": one_of(optimizers.SCHEDULES),
    "model.pooling": one_of(("cls", "mean")),
    "precision.float16_accumulation": one_of(("float32", "float16")),
    "precision.optimizer_state": one_of(low_bit.STATES),
    "precision.weights": one_of(("float32", "bfloat16")),
    "precision.overrides": _PAIRS,
}
_RULES = {field: rule for fields, rule in _GROUPS.items() for field in fields.split()}


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense."""
    wrong = broken_rules(config, _RULES)
    defaults = get_config().float32
    if unknown := sorted(set(config.float32) - set(defaults)):
        wrong.append(
            f"config.float32 has {', '.join(unknown)}. Expected {', '.join(defaults)}."
        )
    model = config.model
    if not wrong and model.get("num_heads") and not model.get("preset"):
        if model.hidden_dim % model.num_heads:
            wrong.append(
                "config.model.hidden_dim must be a multiple of config.model.num_heads. "
                f"Received: hidden_dim={model.hidden_dim}, num_heads={model.num_heads}."
            )
    if config.strategy != "none" and config.steps_per_execution > 1:
        # A step's graph within a loop lacks a placeholder.
        wrong.append(
            "Keras 3.15 fails with config.steps_per_execution under a strategy. "
            f"Received: config.strategy={config.strategy!r} and "
            f"config.steps_per_execution={config.steps_per_execution}. Expected 1 or "
            "strategy='none'."
        )
    if config.precision.numerics and config.steps_per_execution > 1:
        wrong.append(
            "A NumericsMonitor watches single steps. Received: config.precision."
            f"numerics={config.precision.numerics} and config.steps_per_execution="
            f"{config.steps_per_execution}. Expected one of them unset (0 or 1)."
        )
    try:
        rule.LossScaleConfig.from_keywords(
            loss_scale_keywords(config.precision.loss_scale)
        )
    except (TypeError, ValueError) as e:
        wrong.append(f"config.precision.loss_scale: {e}")
    if wrong:
        raise ValueError(" ".join(wrong))


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


def check_fields(config: Any) -> None:
    """Raises TypeError unless `get_config` of a file returned what it should."""
    expected = get_config().keys()
    given = config.keys() if isinstance(config, config_dict.ConfigDict) else ()
    if missing := [name for name in expected if name not in given]:
        raise TypeError(
            "`get_config` must return what `tfamp.training.get_config` does, with its "
            f"fields changed. Received: {type(config).__name__}, without "
            f"{', '.join(missing[:3])}{' and others' * (len(missing) > 3)}."
        )


def apply_fine_tuning(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy with the overrides of `config.fine_tuning`, with a preset.

    A new model wants larger steps, and more of them, than pretrained weights do. The
    configuration itself is returned without a preset, or without such overrides.
    """
    if not config.model.get("preset") or "fine_tuning" not in config:
        return config
    tuned = config.copy_and_resolve_references()
    tuned.update(config.fine_tuning.to_dict())
    return tuned


# ---- The precision part ----


def settle_rewrite(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy in which no graph rewrite is left to the environment.

    A run's folder thus records whether graphs were rewritten.

    Raises:
      ValueError: If the environment asks for a rewrite, and the mode for a policy.
    """
    settled = config.copy_and_resolve_references()
    if settled.precision.graph_rewrite is None:
        request = precision_settings.rewrite_request(
            False, settled.precision.mode, None
        )
        settled.precision.graph_rewrite = request is not None
    return settled


def loss_scale_keywords(settings: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns keywords of `LossScaleOptimizer`, the schedule as an object.

    Args:
      settings: The `precision.loss_scale` part of a configuration.

    Raises:
      ValueError: If the schedule makes no sense; TypeError if of another type.
    """
    keywords = settings.to_dict()
    del keywords["enabled"]
    schedule = keywords.pop("schedule")
    if schedule["name"] == "piecewise":
        keywords["growth_interval"] = growth_schedules.PiecewiseGrowthInterval(
            schedule["boundaries"], schedule["intervals"]
        )
    elif schedule["name"] == "geometric":
        low, high = schedule["min_interval"], schedule["max_interval"]
        initial = schedule["initial"]
        if initial is None:
            initial = min(max(keywords["growth_interval"], low), high)
        keywords["growth_interval"] = growth_schedules.GeometricGrowthInterval(
            initial, schedule["lengthen"], schedule["shorten"], low, high
        )
    elif schedule["name"] != "constant":
        raise ValueError(
            "`schedule.name` must be 'constant', 'piecewise' or 'geometric'. Received: "
            f"{schedule['name']!r}."
        )
    return keywords
