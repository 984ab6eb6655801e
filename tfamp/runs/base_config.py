"""What a configuration must satisfy, and copies of it as flags and presets ask."""

from typing import Any

from ml_collections import config_dict

from tfamp.loss_scaling import growth_schedules, rule
from tfamp.precision import settings as precision_settings
from tfamp.runs import default_config
from tfamp.runs.default_config import get_config
from tfamp.storage import low_bit

# Those of values that TensorFlow is needed for are here.
_RULES = {
    **default_config.RULES,
    "precision.optimizer_state": default_config.one_of(low_bit.STATES),
}


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense."""
    wrong = default_config.broken_rules(config, _RULES)
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
    return keywords
