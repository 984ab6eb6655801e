"""What the `precision` part of a configuration is to the library: keywords."""

from typing import Any

from ml_collections import config_dict

from tfamp.loss_scaling import growth_schedules as growth_interval
from tfamp.precision import settings as enable_settings

SCHEDULES = ("constant", "piecewise", "geometric")  # Of the growth interval.


def enable_keywords(settings: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the keywords of `tfamp.enable` beside the mode.

    Args:
      settings: The `precision` part of a configuration.

    Raises:
      ValueError: If a setting makes no sense; TypeError if of another type.
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
        request = enable_settings.rewrite_request(False, settled.precision.mode, None)
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
    schedule = keywords.pop("schedule")
    name = schedule["name"]
    if name not in SCHEDULES:
        raise ValueError(
            "Unknown schedule of the growth interval. Received: "
            f"config.precision.loss_scale.schedule.name={name!r}. "
            f"Expected one of {SCHEDULES}."
        )
    if name == "piecewise":
        keywords["growth_interval"] = growth_interval.PiecewiseGrowthInterval(
            schedule["boundaries"], schedule["intervals"]
        )
    elif name == "geometric":
        bounds = schedule["min_interval"], schedule["max_interval"]
        initial = schedule["initial"]
        if initial is None:
            initial = min(max(keywords["growth_interval"], bounds[0]), bounds[1])
        keywords["growth_interval"] = growth_interval.GeometricGrowthInterval(
            initial, schedule["lengthen"], schedule["shorten"], *bounds
        )
    return keywords
