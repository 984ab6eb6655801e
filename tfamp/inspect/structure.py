"""The layers that a model consists of: where each is, what it holds, what it is."""

from typing import Any, NamedTuple

import keras

from tfamp.facts import formats, names

_ASSIGNABLE = (*formats.LOW, "float32")  # A float64 layer is one on purpose.


class Place(NamedTuple):
    """Where a layer is in a model.

    Attributes:
      layer: The layer.
      path: Names from the outermost layer to it, with slashes. The name of a functional
        model is left out, as in Keras' own paths.
      holders: Places of those that hold it; a shared layer has several, a model none.
    """

    layer: keras.layers.Layer
    path: str
    holders: list["Place"]


def walk(model: keras.layers.Layer) -> list[Place]:
    """Returns the place of a model and of each layer in it, parents first.

    Formed from the structure: Keras (<= 3.15) gives no path to layers without a
    `build`, and a shorter one to layers that are loaded from a file.
    """
    places: dict[int, Place] = {}

    def visit(layer, scope, *holders):
        if id(layer) in places:
            places[id(layer)].holders.extend(holders)
            return
        path = f"{scope}/{layer.name}" if scope else layer.name
        places[id(layer)] = place = Place(layer, path, list(holders))
        for each in children(layer):
            visit(each, "" if is_functional(layer) else path, place)

    visit(model, "")
    return list(places.values())


def check_built(model: Any, error: type[Exception] = ValueError) -> None:
    """Raises TypeError if this is no model, `error` if it is not built."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {type(model).__name__}."
        )
    if not model.built:
        raise error(
            f"Model {model.name!r} is not built, so its layers and inputs are not "
            "known. Call it on a batch first, or build it under `tfamp.enable` or "
            "`tfamp.policy_scope`. For a model without `call`, pass the models that "
            "it is made of."
        )


def is_built(model: keras.Model) -> bool:
    """Whether a model and its layers are built; Keras says so too soon.

    `build` of a model that defines none marks the model alone as built.
    """
    called, flat = getattr(model, "_called", False), names.flatten_layers(model)
    return model.built and (called or all(x.built for x in flat))


def layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns a model and each layer in it, parents first."""
    return [place.layer for place in walk(model)]


def layer_ids(model: keras.Model) -> frozenset[int]:
    """Returns which layers a model consists of."""
    return frozenset(map(id, layers(model)))


def is_functional(layer: Any) -> bool:
    """Whether a layer is a model made of a graph, as `keras.Model(inputs, outputs)`."""
    return isinstance(layer, keras.Model) and hasattr(type(layer), "operations")


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers that a layer holds itself, each once."""
    # A sequential model keeps a functional one of the same layers (Keras <= 3.15).
    twin = getattr(layer, "_functional", None)
    held = names.flatten_layers(layer, include_self=False, recursive=False)
    return [each for each in held if each is not twin]


def policy(layer: keras.layers.Layer) -> keras.DTypePolicy:
    """Returns the dtype policy of a layer; of a map that layers share, its own."""
    held = layer.dtype_policy
    is_map = isinstance(held, keras.dtype_policies.DTypePolicyMap) and layer.path
    return held[layer.path] if is_map else held


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer that no layer in it has."""
    theirs = {id(weight) for each in children(layer) for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in theirs]


def is_assignable(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a precision to choose; ids, strings and files have none."""
    fixed = (keras.layers.InputLayer, keras.layers.TFSMLayer)
    return layer.compute_dtype in _ASSIGNABLE and not isinstance(layer, fixed)
