"""One plan: the dtype policy that each layer of a model gets, and why.

`enable` (when a model is compiled or first called), `set_precision`, a comparison, a
search, an export and the audit all ask it, and nothing else. What applies to a layer
is, in this order:

    the override that matches its path
    the override of the nearest layer or model around it
    float32, if the layer around it is in float32 by a rule (`rules`)
    what it keeps, such as its own `dtype`
    float32 by a rule: its kind, an overflow that was healed, raw or float32 inputs
    the format of the layer by which Keras runs it
    the mode

A layer's assignment says what it was made with. So each plan decides anew, whatever an
earlier one has assigned.
"""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import keras

from tfamp import errors, records
from tfamp.facts import formats, modes
from tfamp.inspect import quantized, structure
from tfamp.precision import overrides as overriding
from tfamp.precision import rules

AS_MADE, BY_MODE = "as it was created", "the mode is"
Row = tuple[str, str]  # The name of a dtype policy, and why.


class Assignment(NamedTuple):
    """The dtype policy that a plan has given a layer.

    Attributes:
      original: The dtype policy that it was made with.
      policy: The one that it was assigned. Once it has another, the user set that.
      reason: Why.
      root: Weak reference to the model whose plan it was.
    """

    original: keras.DTypePolicy
    policy: keras.DTypePolicy
    reason: str
    root: Any


def assignment_of(layer: keras.layers.Layer) -> Assignment | None:
    """Returns a layer's assignment if it still has the policy of it, else None."""
    last = records.of(layer).assignment
    return last if last and last.policy is structure.policy(layer) else None


def made_with(layer: keras.layers.Layer) -> keras.DTypePolicy:
    """Returns the dtype policy that a layer was made with, or that the user gave it."""
    last = assignment_of(layer)
    return last.original if last else structure.policy(layer)


def reason_of(layer: keras.layers.Layer) -> str:
    """Returns why a layer has its dtype policy."""
    last = assignment_of(layer)
    return last.reason if last else AS_MADE


# ---- What a layer keeps where neither an override nor a rule applies ----

Keeps = Callable[[keras.layers.Layer], Row | None]


def keeps_unlike(policy: str) -> Keeps:
    """For `enable`: another dtype policy than the mode's that a layer was made with."""

    def keeps(layer):
        name = quantized.base_name(made_with(layer))
        return (name, AS_MADE) if name != policy else None

    return keeps


def keeps_float32_made(layer: keras.layers.Layer) -> Row | None:
    """For `set_precision`: the float32 that a layer was made with."""
    return ("float32", AS_MADE) if made_with(layer).compute_dtype == "float32" else None


def keeps_float32_now(layer: keras.layers.Layer) -> Row | None:
    """For an export: the float32 that a layer has, and why."""
    name = quantized.base_name(structure.policy(layer))
    return (name, reason_of(layer)) if layer.compute_dtype == "float32" else None


def keeps_nothing(layer: keras.layers.Layer) -> Row | None:
    """For all else."""


def at_first_call(layer: keras.layers.Layer, mode: modes.Mode) -> Row | None:
    """Returns what a layer gets that may be in no model yet, or None."""
    low = mode.compute_format
    if low not in formats.LOW or structure.policy(layer).name != mode.policy:
        return None
    why = rules.by_kind(layer, low, first_call=True)
    return ("float32", why) if why else None


class Plan:
    """What a mode and overrides ask of the layers of a model, which stays as it is.

    `matched` are the patterns that match a layer to which they can apply; `remat` says
    which layers are computed again: {id of a layer: pattern}, None to leave them.

    Args:
      model: A model; layers that are not made yet are not in its plan.
      mode: The mode of all layers that nothing else applies to.
      overrides: What `overrides.parse` returned.
      traced: The result of a trace of it; see `rules.traced`.
      keeps: The row that a layer keeps unless an override applies to it, or None.
      remat: Patterns of layers to compute again in the backward pass; None to leave
        those as they are.

    Raises:
      OverrideError: If patterns contradict one another.
    """

    def __init__(
        self,
        model: keras.Model,
        mode: modes.Mode,
        overrides: overriding.Overrides = (),
        traced: rules.Traced = rules.UNTRACED,
        keeps: Keeps = keeps_nothing,
        remat: Sequence[str] | None = None,
    ):
        self.model, self.mode = model, mode
        self._overrides, self._traced, self._keeps = overrides, traced, keeps
        self._places = [
            p for p in structure.walk(model) if structure.is_assignable(p.layer)
        ]
        self._free = [place for place in self._places if _leader(place) is None]
        paths = [_paths(place) for place in self._free]
        own = [overriding.find(each, overrides) for each in paths]
        self._own = {id(p.layer): x for p, x in zip(self._free, own, strict=True)}
        self.matched = {x.pattern for x in overrides if any(map(x.matches, paths))}
        self._patterns = [*(x.pattern for x in overrides), *(remat or ())]
        self.remat = None if remat is None else self._again(remat)
        self.matched |= set((self.remat or {}).values())

    def check(self, matched: Container[str]) -> None:
        """Raises OverrideError, with the known paths, for patterns not in `matched`."""
        if missing := [x for x in self._patterns if x not in matched]:
            paths = [place.path for place in self._free]
            raise overriding.OverrideError(overriding.unmatched(missing, paths))
        idle = [
            x.pattern
            for x in self._overrides
            if (product := x.mode.product_format) and x.pattern in self.matched
            if not any(
                name.startswith(product) and x.reason in reason
                for name, reason in self.rows.values()
            )
        ]
        if idle:
            raise overriding.OverrideError(
                f"{errors.examples(map(repr, idle))}: no layer can compute in float8, "
                "which Keras has for Dense and EinsumDense without LoRA or integers."
            )

    def _again(self, patterns):
        """Returns {id of a layer: the first pattern that it is the outermost of}."""
        free = {id(place.layer) for place in self._free if place.holders}

        def matches(place, pattern):
            return id(place.layer) in free and any(
                overriding.matches(pattern, x) for x in _paths(place)
            )

        def is_inside(place, pattern):
            return any(
                matches(x, pattern) or is_inside(x, pattern) for x in place.holders
            )

        return {
            id(place.layer): pattern
            for pattern in reversed(patterns)
            for place in self._free
            if matches(place, pattern) and not is_inside(place, pattern)
        }

    @functools.cached_property
    def rows(self) -> dict[int, Row]:
        """{id of a layer: (name of its policy, why)}."""
        return {id(place.layer): self._row(place) for place in self._places}

    def _row(self, place):
        keeps = self._keeps
        if row := self._overridden(place) or self._pinned(place) or keeps(place.layer):
            return row
        largest = records.of(place.layer).overflow
        if largest is not None and self.mode.compute_format == "float16":
            return "float32", rules.healed_by(largest)
        if reason := self._traced.routes.get(id(place.layer)):
            return "float32", reason
        if self._takes_float32(place.layer):
            return "float32", rules.NORMALIZES
        if leader := _leader(place):
            return self._row(leader)[0], f"follows {leader.layer.name!r}"
        return _by_mode(place.layer, self.mode, f"{BY_MODE} {self.mode.name}")

    def _takes_float32(self, layer):
        """Whether a normalization takes float32, which 16 bits may not hold."""
        sources = self._traced.sources.get(id(layer), ())
        places = [x for x in self._places if any(x.layer is y for y in sources)]
        wide = any(x.layer is layer or self._row(x)[0] == "float32" for x in places)
        return wide and self.mode.policy != "float32"

    def _overridden(self, place):
        if override := self._own.get(id(place.layer)):
            return _by_mode(place.layer, override.mode, override.reason, any_size=True)
        around = self._around(place)
        if len(around) > 1:
            names = " and ".join(repr(name) for name, _ in around.values())
            raise overriding.OverrideError(
                f"Layer {place.path!r} is shared by {names}, whose overrides are "
                f"{' and '.join(around)}. Name the layer itself."
            )
        for name, override in around.values():
            reason = f"in {name!r}, {override.reason}"
            return _by_mode(place.layer, override.mode, reason, any_size=True)
        return None

    def _around(self, place):
        """Returns {mode: (layer around, its override)} of the nearest ones around."""
        nearest = {}
        for holder in place.holders:
            own = self._own.get(id(holder.layer))
            one = own and {own.mode.name: (holder.layer.name, own)}
            nearest |= one or self._around(holder)
        return nearest

    def _pinned(self, place):
        """Returns float32, and the reason, by a rule for it or for one around it."""
        if _leader(place) is None and (reason := self._rule(place.layer)):
            return "float32", reason
        for holder in place.holders:
            if not isinstance(holder.layer, keras.Model) and self._pinned(holder):
                return "float32", f"in {holder.layer.name!r}, which stays in float32"
        return None

    def _rule(self, layer):
        if self.mode.policy == "float32" or self._keeps(layer):
            return ""
        kind = rules.by_kind(layer, self.mode.compute_format)
        return kind or self._traced.outputs.get(id(layer), "")


def _by_mode(layer, mode, reason, any_size=False):
    """Returns the row of a mode; one of float8 leaves layers in 16 bits."""
    if not mode.product_format or not quantized.multiplies(layer):
        return mode.policy, reason
    if why := quantized.why_not_float8(layer, any_size):
        return mode.policy, f"{reason}; {why}"
    return f"{mode.product_format}_from_{mode.policy}", reason


def _leader(place):
    """Returns the place of the layer by whose precision this one runs, or None."""
    return next((x for x in place.holders if rules.follows(place.layer, x.layer)), None)


def _paths(place):
    """The structure's path, and Keras' own where it has another."""
    return tuple(dict.fromkeys((place.path, place.layer.path or place.path)))
