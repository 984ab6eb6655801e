"""The package's own errors; each is also one of Python's, so either can be caught."""


class TfampError(Exception):
    """Base of the errors that only tfamp raises."""


class UnsupportedModeError(TfampError, ValueError):
    """The asked mode, or the Keras backend, cannot work on this host."""


class ExportError(TfampError, RuntimeError):
    """A model could not be exported or verified in float32."""


class DataError(TfampError, ValueError):
    """A data file or data set is missing, malformed or not prepared."""


class RunError(TfampError, RuntimeError):
    """A training run cannot start in, or go on from, its working directory."""


class LossScaleExhaustedError(TfampError, RuntimeError):
    """Steps are skipped one after the other, and the loss scale cannot fall further."""
