"""Fresh processes: forked off a server that has the imports, under a limit of memory.

What measures must find no memory, switch or traced function of another: a process for
each call. The server imports TensorFlow and never starts it, so that what is forked off
is as new as a fresh interpreter, without the seconds of its imports.

A process is held to its limit by its resident memory, as a container is by Linux.
`RLIMIT_DATA` and `RLIMIT_AS` would not do: where an allocation fails, TensorFlow 2.21
often crashes on a CPU with nothing said.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp import extras, functions
from tfamp.facts import switches, xla_flags
from tfamp.measuring import process_memory

TIME_LIMIT = 3600  # Seconds; compilation can take many minutes.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DUMP = 300  # Seconds.
_PAUSE = 0.005  # Seconds; between two looks a step can take some tens of MiB.
_KILLED = "killed (SIGKILL), as Linux does with a process when memory runs out"
# How a process' last words tell that memory ran out, and what of them is shown.
_SIGNS = (
    r"^killed \(SIGKILL\).*",
    r"OOM when allocating tensor.*? by allocator \w+",
    r"Out of memory while trying to allocate [\d.]+ ?\w+",  # XLA.
    # A full disk, or too many files, are errors of the same name.
    r"^ResourceExhaustedError: (?!.*(No space left|Too many open files|quota)).*",
    r"RESOURCE_EXHAUSTED.*",
    # 1 is `dnnl_out_of_memory` of oneDNN's `dnnl_status_t`.
    r"received an exception: ?Status: ?1\b[^\[]*",
    r"std::bad_alloc",
    r"^\w*MemoryError\b.*",  # Python's, NumPy's, and that of `_watch`.
    r"CUDA_ERROR_OUT_OF_MEMORY.*",
    r"Dst tensor is not initialized.*",  # A copy to a GPU without room for it.
    r"failed to allocate the scratch space.*",  # cuDNN's.
    r"Failed to allocate \d+ bytes.*",
    r"(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED.*",
)
_starting = threading.Lock()  # Of processes, one after the other.
# What a crash prints below its reason.
_FRAME = re.compile(r"\s*($|@|\*\*\*|PC:)")


class Outcome(NamedTuple):
    """How a call ended.

    Attributes:
      value: What the function returned; None where it failed.
      failure: Why it failed, in a line; "" if it did not.
    """

    value: Any
    failure: str = ""

    @property
    def lack(self) -> str:
        """The part of `failure` that reports a lack of memory; "" if none does."""
        for sign in _SIGNS:
            if match := re.search(sign, self.failure):
                return match.group().strip()[:200]
        return ""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIME_LIMIT,
    memory: process_memory.Memory = process_memory.NO_LIMIT,
    preload: Sequence[str] = (),
) -> Outcome:
    """Calls a function in a separate process, which ends with this one.

    Args:
      function: Of a module; what it returns, and its arguments, can be pickled.
      *arguments: Its arguments.
      timeout: Seconds.
      memory: What the process may hold.
      preload: Modules that the server imports beside the function's, if they are
        installed; those of the first call count.

    Returns:
      An `Outcome`: whatever happens in the process is no error here.

    Raises:
      RuntimeError: In a process of `call` itself.
    """
    with Process(function, *arguments, memory=memory, preload=preload) as process:
        return process.result(timeout)


class Process:
    """A separate process in which a function is called; it ends with the context.

    A function has one result, and a generator one for each value that it yields; after
    each it stops until `proceed`, and the last is None. So several processes can be
    prepared at once, and measure in turns.

    Args:
      function, *arguments, memory, preload: As of `call`.

    Raises:
      RuntimeError: In such a process itself.
    """

    def __init__(
        self, function, *arguments, memory=process_memory.NO_LIMIT, preload=()
    ):
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "This process was started to measure something, and would start others "
                'endlessly. Put the call below `if __name__ == "__main__":`.'
            )
        extras.require("psutil")  # Which `_watch` needs, there.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, function.__module__, *preload])
        # It calls `enable` itself, or is to be stock Keras.
        environment = one_gpu(os.environ) | xla_flags.users()
        self._folder = tempfile.TemporaryDirectory()
        self._words = pathlib.Path(self._folder.name, "words")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(other, self._words, memory, environment, function, arguments),
        )
        with _starting:
            # Without it `multiprocessing` would run the user's script again.
            before = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = before
        other.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pipe.close()
        self.stop()
        self._process.join()
        self._folder.cleanup()

    def stop(self) -> None:
        """Ends it now: its next result is a failure."""
        if self._process.is_alive():
            self._process.kill()

    def result(self, timeout: float) -> Outcome:
        """Waits for the next result, so many seconds; a process that fails ends."""
        timeout = max(0, timeout)
        ended = self._pipe.poll(timeout)
        with contextlib.suppress(EOFError, ConnectionError):
            if ended:
                return Outcome(*self._pipe.recv())
        # A crash may write its memory to a disk first.
        self._process.join(_DUMP if ended else 0)
        if self._process.exitcode is None:
            return Outcome(None, f"ended after {timeout:.0f} s without a result")
        text = self._words.read_text(errors="replace") if self._words.exists() else ""
        return Outcome(None, reason(self._process.exitcode, text))

    def proceed(self) -> None:
        """Has it go on to its next result."""
        with contextlib.suppress(OSError):  # It has ended: `result` says why.
            self._pipe.send(None)


def one_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what a process of `call` has in its environment besides.

    One GPU, the first of those that are visible here, of which it takes what it needs:
    TensorFlow would reserve the memory of all.

    Args:
      environment: That of this process; what it says of memory holds.
    """
    return {
        _VISIBLE: environment.get(_VISIBLE, "0").split(",")[0],
        switches.GROWTH: environment.get(switches.GROWTH, "true"),
    }


def outside() -> dict[str, str]:
    """Returns the environment of a command with an interpreter of its own.

    Its TensorFlow or JAX may not know the XLA flags of this one.
    """
    variables = {**os.environ, **one_gpu(os.environ), **xla_flags.users()}
    return {name: text for name, text in variables.items() if text is not None}


def _serve(pipe, words, memory, environment, function, arguments):
    """Calls the function and sends what came of it, each value of a generator."""
    switches.set_environ(environment)  # TensorFlow has not looked for GPUs yet.
    with contextlib.suppress(OSError, ValueError):  # Nobody would read it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = os.open(words, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    with contextlib.suppress(OSError):
        # Where memory runs out Linux is to end this process, not the one that waits.
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    gpus = tf.config.list_physical_devices("GPU")
    if memory.device is not None and gpus:
        size = memory.device // process_memory.MIB
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=size)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    threading.Thread(target=_watch, args=(memory.host,), daemon=True).start()
    try:
        value = function(*arguments)
        if not isinstance(value, types.GeneratorType):
            value = iter([value])
        for each in value:
            pipe.send((each, ""))
            pipe.recv()
        pipe.send((None, ""))
    except EOFError:  # The one that asked wants no more.
        pass
    except Exception as error:  # Whatever it is becomes the reason.
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        pipe.send((None, text + functions.place_of(error)))
    # At once: TensorFlow 2.21's XLA, out of memory, crashes where it is taken down.
    os._exit(0)


def _watch(limit):
    """Ends this process when the one that asked ends, or where it exceeds its limit."""
    psutil = extras.require("psutil")
    parent = multiprocessing.parent_process()
    own, waiting = psutil.Process(), [parent.sentinel] if parent else []
    while not multiprocessing.connection.wait(waiting, _PAUSE if limit else None):
        held = own.memory_info().rss
        if limit and held > limit:
            # Not through `sys.stderr`, which another thread may have locked.
            words = process_memory.over(held, limit)
            os.write(2, f"\nMemoryError: {words}\n".encode())
            break
    os._exit(1)  # At once: the next allocation is on its way.


def reason(code: int, words: str) -> str:
    """Returns why a process ended without figures, in a line.

    Args:
      code: Its exit code; below 0 the number of a signal.
      words: What it wrote to standard error.
    """
    lines = [line for line in words.splitlines() if not _FRAME.match(line)]
    last = lines[-1].strip() if lines else "no reason was reported"
    if code >= 0:
        return last
    name = signal.Signals(-code).name
    return _KILLED if name == "SIGKILL" else f"ended by {name}: {last}"


def cores() -> int:
    """Returns how many cores this process may use: those of a container."""
    some = getattr(os, "sched_getaffinity", None)  # Linux alone has it.
    return len(some(0)) if some else os.cpu_count() or 1
