"""Schedules of the growth interval: how many finite steps before the scale grows.

A long one loses few steps once the right scale is found: every growth beyond it costs
a skipped step. A short one finds that scale soon.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfamp import checks

# The dtype of Keras' own step counter on the TensorFlow backend.
COUNTER_DTYPE = "int64"
# float64 holds every integer up to here, so that products round as documented.
LARGEST_GEOMETRIC_INTERVAL = 2**53


class GrowthIntervalSchedule:
    """Base class of growth intervals that depend on the state of the loss scale.

    Subclass it as a frozen dataclass that defines `initial_interval` and
    `next_interval`. Register the subclass with Keras, so that a saved optimizer loads.

    Example:
      @keras.saving.register_keras_serializable()
      @dataclasses.dataclass(frozen=True)
      class Doubling(tfamp.GrowthIntervalSchedule):
        first: int = 100

        @property
        def initial_interval(self):
          return self.first

        def next_interval(self, state, grew, backed_off):
          return tf.where(grew, 2 * state.growth_interval, state.growth_interval)
    """

    @property
    def initial_interval(self) -> int:
        """The growth interval before the first step: a Python int of at least 1."""
        raise NotImplementedError

    def next_interval(self, state, grew, backed_off):
        """Returns the growth interval for the steps that follow.

        Args:
          state: A `rule.LossScaleState` of scalar tensors after the step, except that
            `growth_interval` (int64) is still that of the step.
          grew: Bool scalar. Whether the step completed a growth interval, even if the
            scale is at `max_scale`.
          backed_off: Bool scalar. Whether the step lowered the scale, or would have
            done so without `min_scale`. Hysteresis may prevent it.

        Returns:
          int64 scalar tensor, at least 1.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's keywords: the fields of the dataclass."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        """Builds a schedule from its keywords."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class ConstantGrowthInterval(GrowthIntervalSchedule):
    """A constant growth interval, as a plain integer means.

    Attributes:
      interval: Int >= 1. Finite steps in a row before the loss scale grows.
    """

    interval: int

    def __post_init__(self):
        checks.check_count("interval", self.interval)

    @property
    def initial_interval(self) -> int:
        """`interval`."""
        return self.interval

    def next_interval(self, state, grew, backed_off):
        """Returns `interval`."""
        return tf.constant(self.interval, COUNTER_DTYPE)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class PiecewiseGrowthInterval(GrowthIntervalSchedule):
    """A piecewise constant growth interval, by the number of skipped steps so far.

    `intervals[i]` applies until `boundaries[i]` steps have been skipped; the last one
    applies from then on. A short first interval finds the right scale quickly.

    With an interval of 2000, growing from 2**15 to the ceiling 2**24 takes 18,000
    steps, more than many fine-tuning runs have. With the default of 100 it takes 900.
    After the first overflow, 2000 (Keras' default) skips at most one step in 2001.

    `PiecewiseGrowthInterval(boundaries=(1,), intervals=(1, 3))` from scale 8:

    ```
    step       1   2   3   4   5   6   7   8
    gradients  +   +   +   -   +   +   +   -
    scale     16  32  64  32  32  32  64  32
    interval   1   1   1   3   3   3   3   3
    ```

    Attributes:
      boundaries: Tuple of ints, strictly increasing, each at least 1.
      intervals: Tuple of ints of at least 1, one more than boundaries.
    """

    boundaries: tuple[int, ...] = (1,)
    intervals: tuple[int, ...] = (100, 2000)

    def __post_init__(self):
        for name in ("boundaries", "intervals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for index, each in enumerate(getattr(self, name)):
                checks.check_count(f"{name}[{index}]", each)
        if len(self.intervals) != len(self.boundaries) + 1:
            raise ValueError(
                "There must be one more interval than boundaries. Received: "
                f"boundaries={self.boundaries}, intervals={self.intervals}."
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(
                "`boundaries` must be strictly increasing. "
                f"Received: boundaries={self.boundaries}."
            )

    @property
    def initial_interval(self) -> int:
        """The first of `intervals`."""
        return self.intervals[0]

    def next_interval(self, state, grew, backed_off):
        """Returns the interval for `state.skipped_steps`."""
        skipped = tf.convert_to_tensor(state.skipped_steps, COUNTER_DTYPE)
        passed = skipped >= tf.constant(self.boundaries, COUNTER_DTYPE)
        index = tf.reduce_sum(tf.cast(passed, "int32"))
        return tf.gather(tf.constant(self.intervals, COUNTER_DTYPE), index)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class GeometricGrowthInterval(GrowthIntervalSchedule):
    """A growth interval that adapts to how often gradients overflow.

    ```
    scale backs off    interval = min(ceil(interval * lengthen), max_interval)
    scale grows        interval = max(floor(interval * shorten), min_interval)
    ```

    Once the loss scale has found its level, each growth is followed by an overflow. The
    interval then lengthens by half in each round, so that fewer and fewer steps are
    skipped. While the gradients shrink, growths follow one another and it shortens.

    `GeometricGrowthInterval(initial=4, min_interval=2, max_interval=7)` from scale 8,
    where a scale of 16 overflows:

    ```
    step       1   2   3   4   5   6   7   8   9  10  11  12  13
    gradients  +   +   +   +   -   +   +   +   +   +   +   -   +
    scale      8   8   8  16   8   8   8   8   8   8  16   8   8
    interval   4   4   4   3   6   6   6   6   6   6   4   7   7
    ```

    The products are computed in float64 and rounded up or down, so that each changes
    the interval by at least one step.

    The default of 2000 is Keras' and NVIDIA's. From the floor of 100, at most one step
    in 101 is skipped while the interval grows again. The cap, 2**14 as in fairseq,
    bounds how long a loss scale that has become too low is kept.

    Attributes:
      initial: Int. The first interval.
      lengthen: Float in [1, 2**53]. Factor on a backoff; 1 never lengthens.
      shorten: Float in (0, 1]. Factor on a growth; 1 never shortens.
      min_interval: Int >= 1. The floor.
      max_interval: Int <= 2**53. The cap.

    References:
      fairseq's `FP16Optimizer`: a window of 2**14 steps for one worker,
      https://github.com/facebookresearch/fairseq.
    """

    initial: int = 2000
    lengthen: float = 2.0
    shorten: float = 0.75
    min_interval: int = 100
    max_interval: int = 2**14

    def __post_init__(self):
        for name in ("initial", "min_interval", "max_interval"):
            checks.check_count(name, getattr(self, name), LARGEST_GEOMETRIC_INTERVAL)
        checks.check_real("lengthen", self.lengthen)
        checks.check_real("shorten", self.shorten)
        lengthens = 1 <= self.lengthen <= LARGEST_GEOMETRIC_INTERVAL
        if not (lengthens and 0 < self.shorten <= 1):
            raise ValueError(
                "`lengthen` must be in [1, 2**53] and `shorten` in (0, 1]; at 1 the "
                f"interval stays. Received: lengthen={self.lengthen}, "
                f"shorten={self.shorten}."
            )
        if not self.min_interval <= self.initial <= self.max_interval:
            raise ValueError(
                "The growth interval must satisfy min_interval <= initial <= "
                f"max_interval. Received: min_interval={self.min_interval}, "
                f"initial={self.initial}, max_interval={self.max_interval}."
            )

    @property
    def initial_interval(self) -> int:
        """`initial`."""
        return self.initial

    def next_interval(self, state, grew, backed_off):
        """Returns the interval, lengthened or shortened, within the bounds."""
        low, high = self.min_interval, self.max_interval
        # First within the bounds, where float64 is exact.
        before = tf.convert_to_tensor(state.growth_interval, COUNTER_DTYPE)
        before_f64 = tf.cast(tf.clip_by_value(before, low, high), tf.float64)
        longer = tf.math.ceil(before_f64 * float(self.lengthen))
        shorter = tf.math.floor(before_f64 * float(self.shorten))
        after_f64 = tf.where(grew, shorter, tf.where(backed_off, longer, before_f64))
        after_f64 = tf.clip_by_value(after_f64, float(low), float(high))
        return tf.cast(after_f64, COUNTER_DTYPE)


def as_schedule(value: Any) -> GrowthIntervalSchedule:
    """Returns the schedule that a `growth_interval` setting stands for.

    Raises:
      TypeError: If it is neither one nor an integer. ValueError: If it is below 1.
    """
    if isinstance(value, GrowthIntervalSchedule):
        return value
    checks.check_count("growth_interval", value)
    return ConstantGrowthInterval(value)
