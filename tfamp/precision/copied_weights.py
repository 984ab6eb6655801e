"""Takes the weights, states and vocabularies of a layer over to its copy."""

import tempfile
from typing import Any

import keras
import numpy as np

from tfamp.precision import model_structure


def pair_layers(source: Any, target: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of a layer, or a layer in it, and its copy."""
    sources = model_structure.flatten_layers(source)
    targets = model_structure.flatten_layers(target)
    if _kinds(sources) != _kinds(targets):
        # Preprocessing makes some of its layers when it is first used.
        sources, targets = _without_late(sources), _without_late(targets)
    if _kinds(sources) != _kinds(targets):
        raise ValueError(
            f"it holds other layers. Received: {describe_layers(targets)}. Expected: "
            f"{describe_layers(sources)}. Create all of them in `__init__`, `build` or "
            "`call`, from what `get_config` returns."
        )
    return list(zip(sources, targets, strict=True))


def _kinds(layers):
    return [type(layer) for layer in layers]


def _without_late(layers):
    """Leaves out what is inside of layers that have no weights."""
    outer = [layer for layer in layers if not layer.weights]
    inner = [x for each in outer for x in model_structure.flatten_layers(each)[1:]]
    ids = set(map(id, inner))
    return [layer for layer in layers if id(layer) not in ids]


def copy_tables(source: Any, target: Any) -> None:
    """Copies vocabularies, which a lookup layer needs to be called at all."""
    if not isinstance(source, keras.layers.Layer):
        return
    pairs = [
        [
            layer
            for layer in model_structure.flatten_layers(each)
            if hasattr(layer, "save_assets")
        ]
        for each in (source, target)
    ]
    for old, new in zip(*pairs, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)


def copy_own(source: Any, target: Any) -> None:
    """Copies the variables that a layer itself owns, and its recurrent states."""
    if source.built and not target.built:
        target.build_from_config(source.get_build_config())
    store = {}
    source.save_own_variables(store)
    target.load_own_variables({key: np.asarray(store[key]) for key in store})
    states = zip(
        model_structure.recurrent_states(source),
        model_structure.recurrent_states(target),
        strict=True,
    )
    for old, new in states:
        new.assign(old)


def check_same_values(source: Any, target: Any) -> None:
    """Raises unless float32 holds the very values; widening 16 bits is exact."""
    for old, new in zip(source.weights, target.weights, strict=True):
        before, after = np.asarray(old), np.asarray(new)
        widened = before.astype(after.dtype)
        lossless = widened.astype(before.dtype).tobytes() == before.tobytes()
        if not lossless or widened.tobytes() != after.tobytes():
            raise ValueError(
                f"the values of {new.path!r} ({new.dtype}) differ from those of "
                f"{old.path!r} ({old.dtype})"
            )


def describe_layers(layers: Any) -> str:
    """Returns the names and classes of at most five layers."""
    return listed([f"{layer.name} ({type(layer).__name__})" for layer in layers])


def listed(items: list[str], most: int = 5) -> str:
    """Joins at most five items."""
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
