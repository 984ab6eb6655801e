"""Per-layer precision: {pattern of a layer's path: mode}, checked and matched.

A pattern is a regular expression that matches a layer's whole path, or its end after a
`/` (`re.fullmatch`): `head` is every layer of that name, in a model of any kind, and
`block/head` those in a "block"; `^head` is a whole path. What applies to a layer is, in
this order:

    1. the override whose pattern matches its own path
    2. the override of the nearest layer or model around it ("mha": "mha/query", too)
    3. what it has, or is given, otherwise

Under `enable` a pattern that matches a layer's path holds for its first call, too: what
fails in 16 bits can be helped before it is in a model.

Layers that Keras never runs by their own precision (a recurrent layer's cell, what
`TimeDistributed` wraps, softmax and dropout inside an attention layer) follow the
layer around them; a pattern that names such layers alone is an error.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import keras

from tfamp import errors
from tfamp.facts import modes
from tfamp.inspect import structure

REQUESTED = "requested by"  # Begins the reason of an override.
_MOST_SHOWN = 8  # Known paths in a message.


class OverrideError(errors.TfampError, ValueError):
    """Overrides are malformed, match no layer, or contradict one another."""


class Override(NamedTuple):
    """One entry of `overrides`: a valid pattern and the mode it requests."""

    pattern: str
    mode: modes.Mode

    @property
    def reason(self) -> str:
        """Why a layer has its mode."""
        return f"{REQUESTED} {self.pattern!r}"

    def matches(self, paths: Iterable[str]) -> bool:
        """Whether the pattern matches one of a layer's paths, or its end."""
        return any(matches(self.pattern, path) for path in paths)


Overrides = tuple[Override, ...]


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path as a whole, or its end after a `/`.

    `^` is the start of the path, so that `^head` is no `block/head`.
    """
    starts = (0, *(slash.end() for slash in re.finditer("/", path)))
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(path, start) for start in starts)


def exact(path: str, paths: Iterable[str]) -> str:
    """Returns a pattern that matches one of these paths alone."""
    is_an_end = any(each.endswith(f"/{path}") for each in paths)
    return f"{'^' * is_an_end}{re.escape(path)}"


def parse(mode: modes.Mode, overrides: Mapping[str, str] | None) -> Overrides:
    """Checks overrides by themselves; no model is needed.

    Args:
      mode: The mode of all other layers.
      overrides: {pattern: name of a mode}; it is not changed.

    Returns:
      An `Override` for each entry.

    Raises:
      OverrideError: With everything that is wrong: patterns that are no regular
        expressions, unknown modes, and "tf32" for single layers.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise OverrideError(
            "`overrides` must be a dict of {pattern of a layer's path: mode}. "
            f"Received: overrides={overrides!r}."
        )
    entries = (overrides or {}).items()
    problems = [
        f"{pattern!r}: {text}"
        for pattern, name in entries
        if (text := _pattern_problem(pattern) or _mode_problem(mode, name))
    ]
    if problems:
        raise OverrideError("Invalid overrides: " + "; ".join(problems))
    return tuple(Override(pattern, modes.get_mode(name)) for pattern, name in entries)


def parse_remat(patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Checks the patterns of layers to recompute in the backward pass; None is none.

    Raises:
      OverrideError: If they are no list, or no regular expressions.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence | None):
        raise OverrideError(
            "`remat` must be a list of patterns of layers' paths, as ['block_.*']. "
            f"Received: remat={patterns!r}."
        )
    remat = tuple(patterns or ())
    problems = [f"{x!r}: {text}" for x in remat if (text := _pattern_problem(x))]
    if problems:
        raise OverrideError("Invalid patterns of `remat`: " + "; ".join(problems))
    return remat


def _pattern_problem(pattern):
    if not isinstance(pattern, str) or not pattern:
        return (
            "a pattern must be a non-empty string. "
            f"Received: {pattern!r} ({type(pattern).__name__})"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        return f"not a regular expression ({error}); '.*' matches anything"
    return ""


def _mode_problem(mode, name):
    try:
        chosen = modes.get_mode(name)
    except ValueError as error:
        return str(error)
    whole = "TF32 is a flag of the whole process and cannot be set for single layers"
    if chosen.name == "tf32":
        return f"{whole}. Use 'float32' here, and mode='tf32' for the process"
    if chosen.name == "float32" and mode.name == "tf32":
        return f"{whole}: beside mode='tf32' no layer can be 'float32'"
    return ""


def find(paths: Iterable[str], parsed: Overrides) -> Override | None:
    """Returns the override that matches a layer itself.

    Args:
      paths: The layer's paths: the structure's, and Keras' where it differs.
      parsed: What `parse` returned.

    Raises:
      OverrideError: If patterns that ask for different modes match it.
    """
    matching = [each for each in parsed if each.matches(paths)]
    if len({each.mode.name for each in matching}) > 1:
        clashes = ", ".join(f"{each.pattern!r} ({each.mode.name})" for each in matching)
        raise OverrideError(
            f"{len(matching)} patterns match {next(iter(paths))!r} with different "
            f"modes: {clashes}. Let only one of them match, for example by a negative "
            "lookahead, '^(?!...)'."
        )
    return matching[0] if matching else None


def unmatched(patterns: Sequence[str], paths: Sequence[str]) -> str:
    """Returns what to say of patterns that matched no layer, with the known paths.

    Args:
      patterns: The patterns.
      paths: Paths of the layers to which an override can apply.
    """
    near = {
        path
        for pattern in patterns
        for path in difflib.get_close_matches(pattern, paths, _MOST_SHOWN, 0.0)
    }
    shown = [path for path in paths if path in near][:_MOST_SHOWN]
    more = len(paths) - len(shown)
    rest = f", and {more} more" if more else ""
    return (
        f"{len(patterns)} {'pattern' if len(patterns) == 1 else 'patterns'} matched no "
        f"layer: {', '.join(map(repr, patterns))}. Known paths: "
        f"{', '.join(map(repr, shown)) or 'none'}{rest}. (Layers inside a wrapper, or "
        "a recurrent or attention layer, have that layer's precision.)"
    )


def pattern_of(model: keras.Model, path: str) -> str:
    """Returns a pattern for a path, whatever number Keras gives the model: model_1."""
    base, rest = re.sub(r"_\d+$", "", model.name), path.removeprefix(model.name)
    kind = type(model).__name__.lower()
    is_counted = base.replace("_", "") == kind.replace("_", "")
    if structure.is_functional(model) or not is_counted:
        return re.escape(path)
    return rf"{base}(_\d+)?{re.escape(rest)}"
