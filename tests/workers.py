"""Scripts and functions in processes forked off a server, after TensorFlow's import.

Importing takes longer than most of what the tests do in a process. In the server
TensorFlow is imported and not started: forking is safe, and a cluster, whose gRPC
servers do not survive a fork, can be joined in the new processes.
"""

import atexit
import contextlib
import functools
import importlib
import inspect
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

TESTS = pathlib.Path(__file__).resolve().parent
GRACE = 30.0  # Seconds that the others have to end after one has failed.


class Finished(NamedTuple):
    """How a process ended; `result` is what its function returned."""

    returncode: int
    stdout: str
    stderr: str
    result: Any


def run_script(script, arguments: Sequence[str], cwd) -> Finished:
    """Runs a script as `python script` does."""
    case = {"argv": [str(script), *arguments], "cwd": str(cwd)}
    (done,) = run_together([case], 900.0)
    return done


def run(
    function: Callable,
    arguments: Sequence = (),
    *,
    workers: int = 2,
    cpus: int = 1,
    timeout: float = 300.0,
    killed: int | None = None,
) -> list[Any]:
    """Runs a function in worker processes, as a cluster on this host.

    Args:
      function: A function at the top of a test module; it runs in each worker, as
        `function(*arguments)`. Importing its module must not start TensorFlow.
      arguments: What JSON can hold; paths become strings.
      workers: How many. 1: one process and no cluster.
      cpus: Logical CPU devices of each.
      timeout: Seconds; those still running are killed then, or `GRACE` after one has
        failed: the others may wait for it for ever.
      killed: The worker that kills itself with SIGKILL.

    Returns:
      What the function returned in each worker; None of a killed one.

    Raises:
      AssertionError: If they end otherwise; the text has what each wrote.
    """
    case = {
        "folder": str(pathlib.Path(inspect.getfile(function)).resolve().parent),
        "function": [function.__module__, function.__name__],
        "arguments": json.loads(json.dumps(arguments, default=str)),
        "cpus": cpus,
    }
    done = run_together(
        [case | {"environ": each} for each in cluster(workers)], timeout
    )
    expected = [-signal.SIGKILL if i == killed else 0 for i in range(workers)]
    assert [each.returncode for each in done] == expected, "\n".join(
        f"---- worker {index}, exit code {each.returncode}, {each.result}:\n"
        f"{each.stdout}{each.stderr}"
        for index, each in enumerate(done)
    )
    return [each.result for each in done]


def run_python(*arguments, cwd=None, **environ: str | None) -> Any:
    """Runs a new Python, which must end well; None takes a variable away."""
    given = os.environ | {"PYTHONPATH": str(TESTS.parent)} | environ
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in given.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done


def cluster(workers: int) -> list[dict[str, str]]:
    """Returns the environment of each worker, with its place in a new cluster."""
    common = {"CUDA_VISIBLE_DEVICES": "-1"}
    if workers == 1:
        return [common]
    with contextlib.ExitStack() as held:  # Until the last port is found.
        sockets = [held.enter_context(socket.socket()) for _ in range(workers)]
        for each in sockets:
            each.bind(("localhost", 0))
        names = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    tasks = [{"type": "worker", "index": index} for index in range(workers)]
    config = [{"cluster": {"worker": names}, "task": task} for task in tasks]
    return [common | {"TF_CONFIG": json.dumps(each)} for each in config]


def run_together(cases: Sequence[dict[str, Any]], timeout: float) -> list[Finished]:
    """Runs processes beside one another; see `_become` for a case."""
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    for case in cases:
        case["environ"] = environ | case.get("environ", {})
    server = _server()
    server.stdin.write(json.dumps([cases, timeout]) + "\n")
    server.stdin.flush()
    return [Finished(*each) for each in json.loads(server.stdout.readline())]


@functools.cache
def _server() -> Any:
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
    )
    atexit.register(server.communicate)  # Closes its input, which ends it.
    return server


# ---- In the server ----


def _serve():
    sys.path.insert(1, str(TESTS.parent))
    for module in ("tfamp.commands.app", "tfamp.commands.benchmark_jobs", "keras_hub"):
        with contextlib.suppress(ImportError):  # An extra that is not installed.
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_run_all(*json.loads(line))), flush=True)


def _run_all(cases, timeout):
    with tempfile.TemporaryDirectory() as name:
        folders = [pathlib.Path(name, str(index)) for index in range(len(cases))]
        pids = [_fork(*each) for each in zip(cases, folders, strict=True)]
        codes = _wait(pids, time.monotonic() + timeout)
        return [
            [code, *_texts(folder), json.loads((folder / "result").read_text())]
            for code, folder in zip(codes, folders, strict=True)
        ]


def _texts(folder):
    names = "stdout", "stderr"
    return [(folder / name).read_text(errors="replace") for name in names]


def _wait(pids, deadline):
    """Returns exit codes; kills what runs longer, or longer than the tests."""
    codes, parent = {}, os.getppid()
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if time.monotonic() > deadline or os.getppid() != parent:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _fork(case, folder):
    folder.mkdir()
    (folder / "result").write_text("null")
    child = os.fork()
    if child == 0:
        _become(case, folder)
    return child


def _become(case, folder):
    """Ends this process as Python would have that had been started for the case."""
    code = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(case["environ"])
        if "argv" in case:
            os.chdir(case["cwd"])
            sys.argv = case["argv"]
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            (folder / "result").write_text(json.dumps(_call(**case)))
            time.sleep(0.5)  # A peer may still read what was sent to it last.
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: the shutdown of a cluster whose peers have gone can hang.
        os._exit(code)


def _call(folder, function, arguments, cpus, environ):
    sys.path.insert(0, folder)
    if cpus > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * cpus
        tf.config.set_logical_device_configuration(cpu, logical)
    module, name = function
    return getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    _serve()
