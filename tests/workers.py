"""Runs a function in worker processes of their own, as a cluster on this host.

Each process starts fresh: gRPC servers and collective operations do not survive a
fork, and a multi-worker strategy must be created before TensorFlow has started.
"""

import importlib
import inspect
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent
GRACE = 30.0  # Seconds that the others have to end after one has failed.


class WorkersError(AssertionError):
    """A worker failed, or not all ended in time; the text has what each wrote."""


class Group:
    """Running workers; a context manager that kills what is left of them.

    Args:
      function: A function at the top of a test module; it runs in each worker, as
        `function(*arguments)`. Importing its module must not start TensorFlow.
      arguments: What JSON can hold; paths become strings.
      workers: How many. 1: one process and no cluster.
      cpus: Logical CPU devices of each.
    """

    def __init__(
        self,
        function: Callable,
        arguments: Sequence = (),
        *,
        workers: int = 2,
        cpus: int = 1,
    ):
        self._folder = tempfile.TemporaryDirectory()
        task = {
            "folder": str(pathlib.Path(inspect.getfile(function)).resolve().parent),
            "module": function.__module__,
            "function": function.__name__,
            "arguments": arguments,
            "cpus": cpus,
        }
        self._file("task").write_text(json.dumps(task, default=str))
        self.processes = [
            self._start(index, environment)
            for index, environment in enumerate(_environments(workers))
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self._folder.cleanup()

    def _file(self, name, index=""):
        return pathlib.Path(self._folder.name, f"{name}{index}")

    def _start(self, index, environment):
        with self._file("output", index).open("w") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-u", __file__),
                    *(str(self._file("task")), str(self._file("result", index))),
                ],
                stdin=subprocess.PIPE,  # Its end tells the worker to end.
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait(self, timeout: float) -> list[Any]:
        """Returns what the function returned in each worker, in their order.

        Raises:
          WorkersError: If one fails, or they take longer; all are killed then.
        """
        deadline = time.monotonic() + timeout
        failed = None
        while None in (codes := [p.poll() for p in self.processes]):
            if any(codes) and failed is None:  # The others may wait for it for ever.
                failed = codes
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(codes) or None in codes:
            self.kill()
            reason = "a worker failed" if any(codes) else f"not done in {timeout} s"
            raise WorkersError(f"{reason}\n{self.outputs(failed or codes)}")
        count = len(self.processes)
        return [json.loads(self._file("result", i).read_text()) for i in range(count)]

    def outputs(self, codes: Sequence[int | None] | None = None) -> str:
        """Returns what all workers have written so far, below their exit codes."""
        codes = codes or [p.poll() for p in self.processes]
        return "\n".join(
            f"---- worker {i}, {'ran' if code is None else f'exit code {code}'}:\n"
            + self._file("output", i).read_text(errors="replace")
            for i, code in enumerate(codes)
        )

    def kill(self) -> None:
        """Kills all workers at once, with SIGKILL."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def run(
    function: Callable,
    arguments: Sequence = (),
    *,
    workers: int = 2,
    cpus: int = 1,
    timeout: float = 120.0,
) -> list[Any]:
    """Runs a function in all workers; see `Group` for the arguments.

    Args:
      function: What each worker runs.
      arguments: Its arguments.
      workers: How many processes. 1: one, and no cluster.
      cpus: Logical CPU devices of each.
      timeout: Seconds until all are killed.

    Returns:
      What each worker's function returned, read back from JSON.

    Raises:
      WorkersError: If one fails, or they take longer.
    """
    with Group(function, arguments, workers=workers, cpus=cpus) as group:
        return group.wait(timeout)


def _environments(workers):
    """The environment of each worker, with its place in the cluster."""
    names = [f"localhost:{port}" for port in _free_ports(workers)]
    common = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    common["KERAS_BACKEND"] = "tensorflow"
    common.pop("TF_CONFIG", None)
    if workers == 1:
        return [common]
    return [
        {
            **common,
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": names},
                    "task": {"type": "worker", "index": index},
                }
            ),
        }
        for index in range(workers)
    ]


def _free_ports(count):
    """Ports that no one listens on now; all are held until the last is found."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _work(task, result):
    """Runs in the worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = json.loads(pathlib.Path(task).read_text())
    sys.path[:0] = [task["folder"], str(TESTS), str(TESTS.parent)]
    if task["cpus"] > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * task["cpus"]
        tf.config.set_logical_device_configuration(cpu, logical)
    function = getattr(importlib.import_module(task["module"]), task["function"])
    pathlib.Path(result).write_text(json.dumps(function(*task["arguments"])))


def _end_with_parent():
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _work(*sys.argv[1:])
    # At once: the shutdown of a cluster whose peers have gone can hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
