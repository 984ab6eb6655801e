"""Whether XLA compiles the step: as it was asked for, or as Keras would decide.

    asked for        | the model             | on this host   | on another device
    None             | compiled              | as compiled    | True stays, else "auto"
    None, "auto"     |                       | "auto"         | "auto"
    True, False      |                       | that           | that
    any              | run_eagerly=True      | off            | off

"auto" is the rule of Keras 3.15 (`Trainer._resolve_auto_jit_compile`): on where there
is an accelerator, no distribution strategy, and no layer without XLA. `tfamp.enable`
turns it off for a graph rewrite.
"""

from typing import Literal, NamedTuple

import keras

from tfamp import graph_context as tracing
from tfamp.diagnostics import cudnn, devices, format_rules
from tfamp.precision import model_structure


class Choice(NamedTuple):
    """Whether XLA compiles the step, whether it could, and what to tell."""

    jit_compile: bool
    possible: bool
    notes: tuple[str, ...] = ()


def choose(
    model: keras.Model,
    asked: bool | Literal["auto"] | None,
    about: devices.Subject,
    rewrite: str | None,
) -> Choice:
    """Decides; changes nothing.

    Args:
      model: A built model.
      asked: The argument of `audit`.
      about: The device.
      rewrite: Dtype that graphs are rewritten to, or None.

    Returns:
      A `Choice`.
    """
    if model.compiled and model.run_eagerly:
        note = "XLA is off, as the model was compiled with run_eagerly=True"
        return Choice(False, True, (note,) if asked else ())
    against = _against(model, about)
    possible = not against
    # Keras 3.15 has no public name for the strategy; guarded by
    # tests/diagnostics/test_xla_choice.py.
    distributed = getattr(model, "_distribute_strategy", None) is not None
    if asked in (True, False):
        note = f"jit_compile=True is as asked for; Keras turns it off: {against}"
        return Choice(bool(asked), possible, (note,) if asked and against else ())
    if asked is None and model.compiled and not about.simulated:
        return Choice(bool(model.jit_compile), possible)
    compiled = asked is None and model.compiled and bool(model.jit_compile)
    auto = about.device.kind != "CPU" and rewrite is None
    wanted = compiled or (auto and not distributed)
    notes = []
    if (compiled or auto) and against:
        notes.append(f"XLA is off, as Keras turns it off: {against}")
    elif auto and distributed and not compiled:
        notes.append("XLA is off, as Keras chooses under a distribution strategy")
    elif auto and model.compiled and asked is None and not compiled:
        notes.append(
            "XLA is taken to be as Keras decides there; pass `jit_compile` if not"
        )
    return Choice(wanted and possible, possible, tuple(notes))


def _against(model, about):
    """Why Keras would not let XLA compile the step; "" if it would."""
    if tracing.deterministic():
        return "ops are deterministic"
    nvidia = about.device.compute_capability is not None
    names = [
        model_structure.path_of(layer)
        for layer in model_structure.flatten_layers(model)
        if not layer.supports_jit or (nvidia and cudnn.refuses_xla(layer))
    ]
    return f"no XLA for {format_rules.examples(names)}" if names else ""
