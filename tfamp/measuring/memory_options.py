"""The options of `fit_memory`, and what each of them is predicted to hold."""

import contextlib
import math
import re
from typing import Any

import keras

from tfamp.inspect import structure
from tfamp.measuring import training_steps
from tfamp.precision import overrides
from tfamp.storage import step_memory

# What an option must free to be kept in the next ones, of all that float32 holds: each
# brings programs of its own.
_FREES = 0.01


def make(
    name: str, keywords: dict[str, Any], size: int, count: int = 1
) -> dict[str, Any]:
    """Returns an option as of `MemoryPlan.options`, not yet predicted.

    Args:
      name: What is new in it.
      keywords: Of `enable`.
      size: Examples of an update of the weights.
      count: Parts of an update.
    """
    return {
        "option": name,
        "kept": True,
        "keywords": keywords,
        "batch_size": size // count,
        "accumulation_steps": count,
        "predicted_bytes": 0,
        "measured_bytes": None,
        "workspaces_bytes": 0,
        "time_ratio": None,
        "exceeded": False,
    }


def arguments(option: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Returns keywords, batch size and parts of an option, as its trial takes them."""
    return option["keywords"], option["batch_size"], option["accumulation_steps"]


def predict(
    workload: Any, size: int, mixed: str, held: int | None
) -> list[dict[str, Any]]:
    """Returns float32 and the options after it, in a process of its own.

    Args:
      workload: As `training_steps.identity` returns it.
      size: Examples of an update of the weights.
      mixed: The 16-bit mode.
      held: What a step in float32 holds in all, in bytes; None if it is not known.
    """
    options, start = [], ({}, 1)
    least, frees = math.inf, 0.0

    def add(name, count=None, **more):
        nonlocal start, least
        keywords, count = {**start[0], **more}, count or start[1]
        option, blocks = _predicted(workload, name, keywords, size, count)
        options.append(option)
        option["kept"] = option["predicted_bytes"] <= least - frees
        if option["kept"]:
            start, least = (keywords, count), option["predicted_bytes"]
        return blocks

    add("float32", mode="float32")
    frees = _FREES * (held or least)
    blocks = add(mixed, mode=mixed)
    for several in sorted({len(blocks) // 2, len(blocks)} - {0}):
        numbered = (re.sub(r"\d+$", r"\\d+", path) for path in blocks)
        whole = several == len(blocks)
        again = [*dict.fromkeys(numbered if whole else blocks[:several])]
        add(f"+ remat of {several} of {len(blocks)} blocks", remat=again)
    refused = contextlib.suppress(ValueError)  # By the optimizer.
    for state, words in {"bfloat16": "bfloat16", "8bit": "8 bits"}.items():
        with refused:
            add(f"+ slots of {words}", optimizer_state=state)
    for parts in _parts(size):
        add(f"+ {parts} parts of a batch", parts)
    if mixed == "mixed_bfloat16":
        there = "" if start[0]["mode"] == mixed else f", in {mixed}"
        with refused:
            add(f"+ weights of bfloat16{there}", mode=mixed, weights="bfloat16")
    return options


def predict_parts(workload: Any, size: int, mixed: str) -> list[dict[str, Any]]:
    """Returns the options of accumulation alone, in a process of its own.

    Args:
      workload, size, mixed: As of `predict`.
    """
    return [
        _predicted(workload, f"{mode}, {n} parts", {"mode": mode}, size, n)[0]
        for mode in (mixed, "float32")
        for n in _parts(size)
    ]


def _parts(size):
    return [count for count in (2, 4, 8, 16) if size % count == 0]


def _predicted(workload, *given):
    """Returns an option of `make`, predicted, and the blocks of its model."""
    keras.utils.clear_session()  # Names of layers are counted.
    option = make(*given)
    variant = training_steps.variant(workload, *arguments(option))
    with training_steps.built(variant, 1) as setup:
        held, own = step_memory.predicted(setup.model, next(iter(setup.batches)))
        option["predicted_bytes"] = held.total
        return option, _blocks(setup.model, own)


def _blocks(model, own):
    """Returns patterns of layers with others in them, each of at most half of it all.

    Args:
      model: A model.
      own: Layer -> its activations.
    """

    def share(layer):
        return sum(own.get(place.layer, 0) for place in structure.walk(layer))

    places = {id(place.layer): place for place in structure.walk(model)}
    paths = [place.path for place in places.values()]
    patterns, queue = [], structure.children(model)
    while queue:
        layer = queue.pop(0)
        if not (inner := structure.children(layer)):
            continue
        if 0 < share(layer) <= sum(own.values()) / 2:
            patterns.append(overrides.exact(places[id(layer)].path, paths))
        else:
            queue += inner
    return patterns
