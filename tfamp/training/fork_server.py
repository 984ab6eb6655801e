"""Fresh processes without the seconds of their imports, forked off one that has them.

    the process that asks -> the server, which imports and waits -> one child a request

The server imports TensorFlow and never starts it, so that what is forked off is as new
as a process of its own: no device, no memory, no switch of another. Linux only.
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence

from tfamp.training import child_process

SUPPORTED = sys.platform == "linux"


class ForkServer:
    """Starts the server with the first request; a context manager that ends it.

    Args:
      module: Name of the module whose `main` serves a request on standard input, see
        `child_process.main`.
      extra: Names of modules that are imported beforehand, too, where they are
        installed.
      environment: Variables of the server.
    """

    def __init__(self, module: str, extra: Sequence[str], environment: dict[str, str]):
        names = [module, *extra]
        code = f"import {__name__} as server; server.main({names!r})"
        self._command = [sys.executable, "-P", "-c", code]
        self._environment = environment
        self._server = self._log = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def launch(self, request: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Has a request served by a new process and waits for its end.

        Args:
          request: From `child_process.to_request`.
          timeout: Seconds.

        Returns:
          Its exit status and standard error.

        Raises:
          subprocess.TimeoutExpired: If it takes longer; it is ended then.
        """
        server = self._started()
        with tempfile.TemporaryDirectory() as folder:
            errors = pathlib.Path(folder, "stderr")
            job = json.dumps({"request": json.loads(request), "errors": str(errors)})
            with contextlib.suppress(BrokenPipeError):  # No answer will come then.
                server.stdin.write(job + "\n")
                server.stdin.flush()
            answer = self._answer(server, timeout)
            text = errors.read_text(errors="replace") if errors.exists() else ""
        if answer:
            return subprocess.CompletedProcess([], int(answer), stderr=text)
        code = server.wait()  # The server itself has ended; the next call starts one.
        text += self._told()
        self.close()
        return subprocess.CompletedProcess([], code or 1, stderr=text)

    def _started(self):
        if self._server is not None and self._server.poll() is not None:
            self.close()  # Linux ended it, say, for lack of memory.
        if self._server is None:
            self._log = tempfile.TemporaryFile()
            self._server = subprocess.Popen(
                [*self._command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the process that asks.
            )
        return self._server

    def _answer(self, server, timeout):
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                self.close()
                raise subprocess.TimeoutExpired(self._command, timeout)
        return server.stdout.readline()

    def _told(self):
        """What the server wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the server, and with it what it has forked off."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait()
            with contextlib.suppress(BrokenPipeError):  # What was not sent any more.
                server.stdin.close()
            server.stdout.close()
            self._log.close()


def main(modules: Sequence[str]) -> None:
    """Serves requests: imports, then a process for each line on standard input.

    Args:
      modules: The first serves a request by its `main`; the others are imported where
        they are installed.
    """
    child_process.end_with(int(sys.argv[-1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # For what a module prints.
    served = importlib.import_module(modules[0])
    for name in modules[1:]:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # Whoever needs it tells.
    for line in sys.stdin:
        job = json.loads(line)
        job["request"]["parent"] = os.getpid()
        child = os.fork()
        if child == 0:
            _become(job, served.main)
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _become(job, serve):
    """Serves a request and ends."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        errors = os.open(job["errors"], os.O_WRONLY | os.O_CREAT)
        for number, file in enumerate((nothing, nothing, errors)):
            os.dup2(file, number)
        sys.stdin = io.StringIO(json.dumps(job["request"]))
        serve()
        code = 0
    except BaseException:  # Whatever it is, this process must not go on as a server.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
