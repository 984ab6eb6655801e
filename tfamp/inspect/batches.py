"""Whether a batch fits a model, told before anything is traced with it."""

from typing import Any

import keras


def check_parts(name: str, model: keras.Model, batch: Any) -> None:
    """Raises ValueError unless a batch has what the model's training step takes.

    A step or loss of a user's own takes what it takes: nothing is told of it.

    Args:
      name: That of the argument.
      model: A compiled model.
      batch: What a dataset for `fit` yields.
    """
    for method in ("train_step", "compute_loss"):
        owner = next(x for x in type(model).__mro__ if method in vars(x))
        if not owner.__module__.startswith("keras."):
            return
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    if y is None and _has_keras_loss(model):
        raise ValueError(
            f"`{name}` needs targets: {model.name!r} was compiled with a loss. "
            "Received: inputs alone. Expected (inputs, targets)."
        )
    check_shapes(name, model, x)
    check_rows(model, x, y, weights)


def check_shapes(name: str, model: keras.Model, inputs: Any) -> None:
    """Raises ValueError where inputs have other sizes than a model takes.

    What is not known is not told: of a model without inputs of its own, of several
    in another structure, of axes that Keras adds.

    Args:
      name: That of the argument.
      model: A built model.
      inputs: What it is to be called with.
    """
    expected = [x.shape for x in getattr(model, "inputs", None) or ()]
    given = _shapes(inputs)
    if isinstance(inputs, dict) or len(given) != len(expected):
        return
    for wanted, shape in zip(expected, given, strict=True):
        pairs = [*zip(wanted[1:], shape[1:], strict=False)]
        if len(wanted) == len(shape) and any(
            None not in p and len({*p}) > 1 for p in pairs
        ):
            raise ValueError(
                f"`{name}` must have the shapes that {model.name!r} takes. Received: "
                f"{', '.join(map(str, given))}. Expected: "
                f"{', '.join(map(str, expected))}."
            )


def check_rows(
    model: keras.Model, inputs: Any, targets: Any, weights: Any = None
) -> None:
    """Raises ValueError unless targets and weights have as many rows as inputs.

    Only where a model and its loss cannot mean it otherwise: of a functional model with
    one loss of Keras' own. A single row is broadcast.

    Args:
      model: The model.
      inputs: Its inputs.
      targets: Targets of its loss.
      weights: Weights of the rows.
    """
    if not getattr(model, "inputs", None) or not _has_keras_loss(model):
        return
    parts = {"inputs": inputs, "targets": targets, "sample weights": weights}
    counts = {name: {x[0] for x in _shapes(part)} for name, part in parts.items()}
    rows = {name: x.pop() for name, x in counts.items() if len(x) == 1}
    if len({*rows.values()} - {1}) > 1:
        raise ValueError(
            "A batch must have as many targets (and weights) as inputs. Received: "
            f"{', '.join(f'{n} rows of {name}' for name, n in rows.items())}."
        )


def _has_keras_loss(model):
    loss = getattr(model, "loss", None)
    return isinstance(loss, str) or getattr(loss, "__module__", "").startswith("keras.")


def _shapes(nested):
    """Returns the shapes of arrays and tensors that have an axis, in order."""
    shapes = [getattr(x, "shape", None) for x in keras.tree.flatten(nested)]
    # That of a tensor of unknown rank has no length.
    return [tuple(x) for x in shapes if getattr(x, "rank", x)]
