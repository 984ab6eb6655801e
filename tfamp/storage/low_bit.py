"""Optimizers whose slots, and trained variables, are stored in fewer bits.

| stored | what | bytes for a parameter of Adam |
| --- | --- | --- |
| "float32" | as in Keras | 8 |
| "bfloat16" | slots, rounded stochastically | 4 |
| "8bit" | slots, a code of 8 bits and a scale for 256 | 2.01 |

The optimizer's own code runs unchanged, on float32: a variable's slots are read before
its update and stored after it, in one pass that XLA compiles.
"""

import functools
import math
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.inspect import structure
from tfamp.keras_patches import keras_optimizers
from tfamp.storage import codes, stored

STATES = ("float32", "bfloat16", "8bit")
MIN_SIZE = 4096  # Of smaller variables slots stay float32.
# Slots by Keras' names (3.10 to 3.15): averages of gradients, and of what has no sign.
_SIGNED = ("_momentum",)
_UNSIGNED = (
    *("_velocity", "_norm", "_accumulator"),
    *("_accumulated_grad", "_accumulated_delta_var"),
)
_WHOLE = "_gradient_accumulator"  # Of sums that grow.
# Sums or weights, no averages: rounding them moves what is trained.
_REFUSED = ("Ftrl", "ScheduleFreeAdamW")


def low_bit(
    optimizer: keras.optimizers.Optimizer,
    state: Literal["8bit", "bfloat16", "float32"] = "8bit",
) -> keras.optimizers.Optimizer:
    """Has an optimizer keep its slots in 8 bits or in bfloat16.

    Slots of variables with 4,096 elements or more are stored so; the optimizer reads
    and writes them as float32. This is for custom loops; for models that are compiled
    there is `tfamp.enable(optimizer_state=)`.

    Rounding is stochastic, by the count of updates: equal on all replicas, in another
    run, and in a resumed one. Saved files hold float32, as stock Keras', and are
    loaded by either kind; what 8 bits cannot hold is rounded then.

    Args:
      optimizer: A Keras optimizer, a `LossScaleOptimizer` or a `MultiOptimizer`, built
        or not; it is changed. Adam, AdamW, Nadam, Adamax, Lamb, Lion, Muon, SGD,
        RMSprop (not centered), Adagrad, Adadelta and Adafactor have such slots; what
        else they keep (averaged weights, accumulated gradients, AMSGrad's maximum)
        stays float32.
      state: "8bit", "bfloat16" or "float32".

    Returns:
      The optimizer.

    Raises:
      ValueError: If the state is unknown, or the optimizer keeps what must not be
        rounded. Nothing is changed then.
      TypeError: If it is no Keras optimizer.

    Example:
      optimizer = tfamp.low_bit(keras.optimizers.Adam(1e-3), "8bit")

    References:
      Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021,
      https://arxiv.org/abs/2110.02861
    """
    check_state(state)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be a Keras optimizer. Received: {optimizer!r}."
        )
    members = members_of(optimizer)
    for each in members:
        _check(each)
    for each in members:
        prepare(each)._state = state
        for variable in each.variables:
            each._store(variable)
    return optimizer


def store_slots(model: keras.Model, optimizer: Any, state: str) -> None:
    """Has a model's optimizer store its slots, and know weights that are stored.

    Args:
      model: A model; weights of it may be stored since an earlier `compile`.
      optimizer, state: As of `low_bit`; None for a model without an optimizer.
    """
    weights = any(isinstance(v, stored.StoredVariable) for v in model.variables)
    if optimizer is None or (state == "float32" and not weights):
        return
    if not any(isinstance(each, _LowBit) for each in members_of(optimizer)):
        low_bit(optimizer, state)


def check_state(state: Any) -> None:
    """Raises ValueError unless slots can be stored so."""
    if state not in STATES:
        raise ValueError(
            f"An optimizer's state must be one of {STATES}. Received: {state!r}."
        )


def members_of(optimizer) -> list:
    """Returns the optimizers that hold slots, inside of what scales the loss."""
    inner = optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
    return keras_optimizers.member_optimizers(inner)


def _check(optimizer):
    kind = type(optimizer).__name__
    centered = getattr(optimizer, "centered", False)
    if kind in _REFUSED or centered:
        raise ValueError(
            f"{kind}{' with `centered=True`' * bool(centered)} has state that must not "
            f"be rounded. Received: {optimizer!r}. Use optimizer_state='float32', or "
            "another optimizer, such as AdamW."
        )


def prepare(optimizer):
    """Gives an optimizer the class that stores; returns it."""
    if not isinstance(optimizer, _LowBit):
        optimizer.__class__ = _kind(type(optimizer))
        optimizer._state = "float32"
    return optimizer


@functools.cache
def _kind(base):
    # Keras asks an object for its `__class__` when it saves it: the one that it knows.
    members = {"__module__": base.__module__, "__class__": property(lambda _: base)}
    return type(base.__name__, (_LowBit, base), members)


class _LowBit:
    """What Keras' optimizers do, over stored variables."""

    def build(self, variables):
        with tf.init_scope():  # What Keras makes in a graph has no value there.
            super().build(variables)

    def _store(self, variable):
        """Stores a slot of an optimizer as its state says."""
        name = variable.name
        ways = codes.SIGNED if name.endswith(_SIGNED) else codes.UNSIGNED
        small = math.prod(variable.shape) < MIN_SIZE or variable.dtype != "float32"
        if small or name.endswith(_WHOLE) or not name.endswith(_SIGNED + _UNSIGNED):
            return
        if isinstance(variable, stored.StoredVariable):
            with self._distribution_strategy.scope():
                stored.restore(variable)
        if self._state != "float32":
            code = codes.BFLOAT16 if self._state == "bfloat16" else ways
            self._keep(variable, code)

    def _keep(self, variable, code):
        variables = [*self._variables, *self._trainable_variables]
        salt = next(i for i, v in enumerate(variables) if v is variable)
        with self._distribution_strategy.scope():
            stored.store(variable, code, salt, self._iterations)

    def store_weights(self, variables):
        """Stores those of these variables that it trains in bfloat16."""
        # Keras knows a variable by TensorFlow's; 3.16 has a second table.
        decays = getattr(self, "_weight_decay_by_var_key", {})
        for variable in variables:
            key = self._var_key(variable)
            is_trained = key in self._trainable_variables_indices
            if is_trained and not isinstance(variable, stored.StoredVariable):
                self._keep(variable, codes.BFLOAT16)
                for table in (self._trainable_variables_indices, decays):
                    if key in table:
                        table[self._var_key(variable)] = table[key]

    def _var_key(self, variable):
        is_special = stored.is_special(variable)
        return super()._var_key(variable._value if is_special else variable)

    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        slot = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        self._store(slot)
        return slot

    def assign(self, variable, value):
        _assign("assign", super(), variable, value)

    def assign_add(self, variable, value):
        _assign("assign_add", super(), variable, value)

    def assign_sub(self, variable, value):
        _assign("assign_sub", super(), variable, value)

    def _clip_gradients(self, grads):
        # Those of variables in bfloat16 have its format; their norm is float32.
        if self.clipnorm or self.global_clipnorm or self.clipvalue:
            grads = keras_optimizers.in_float32(grads)
        return super()._clip_gradients(grads)

    def _backend_apply_gradients(self, grads, trainable_variables):
        if self.gradient_accumulation_steps:  # They are added up in float32.
            grads = keras_optimizers.in_float32(grads)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _apply_weight_decay(self, variables):
        plain = [v for v in variables if not isinstance(v, stored.StoredVariable)]
        super()._apply_weight_decay(plain)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        natives = keras_optimizers.native(trainable_variables)
        self._programs, self._before = {}, {}  # Of this trace.
        # In the order in which a backward pass has the gradients.
        super()._backend_update_step(grads[::-1], natives[::-1], learning_rate)
        self._programs, self._before = {}, {}

    def update_step(self, gradient, variable, learning_rate):
        step, index = super().update_step, self._get_variable_index(variable)
        count, weight = len(self._trainable_variables), self._trainable_variables[index]
        # As Keras finds them: by the place of the variable in each list of slots.
        lists = [x for x in vars(self).values() if isinstance(x, list)]
        entries = {id(x[index]): x[index] for x in lists if len(x) == count}
        mine = [v for v in entries.values() if isinstance(v, keras.Variable)]
        if not any(isinstance(v, stored.StoredVariable) for v in mine):
            return step(gradient, variable, learning_rate)
        decays = isinstance(weight, stored.StoredVariable) and (
            self.weight_decay is not None and self._use_weight_decay(weight)
        )

        def body(gradient, learning_rate):
            if decays:  # Before the step, as in Keras.
                weight.assign_sub(weight * self.weight_decay * learning_rate)
            step(gradient, weight, learning_rate)

        def update(gradient, learning_rate, keys, parts):
            whole = [stored.read(v, each) for v, each in zip(mine, parts, strict=True)]
            new = stored.updated(lambda: body(gradient, learning_rate), mine, whole)
            changes = zip(mine, new, whole, keys, strict=True)
            return [None if x is y else stored.pack(v, x, k) for v, x, y, k in changes]

        gradient = keras_optimizers.whole(gradient)
        arguments = [
            gradient,
            tf.convert_to_tensor(learning_rate),
            [stored.key_of(v) for v in mine],
            [[tf.convert_to_tensor(x) for x in stored.parts_of(v)] for v in mine],
        ]
        flat = tf.nest.flatten(gradient, expand_composites=True)
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        # A graph updates all variables side by side, with slots in float32; not XLA.
        before = () if graph_context.in_xla() else self._before.get(variable.device, ())
        with tf.control_dependencies(before):
            if all(x.shape.is_fully_defined() for x in flat):
                key = self._program_key(mine, decays)
                compiled = stored.compiled(update, [variable])
                update = self._programs.setdefault(key, compiled)
            for each, parts in zip(mine, update(*arguments), strict=True):
                if parts is not None:
                    stored.assign_parts(each, parts)
        self._before[variable.device] = graph.get_operations()[first:]

    def _program_key(self, variables, decays):
        """Returns what two variables have in common if their updates are the same."""
        kind = type(self)  # Code of others, and Muon's, may look at a variable's name.
        alike = kind.__module__.startswith("keras.") and kind.__name__ != "Muon"
        shapes = [(stored.code_of(v), tuple(v.shape)) for v in variables]
        return decays, *shapes, *(() if alike else map(id, variables))


def _assign(how, keras_own, variable, value):
    if stored.is_special(variable):
        getattr(variable, how)(tf.convert_to_tensor(value))
    else:
        getattr(keras_own, how)(variable, value)


# ---- Weights ----


def store_weights(model: keras.Model) -> None:
    """Has a model's large weights in layers of bfloat16 stored in bfloat16.

    Those that its own optimizer trains, of two axes or more and 4,096 elements or more.
    They read as float32 outside of such layers, and the optimizer rounds them
    stochastically. Their gradients are bfloat16.

    Args:
      model: A built model with a built optimizer.
    """
    members = members_of(model.optimizer)
    if any(each.use_ema for each in members):
        raise ValueError(
            "With use_ema=True Keras overwrites weights by their averages directly, "
            "which bypasses stochastic rounding. Received: use_ema=True with weights "
            "in bfloat16. Use weights='float32'."
        )
    if not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    large = [
        weight
        for place in structure.walk(model)
        if place.layer.compute_dtype == "bfloat16"
        for weight in structure.own_weights(place.layer)
        if weight.trainable
        and weight.dtype == "float32"
        and len(weight.shape) > 1
        and math.prod(weight.shape) >= MIN_SIZE
        and not keras_optimizers.overwrites_with_gradient(weight)
    ]
    for each in members:
        prepare(each).store_weights(large)
