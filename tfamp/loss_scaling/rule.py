"""The rule of dynamic loss scaling: its settings, and a pure function of its state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tfamp import checks
from tfamp.facts import formats
from tfamp.loss_scaling import growth_schedules

# apex.amp's ceiling; growth beyond it has no use and nears float32's infinity.
DEFAULT_MAX_SCALE = 2.0**24
COUNTER_DTYPE = growth_schedules.COUNTER_DTYPE


class LossScaleState(NamedTuple):
    """State of the loss scale between two steps; all fields have shape [].

    Attributes:
      scale: float32. The loss scale of the next step.
      growth_tracker: int64. Finite steps since the last change of the scale.
      hysteresis_tracker: int64. Non-finite steps left before the scale backs off.
      growth_interval: int64. The current growth interval, in finite steps.
      skipped_steps: int64. Steps skipped so far.
      consecutive_skipped_steps: int64. Steps skipped since the last finite one.
    """

    scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any
    growth_interval: Any
    skipped_steps: Any
    consecutive_skipped_steps: Any


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """The keywords of a `LossScaleOptimizer`; validated here, and nowhere else.

    Raises:
      ValueError: If a value makes no sense; TypeError if it is not a number.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018,
      https://arxiv.org/abs/1710.03740. Defaults 2**15, 2.0, 0.5, 2000: Keras 3
      and NVIDIA's "Train With Mixed Precision"; hysteresis: Megatron-LM's
      `DynamicGradScaler`; the ceiling 2**24: NVIDIA Apex. The floor 2**-14 is
      well below the 1.0 of Keras 2, which users found too high
      (keras-team/keras#16100, tensorflow/tensorflow#38357).
    """

    initial_scale: float = 2.0**15
    growth_interval: int | growth_schedules.GrowthIntervalSchedule = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float | None = None
    dynamic: bool = True
    jit_compile: Literal["auto", True, False] = "auto"

    def __post_init__(self):
        reals = ["initial_scale", "growth_factor", "backoff_factor", "min_scale"]
        for name in reals + ["max_scale"] * (self.max_scale is not None):
            checks.check_real(name, getattr(self, name))
        growth_schedules.as_schedule(self.growth_interval)
        checks.check_count("hysteresis", self.hysteresis)
        if not isinstance(self.dynamic, bool):
            raise TypeError(
                f"`dynamic` must be True or False. Received: dynamic={self.dynamic!r}."
            )
        float32 = formats.float_format("float32")
        compiles = self.jit_compile in ("auto", True, False)
        # A factor that float32 rounds to 1 would hold the scale for ever.
        grows = 1 + float32.epsilon <= self.growth_factor <= float32.max
        backs_off = 0 < self.backoff_factor <= 1 - float32.epsilon / 2
        low, high, most = float32.smallest_normal, float32.max, self.upper_bound
        ordered = low <= self.min_scale <= self.initial_scale <= most <= high
        static = "also as a float32; for a fixed scale use `dynamic=False`"
        order = "The loss scale must satisfy min_scale <= initial_scale <= max_scale"
        for holds, expected in (
            (compiles, "`jit_compile` must be 'auto', True or False"),
            (grows, f"`growth_factor` must be greater than 1, {static}"),
            (backs_off, f"`backoff_factor` must be in (0, 1), {static}"),
            (ordered, f"{order}, all from {low:.4g} to {high:.4g}"),
        ):
            if not holds:
                raise ValueError(f"{expected}. Received: {self}.")

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> "LossScaleConfig":
        """Returns the settings that keywords of `LossScaleOptimizer` stand for.

        Raises:
          TypeError: If a keyword is unknown. ValueError: If a value makes no sense.
        """
        own_keywords = own_names(keywords)
        fields = [field.name for field in dataclasses.fields(cls)]
        checks.check_keywords("loss-scale keywords", own_keywords, fields)
        return cls(**own_keywords)

    @property
    def upper_bound(self) -> float:
        """`max_scale` with its default filled in."""
        default = max(DEFAULT_MAX_SCALE, self.initial_scale)
        return default if self.max_scale is None else self.max_scale

    @property
    def schedule(self) -> growth_schedules.GrowthIntervalSchedule:
        """`growth_interval` as a schedule: a constant one for an integer."""
        return growth_schedules.as_schedule(self.growth_interval)

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, as Python numbers."""
        return LossScaleState(
            scale=float(self.initial_scale),
            growth_tracker=0,
            hysteresis_tracker=self.hysteresis,
            growth_interval=self.schedule.initial_interval,
            skipped_steps=0,
            consecutive_skipped_steps=0,
        )


def next_state(
    config: LossScaleConfig, state: LossScaleState, grads_finite
) -> LossScaleState:
    """Returns the loss-scale state after one step.

    ```
    finite step        growth_tracker + 1; consecutive_skipped_steps = 0
      at the interval  scale = min(scale * growth_factor, max_scale)
                       growth_tracker = 0; hysteresis_tracker refilled
    non-finite step    growth_tracker = 0; both skip counters + 1
                       hysteresis_tracker - 1, not below 0
      at 0             scale = max(scale * backoff_factor, min_scale)
    either             growth_interval = schedule.next_interval(...), for the next
    ```

    Hysteresis stays spent until the next growth, as in Megatron-LM. With hysteresis
    1, factors 2.0 and 0.5 and wide bounds the scale's trajectory equals that of Keras
    3 and of PyTorch's `GradScaler`. With `dynamic=False` only the skip counters move.
    A restored scale from outside the bounds is clamped first.

    Args:
      config: The settings.
      state: Of Python numbers, variables or scalar tensors.
      grads_finite: Bool scalar. Whether every gradient of the step was finite.

    Returns:
      A `LossScaleState` of scalar tensors: float32 and int64.
    """
    state = LossScaleState(
        clamp_scale(config, state.scale),
        *(tf.convert_to_tensor(field, COUNTER_DTYPE) for field in state[1:]),
    )
    finite = tf.convert_to_tensor(grads_finite, "bool")
    skipped = tf.cast(tf.logical_not(finite), COUNTER_DTYPE)
    counted = state._replace(
        skipped_steps=state.skipped_steps + skipped,
        consecutive_skipped_steps=(state.consecutive_skipped_steps + 1) * skipped,
    )
    if not config.dynamic:
        return counted
    tracker = (state.growth_tracker + 1) * (1 - skipped)
    spent = tf.maximum(state.hysteresis_tracker - skipped, 0)
    # `>=`: a restored tracker may lie above a shorter new interval.
    grow = tf.logical_and(finite, tracker >= state.growth_interval)
    back_off = tf.logical_and(tf.logical_not(finite), spent <= 0)
    scale = tf.where(grow, state.scale * config.growth_factor, state.scale)
    scale = tf.where(back_off, scale * config.backoff_factor, scale)
    moved = counted._replace(
        scale=clamp_scale(config, scale),
        growth_tracker=tf.where(grow, tf.zeros_like(tracker), tracker),
        hysteresis_tracker=tf.where(
            grow, tf.constant(config.hysteresis, COUNTER_DTYPE), spent
        ),
    )
    interval = config.schedule.next_interval(moved, grow, back_off)
    return moved._replace(growth_interval=tf.convert_to_tensor(interval, COUNTER_DTYPE))


def clamp_scale(config: LossScaleConfig, scale):
    """Returns `scale` within the bounds, NaN as the first one; float32 tensor [].

    With `dynamic=False` the bounds are `initial_scale` itself.
    """
    if not config.dynamic:
        return tf.constant(config.initial_scale, "float32")
    scale = tf.convert_to_tensor(scale, "float32")
    number = tf.where(tf.math.is_nan(scale), float(config.initial_scale), scale)
    return tf.clip_by_value(number, float(config.min_scale), float(config.upper_bound))


def own_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keywords with `growth_interval` in place of Keras' name of it."""
    own = dict(keywords)
    steps = own.pop("dynamic_growth_steps", None)
    if steps is None:
        return own
    default = LossScaleConfig.growth_interval
    if own.get("growth_interval", steps) not in (default, steps):
        raise ValueError(
            "`dynamic_growth_steps` is Keras' name for `growth_interval`: pass one of "
            f"them. Received: {dict(keywords)}."
        )
    return {**own, "growth_interval": steps}
