"""Checks of numbers, names and keywords of a caller; errors say what was received."""

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

LARGEST_COUNT = 2**63 - 1  # Of int64, the dtype of Keras' counters.


def check_real(name: str, value: Any) -> None:
    """Raises unless `value` is a finite number; `name` is that of the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _type_error(name, value, "a number")
    # An integer is finite, and `isfinite` overflows on one beyond float64.
    if not isinstance(value, numbers.Integral) and not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Received: {name}={value}.")


def check_count(
    name: str, value: Any, largest: int = LARGEST_COUNT, smallest: int = 1
) -> None:
    """Raises unless `value` is an integer from `smallest` to `largest`."""
    if not is_integer(value):
        raise _type_error(name, value, "an integer")
    if not smallest <= value <= largest:
        ceiling = "" if value < smallest else f" and at most {largest}"
        raise ValueError(
            f"`{name}` must be an integer of at least {smallest}{ceiling}. "
            f"Received: {name}={value}."
        )


def check_keywords(what: str, keywords: Iterable[str], expected: Sequence[str]) -> None:
    """Raises TypeError unless all keywords are known; `what` names them."""
    if unknown := [name for name in keywords if name not in expected]:
        raise TypeError(
            f"Unknown {what}. Received: {', '.join(map(repr, unknown))}. "
            f"Expected some of {', '.join(expected)}.{nearest(unknown[0], expected)}"
        )


def check_names(name: str, values: Any) -> None:
    """Raises TypeError for one text in place of several, whose letters would count."""
    if isinstance(values, str):
        raise TypeError(
            f"`{name}` must be a sequence of names. Received: {name}={values!r}. "
            f"Expected {name}=({values!r},)."
        )


def is_integer(value: Any) -> bool:
    """Whether `value` is Python's or NumPy's integer; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def nearest(name: object, names: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for a mistyped name; "" if none is like it."""
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    return "".join(f" Did you mean {each!r}?" for each in near)


def _type_error(name, value, noun):
    return TypeError(
        f"`{name}` must be {noun}. Received: {name}={value!r} "
        f"of type {type(value).__name__}."
    )
