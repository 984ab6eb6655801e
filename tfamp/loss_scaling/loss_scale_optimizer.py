"""An optimizer that scales the loss: a Keras shell of variables around the rule."""

import dataclasses
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.facts import user_code
from tfamp.keras_patches import keras_optimizers, replicas
from tfamp.loss_scaling import (
    growth_schedules,
    rule,
    saved_state,
    skipped_loss,
    train_steps,
)
from tfamp.updates import gate

# In a `tf.function`, AutoGraph would rewrite what the user's code calls.
_NOT_CONVERTED = tf.autograph.experimental.do_not_convert


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss to keep float16 gradients from underflow.

    A drop-in replacement for `keras.optimizers.LossScaleOptimizer`, with the same
    positional arguments and attributes. It adds bounds, separate factors, hysteresis,
    growth schedules, a static scale and counters. A step with a gradient that is not
    finite is skipped on all replicas: nothing of the inner optimizer changes.
    `rule.next_state` documents the rule. With `initial_scale=1, dynamic=False` it
    guards bfloat16 and float32 training: it skips and counts bad steps. It works
    without a strategy and under OneDeviceStrategy, MirroredStrategy and
    MultiWorkerMirroredStrategy; create it in the scope of the strategy.

    Args:
      inner_optimizer: The Keras optimizer to wrap. Its clipping, weight decay, moving
        averages and gradient accumulation see unscaled float32 gradients. A bad
        micro-batch of an accumulation costs only itself.
      initial_scale: Float. The first loss scale.
      growth_interval: Finite steps before it grows, or a `GrowthIntervalSchedule`.
      name: String. Name of the optimizer.
      growth_factor: Float > 1. Factor by which the loss scale grows.
      backoff_factor: Float in (0, 1). Factor by which the loss scale backs off.
      hysteresis: Int >= 1. Non-finite steps since the last growth before the loss
        scale backs off; after that each further one does, until it grows.
      min_scale: Float > 0. Lower bound of the loss scale.
      max_scale: Float. Upper bound; None: `max(2**24, initial_scale)`.
      dynamic: Bool. If False the loss scale is static; bad steps are still skipped.
      jit_compile: "auto", True or False. Whether XLA compiles updates in graphs: "auto"
        for Keras' own optimizers, on a GPU of `tfamp.enable`, and on a CPU but Adam.
      dynamic_growth_steps: Keras' name of `growth_interval`.
      config: A `rule.LossScaleConfig` instead of the settings above.
      **kwargs: Keras' deprecated defaults.

    Attributes:
      config: The settings: a `rule.LossScaleConfig`.
      growth_tracker, hysteresis_tracker, current_growth_interval, skipped_steps,
        consecutive_skipped_steps: int64 variables [] of `rule.LossScaleState`.
      retried_steps: Int. Steps that `fit` took again to find the loss scale.

    Raises:
      ValueError: If a setting is invalid, or the inner optimizer scales the loss.
      TypeError: If the inner optimizer is not a Keras optimizer.

    Example:
      model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    """

    _restore_on_build = None
    _scale_was_read = False
    retried_steps = retried_until_healed = diagnoses = 0  # For `retried_steps`.
    overflow_counts: Any = None  # A monitor's, in steps that are traced from then on.

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
        jit_compile="auto",
        dynamic_growth_steps=None,
        config=None,
        **kwargs,
    ):
        keras_optimizers.check_inner(inner_optimizer)
        keywords = dict(
            initial_scale=initial_scale,
            growth_interval=growth_interval,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            dynamic=dynamic,
            jit_compile=jit_compile,
            dynamic_growth_steps=dynamic_growth_steps,
        )
        keras_optimizers.check_defaults(kwargs, keywords)
        config = config or rule.LossScaleConfig.from_keywords(keywords)
        # Before Keras' constructor, which assigns what are properties of it here.
        object.__setattr__(self, "config", config)
        super().__init__(
            inner_optimizer, config.initial_scale, config.growth_interval, name=name
        )
        self.skipped_loss = skipped_loss.SkippedLoss()
        self.beside: Any = weakref.WeakSet()  # Plain ones, in steps that it scales.
        self._create_state()
        unbuilt = [] if inner_optimizer.built else inner_optimizer.variables
        # Not a list: TensorFlow would make it a part of its checkpoints.
        self._unbuilt_inner = frozenset(map(id, unbuilt))

    def _create_state(self):
        """Before `build`: a `tf.function` traced earlier reads the live scale."""

        def scalar(name, value, dtype=rule.COUNTER_DTYPE):
            initializer: Any = keras.initializers.Constant(value)
            return self.add_variable((), initializer, dtype, name=name)

        first = self.config.initial_state()
        self.step_counter = self.growth_tracker = scalar("step_counter", 0)
        self.dynamic_scale = scalar("dynamic_scale", first.scale, "float32")
        self.hysteresis_tracker = scalar("hysteresis_tracker", first.hysteresis_tracker)
        self.current_growth_interval = scalar("growth_interval", first.growth_interval)
        self.skipped_steps = scalar("skipped_steps", 0)
        self.consecutive_skipped_steps = scalar("consecutive_skipped_steps", 0)

    def state(self) -> rule.LossScaleState:
        """Returns its variables."""
        return rule.LossScaleState(
            vars(self)["dynamic_scale"],
            self.growth_tracker,
            self.hysteresis_tracker,
            self.current_growth_interval,
            self.skipped_steps,
            self.consecutive_skipped_steps,
        )

    def __getattr__(self, name):
        now = {
            "get_scaled_loss": "`scale_loss(loss)`",
            "get_unscaled_gradients": "`apply(gradients, variables)`, which unscales",
        }
        hint = f": in Keras 3 it is {now[name]}" if name in now else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    @property
    def initial_scale(self) -> float:
        """The first loss scale."""
        return self.config.initial_scale

    @initial_scale.setter
    def initial_scale(self, value):
        self.config = dataclasses.replace(self.config, initial_scale=value)

    @property
    def growth_interval(self) -> int | growth_schedules.GrowthIntervalSchedule:
        """Finite steps in a row before the loss scale grows, or a schedule of them.

        As in Keras, a new value takes effect when a step is traced next.
        """
        return self.config.growth_interval

    @growth_interval.setter
    def growth_interval(self, value):
        self.config = dataclasses.replace(self.config, growth_interval=value)

    dynamic_growth_steps = growth_interval  # Keras' name.

    @property
    def dynamic_scale(self):
        """Keras' name of `loss_scale`."""
        if "dynamic_scale" not in vars(self):
            raise AttributeError  # Keras asks before it sets it.
        # A step of the model's own that reads it scales by itself.
        self._scale_was_read |= train_steps.mark_read(self)
        return vars(self)["dynamic_scale"]

    @dynamic_scale.setter
    def dynamic_scale(self, variable):
        vars(self)["dynamic_scale"] = variable

    @property
    def loss_scale(self):
        """The loss scale of the next step: float32 variable of shape []."""
        self._scale_was_read = True
        return self.dynamic_scale

    @_NOT_CONVERTED
    def scale_loss(self, loss):
        """Returns `loss` times the loss scale, in float32 or wider."""
        self._scale_was_read = True
        train_steps.mark_read(self)
        skipped_loss.note(loss)
        return keras.ops.multiply(loss, self.usable_scale())

    @_NOT_CONVERTED
    def usable_scale(self):
        """Returns the loss scale, clamped to its bounds: float32 tensor []."""
        return rule.clamp_scale(self.config, self.state().scale.value)

    @_NOT_CONVERTED
    def check_finite(self, grads):
        """Returns whether every unscaled gradient is finite: bool []."""
        return gate.all_finite(grads, self.usable_scale())

    def build(self, var_list):
        """Builds the inner optimizer for a list of trainable variables."""
        if not var_list:
            return  # Keras' loader of `.h5` files does that, and never again.
        if not self.inner_optimizer.built:
            with replicas.accumulators_apart():
                self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)
        if self._restore_on_build is not None:
            restore, self._restore_on_build = self._restore_on_build, None
            with tf.init_scope():  # Keras may build it while tracing a step.
                restore()

    @_NOT_CONVERTED
    def apply(
        self, grads, trainable_variables=None, *, skip_gradients_aggregation=False
    ):
        """Unscales and applies gradients, or skips the step if one is not finite.

        Under a strategy the gradients are summed over the replicas first, so that all
        replicas take the same decision. Under `tfamp.enable`, a custom `train_step`
        that does not scale the loss has unscaled gradients, which are not divided.

        Args:
          grads: Gradients of the scaled loss: tensors, `tf.IndexedSlices` or None.
          trainable_variables: The variables; optional once the optimizer is built.
          skip_gradients_aggregation: Bool. True if the gradients are already summed
            over the replicas, as after an all-reduce in float16.

        Raises:
          RuntimeError: Under a strategy that loss scaling does not support.
          ValueError: If there is not one variable for each gradient.
        """
        inner, settle = self.inner_optimizer, train_steps.settled_by(self)
        gate.check_context(inner, self._distribution_strategy)
        grads, variables = keras_optimizers.pairs(self, grads, trainable_variables)
        if not grads:  # As Keras does.
            return
        if not settle and not self._scale_was_read and self.initial_scale != 1:
            self._scale_was_read = True  # Keras 3 divides in silence.
            user_code.log(
                f"{self.name}.apply divides the gradients by the loss scale, and "
                "`scale_loss` was not called: differentiate `loss = "
                "optimizer.scale_loss(loss)`."
            )
        loss = skipped_loss.last()
        scale = (lambda: 1.0) if settle else self.usable_scale  # Read where it is used.

        def unscale(grads):
            return gate.unscale(grads, variables, scale())

        def count_overflows(grads, finite):
            self.skipped_loss.record(loss, finite)
            if self.overflow_counts is not None:
                # Below a scale of 1 they may overflow only there.
                self.overflow_counts.record(unscale(grads), variables, finite)

        step = gate.GatedUpdate(
            check=train_steps.check(grads, scale),
            update=lambda grads: inner.apply_gradients(  # Users override it.
                zip(unscale(grads), variables, strict=True)
            ),
            record_skip=count_overflows,
            settle=settle or self.settle,
        )
        jit = self.config.jit_compile
        with train_steps.suspended():
            gate.take(step, grads, variables, inner, jit, skip_gradients_aggregation)

    @_NOT_CONVERTED
    def apply_gradients(self, grads_and_vars, **keywords):
        """Applies (scaled gradient, variable) pairs and returns `iterations`."""
        self.apply(*zip(*grads_and_vars, strict=True), **keywords)
        return self.iterations

    def settle(self, finite):
        """Updates the loss scale and counters; `finite`: bool tensor of the step."""
        state = self.state()
        after = rule.next_state(self.config, state, finite)
        for variable, value in zip(state, after, strict=True):
            variable.assign(value)

    def load_own_variables(self, store):
        """Restores the state, at once or in `build`; layouts as in `set_weights`."""
        self.set_weights([store[str(i)] for i in range(len(store.keys()))])

    def set_weights(self, weights):
        """Sets the state from arrays in tfamp's, Keras' or the inner one's layout."""
        saved = [np.asarray(each) for each in weights]

        def restore():
            inner = self.inner_optimizer.variables
            head = [v for v in inner if id(v) in self._unbuilt_inner]
            saved_state.restore(saved, self._variables, inner, head)
            saved_state.fit_to_config(self.state(), self.config)

        if self.built:
            restore()
        elif saved:
            self._restore_on_build = restore

    def __dir__(self):
        # Keras would save the inner optimizer found here a second time.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's keywords as plain data."""
        keywords = {"inner_optimizer": self.inner_optimizer, "name": self.name}
        return keras.saving.serialize_keras_object(keywords | vars(self.config))

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Creates an optimizer from tfamp's or Keras' config, which stays as it is."""
        return cls(**keras.saving.deserialize_keras_object(config, custom_objects))
