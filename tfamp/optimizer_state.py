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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
    layouts = [
        [*own, *inner],
        [*own[:STOCK_VARIABLES], *inner],
        [*inner],
        [*own, *head],
        [*own[:_UNBUILT_STOCK_VARIABLES], *head],
        [*head],
    ]
    return next((targets for targets in layouts if _fits(saved, targets)), None)


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


def describe(saved: Mapping, variables: Variables) -> str:
    """Returns what was received and what was expected, as sentences."""
    own, inner = len(variables.own), len(variables.inner)
    return (
        f"Received: {len(saved.keys())} saved variables. Expected: {own + inner} "
        f"(tfamp's layout), {STOCK_VARIABLES + inner} (stock Keras') or {inner} "
        "(the inner optimizer's alone) of this optimizer's shapes."
    )


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
