"""What tfamp knows of each model and layer: one record of each, forgotten with it.

Every part of tfamp that learns something of a model or layer keeps it here, and asks
here. Nothing of it is written into a saved file.
"""

import dataclasses
import weakref
from typing import Any

import keras


@dataclasses.dataclass(eq=False)
class Enabled:
    """What the `enable` in force knows of a layer or model; the next one begins anew.

    Attributes:
      was_called: Whether it has been called.
      is_explicit: Whether it was made with a `dtype` of its own.
      compiled: Of a compiled model: its number, in the order of their first `compile`
        and from 1; else 0.
      scales_loss: Whether `compile` asked for loss scaling.
      planned: Of a model that has its plan: the ids of the layers that it had then.
    """

    was_called: bool = False
    is_explicit: bool = False
    compiled: int = 0
    scales_loss: bool = False
    planned: frozenset[int] | None = None


@dataclasses.dataclass(eq=False)
class Record:
    """All that is known of one layer or model.

    Attributes:
      assignment: The last `plan.Assignment` of a dtype policy.
      overflow: The largest magnitude of what was healed, as it overflowed float16.
      remat: The `recomputed.Mark` of a layer that is computed again.
      precision_is_set: Whether `set_precision` was called on it: `enable` leaves it.
      remat_is_set: Whether `set_remat` was called on it: `enable` leaves it.
      wants_xla: Whether the user compiled it with `jit_compile=True`.
      inputs: What a subclassed model took when it was first called, as symbols.
      traced: Of the last trace: (ids of its layers then, `rules.Traced`).
      rewrites: {request: what its training function showed of the graph rewrite}.
      enabled: What the `enable` in force knows.
    """

    assignment: Any = None
    overflow: float | None = None
    remat: Any = None
    precision_is_set: bool = False
    remat_is_set: bool = False
    wants_xla: bool = False
    inputs: Any = None
    traced: tuple[Any, Any] | None = None
    rewrites: dict[str, Any] = dataclasses.field(default_factory=dict)
    enabled: Enabled = dataclasses.field(default_factory=Enabled)


_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def of(layer: keras.layers.Layer) -> Record:
    """Returns the record of a layer or model; a new one at first."""
    record = _records.get(layer)
    return record if record is not None else _records.setdefault(layer, Record())


def every() -> list[tuple[keras.layers.Layer, Record]]:
    """Returns each layer and model that has a record, and its record."""
    # All at once: another thread may add one.
    layers = [reference() for reference in _records.keyrefs()]
    return [(layer, of(layer)) for layer in layers if layer is not None]
