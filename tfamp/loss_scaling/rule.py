"""The rule of dynamic loss scaling as a pure function of explicit state.

No variable, optimizer or global is touched here; `optimizer.LossScaleOptimizer`
holds the variables and applies the rule.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import checks, formats
from tfamp.loss_scaling import growth_schedules as growth_interval

# apex.amp's ceiling; growth beyond it has no use and nears float32's infinity.
DEFAULT_MAX_SCALE = 2.0**24
COUNTER_DTYPE = checks.COUNTER_DTYPE
# Under another name: the configuration has a field called `growth_interval`.
_Schedule = growth_interval.GrowthIntervalSchedule


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
    """Settings of the loss scale, validated.

    Attributes:
      initial_scale: Float. The first loss scale.
      growth_interval: Int, finite steps in a row before the scale grows; or a
        `growth_interval.GrowthIntervalSchedule` that moves it.
      growth_factor: Float > 1. The scale is multiplied by it to grow.
      backoff_factor: Float in (0, 1). The scale is multiplied by it to back off.
      hysteresis: Int >= 1. Non-finite steps since the last growth before the
        scale backs off; from then on each further one backs off, until it grows.
      min_scale: Float > 0. The scale never falls below it.
      max_scale: Float. The scale never rises above it; None means
        `max(2**24, initial_scale)`.
      dynamic: Bool. False holds the scale at `initial_scale`; non-finite steps
        are skipped and counted all the same.

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
    growth_interval: int | _Schedule = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float | None = None
    dynamic: bool = True

    def __post_init__(self):
        for name in ("initial_scale", "growth_factor", "backoff_factor", "min_scale"):
            checks.check_real(name, getattr(self, name))
        growth_interval.check_setting(self.growth_interval)
        checks.check_count("hysteresis", self.hysteresis)
        if not isinstance(self.dynamic, bool):
            raise TypeError(
                f"`dynamic` must be True or False. Received: dynamic={self.dynamic!r}."
            )
        if self.max_scale is not None:
            checks.check_real("max_scale", self.max_scale)
        _check_factors(self)
        _check_bounds(self)

    @property
    def upper_bound(self) -> float:
        """`max_scale` with its default filled in."""
        if self.max_scale is None:
            return max(DEFAULT_MAX_SCALE, self.initial_scale)
        return self.max_scale

    @property
    def schedule(self) -> _Schedule:
        """`growth_interval` as a schedule: a constant one for an integer."""
        return growth_interval.schedule_from(self.growth_interval)

    def to_dict(self) -> dict[str, Any]:
        """Returns the constructor's keywords as plain data, a schedule serialized."""
        fields = dataclasses.fields(self)
        return {field.name: _plain(getattr(self, field.name)) for field in fields}

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
    with a schedule    growth_interval = schedule.next_interval(...), for the next
    ```

    Hysteresis stays spent until the next growth, as in Megatron-LM: a finite step
    does not refill it. With hysteresis 1, factors 2.0 and 0.5 and wide bounds the
    scale's trajectory equals that of Keras 3 and of PyTorch's `GradScaler`.
    A step is held against the growth interval in `state`; the new one, by
    `config.schedule`, counts from the next step on.
    With `dynamic=False` only the skip counters move. A scale that came from outside
    the bounds (a restored checkpoint's, say) is clamped first.

    Args:
      config: A `LossScaleConfig`.
      state: A `LossScaleState` of Python numbers or scalar tensors.
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
    if not isinstance(config.growth_interval, _Schedule):
        return moved  # A number stays; whoever sets another one sets the state.
    interval = config.schedule.next_interval(moved, grow, back_off)
    interval = tf.convert_to_tensor(interval, COUNTER_DTYPE)
    # A schedule of the user's own may return anything.
    return moved._replace(growth_interval=tf.maximum(interval, 1))


def _plain(value):
    """Python's numbers for NumPy's, which would not serialize."""
    if isinstance(value, _Schedule):
        return keras.saving.serialize_keras_object(value)
    return value.item() if hasattr(value, "item") else value


def clamp_scale(config: LossScaleConfig, scale):
    """Returns `scale` within the bounds, NaN as the first one; float32 tensor [].

    With `dynamic=False` the bounds are `initial_scale` itself.
    """
    if not config.dynamic:
        return tf.constant(config.initial_scale, "float32")
    low = tf.constant(config.min_scale, "float32")
    high = tf.constant(config.upper_bound, "float32")
    first = tf.constant(config.initial_scale, "float32")
    scale = tf.convert_to_tensor(scale, "float32")
    return tf.clip_by_value(tf.where(tf.math.is_nan(scale), first, scale), low, high)


def _check_factors(config):
    # A factor that float32 rounds to 1 would hold the scale for ever.
    epsilon = formats.float_format("float32").epsilon
    if config.growth_factor < 1 + epsilon:
        raise ValueError(
            "`growth_factor` must be greater than 1, also as a float32. Received: "
            f"growth_factor={config.growth_factor}. For a fixed scale use "
            "`dynamic=False`."
        )
    if config.growth_factor > formats.float_format("float32").max:
        raise ValueError(
            "`growth_factor` must be a float32. Received: "
            f"growth_factor={float(config.growth_factor):.4g}."
        )
    if not 0 < config.backoff_factor <= 1 - epsilon / 2:
        raise ValueError(
            "`backoff_factor` must be in (0, 1), also as a float32. Received: "
            f"backoff_factor={config.backoff_factor}. For a fixed scale use "
            "`dynamic=False`."
        )


def _check_bounds(config):
    float32 = formats.float_format("float32")
    if config.min_scale < float32.smallest_normal:
        raise ValueError(
            "`min_scale` must be positive and a normal float32 number (at least "
            f"{float32.smallest_normal:.4g}). Received: min_scale={config.min_scale}."
        )
    if config.upper_bound > float32.max:
        raise ValueError(
            f"The loss scale is a float32 (at most {float32.max:.4g}). Received: "
            f"initial_scale={config.initial_scale}, max_scale={config.max_scale}."
        )
    if not config.min_scale <= config.initial_scale <= config.upper_bound:
        raise ValueError(
            "The loss scale must satisfy min_scale <= initial_scale <= max_scale. "
            f"Received: min_scale={config.min_scale}, "
            f"initial_scale={config.initial_scale}, max_scale={config.max_scale}."
        )
