"""Validates the keywords of `LossScaleOptimizer`, without creating a variable."""

import dataclasses

from tfamp.loss_scaling import rule as loss_scale

OVERFLOW_DROPS = ("microbatch", "window")
JIT_COMPILE = ("auto", True, False)


def check_keywords(**loss_scale_keywords) -> loss_scale.LossScaleConfig:
    """Validates keywords of `LossScaleOptimizer` without creating a variable.

    Returns:
      The `LossScaleConfig` that they stand for.

    Raises:
      TypeError: If a keyword is unknown. ValueError: If a value makes no sense.
    """
    keywords = dict(loss_scale_keywords)
    keywords.pop("name", None)
    if "dynamic_growth_steps" in keywords:
        keywords["growth_interval"] = keywords.pop("dynamic_growth_steps")
    known = [field.name for field in dataclasses.fields(loss_scale.LossScaleConfig)]
    known += ["overflow_drops", "jit_compile"]
    unknown = sorted(set(keywords) - set(known))
    if unknown:
        raise TypeError(
            f"Unknown loss-scale keywords. Received: {', '.join(unknown)}. "
            f"Expected some of {', '.join(known)}."
        )
    return validate(**keywords)


def validate(
    overflow_drops="microbatch", jit_compile="auto", **settings
) -> loss_scale.LossScaleConfig:
    """Returns the loss scale's settings.

    Args:
      overflow_drops: As for `LossScaleOptimizer`.
      jit_compile: As for `LossScaleOptimizer`.
      **settings: Fields of `LossScaleConfig`.

    Raises:
      ValueError: If a value makes no sense; TypeError if it is of another type.
    """
    if overflow_drops not in OVERFLOW_DROPS:
        raise ValueError(
            f"`overflow_drops` must be one of {OVERFLOW_DROPS}. "
            f"Received: overflow_drops={overflow_drops!r}."
        )
    if jit_compile not in JIT_COMPILE:
        raise ValueError(
            f"`jit_compile` must be one of {JIT_COMPILE}. "
            f"Received: jit_compile={jit_compile!r}."
        )
    return loss_scale.LossScaleConfig(**settings)
