"""Per-layer precision: {pattern of a layer's path: mode}, checked and resolved.

A pattern is a regular expression that matches a layer's *whole* path
(`re.fullmatch`). What applies to a layer is, in this order:

    1. the override whose pattern matches its own path
    2. the override of the nearest layer around it ("mha" holds for "mha/query")
    3. what the layer was given, or else the mode

Layers that Keras never runs by their own precision (a recurrent layer's cell, what
`TimeDistributed` wraps, softmax and dropout inside an attention layer) follow the
layer around them; a pattern that names such layers alone is an error.

Paths are Keras': `head` in a functional model, `model/head` in a subclassed one,
`stack/head` in a sequential one that is named "stack". Keras gives no path to layers
without a `build` (activations, say); theirs is the scope of their first call and
their name, formed alike.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import keras

from tfamp import errors, modes

_MOST_SHOWN = 8  # Known paths in a message; of more, the nearest are shown.
_NEAREST = 5


class OverrideError(errors.TfampError, ValueError):
    """Overrides that are malformed, match no layer, or contradict one another."""


class Override(NamedTuple):
    """One entry of `overrides`: a valid pattern and the mode it asks for."""

    pattern: str
    mode: modes.Mode

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the whole path."""
        return re.fullmatch(self.pattern, path) is not None


Overrides = tuple[Override, ...]


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
    parsed, problems = [], []
    for pattern, name in (overrides or {}).items():
        wrong = _pattern_problem(pattern) or _mode_problem(mode, name)
        if wrong:
            problems.append(f"{pattern!r}: {wrong}")
        else:
            parsed.append(Override(pattern, modes.get_mode(name)))
    if problems:
        raise OverrideError("Invalid overrides: " + "; ".join(problems))
    return tuple(parsed)


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


def create_policy(
    mode: modes.Mode, overrides: Mapping[str, str] | None
) -> keras.dtype_policies.DTypePolicy:
    """Returns the global dtype policy of a mode with overrides.

    Args:
      mode: The mode of all layers that no pattern matches: the explicit default.
      overrides: {pattern: name of a mode}; it is not changed.

    Returns:
      A new `DTypePolicyMap`, or the mode's plain policy if there are no overrides.

    Raises:
      OverrideError: As `parse`.
    """
    parsed = parse(mode, overrides)
    if not parsed:
        return keras.dtype_policies.get(mode.policy)
    return keras.dtype_policies.DTypePolicyMap(
        default_policy=mode.policy,
        policy_map={
            each.pattern: keras.dtype_policies.get(each.mode.policy) for each in parsed
        },
    )


# ---- Matching: pure ----


def find(path: str, parsed: Overrides) -> Override | None:
    """Returns the override that matches a path itself.

    Raises:
      OverrideError: If patterns that ask for different modes match it.
    """
    matching = [each for each in parsed if each.matches(path)]
    if len({each.mode.name for each in matching}) > 1:
        raise OverrideError(_ambiguity([path], matching))
    return matching[0] if matching else None


def find_around(path: str, parsed: Overrides) -> Override | None:
    """Returns the override of the nearest layer around the one with this path."""
    while "/" in path:
        path = path.rpartition("/")[0]
        found = find(path, parsed)
        if found:
            return found
    return None


def _find_ambiguities(paths, parsed):
    """Returns a message for each set of patterns that contradict one another."""
    groups: dict[Overrides, list[str]] = {}
    for path in paths:
        matching = tuple(each for each in parsed if each.matches(path))
        if len({each.mode.name for each in matching}) > 1:
            groups.setdefault(matching, []).append(path)
    return [_ambiguity(group, matching) for matching, group in groups.items()]


def _ambiguity(paths, matching):
    asked = ", ".join(f"{each.pattern!r} ({each.mode.name})" for each in matching)
    return (
        f"{len(matching)} patterns match {listed(paths)} with different modes: "
        f"{asked}. Let only one of them match, for example by a negative lookahead, "
        "'(?!...)'."
    )


def listed(paths: Sequence[str]) -> str:
    """Returns at most five paths, quoted, and how many more there are."""
    shown = ", ".join(map(repr, paths[:_NEAREST]))
    return shown + (f" and {len(paths) - _NEAREST} more" if paths[_NEAREST:] else "")


def check(
    paths: Iterable[str],
    parsed: Overrides,
    notes: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Raises unless each pattern matches a path, and no path is asked two things.

    Args:
      paths: Paths of layers to which an override can apply.
      parsed: What `parse` returned.
      notes: {pattern: why what it matches does not count}.
      more: Other problems, to be reported along with these.

    Raises:
      OverrideError: With all problems and the known paths.
    """
    paths = list(dict.fromkeys(paths))
    problems = [*more, *_find_ambiguities(paths, parsed)]
    unmatched = [each.pattern for each in parsed if not any(map(each.matches, paths))]
    if unmatched:
        problems.append(_unmatched(unmatched, paths, notes or {}))
    if problems:
        raise OverrideError("\n".join(problems))


def _unmatched(patterns, paths, notes):
    quoted = ", ".join(map(repr, patterns))
    noun = "pattern" if len(patterns) == 1 else "patterns"
    hints = [_hint(pattern, paths, notes) for pattern in patterns]
    text = (
        f"{len(patterns)} {noun} matched no layer: {quoted}. {_known(paths, patterns)}"
    )
    return " ".join(filter(None, [text, *hints]))


def _known(paths, patterns):
    if not paths:
        return "Known paths: none yet."
    if len(paths) <= _MOST_SHOWN:
        return f"Known paths: {', '.join(map(repr, paths))}."
    near = [
        path
        for pattern in patterns
        for path in difflib.get_close_matches(pattern, paths, _NEAREST, cutoff=0.0)
    ]
    shown = list(dict.fromkeys(near))[:_NEAREST]
    return (
        f"Known paths, nearest first: {', '.join(map(repr, shown))}, and "
        f"{len(paths) - len(shown)} more."
    )


def _hint(pattern, paths, notes):
    if pattern in notes:
        return f"{pattern!r}: {notes[pattern]}"
    suggested = _other_prefix(pattern, paths)
    if not suggested:
        return ""
    return (
        "In a functional model the path of a layer is 'head', in a subclassed one "
        f"'model/head': use {suggested!r} instead of {pattern!r}."
    )


def _other_prefix(pattern, paths):
    """Returns the pattern with the model's name before it, or without it."""
    body = f"(?:{pattern})" if "|" in pattern else pattern
    for path in paths:
        parts = path.split("/")
        for cut in range(1, len(parts)):
            candidate = "/".join([*map(re.escape, parts[:cut]), body])
            if re.fullmatch(pattern, "/".join(parts[cut:])):
                if _matches(candidate, path):
                    return candidate
    shorter = pattern
    while "/" in shorter:
        shorter = shorter.partition("/")[2]
        matched = [path for path in paths if _matches(shorter, path)]
        if matched and len(matched) < len(paths):
            return shorter
    return ""


def _matches(pattern, path):
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:  # Half of a pattern need not be one.
        return False
