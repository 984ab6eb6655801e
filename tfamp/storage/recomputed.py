"""Which built layers are computed again in the backward pass, and by which pattern.

A property of the layer, as its dtype policy is, and of no file that is saved.
"""

from typing import Any, NamedTuple

import keras

from tfamp import records
from tfamp.storage import remat


class Mark(NamedTuple):
    """A layer's pattern, and the mode that a `keras.RematScope` had given it."""

    pattern: str
    before: Any


def pattern_of(layer: keras.layers.Layer) -> str | None:
    """Returns the pattern by which a layer is computed again, or None."""
    mark = records.of(layer).remat
    return mark.pattern if mark else None


def mark(layer: keras.layers.Layer, pattern: str | None) -> None:
    """Has a layer computed again from its next trace on, or no more."""
    record = records.of(layer)
    old, record.remat = record.remat, None
    before = old.before if old else getattr(layer, "_remat_mode", None)
    # Past Keras, which tracks what a layer holds. Keras 3.10 to 3.15 asks a layer that
    # has a mode for the function to call.
    put = object.__setattr__
    if pattern is not None:
        record.remat = Mark(pattern, before)
        put(layer, "_remat_mode", keras.RematScope("full"))
        put(
            layer,
            "rematerialized_call",
            lambda call, *_, **__: remat.rematerialized(call),
        )
    elif old:
        put(layer, "_remat_mode", before)
        object.__delattr__(layer, "rematerialized_call")


def describe(layer: keras.layers.Layer) -> str:
    """Returns what to say of a layer that is computed again; empty if it is not."""
    if pattern := pattern_of(layer):
        return f"recomputed in the backward pass, requested by {pattern!r}"
    mode = getattr(layer, "_remat_mode", None)
    kind = getattr(mode, "mode", None)
    named = kind != "list_of_layers" or layer.name in mode.layer_names
    return (
        f"recomputed in the backward pass, by keras.RematScope({kind!r})"
        if kind and named
        else ""
    )
