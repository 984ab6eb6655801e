"""Schedules of the growth interval: how many finite steps before the scale grows.

Each is a pure function of the loss scale's state; `loss_scale.next_state` applies
it. A long interval loses few steps once the right scale is found: every growth
beyond it costs a skipped step. A short one finds that scale soon.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfamp import checks

# float64 holds every integer up to here, so that products round as documented.
LARGEST_GEOMETRIC_INTERVAL = 2**53


class GrowthIntervalSchedule:
    """Base class: the growth interval as a function of the loss scale's state.

    A subclass defines `initial_interval` and `next_interval`. One that is a frozen
    dataclass is compared by value and saved by Keras as it is; register it with
    `keras.saving.register_keras_serializable` so that a saved optimizer loads.

    Example:
      @keras.saving.register_keras_serializable()
      @dataclasses.dataclass(frozen=True)
      class Doubling(tfamp.growth_interval.GrowthIntervalSchedule):
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
        """Returns the growth interval of the steps to come.

        Called once after each step, and with neither growth nor backoff to bring
        a restored state's interval in line with this schedule.

        Args:
          state: A `loss_scale.LossScaleState` of scalar tensors: as after the step,
            but `growth_interval` (int64) is still the one the step had.
          grew: Bool scalar. Whether the step ended a growth interval; also at
            `max_scale`, where the scale itself cannot rise.
          backed_off: Bool scalar. Whether the step lowered the scale; not while
            hysteresis holds it. At `min_scale` too.

        Returns:
          int64 scalar tensor, at least 1.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's keywords: a dataclass' fields."""
        if not dataclasses.is_dataclass(self):
            raise NotImplementedError(
                "A growth interval schedule must be a dataclass, or define "
                f"`get_config`. Received: {type(self).__name__}."
            )
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Keras would wrap a tuple, and not unwrap it before `from_config`.
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        """Builds a schedule from its keywords."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class ConstantGrowthInterval(GrowthIntervalSchedule):
    """The same growth interval throughout; what a plain integer stands for.

    `ConstantGrowthInterval(3)` from scale 8:

    ```
    step       1   2   3   4   5   6   7
    gradients  +   +   +   -   +   +   +
    scale      8   8  16   8   8   8  16
    interval   3   3   3   3   3   3   3
    ```

    Attributes:
      interval: Int >= 1. Finite steps in a row before the scale grows.

    Raises:
      ValueError: If `interval` is below 1; TypeError if it is not an integer.
    """

    interval: int

    def __post_init__(self):
        checks.check_count("interval", self.interval)
        _freeze(self, interval=int(self.interval))

    @property
    def initial_interval(self) -> int:
        """`interval`."""
        return self.interval

    def next_interval(self, state, grew, backed_off):
        """Returns `interval`, whatever the state holds."""
        return tf.constant(self.interval, checks.COUNTER_DTYPE)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class PiecewiseGrowthInterval(GrowthIntervalSchedule):
    """One growth interval after another, by the number of steps skipped so far.

    Short while the right scale is searched for from below, long once an overflow
    has shown that it is found: `intervals[i]` holds until `boundaries[i]` steps
    have been skipped, the last one from then on.

    The defaults: with an interval of 2000 the way from 2**15 to the ceiling 2**24
    takes 18,000 steps, more than many a fine-tuning run has; with 100 it takes 900.
    It is nearly free, since what ends the search is one skipped step. From then on
    2000, Keras' default, loses at most one step in 2001.

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

    Raises:
      ValueError: If a value makes no sense; TypeError if it is of another type.
    """

    boundaries: tuple[int, ...] = (1,)
    intervals: tuple[int, ...] = (100, 2000)

    def __post_init__(self):
        for name in ("boundaries", "intervals"):
            _freeze(self, **{name: checks.as_counts(name, getattr(self, name))})
        if len(self.intervals) != len(self.boundaries) + 1:
            raise ValueError(
                "There must be one more interval than boundaries. Received: "
                f"boundaries={self.boundaries}, intervals={self.intervals}. Give one "
                "interval before each boundary, and one after the last."
            )
        pairs = zip(self.boundaries, self.boundaries[1:], strict=False)
        if not all(left < right for left, right in pairs):
            raise ValueError(
                "`boundaries` must be strictly increasing. "
                f"Received: boundaries={self.boundaries}."
            )

    @property
    def initial_interval(self) -> int:
        """The first of `intervals`."""
        return self.intervals[0]

    def next_interval(self, state, grew, backed_off):
        """Returns the interval that belongs to `state.skipped_steps`."""
        skipped = tf.convert_to_tensor(state.skipped_steps, checks.COUNTER_DTYPE)
        passed = skipped >= tf.constant(self.boundaries, checks.COUNTER_DTYPE)
        index = tf.reduce_sum(tf.cast(passed, "int32"))
        return tf.gather(tf.constant(self.intervals, checks.COUNTER_DTYPE), index)


@keras.saving.register_keras_serializable(package="tfamp")
@dataclasses.dataclass(frozen=True)
class GeometricGrowthInterval(GrowthIntervalSchedule):
    """A growth interval that finds its own length from overflows and calm.

    ```
    scale backs off    interval = min(ceil(interval * lengthen), max_interval)
    scale grows        interval = max(floor(interval * shorten), min_interval)
    ```

    Where the scale has found its level, each growth is answered by an overflow:
    a factor of `lengthen * shorten`, 1.5, on each round, up to the cap, and fewer
    and fewer steps are lost. Where the gradients become smaller, growth follows on
    growth, the interval shortens and the scale is soon where it belongs.

    `GeometricGrowthInterval(initial=4, min_interval=2, max_interval=7)`, scale 8, where
    16 overflows:

    ```
    step       1   2   3   4   5   6   7   8   9  10  11  12  13
    gradients  +   +   +   +   -   +   +   +   +   +   +   -   +
    scale      8   8   8  16   8   8   8   8   8   8  16   8   8
    interval   4   4   4   3   6   6   6   6   6   6   4   7   7
    ```

    and where nothing does:

    ```
    step       1   2   3   4   5   6   7   8   9  10  11
    gradients  +   +   +   +   +   +   +   +   +   +   +
    scale      8   8   8  16  16  16  32  32  64  64 128
    interval   4   4   4   3   3   3   2   2   2   2   2
    ```

    The products are rounded once, to float64, and then up or down, so that each
    moves the interval by one step at least, from 1 on too. Below 3 the rounding down
    undoes a round's lengthening; a useful `min_interval` is far above.

    The defaults: 2000 is Keras' and NVIDIA's. From the floor, 100, at most one step
    in 101 is lost while the interval grows again. The cap, 2**14 as in fairseq,
    bounds how long a scale that has become too low is kept.

    Attributes:
      initial: Int. The first interval.
      lengthen: Float in [1, 2**53]. Factor on a backoff; 1 never lengthens.
      shorten: Float in (0, 1]. Factor on a growth; 1 never shortens.
      min_interval: Int >= 1. The floor.
      max_interval: Int <= 2**53. The cap.

    Raises:
      ValueError: If a value makes no sense; TypeError if it is not a number.

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
            value = getattr(self, name)
            checks.check_count(name, value, LARGEST_GEOMETRIC_INTERVAL)
            _freeze(self, **{name: int(value)})
        for name in ("lengthen", "shorten"):
            checks.check_real(name, getattr(self, name))
        if not 1 <= self.lengthen <= LARGEST_GEOMETRIC_INTERVAL:
            raise ValueError(
                "`lengthen` must be in [1, 2**53]; 1 never lengthens the interval. "
                f"Received: lengthen={self.lengthen}."
            )
        if not 0 < self.shorten <= 1:
            raise ValueError(
                "`shorten` must be in (0, 1]; 1 never shortens the interval. "
                f"Received: shorten={self.shorten}."
            )
        _freeze(self, lengthen=float(self.lengthen), shorten=float(self.shorten))
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
        """Returns the state's interval within the bounds, lengthened or shortened."""
        before = tf.convert_to_tensor(state.growth_interval, checks.COUNTER_DTYPE)
        low, high = (
            tf.constant(bound, checks.COUNTER_DTYPE)
            for bound in (self.min_interval, self.max_interval)
        )
        # First within the bounds, where float64 is exact.
        before_f64 = tf.cast(tf.clip_by_value(before, low, high), tf.float64)
        longer = tf.math.ceil(before_f64 * tf.constant(self.lengthen, tf.float64))
        shorter = tf.math.floor(before_f64 * tf.constant(self.shorten, tf.float64))
        after_f64 = tf.where(grew, shorter, before_f64)
        after_f64 = tf.where(backed_off, longer, after_f64)
        after = tf.cast(
            tf.minimum(after_f64, tf.cast(high, tf.float64)), checks.COUNTER_DTYPE
        )
        return tf.maximum(after, low)


def schedule_from(
    value: Any, custom_objects: Mapping[str, Any] | None = None
) -> GrowthIntervalSchedule:
    """Returns the schedule that a `growth_interval` setting stands for.

    Args:
      value: An integer of at least 1, a `GrowthIntervalSchedule`, or what
        `keras.saving.serialize_keras_object` gives for one.
      custom_objects: Dict of classes by name, for a schedule that is not
        registered with Keras.

    Raises:
      TypeError: If it is none of these. ValueError: If its values make no sense.
    """
    if isinstance(value, Mapping):
        value = keras.saving.deserialize_keras_object(dict(value), custom_objects)
    if isinstance(value, GrowthIntervalSchedule):
        return value
    check_setting(value)
    return ConstantGrowthInterval(value)


def check_setting(value: Any) -> None:
    """Raises unless `value` is a growth interval: an integer or a schedule."""
    if isinstance(value, GrowthIntervalSchedule):
        return
    if not checks.is_integer(value):
        serialized = isinstance(value, Mapping)
        raise TypeError(
            "`growth_interval` must be an integer or a GrowthIntervalSchedule. "
            f"Received: growth_interval={value!r} of type {type(value).__name__}."
            f"{' See `growth_interval.schedule_from`.' if serialized else ''}"
        )
    checks.check_count("growth_interval", value)


def _freeze(schedule, **values):
    """Stores plain numbers in a frozen dataclass: NumPy's would not serialize."""
    for name, value in values.items():
        object.__setattr__(schedule, name, value)
