"""The package's own errors; each is also one of Python's, so either can be caught."""

from collections.abc import Iterable


def examples(names: Iterable[str]) -> str:
    """Returns at most five names as one phrase, for a message."""
    first, more = (all_names := list(names))[:5], len(all_names) - 5
    return ", ".join(first) + (f", and {more} more" if more > 0 else "")


class TfampError(Exception):
    """Base class of the errors that only tfamp raises."""


class UnsupportedModeError(TfampError, ValueError):
    """The requested mode, or the Keras backend, is not supported on this host."""


class ExportError(TfampError, RuntimeError):
    """A model could not be exported, or the exported file failed verification."""


class DataError(TfampError, ValueError):
    """A data file or data set is missing, malformed or not prepared."""


class RunError(TfampError, RuntimeError):
    """A training run cannot start in its working directory, or resume from it."""


class LossScaleExhaustedError(TfampError, RuntimeError):
    """Step after step is skipped, and the loss scale cannot fall further."""
