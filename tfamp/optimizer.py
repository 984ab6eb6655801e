"""Loss scaling around any Keras optimizer: variables around `loss_scale`'s rule."""

import dataclasses
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import keras_hooks, loss_scale

OVERFLOW_DROPS = ("microbatch", "window")
_STOCK_VARIABLES = 4  # iteration, learning_rate, step_counter, dynamic_scale


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss so that float16 gradients do not underflow.

    A drop-in for `keras.optimizers.LossScaleOptimizer`: the same positional
    arguments, attributes and saved format, plus bounds, separate factors,
    hysteresis, a static scale and counters. A step whose gradients are not all
    finite is skipped: no weight, slot, average, accumulator or counter of the
    inner optimizer changes, and the scale backs off. `loss_scale.next_state`
    documents the rule.

    Stock Keras' scale has no bounds: 160 overflows in a row drive it to 0, and
    the next good step then writes NaN into every weight. Here it stays within
    [`min_scale`, `max_scale`].

    Args:
      inner_optimizer: The Keras optimizer to wrap. Clipping, weight decay, moving
        averages and gradient accumulation are set there and see unscaled
        float32 gradients.
      initial_scale: Float. The first loss scale.
      growth_interval: Int. Finite steps in a row before the scale grows. Keras'
        name `dynamic_growth_steps` works too.
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
        **kwargs,
    ):
        _check_inner(inner_optimizer)
        if "dynamic_growth_steps" in kwargs:
            growth_interval = kwargs.pop("dynamic_growth_steps")
        config, overflow_drops = _validate(
            initial_scale=initial_scale,
            growth_interval=growth_interval,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            dynamic=dynamic,
            overflow_drops=overflow_drops,
        )
        super().__init__(
            inner_optimizer,
            initial_scale=config.initial_scale,
            dynamic_growth_steps=config.growth_interval,
            name=name,
            **kwargs,
        )
        self._config, self.overflow_drops = config, overflow_drops
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
        """The first loss scale; setting it before `build` sets the scale too."""
        return self._config.initial_scale

    @initial_scale.setter
    def initial_scale(self, value):
        if self._change_config(initial_scale=value) and not self.built:
            self.dynamic_scale.assign(value)

    @property
    def growth_interval(self) -> int:
        """Finite steps in a row before the scale grows."""
        return self._config.growth_interval

    @growth_interval.setter
    def growth_interval(self, value):
        if self._change_config(growth_interval=value):
            self._state_variables().growth_interval.assign(value)

    @property
    def dynamic_growth_steps(self) -> int:
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
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    def scale_loss(self, loss):
        """Returns `loss` times the loss scale, in float32 or wider."""
        return keras.ops.multiply(loss, self._usable_scale())

    def _usable_scale(self):
        """The scale, within bounds whatever was restored or assigned."""
        return loss_scale.clamp_scale(self._config, self.dynamic_scale.value)

    def apply(self, grads, trainable_variables=None):
        """Applies scaled gradients, or skips the step if one is not finite.

        Args:
          grads: List of gradients of the scaled loss: tensors, `tf.IndexedSlices`
            or None.
          trainable_variables: Their variables; may be left out once built.

        Raises:
          RuntimeError: Under a `tf.distribute` strategy other than OneDeviceStrategy.
          ValueError: If the optimizer is not built and no variables are given.
        """
        check_strategy()
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The optimizer is not built. Received: trainable_variables=None. "
                    "Pass the variables, or call `build(trainable_variables)` first."
                )
            trainable_variables = list(trainable_variables)
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        grads = list(grads)
        variables = list(trainable_variables or self._trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient (or None) for each variable. Received: "
                f"{len(grads)} gradients and {len(variables)} variables."
            )
        finite = self.check_finite(grads)
        tf.cond(finite, lambda: self._apply_finite(grads, variables), self._skip)
        self._advance(finite)

    def _apply_finite(self, grads, variables):
        # Not times 1 / scale, which is subnormal, and flushed to 0, above 2**126.
        scale = self._usable_scale()
        unscaled = [
            grad
            if grad is None or keras_hooks.overwrites_with_gradient(variable)
            else _divide_f32(grad, scale)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(unscaled, variables)
        return tf.constant(True)

    def _skip(self):
        if self.overflow_drops == "window":
            keras_hooks.drop_accumulation_window(self.inner_optimizer)
        return tf.constant(False)

    def _advance(self, finite):
        variables = self._state_variables()
        before = loss_scale.LossScaleState(*(v.value for v in variables))
        after = loss_scale.next_state(self._config, before, finite)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def check_finite(self, grads):
        """Returns whether every gradient is finite: bool tensor of shape [].

        `tf.IndexedSlices` are checked on their `values`, without densifying.
        """
        values = [
            grad.values if isinstance(grad, tf.IndexedSlices) else grad
            for grad in grads
            if grad is not None
        ]
        each = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
        return tf.reduce_all(each) if each else tf.constant(True)

    def load_own_variables(self, store):
        """Restores the state from our layout, stock Keras' or the bare inner one's.

        Settings given to this object win over saved ones: the growth interval and
        the hysteresis are its own, and a scale outside its bounds is clamped with
        a warning. A state that fits none of the layouts is left out whole, with a
        warning, as in Keras: one saved by an optimizer of another kind, or loaded
        before this one is built.
        """
        own, inner = self._variables, self.inner_optimizer.variables
        layouts = (own + inner, own[:_STOCK_VARIABLES] + inner, inner)
        fitting = [targets for targets in layouts if _fits(store, targets)]
        if not (self.built and fitting):
            warnings.warn(self._why_not_loaded(store, layouts), stacklevel=2)
            return
        for index, variable in enumerate(fitting[0]):
            variable.assign(store[str(index)])
        self._fit_state_to_config()

    def _why_not_loaded(self, store, layouts):
        counts = " or ".join(str(len(targets)) for targets in layouts)
        return (
            f"The state of optimizer '{self.name}' was not loaded. Received: "
            f"{len(store.keys())} saved variables. Expected: {counts} (tfamp's layout, "
            "stock Keras', the inner optimizer's alone) of this optimizer's shapes"
            f"{'' if self.built else '; it is not built yet'}. Compile with the same "
            "kind of optimizer, call `optimizer.build(model.trainable_variables)`, "
            "then load."
        )

    def _fit_state_to_config(self):
        state = self._state_variables()
        state.growth_interval.assign(self._config.growth_interval)
        state.hysteresis_tracker.assign(
            tf.minimum(
                state.hysteresis_tracker.value,
                tf.constant(self._config.hysteresis, loss_scale.COUNTER_DTYPE),
            )
        )
        loaded, clamped = float(state.scale.value), float(self._usable_scale())
        if not loaded == clamped:  # Also true of NaN.
            low, high = self._config.min_scale, self._config.upper_bound
            warnings.warn(
                f"The loaded loss scale {loaded} is outside [{low}, {high}]; "
                f"it was set to {clamped}.",
                stacklevel=2,
            )
            state.scale.assign(clamped)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's keywords, the inner optimizer serialized."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **self._config.to_dict(),
            "overflow_drops": self.overflow_drops,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Builds an optimizer from our config or stock Keras'; neither is changed."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
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
    known.append("overflow_drops")
    unknown = sorted(set(keywords) - set(known))
    if unknown:
        raise TypeError(
            f"Unknown loss-scale keywords. Received: {', '.join(unknown)}. "
            f"Expected some of {', '.join(known)}."
        )
    return _validate(**keywords)[0]


def _validate(overflow_drops="microbatch", **settings):
    if overflow_drops not in OVERFLOW_DROPS:
        raise ValueError(
            f"`overflow_drops` must be one of {OVERFLOW_DROPS}. "
            f"Received: overflow_drops={overflow_drops!r}."
        )
    return loss_scale.LossScaleConfig(**settings), overflow_drops


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


def check_strategy(strategy=None):
    """Raises RuntimeError for a strategy that loss scaling does not work under yet."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`apply` must be called in a replica context: inside `strategy.run`."
        )
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None or isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return
    raise RuntimeError(
        "Loss scaling works without a distribution strategy, or under "
        f"OneDeviceStrategy. Received: {type(strategy).__name__} with "
        f"{strategy.num_replicas_in_sync} replica(s). Train on one device, or use "
        "mixed_bfloat16, which needs no loss scaling."
    )


def _fits(store, targets):
    """Whether a saved state has as many variables, of these shapes and kinds."""
    if len(store.keys()) != len(targets):
        return False
    saved = [store[str(index)] for index in range(len(targets))]
    return all(
        np.shape(value) == tuple(variable.shape)
        and np.issubdtype(value.dtype, np.integer) == ("int" in variable.dtype)
        for value, variable in zip(saved, targets, strict=True)
    )


def _divide_f32(grad, scale):
    """Returns grad / scale in float32 (float64 stays), IndexedSlices kept sparse."""
    if isinstance(grad, tf.IndexedSlices):
        values = _divide_f32(grad.values, scale)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    if grad.dtype == tf.float64:
        return grad / tf.cast(scale, tf.float64)
    return tf.cast(grad, tf.float32) / scale
