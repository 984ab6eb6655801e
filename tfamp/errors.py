"""The package's own errors; each is also one of Python's, so either can be caught."""

from collections.abc import Iterable


def examples(names: Iterable[str]) -> str:
    """Returns at most five names as one phrase, for a message."""
    first, more = (found := list(names))[:5], len(found) - 5
    return ", ".join(first) + (f", and {more} more" if more > 0 else "")


class TfampError(Exception):
    """Base of the errors that only tfamp raises."""


class UnsupportedModeError(TfampError, ValueError):
    """The asked mode, or the Keras backend, cannot work on this host."""


class ExportError(TfampError, RuntimeError):
    """A model could not be exported, or what was written not verified."""


class DataError(TfampError, ValueError):
    """A data file or data set is missing, malformed or not prepared."""


class RunError(TfampError, RuntimeError):
    """A training run cannot start in, or go on from, its working directory."""


class LossScaleExhaustedError(TfampError, RuntimeError):
    """Steps are skipped one after the other, and the loss scale cannot fall further."""
