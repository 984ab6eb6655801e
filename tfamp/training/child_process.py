"""A process that measures one thing for another process, and ends with it.

A request is a line of JSON on standard input; what the process found goes into the file
that the request names. An error is one line, the last of standard error.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from tfamp.training import memory_limit, run_files

Measure = Callable[[dict[str, Any]], dict[str, Any]]


def to_request(
    asked: dict[str, Any],
    output: pathlib.Path,
    identity: dict[str, Any],
    memory: dict[str, int | None] | None = None,
) -> str:
    """Returns a request as text.

    Args:
      asked: What is to be measured: plain data.
      output: The file that the figures are written to.
      identity: What is written beside them.
      memory: Arguments of `memory_limit.hold`; None without a limit.
    """
    own = {"output": str(output), "identity": identity}
    return json.dumps({**asked, **own, "parent": os.getpid(), "memory": memory})


def main(measure: Measure) -> None:
    """Serves the request on standard input, and ends the process if that fails.

    Args:
      measure: Function of the request; returns figures as plain data.
    """
    text = sys.stdin.read()
    request = json.loads(text)
    end_with(request["parent"])
    with contextlib.suppress(OSError):
        # Where memory runs out Linux is to end this process, not the one that waits.
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    if request["memory"]:
        memory_limit.hold(**request["memory"])
    try:
        serve(text, measure)
    except SystemExit as error:
        os.write(2, f"\n{error}\n".encode())
        # At once: TensorFlow 2.21's XLA, out of memory, crashes where it is taken down
        # ("double free or corruption"), and the reason would be lost.
        os._exit(1)


def serve(text: str, measure: Measure) -> None:
    """Measures what a request asks for and writes the figures; exits with an error.

    Args:
      text: From `to_request`.
      measure: As for `main`.
    """
    request = json.loads(text)
    try:
        figures = measure(request)
    except Exception as error:  # Whatever it is becomes the reason.
        line = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {line}")
    text = json.dumps({**figures, "identity": request["identity"]})
    run_files.write_text(pathlib.Path(request["output"]), text)


def with_tuples(value: Any) -> Any:
    """Returns lists as tuples: JSON has no tuples, and configurations no lists."""
    if isinstance(value, dict):
        return {name: with_tuples(part) for name, part in value.items()}
    if isinstance(value, list):
        return tuple(map(with_tuples, value))
    return value


def end_with(parent: int) -> None:
    """Makes Linux end this process when the one that asked ends.

    It would go on beside the next one, hold its memory, and falsify its times.

    Args:
      parent: Process number of the one that asked; exits if that has ended.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>.
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that asked has ended")
