"""The same step in PyTorch, with its automatic mixed precision: a peer to compare with.

`exchange` writes a Keras model's weights and batches; `cell` is a program for an
interpreter that may have PyTorch and nothing of tfamp, so it imports nothing of it.
"""

import json
import pathlib
import subprocess
from typing import Any

from tfamp.measuring import processes

_CELL = pathlib.Path(__file__).with_name("cell.py")
_PROBE = """
import importlib.metadata, json, safetensors, torch, transformers
names = ("torch", "transformers")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""
_PROBE_SECONDS = 300  # The first import from a cold disk takes a minute.


def call(python: str, request: dict[str, Any], timeout: float) -> processes.Outcome:
    """Measures a cell in PyTorch.

    Args:
      python: An interpreter with PyTorch.
      request: See `cell.measure`.
      timeout: Seconds.

    Returns:
      An `Outcome` with figures as `measure.measure` returns them.
    """
    return _run([python, str(_CELL)], json.dumps(request), timeout)


def versions(python: str) -> tuple[dict[str, str], str]:
    """Finds out whether an interpreter has PyTorch and transformers.

    Args:
      python: The interpreter.

    Returns:
      Their versions by name, and why there are none, in a line; "" if there are.
    """
    done = _run([python, "-P", "-c", _PROBE], "", _PROBE_SECONDS)
    return done.value or {}, done.failure


def _run(command, text, timeout) -> processes.Outcome:
    """Returns what a command writes in its last line, as JSON."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=processes.outside(),
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return processes.Outcome(None, f"ended after {timeout:.0f} s without a result")
    except OSError as error:
        return processes.Outcome(None, f"{command[0]}: {error}")
    if done.returncode:
        return processes.Outcome(None, processes.reason(done.returncode, done.stderr))
    return processes.Outcome(json.loads(done.stdout.splitlines()[-1]))
