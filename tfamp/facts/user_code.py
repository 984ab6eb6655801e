"""The user's line: where in the user's files a call began, for warnings about it."""

import contextlib
import os
import pathlib
import traceback
import warnings

import absl
import keras
import tensorflow as tf
from absl import logging

from tfamp.facts import names

_SKIPPED = (
    *(os.path.dirname(each.__file__) + os.sep for each in (absl, keras, tf)),
    f"{pathlib.Path(__file__).parents[1]}{os.sep}",
    contextlib.__file__,
)
_said: set[str] = set()


def frames() -> list[traceback.FrameSummary]:
    """Returns the frames of a call, the last first, as far as the user's own.

    Under AutoGraph, those of the lines that he wrote.
    """
    tf_stack = "tensorflow.python.util.tf_stack:extract_stack"
    stack = []
    for frame in reversed(names.resolve(tf_stack, traceback.extract_stack)()):
        stack.append(frame)
        if not frame.filename.startswith(_SKIPPED):
            break
    return stack


def line() -> tuple[str, int]:
    """Returns the user's file and line."""
    last = frames()[-1]
    return last.filename, last.lineno or 0


def is_told(text: str) -> bool:
    """Whether a text was reported before."""
    return text in _said


def warn(text: str) -> None:
    """Warns at the user's line, once a process."""
    if text not in _said:
        warnings.warn_explicit(text, UserWarning, *line())
        _said.add(text)


def log(text: str) -> None:
    """Logs a warning with the user's file and line, once a process."""
    if text not in _said:
        _said.add(text)
        logging.warning("%s:%d: %s", *line(), text)
