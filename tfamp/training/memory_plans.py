"""Finds what makes a model's training fit into memory, at the least cost."""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from absl import logging
from ml_collections import config_dict

from tfamp import checks, errors, functions, tables
from tfamp.inspect import structure
from tfamp.memory_saving import account
from tfamp.training import batch_size as batch_sizes
from tfamp.training import batch_trials, processes

# What an option leaves of the bytes before it, at most, to be kept in the next ones.
_FREES = 0.999


class MemoryPlan(NamedTuple):
    """What makes a training step fit, as plain data; `print` it.

    Attributes:
      name: Name of the configuration or function.
      limit: The memory that a step must fit into, as text.
      options: A dict for each option, in the order in which they were tried; each has
        those before it that free memory: option (what is new); keywords (of `enable`);
        batch_size (of one part); accumulation_steps (parts of one update of the
        weights); predicted_bytes; measured_bytes and time_ratio (over float32's), None
        where no step was taken.
      chosen: The option that fits; None if none does.
      notes: Lines on the machine, and on what is short.
    """

    name: str
    limit: str
    options: tuple[dict[str, Any], ...]
    chosen: dict[str, Any] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1, **self._asdict()}

    def to_text(self) -> str:
        """Returns the table, the choice and the notes."""
        rows = []
        for each in self.options:
            measured, ratio = each["measured_bytes"], each["time_ratio"]
            rows.append(
                {
                    "option": each["option"],
                    "predicted": processes.mib(each["predicted_bytes"]),
                    "measured": processes.mib(measured) if measured else "-",
                    "time over float32": f"{ratio:.2f}" if ratio else "-",
                    "chosen": "yes" if each is self.chosen else "",
                }
            )
        lines = [tables.of_dicts(rows), "", *(f"- {x}" for x in self._lines())]
        return "\n".join(lines)

    __str__ = to_text

    def _lines(self):
        yield f"limit: {self.limit}"
        if self.chosen is not None:
            given = {k: v for k, v in self.chosen["keywords"].items() if k != "mode"}
            texts = [json.dumps(self.chosen["keywords"]["mode"])]
            texts += [f"{key}={json.dumps(value)}" for key, value in given.items()]
            parts, size = self.chosen["accumulation_steps"], self.chosen["batch_size"]
            how = f"  # Batches of {size}"
            how += f", gradient_accumulation_steps={parts}" if parts > 1 else ""
            yield f"`tfamp.enable({', '.join(texts)}){how}`"
        yield from self.notes


def fit_memory(
    workload: str | Callable[..., Any] | config_dict.ConfigDict,
    limit: str | int | None = None,
    *,
    batch_size: int | None = None,
    steps: int = 3,
    report: Callable[[str], object] = logging.info,
) -> MemoryPlan:
    """Finds the cheapest settings with which a training step fits into memory.

    These measures are added in order until a step fits: the 16-bit mode for this
    hardware (with attention in linear memory), recomputing half of the blocks in the
    backward pass, recomputing all of them, optimizer slots in bfloat16, slots in 8
    bits, gradient accumulation over parts of the batch, and weights in bfloat16. One
    that frees less than 0.1 % is left out of the next plans. `tfamp.memory` predicts
    the memory of each. A plan that is predicted to fit is measured in a separate
    process, which ends if it exceeds the limit.

    Args:
      workload: As in `find_batch_size`: a function with an argument `batch_size` that
        returns a compiled model and a dataset of batches, or its name; or a
        configuration.
      limit: As in `find_batch_size`: "2GiB" or a number of bytes, programs included.
      batch_size: Examples of an update of the weights; None: the configuration's.
      steps: Updates that are measured.
      report: Function called with a line on each measurement.

    Returns:
      A `MemoryPlan`; `print` shows its table, and keywords of `enable` to paste.

    Raises:
      RunError: If a trial fails for another reason than memory.
      ValueError: If a setting is invalid, or there is no such function.

    Example:
      print(tfamp.fit_memory("my_script:build", limit="2GiB", batch_size=64))
    """
    if not isinstance(workload, config_dict.ConfigDict):
        workload = config_dict.ConfigDict({"function": functions.name_of(workload)})
    size = workload.get("batch_size") if batch_size is None else batch_size
    checks.check_count("batch_size", size)
    checks.check_count("steps", steps)
    asked = batch_trials.Settings(limit=processes.parse_size(limit), steps=steps)
    mixed = batch_sizes.plan(workload, asked)[1]
    memory, words = processes.limits(asked.limit)
    shared = batch_sizes.identity(workload, asked)
    options = _value(processes.call(_predict, shared, size, mixed), "A prediction")

    def measure(option, memory):
        given = option["keywords"], option["batch_size"], option["accumulation_steps"]
        what = batch_trials.what(shared, *given)
        done = processes.call(batch_trials.train, what, *given, steps, memory=memory)
        if not done.lack:
            found = _value(done, option["option"])
            option["measured_bytes"] = found["peak_bytes"]
            seconds[option["option"]] = found["seconds"]
        told = done.lack or processes.mib(option["measured_bytes"])
        report(f"{option['option']}: {told}")
        return option["measured_bytes"] or math.inf

    base, chosen, seconds = options[0], None, {}
    most = memory.host if memory.device is None else memory.device
    held = measure(base, processes.limits(None)[0])
    # Programs, and what libraries take for themselves.
    others = held - base["predicted_bytes"] if base["measured_bytes"] else 0
    for each in options:
        each["predicted_bytes"] += others
        fits = each is not base and (not most or each["predicted_bytes"] <= most)
        if chosen is None and fits and measure(each, memory) <= (most or math.inf):
            chosen = each
        if base["option"] in seconds and each["option"] in seconds:
            times = seconds[each["option"]], seconds[base["option"]]
            each["time_ratio"] = times[0] / times[1]
    notes = [
        "predicted: by `tfamp.memory`, plus what else a measured step in float32 held"
    ]
    if chosen is None:
        sizes = {
            x["option"]: x["measured_bytes"] or x["predicted_bytes"] for x in options
        }
        least = min(sizes, key=sizes.get)
        short = (
            f"{processes.mib(sizes[least] - most)} more than available"
            if sizes[least] > most
            else "as predicted, but more than available when it was tried"
        )
        notes.append(
            f"nothing fits: {least!r} holds {processes.mib(sizes[least])}, {short}"
        )
    return MemoryPlan(shared.name, words, tuple(options), chosen, tuple(notes))


def _value(done, what):
    if done.failure:
        raise errors.RunError(f"{what} failed. Received: {done.failure}")
    return done.value


def _predict(workload, size, mixed):
    """Returns the options of a `MemoryPlan`, in a process of its own."""
    options = []
    kept, least = ({"mode": "float32"}, 1), math.inf

    def add(option, count=None, **more):
        nonlocal kept, least
        keywords, count = {**kept[0], **more}, count or kept[1]
        keras.utils.clear_session()  # Names of layers are counted.
        part = size // count
        what = batch_trials.what(workload, keywords, part, count)
        with batch_trials.built(what, keywords, part, count, 1) as made:
            held, own = account.measured(made.model, next(iter(made.batches)))
            blocks = _blocks(made.model, own)
        options.append(
            {
                "option": option,
                "keywords": keywords,
                "batch_size": part,
                "accumulation_steps": count,
                "predicted_bytes": held.total,
                "measured_bytes": None,
                "time_ratio": None,
            }
        )
        if held.total < least * _FREES:
            kept, least = (keywords, count), held.total
        return blocks

    add("float32")
    blocks = add(mixed, mode=mixed)
    for several in sorted({len(blocks) // 2, len(blocks)} - {0}):
        numbered = (re.sub(r"\d+$", r"\\d+", path) for path in blocks)
        whole = several == len(blocks)
        again = [*dict.fromkeys(numbered if whole else blocks[:several])]
        add(f"remat of {several} of {len(blocks)} blocks", remat=again)
    for state in ("bfloat16", "8bit"):
        add(f"slots of {state}", optimizer_state=state)
    for parts in (2, 4, 8, 16):
        if size % parts == 0:
            add(f"{parts} parts of a batch", parts)
    if kept[0]["mode"] == "mixed_bfloat16":
        add("weights of bfloat16", weights="bfloat16")
    return options


def _blocks(model, own):
    """Returns patterns of layers with others in them, each of at most half of it all.

    Args:
      model: A model.
      own: Layer -> its activations.
    """

    def share(layer):
        return sum(own.get(place.layer, 0) for place in structure.walk(layer))

    places = {id(place.layer): place for place in structure.walk(model)}
    found, queue = [], structure.children(model)
    while queue:
        layer = queue.pop(0)
        if not (inner := structure.children(layer)):
            continue
        if 0 < share(layer) <= sum(own.values()) / 2:
            found.append(re.escape(places[id(layer)].path))
        else:
            queue += inner
    return found
