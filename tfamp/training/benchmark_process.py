"""The process of a benchmark's cell, and what it left in the cell's file."""

import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import tfamp
from tfamp.diagnostics import doctor
from tfamp.training import benchmark_cell, fork_server

# Not -m: the package imports the module itself, and Python warns of a second one.
_COMMAND = (
    *(sys.executable, "-P", "-c"),
    f"import {benchmark_cell.__name__} as cell; cell.main()",
)
TIME_LIMIT = 3600  # Seconds of one process; compilation can take many minutes.
_SCHEMA_VERSION = 1
# What a crash prints below its reason.
_FRAME = re.compile(r"\s*($|@|\*\*\*|PC:)")
# Facts that are the calling process' own; each cell sets them for itself.
_OWN_FACTS = ("TF32 flag", "dtype policy", "graph rewrite")


def identity(described: doctor.MachineReport) -> dict[str, Any]:
    """Returns what figures depend on beside the cell: machine, versions, switches.

    Args:
      described: This host.
    """
    plain = described.to_dict()
    facts = {k: v for k, v in plain["facts"].items() if k not in _OWN_FACTS}
    return {
        "schema_version": _SCHEMA_VERSION,
        "device": plain["device"],
        "platform": platform.platform(),
        "facts": facts,
        "switches": {each["name"]: each["requested"] for each in plain["switches"]},
    }


def read(file: pathlib.Path, expected: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the figures in a cell's file.

    Args:
      file: The file.
      expected: What `identity` returned.

    Returns:
      The figures; None where there are none, or another machine or version measured
      them, or the file is damaged.
    """
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(figures, dict) and figures.get("identity") == expected
    return figures if same else None


def run(
    request: str,
    file: pathlib.Path,
    command: Sequence[str] | fork_server.ForkServer | None = None,
) -> str:
    """Runs a cell's process.

    Args:
      request: From `child_process.to_request`.
      file: The file that it names; what another machine or version left is deleted.
      command: The program that reads the request, or the server that forks it off;
        default: `benchmark_cell`.

    Returns:
      Why it failed, in a line; "" if it did not.
    """
    file.unlink(missing_ok=True)
    try:
        if isinstance(command, fork_server.ForkServer):
            done = command.launch(request, TIME_LIMIT)
        else:
            done = subprocess.run(  # Ctrl-C ends the process, too.
                command or _COMMAND,
                input=request,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
                timeout=TIME_LIMIT,
            )
    except subprocess.TimeoutExpired:
        return f"ended after {TIME_LIMIT} s without figures"
    return "" if done.returncode == 0 and file.exists() else _reason(done)


def environment() -> dict[str, str]:
    """Returns the variables of a cell's process: it imports this tfamp."""
    root = str(pathlib.Path(tfamp.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _reason(done):
    lines = [line for line in done.stderr.splitlines() if not _FRAME.match(line)]
    last = lines[-1] if lines else "no reason was given"
    if done.returncode >= 0:
        return last
    name = signal.Signals(-done.returncode).name
    if name == "SIGKILL":
        return "killed (SIGKILL), as Linux does with a process when memory runs out"
    return f"ended by {name}: {last}"
