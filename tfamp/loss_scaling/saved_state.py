"""Which optimizer a saved state belongs to, and its way into a loss-scaled one.

Keras saves the variables of an optimizer as a list, without names:

| saved by | variables |
|---|---|
| tfamp | iteration, learning rate, step counter, scale, 4 counters; inner ones |
| stock Keras | iteration, learning rate, step counter, scale; inner ones |
| an inner optimizer alone | inner ones |

Of an optimizer that was never built, tfamp saves all but the slots, Keras only
iteration and learning rate of both. Numbers and shapes tell the layouts apart.
"""

from collections.abc import Sequence

from tfamp.facts import user_code
from tfamp.loss_scaling import rule

_STOCK = 4  # iteration, learning_rate, step_counter, dynamic_scale
_UNBUILT_STOCK = 2


def restore(saved: Sequence, own: Sequence, inner: Sequence, head: Sequence) -> None:
    """Assigns a saved state, in any layout, to variables; or raises, and changes none.

    Args:
      saved: Arrays.
      own: The variables of the loss scale, in tfamp's order.
      inner: Those of the inner optimizer.
      head: Those of the inner optimizer that exist before it is built.
    """
    built = [[*own, *inner], [*own[:_STOCK], *inner], [*inner]]
    unbuilt = [[*own, *head], [*own[:_UNBUILT_STOCK], *head], [*head]]
    # A counter that moved is that of a built optimizer without slots.
    ends = saved[len(saved) - len(head) :]
    moved = any(value.any() for value in ends if value.dtype.kind in "iu")
    layouts = built if moved else built + unbuilt
    targets = next((each for each in layouts if _fits(saved, each)), None)
    if targets is None:
        raise ValueError(
            f"The optimizer's state was not loaded. Received: {len(saved)} saved "
            f"variables. Expected: {len(own) + len(inner)} (tfamp's layout), "
            f"{_STOCK + len(inner)} (stock Keras') or {len(inner)} (the inner "
            "optimizer's alone) of this optimizer's shapes. Compile with the kind "
            "of optimizer that was saved; or load the model with `compile=False`, the "
            "weights before `compile`, or with `skip_mismatch=True` after "
            "`optimizer.build(model.trainable_variables)`."
        )
    for variable, value in zip(targets, saved, strict=True):
        variable.assign(value)


def _fits(saved, targets):
    """Whether a saved state has as many variables, of these shapes and kinds."""
    return len(saved) == len(targets) > 0 and all(
        value.shape == tuple(variable.shape)
        and (value.dtype.kind in "iu") == ("int" in variable.dtype)
        for value, variable in zip(saved, targets, strict=True)
    )


def fit_to_config(state: rule.LossScaleState, config: rule.LossScaleConfig) -> None:
    """Brings restored variables in line with the settings, which win over them."""
    values = rule.LossScaleState(*(v.value for v in state))
    interval = config.schedule.next_interval(values, False, False)
    state.growth_interval.assign(interval)
    loaded = float(state.scale.numpy())
    clamped = float(rule.clamp_scale(config, loaded))
    if config.dynamic and not loaded == clamped:  # Also true of NaN.
        user_code.warn(
            f"The loaded loss scale {loaded} is outside "
            f"[{config.min_scale}, {config.upper_bound}]; it was set to {clamped}."
        )
    state.scale.assign(clamped)
