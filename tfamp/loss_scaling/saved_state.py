"""The saved layouts of a loss-scaled optimizer's state, and how they map to ours.

Keras saves the variables of an optimizer as a list, without names:

| saved by | variables |
|---|---|
| tfamp | iteration, learning rate, step counter, scale, 4 counters; inner ones |
| stock Keras | iteration, learning rate, step counter, scale; inner ones |
| an inner optimizer alone | inner ones |

Of an optimizer that was never built, tfamp saves all but the slots, Keras only
iteration and learning rate of both. Numbers and shapes tell the layouts apart.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.loss_scaling import rule as loss_scale

STOCK_VARIABLES = 4  # iteration, learning_rate, step_counter, dynamic_scale
_UNBUILT_STOCK_VARIABLES = 2


class Variables(NamedTuple):
    """The variables of a loss-scaled optimizer.

    Attributes:
      own: Those of the loss scale, in tfamp's order.
      inner: Those of the inner optimizer.
      head: Those of the inner optimizer that exist before it is built.
    """

    own: Sequence
    inner: Sequence
    head: Sequence


def match(saved: Mapping, variables: Variables) -> Sequence | None:
    """Returns the variables that a saved state belongs to, in its order.

    Args:
      saved: Arrays by "0", "1" and so on.
      variables: The optimizer's.

    Returns:
      A list of variables, or None if the state fits no layout.
    """
    own, inner, head = variables
    built = [[*own, *inner], [*own[:STOCK_VARIABLES], *inner], [*inner]]
    never_built = [
        [*own, *head],
        [*own[:_UNBUILT_STOCK_VARIABLES], *head],
        [*head],
    ]
    for targets in built:
        if _fits(saved, targets):
            return targets
    for targets in never_built:
        if _fits(saved, targets) and _took_no_step(saved, targets, head):
            return targets
    return None


def is_scaled(saved: Mapping) -> bool:
    """Whether a saved state starts with a loss scale's variables, built or not.

    Args:
      saved: Arrays, or HDF5 data sets, by "0", "1" and so on.
    """
    # Iteration, learning rate; step counter or inner iteration, scale or inner rate.
    head = [saved[str(index)] for index in range(min(STOCK_VARIABLES, len(saved)))]
    kinds = [np.issubdtype(value.dtype, np.integer) for value in head]
    scalars = all(value.shape == () for value in head)
    return scalars and kinds[:3] == [True, False, True]


def restore(saved: Mapping, variables: Variables, name: str) -> None:
    """Assigns a saved state in any of the layouts.

    Args:
      saved: Arrays by "0", "1" and so on.
      variables: The optimizer's.
      name: The optimizer's, for the error.

    Raises:
      ValueError: If the state fits no layout. Nothing is changed then.
    """
    targets = match(saved, variables)
    if targets is None:
        own, inner = len(variables.own), len(variables.inner)
        raise ValueError(
            f"The state of optimizer '{name}' was not loaded. Received: {len(saved)} "
            f"saved variables. Expected: {own + inner} (tfamp's layout), "
            f"{STOCK_VARIABLES + inner} (stock Keras') or {inner} (the inner "
            "optimizer's alone) of this optimizer's shapes. Compile with the kind of "
            "optimizer that was saved; or, to go on without its state, load the "
            "weights before `compile`, or with `skip_mismatch=True` after "
            "`optimizer.build(model.trainable_variables)`."
        )
    for index, variable in enumerate(targets):
        variable.assign(saved[str(index)])


def fit_to_config(
    state: loss_scale.LossScaleState, config: loss_scale.LossScaleConfig
) -> None:
    """Brings a restored state in line with the settings, which win over it.

    Args:
      state: Variables.
      config: The settings of the object that was restored.
    """
    values = loss_scale.LossScaleState(*(v.value for v in state))
    interval = config.schedule.next_interval(values, False, False)
    state.growth_interval.assign(interval)
    allowed = tf.constant(config.hysteresis, loss_scale.COUNTER_DTYPE)
    state.hysteresis_tracker.assign(tf.minimum(values.hysteresis_tracker, allowed))
    loaded = float(state.scale.numpy())
    clamped = float(loss_scale.clamp_scale(config, loaded))
    if not config.dynamic:
        state.scale.assign(clamped)
    elif not loaded == clamped:  # Also true of NaN.
        warnings.warn(
            f"The loaded loss scale {loaded} is outside "
            f"[{config.min_scale}, {config.upper_bound}]; it was set to {clamped}.",
            stacklevel=2,
        )
        state.scale.assign(clamped)


def _took_no_step(saved, targets, head):
    """Else it is that of a built optimizer without slots, of another kind."""
    first = len(targets) - len(head)
    counters = [saved[str(first + i)] for i, v in enumerate(head) if "int" in v.dtype]
    return all(int(counter) == 0 for counter in counters)


def _fits(saved, targets):
    """Whether a saved state has as many variables, of these shapes and kinds."""
    if len(saved.keys()) != len(targets) or not targets:
        return False
    values = [saved[str(index)] for index in range(len(targets))]
    return all(
        np.shape(value) == tuple(variable.shape)
        and np.issubdtype(value.dtype, np.integer) == ("int" in variable.dtype)
        for value, variable in zip(values, targets, strict=True)
    )
