"""Finds what makes a model's training fit into memory, at the least cost."""

import contextlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from absl import logging
from ml_collections import config_dict

from tfamp import checks, errors, functions, tables
from tfamp.facts import hardware
from tfamp.inspect import structure
from tfamp.storage import account
from tfamp.training import batch_size as batch_sizes
from tfamp.training import batch_trials, processes

# What an option must free to be kept in the next ones, of all that float32 holds: each
# brings programs of its own.
_FREES = 0.01


class MemoryPlan(NamedTuple):
    """What makes a training step fit, as plain data; `print` it.

    Attributes:
      name: Name of the configuration or function.
      limit: The memory that a step must fit into, as text.
      options: A dict for each option, in the order in which they were tried; each has
        those before it that free enough: option (what is new); keywords (of `enable`);
        batch_size (of one part); accumulation_steps (parts of one update of the
        weights); predicted_bytes; measured_bytes and time_ratio (over float32's), None
        where no step was taken; exceeded, whether a trial was ended by the limit.
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
            none = "over the limit" if each["exceeded"] else "-"
            rows.append(
                {
                    "option": each["option"],
                    "predicted": processes.mib(each["predicted_bytes"]),
                    "measured": processes.mib(measured) if measured else none,
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
    that frees less than 1 % of what float32 holds is left out of the next plans, and
    one that the optimizer refuses is not tried. If nothing fits, accumulation alone is
    tried in both modes, since other measures bring programs of their own.

    `tfamp.memory` predicts the memory of each. Both modes, and plans that are predicted
    to fit, are measured in separate processes; a plan's ends if it exceeds the limit.

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
    free, _ = processes.limits(None)
    gpu = any(device.kind == "GPU" for device in hardware.read_devices())
    most = (memory.device or math.inf) if gpu else memory.host
    shared = batch_sizes.identity(workload, asked)
    seconds: dict[str, float] = {}

    def fits(option, memory=memory):
        given = _given(option)
        what = batch_trials.what(shared, *given)
        done = processes.call(batch_trials.train, what, *given, steps, memory=memory)
        if done.lack:
            option["exceeded"] = True
        else:
            found = _value(done, option["option"])
            option["measured_bytes"] = found["peak_bytes"]
            seconds[option["option"]] = found["seconds"]
        told = done.lack or processes.mib(option["measured_bytes"])
        report(f"{option['option']}: {told}")
        return not done.lack and option["measured_bytes"] <= most

    def predict(function, *given):
        done = processes.call(function, shared, size, mixed, *given)
        return _value(done, "A prediction")

    def choose(options):
        for each in options:
            each["predicted_bytes"] += others[each["keywords"]["mode"]]
        likely = (each for each in options if each["predicted_bytes"] <= most)
        return chosen or next(filter(fits, likely), None)

    modes = [_option(mode, {"mode": mode}, size, 1) for mode in ("float32", mixed)]
    chosen = next((each for each in modes if fits(each, free)), None)
    options = predict(_predict, modes[0]["measured_bytes"])
    others = _others(modes, options)
    options[:2] = modes
    chosen = choose(options[2:])
    if chosen is None and min(others.values()) < most:
        tried = [_given(each) for each in options]
        parts = [x for x in predict(_predict_parts) if _given(x) not in tried]
        options += parts
        chosen = choose(parts)
    for each in options:
        if {"float32", each["option"]} <= seconds.keys():
            each["time_ratio"] = seconds[each["option"]] / seconds["float32"]
    notes = ["predicted: by `tfamp.memory`"]
    if any(others.values()):
        notes[0] += ", plus what else a measured step in that mode held"
    if chosen is None:
        notes.append(f"nothing fits: {_short(options, most)}")
    return MemoryPlan(shared.name, words, tuple(options), chosen, tuple(notes))


def _others(modes, predicted):
    """Returns what a step in each mode held besides: programs, and libraries' own.

    Predicts the modes, too. One that was not measured is taken to hold what the one
    before it does.
    """
    others, extra = {}, 0
    for each, made in zip(modes, predicted, strict=False):
        if held := each["measured_bytes"]:
            extra = held - made["predicted_bytes"]
        each["predicted_bytes"] = made["predicted_bytes"] + extra
        others[each["option"]] = extra
    return others


def _short(options, most):
    """Returns what is short with the option that holds least, as text."""
    least = min(options, key=_held)
    known = "holds" if least["measured_bytes"] else "is predicted to hold"
    text = f"{least['option']!r} {known} {processes.mib(_held(least))}"
    if _held(least) > most:
        return f"{text}, {processes.mib(_held(least) - most)} more than available"
    return f"{text}, and exceeded the limit when it was tried"


def _held(option):
    return option["measured_bytes"] or option["predicted_bytes"]


def _value(done, what):
    if done.failure:
        raise errors.RunError(f"{what} failed. Received: {done.failure}")
    return done.value


def _option(option, keywords, size, count):
    """Returns an option of a `MemoryPlan`, not yet predicted."""
    return {
        "option": option,
        "keywords": keywords,
        "batch_size": size // count,
        "accumulation_steps": count,
        "predicted_bytes": 0,
        "measured_bytes": None,
        "time_ratio": None,
        "exceeded": False,
    }


def _given(option):
    """Returns what a trial is given of an option."""
    return tuple(option[x] for x in ("keywords", "batch_size", "accumulation_steps"))


def _predict_bytes(workload, option):
    """Predicts an option in this process; returns its model's blocks, too."""
    keras.utils.clear_session()  # Names of layers are counted.
    given = _given(option)
    with batch_trials.built(batch_trials.what(workload, *given), *given, 1) as made:
        held, own = account.measured(made.model, next(iter(made.batches)))
        option["predicted_bytes"] = held.total
        return option, _blocks(made.model, own)


def _predict(workload, size, mixed, held):
    """Returns float32 and the options after it, in a process of its own.

    Args:
      workload: As `batch_size.identity` returns it.
      size: Examples of an update of the weights.
      mixed: The 16-bit mode.
      held: What a step in float32 holds in all, in bytes; None if it is not known.
    """
    options, kept = [], ({}, 1)
    least, frees = math.inf, 0.0

    def add(option, count=None, **more):
        nonlocal kept, least
        keywords, count = {**kept[0], **more}, count or kept[1]
        made, blocks = _predict_bytes(workload, _option(option, keywords, size, count))
        options.append(made)
        if made["predicted_bytes"] <= least - frees:
            kept, least = (keywords, count), made["predicted_bytes"]
        return blocks

    add("float32", mode="float32")
    frees = _FREES * (held or least)
    blocks = add(mixed, mode=mixed)
    for several in sorted({len(blocks) // 2, len(blocks)} - {0}):
        numbered = (re.sub(r"\d+$", r"\\d+", path) for path in blocks)
        whole = several == len(blocks)
        again = [*dict.fromkeys(numbered if whole else blocks[:several])]
        add(f"remat of {several} of {len(blocks)} blocks", remat=again)
    refused = contextlib.suppress(ValueError)  # By the optimizer.
    for state in ("bfloat16", "8bit"):
        with refused:
            add(f"slots of {state}", optimizer_state=state)
    for parts in _parts(size):
        add(f"{parts} parts of a batch", parts)
    if mixed == "mixed_bfloat16":
        with refused:
            add("weights of bfloat16", mode=mixed, weights="bfloat16")
    return options


def _predict_parts(workload, size, mixed):
    """Returns the options of accumulation alone, in a process of its own."""
    return [
        _predict_bytes(
            workload, _option(f"{mode}, {count} parts", {"mode": mode}, size, count)
        )[0]
        for mode in (mixed, "float32")
        for count in _parts(size)
    ]


def _parts(size):
    return [count for count in (2, 4, 8, 16) if size % count == 0]


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
