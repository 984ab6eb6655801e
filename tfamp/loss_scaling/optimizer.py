"""Loss scaling around any Keras optimizer: variables around `loss_scale`'s rule."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.loss_scaling import growth_schedules as growth_intervals
from tfamp.loss_scaling import (
    keras_optimizers,
    optimizer_settings,
    overflow_counts,
    replicas,
)
from tfamp.loss_scaling import rule as loss_scale
from tfamp.loss_scaling import saved_state as optimizer_state
from tfamp.loss_scaling import update as gated_update


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss so that float16 gradients do not underflow.

    A drop-in for `keras.optimizers.LossScaleOptimizer`: the same positional
    arguments and attributes, plus bounds, separate factors, hysteresis, growth
    schedules, a static scale and counters. A step whose gradients are not all finite
    is skipped: no weight, slot, average, accumulator or counter of the inner
    optimizer changes, on any replica, and the scale backs off.
    `loss_scale.next_state` documents the rule.

    Stock Keras' scale has no bounds: 160 overflows in a row drive it to 0, and
    the next good step then writes NaN into every weight. Here it stays within
    [`min_scale`, `max_scale`].

    With `initial_scale=1, dynamic=False` it is a finite guard: it skips and counts
    bad steps, and scales nothing, for bfloat16 and float32.

    Works without a strategy and under OneDeviceStrategy, MirroredStrategy and
    MultiWorkerMirroredStrategy; create it in the strategy's scope.

    Args:
      inner_optimizer: The Keras optimizer to wrap. Clipping, weight decay, moving
        averages and gradient accumulation are set there and see unscaled
        float32 gradients.
      initial_scale: Float. The first loss scale.
      growth_interval: Int, finite steps in a row before the scale grows; or a
        `GrowthIntervalSchedule` that moves it. Keras' name `dynamic_growth_steps`
        works too.
      name: String. Name of the optimizer.
      growth_factor: Float > 1.
      backoff_factor: Float in (0, 1).
      hysteresis: Int >= 1. Non-finite steps since the last growth before the
        scale backs off.
      min_scale: Float > 0. The scale's floor.
      max_scale: Float. The scale's ceiling; None: `max(2**24, initial_scale)`.
      dynamic: Bool. False holds the scale at `initial_scale`; non-finite steps
        are still skipped.
      overflow_drops: "microbatch" or "window". What a non-finite micro-batch
        costs under the inner optimizer's gradient accumulation: only itself (as
        in Keras), or everything accumulated since the last update.
      jit_compile: "auto", True or False. Whether XLA compiles the update, which is
        faster: "auto" for Keras' own optimizers, on one CPU or where XLA compiles
        the whole step. Without effect in eager mode, on sparse gradients and under
        accumulation.
      **kwargs: `dynamic_growth_steps`, and Keras' deprecated defaults.

    Raises:
      ValueError: If a setting makes no sense, or the inner optimizer already
        scales the loss.
      TypeError: If the inner optimizer is not a Keras optimizer.

    Example:
      optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
      model.compile(optimizer, loss="mse")
    """

    def __init__(
        self,
        inner_optimizer,
        initial_scale=2.0**15,
        growth_interval=2000,
        name=None,
        *,
        growth_factor=2.0,
        backoff_factor=0.5,
        hysteresis=1,
        min_scale=2.0**-14,
        max_scale=None,
        dynamic=True,
        overflow_drops="microbatch",
        jit_compile="auto",
        **kwargs,
    ):
        _check_inner(inner_optimizer)
        if "dynamic_growth_steps" in kwargs:
            growth_interval = _one_interval(growth_interval, **kwargs)
            del kwargs["dynamic_growth_steps"]
        config = optimizer_settings.validate(
            initial_scale=initial_scale,
            growth_interval=growth_interval,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            dynamic=dynamic,
            overflow_drops=overflow_drops,
            jit_compile=jit_compile,
        )
        super().__init__(
            inner_optimizer,
            initial_scale=config.initial_scale,
            dynamic_growth_steps=config.growth_interval,
            name=name,
            **kwargs,
        )
        self._config = config
        self.overflow_drops, self.jit_compile = overflow_drops, jit_compile
        # Not a list: TensorFlow would make it a part of its checkpoints.
        self._unbuilt_inner = frozenset(
            id(v) for v in inner_optimizer.variables if not inner_optimizer.built
        )
        self._restore_on_build = self._overflow_counts = None
        self._scale_was_read = False
        self._create_state()

    def _create_state(self):
        """Creates the variables; the first two carry stock Keras' names and order.

        They exist before `build`, so that a `tf.function` traced earlier reads the
        live scale and not a constant, as it would with stock Keras.
        """
        first = self._config.initial_state()
        count = loss_scale.COUNTER_DTYPE
        self.step_counter = self._add_scalar("step_counter", 0, count)
        self.dynamic_scale = self._add_scalar("dynamic_scale", first.scale, "float32")
        self._counters = [
            self._add_scalar(name, getattr(first, name), count)
            for name in loss_scale.LossScaleState._fields[2:]
        ]

    def _add_scalar(self, name, value, dtype):
        initializer: Any = keras.initializers.Constant(value)
        return self.add_variable((), initializer, dtype, name=name)

    @property
    def initial_scale(self) -> float:
        """The first loss scale; setting it before `build` sets the scale too.

        Afterwards, assign to `loss_scale`, if the scale is dynamic.
        """
        return self._config.initial_scale

    @initial_scale.setter
    def initial_scale(self, value):
        if self._change_config(initial_scale=value) and not self.built:
            self.dynamic_scale.assign(value)

    @property
    def growth_interval(self) -> int | growth_intervals.GrowthIntervalSchedule:
        """Finite steps in a row before the scale grows, or the schedule of them.

        Another number takes effect with the next step; a schedule, or a number in
        place of one, when the training step is traced next (`compile` does that).
        """
        return self._config.growth_interval

    @growth_interval.setter
    def growth_interval(self, value):
        if self._change_config(growth_interval=value):
            first = self._config.schedule.initial_interval
            self._state_variables().growth_interval.assign(first)

    @property
    def min_scale(self) -> float:
        """The scale's floor."""
        return self._config.min_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._config.dynamic

    @property
    def current_growth_interval(self):
        """The growth interval of the next step: int64 variable of shape []."""
        return self._state_variables().growth_interval

    @property
    def dynamic_growth_steps(self) -> int | growth_intervals.GrowthIntervalSchedule:
        """Keras' name of `growth_interval`."""
        return self.growth_interval

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value):
        self.growth_interval = value

    def _change_config(self, **changes):
        """Returns False before our own `__init__`: Keras' sets attributes first."""
        if not hasattr(self, "_config"):
            return False
        self._config = dataclasses.replace(self._config, **changes)
        return True

    @property
    def loss_scale(self):
        """The scale of the next step: float32 variable of shape []."""
        self._scale_was_read = True
        return self.dynamic_scale

    @property
    def growth_tracker(self):
        """Finite steps since the scale last changed: int64 variable of shape []."""
        return self.step_counter

    @property
    def skipped_steps(self):
        """Steps skipped so far: int64 variable of shape []."""
        return self._state_variables().skipped_steps

    @property
    def consecutive_skipped_steps(self):
        """Steps skipped since the last finite one: int64 variable of shape []."""
        return self._state_variables().consecutive_skipped_steps

    def _state_variables(self):
        return loss_scale.LossScaleState(
            self.dynamic_scale, self.step_counter, *self._counters
        )

    def build(self, var_list):
        """Builds the inner optimizer for a list of trainable variables."""
        if not var_list:
            return  # Keras' loader of `.h5` files does that, and never again.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)
        if self._restore_on_build is not None:
            restore, self._restore_on_build = self._restore_on_build, None
            with tf.init_scope():  # Keras may build it while tracing a step.
                restore()

    def scale_loss(self, loss):
        """Returns `loss` times the loss scale, in float32 or wider."""
        self._scale_was_read = True
        return keras.ops.multiply(loss, self._usable_scale())

    def _usable_scale(self):
        """The scale, within bounds whatever was restored or assigned."""
        return loss_scale.clamp_scale(self._config, self.dynamic_scale.value)

    def apply(
        self, grads, trainable_variables=None, *, skip_gradients_aggregation=False
    ):
        """Applies scaled gradients, or skips the step if one is not finite.

        Under a strategy with several replicas the gradients are summed first, so
        that all replicas take the same decision; clipping and accumulation in the
        inner optimizer see the sum, unscaled.

        Args:
          grads: List of gradients of the scaled loss: tensors, `tf.IndexedSlices`
            or None.
          trainable_variables: Their variables; may be left out once built.
          skip_gradients_aggregation: Bool. True if the gradients are summed over
            the replicas already, as after an all-reduce in float16.

        Raises:
          RuntimeError: Under a strategy that loss scaling cannot work under, or
            another one than the optimizer was created under.
          ValueError: If the optimizer is not built and no variables are given.
        """
        replicas.check_context(self.inner_optimizer, self._distribution_strategy)
        grads = [gated_update.as_gradient(grad) for grad in grads]
        if not grads:
            return  # As Keras does.
        variables = self._check_variables(grads, trainable_variables)
        self._look_for_an_unscaled_loss()
        if not replicas.must_agree():
            self._apply_here(grads, variables)
            return
        if not skip_gradients_aggregation:
            grads = replicas.sum_gradients(grads, variables)
        with keras_optimizers.without_gradient_reduction(self.inner_optimizer):
            replicas.gate_together(
                check=self.check_finite,
                update=lambda grads: self._apply_inner(grads, variables),
                skip=lambda on_one: self._skip(on_one, variables),
                settle=self._advance,
                grads=grads,
                optimizer=self.inner_optimizer,
            )

    def apply_gradients(self, grads_and_vars, *, skip_gradients_aggregation=False):
        """Applies pairs of scaled gradient and variable; see `apply`.

        Returns:
          `iterations`, as Keras 2 does.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(
            grads, variables, skip_gradients_aggregation=skip_gradients_aggregation
        )
        return self.iterations

    def _check_variables(self, grads, trainable_variables):
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The optimizer is not built. Received: trainable_variables=None. "
                    "Pass the variables, or call `build(trainable_variables)` first."
                )
            trainable_variables = list(trainable_variables)
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        variables = list(trainable_variables or self._trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient (or None) for each variable. Received: "
                f"{len(grads)} gradients and {len(variables)} variables."
            )
        return variables

    def _look_for_an_unscaled_loss(self):
        """Keras 3 divides gradients that a custom loop forgot to scale, in silence."""
        if not self._scale_was_read and self.initial_scale != 1:
            self._scale_was_read = True  # Once.
            logging.warning(
                "%s.apply divides the gradients by the loss scale (%g at first), and "
                "`scale_loss` was not called. In a training loop of your own, "
                "differentiate `optimizer.scale_loss(loss)`.",
                self.name,
                self.initial_scale,
            )

    def _apply_here(self, grads, variables):
        finite = self.check_finite(grads)
        gated_update.gate(
            finite,
            update=lambda: self._apply_inner(grads, variables),
            skip=lambda: self._skip(lambda function: function(grads), variables),
            optimizer=self.inner_optimizer,
            variables=variables,
            compilable=gated_update.can_compile(
                self.inner_optimizer, grads, variables, self.jit_compile
            ),
        )
        self._advance(finite)

    def _apply_inner(self, grads, variables):
        unscaled = gated_update.unscale(grads, variables, self._usable_scale())
        self.inner_optimizer.apply(unscaled, variables)

    def _skip(self, on_one_replica, variables):
        if self.overflow_drops == "window":
            keras_optimizers.drop_accumulation_window(self.inner_optimizer)
        if self._overflow_counts is not None:
            # Unscaled: below a scale of 1 they may overflow only there.
            counts = on_one_replica(
                lambda grads: overflow_counts.count(
                    gated_update.unscale(grads, variables, self._usable_scale())
                )
            )
            self._overflow_counts.record(counts, variables)

    def _advance(self, finite):
        variables = self._state_variables()
        before = loss_scale.LossScaleState(*(v.value for v in variables))
        after = loss_scale.next_state(self._config, before, finite)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def check_finite(self, grads):
        """Returns whether every gradient is finite once unscaled: bool tensor [].

        `tf.IndexedSlices` are checked on their `values`, without densifying.
        """
        return gated_update.all_finite(grads, self._usable_scale())

    def create_overflow_counts(self) -> overflow_counts.OverflowCounts:
        """Returns counts, one for each variable, for `count_overflows`.

        Raises:
          RuntimeError: If the optimizer is not built.
        """
        if not self.built:
            raise RuntimeError(
                "Overflows are counted for each variable, and the optimizer is not "
                "built. Call `build(trainable_variables)` first."
            )
        with self._distribution_strategy.scope():
            return overflow_counts.OverflowCounts(len(self._trainable_variables))

    def count_overflows(self, counts: overflow_counts.OverflowCounts | None) -> None:
        """Counts non-finite gradient elements by variable, in skipped steps only.

        Takes effect when the training step is traced next. The counts are not part
        of the saved state.

        Args:
          counts: From `create_overflow_counts`; None: no more counting.
        """
        self._overflow_counts = counts

    def load_own_variables(self, store):
        """Restores the state from our layout, stock Keras' or the bare inner one's.

        Settings given to this object win over saved ones: a growth interval that
        its schedule does not give, hysteresis beyond its own, and a scale outside
        its bounds (with a warning). Before the optimizer is built, the state is
        kept until it is.

        Raises:
          ValueError: If the state is of an optimizer of another kind.
        """
        saved = {name: np.asarray(store[name]) for name in store.keys()}
        if self.built:
            self._restore(saved)
        elif saved:
            # Not as a dict, for TensorFlow would track it.
            self._restore_on_build = functools.partial(self._restore, saved)

    def set_weights(self, weights):
        """Sets the state from a list of arrays, in any of those layouts."""
        self.load_own_variables({str(i): each for i, each in enumerate(weights)})

    def _restore(self, saved):
        inner = self.inner_optimizer.variables
        head = [v for v in inner if id(v) in self._unbuilt_inner]
        variables = optimizer_state.Variables(self._variables, inner, head)
        optimizer_state.restore(saved, variables, self.name)
        optimizer_state.fit_to_config(self._state_variables(), self._config)

    def __dir__(self):
        # Keras saves every optimizer found in `dir()` in a group of its own. The
        # inner one's state is in ours; its group would double the file, and a file
        # without it (a bare optimizer's) would load with a warning.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's keywords, the inner optimizer serialized."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **self._config.to_dict(),
            "overflow_drops": self.overflow_drops,
            "jit_compile": self.jit_compile,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Builds an optimizer from our config or stock Keras'; neither is changed."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        interval = config.get("growth_interval")
        if isinstance(interval, Mapping):
            schedule = growth_intervals.schedule_from(interval, custom_objects)
            config["growth_interval"] = schedule
        return cls(inner, **config)


def wrap_optimizer(optimizer, **loss_scale_keywords):
    """Gives an optimizer loss scaling unless it has it already; idempotent.

    Args:
      optimizer: A Keras optimizer, or its name. A `LossScaleOptimizer`, ours or
        stock Keras', is returned as it is.
      **loss_scale_keywords: Keywords of `LossScaleOptimizer`.

    Returns:
      An optimizer that scales the loss.
    """
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    keywords = {"name": "loss_scale_optimizer", **loss_scale_keywords}
    return LossScaleOptimizer(optimizer, **keywords)


def _one_interval(growth_interval, dynamic_growth_steps, **_):
    default = loss_scale.LossScaleConfig.growth_interval
    if growth_interval not in (default, dynamic_growth_steps):
        raise ValueError(
            "`dynamic_growth_steps` is Keras' name of `growth_interval`: give one. "
            f"Received: growth_interval={growth_interval!r}, "
            f"dynamic_growth_steps={dynamic_growth_steps!r}."
        )
    return dynamic_growth_steps


def _check_inner(optimizer):
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` already scales the loss; scaling twice would unscale "
            f"once too little. Received: {type(optimizer).__name__}. Pass its "
            "`inner_optimizer`, or use `tfamp.wrap_optimizer`."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer. Received: "
            f"{optimizer!r} of type {type(optimizer).__name__}. For a name such as "
            "'adam' use `tfamp.wrap_optimizer`."
        )
