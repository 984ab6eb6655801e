"""Processes that are commands: pytest, and the peer in PyTorch.

Both have what `processes.Process` has: `result`, `proceed`, `stop`, an end with the
context. A wrapper's own processes end with it.
"""

import contextlib
import json
import os
import pathlib
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from tfamp.measuring import processes

_TORCH = pathlib.Path(__file__).with_name("torch_steps.py")
_FIGURES = "FIGURES "  # Before a line of them.
_LAST_LINES = 200
_ENDS = 20  # Seconds in which pytest says what failed.
_LOGGED = re.compile(r"[IWE]\d{4} |WARNING: All log messages")  # By TensorFlow.


class Command:
    """A command; its one result is its exit code and the last lines that it wrote.

    Args:
      command: Its words.
      folder: Where it runs.
      output: Where its standard output goes; None: to the lines that are kept.
    """

    def __init__(
        self, command: Sequence[str], folder: pathlib.Path, output: int | None = None
    ):
        self._done = False
        self._words = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output or self._words,
            stderr=self._words,
            text=True,
            env=processes.outside(),
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def stop(self) -> None:
        """Ends it now, and what it has started."""
        self._send(signal.SIGKILL)

    def _send(self, number):
        with contextlib.suppress(OSError):  # It has ended.
            os.killpg(self._process.pid, number)

    def __exit__(self, *error):
        self.stop()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._words):
            with contextlib.suppress(OSError):  # What nobody has read.
                if file:
                    file.close()

    def proceed(self) -> None:
        """Has it go on to the result after this, which is None."""
        self._done = True

    def result(self, timeout: float) -> processes.Outcome:
        """Waits for the end, so many seconds; then it is interrupted.

        Pytest says what has failed until then: the text is a result, too.
        """
        if self._done:
            return processes.Outcome(None)
        try:
            code = self._process.wait(max(0, timeout))
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            self._send(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS)
            code, failure = None, f"{_ended(timeout)}: {self._last()}"
        text = self._last(_LAST_LINES)
        return processes.Outcome({"code": code, "text": text}, failure)

    def _last(self, count=1):
        self._words.seek(0)
        lines = self._words.read().strip().splitlines()
        return "\n".join([x for x in lines if not _LOGGED.match(x)][-count:])


class TorchSteps(Command):
    """Steps of a model in PyTorch: figures as `steps.steps` yields them.

    Args:
      python: Command of an interpreter with PyTorch; "": this one.
      arguments: Of `torch_steps.py`.
    """

    def __init__(self, python: str, arguments: Sequence[str]):
        words = shlex.split(python) or [sys.executable]
        command = [*words, str(_TORCH), *arguments]
        super().__init__(command, _TORCH.parent, subprocess.PIPE)
        self._figures: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def proceed(self) -> None:
        """Has it go on to its next figures."""
        with contextlib.suppress(OSError):  # It has ended: `result` says why.
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self, timeout: float) -> processes.Outcome:
        """Waits for the next figures, so many seconds; None at the end."""
        try:
            figures = self._figures.get(timeout=max(0, timeout))
        except queue.Empty:
            self.stop()
            return processes.Outcome(None, _ended(timeout))
        if figures is not None or self._process.wait() == 0:
            return processes.Outcome(figures)
        why = processes.reason(self._process.returncode, self._last(_LAST_LINES))
        return processes.Outcome(None, why)

    def _read(self):
        with contextlib.suppress(OSError, ValueError):  # It was closed.
            for line in self._process.stdout:
                if line.startswith(_FIGURES):
                    self._figures.put(json.loads(line.removeprefix(_FIGURES)))
        self._figures.put(None)


def _ended(timeout):
    return f"ended after {max(0, timeout):.0f} s"
