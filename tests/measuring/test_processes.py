"""Fresh processes: what they have of this one, and how their failures are told."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tfamp.facts import hardware, names
from tfamp.measuring import process_memory, processes
from tfamp.precision import control

ROOT = pathlib.Path(__file__).parents[2]
CUT = "Graph execution error: Detected at node a/MaxPool2d: <stack traces unavailable>"


# ---- What the processes do ----


def meet(value):
    """What a process finds of another one."""
    import tensorflow as tf

    before = hasattr(tf, "left_behind")
    tf.left_behind = True
    return value, before, os.getpid()


def fail(how):
    if how == "raise":
        raise ValueError("of two\nlines")
    if how == "crash":
        os.write(2, b"check failed: x == y\n")
        os.kill(os.getpid(), signal.SIGABRT)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(100)
    return [bytes(2**20) + os.urandom(2**20) for _ in range(4000)]


def start_another():
    return processes.call(meet, 1)


def find_environment(*names):
    return [os.environ.get(name) for name in names]


# ---- Tests ----


GPU = "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), ["0", "true"]),
        (("3,1", None), ["3", "true"]),
        (("GPU-8a,GPU-9b", "false"), ["GPU-8a", "false"]),
        (("-1", None), ["-1", "true"]),
        (("", "1"), ["", "1"]),
    ],
)
def test_a_process_sees_one_gpu_and_takes_of_it_what_it_needs(given, expected):
    here = {k: v for k, v in zip(GPU, given, strict=True) if v is not None}
    assert list(processes.one_gpu(here).values()) == expected


def test_a_process_gets_none_of_the_flags_that_enable_sets(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    # As in TensorFlow 2.19, whose XLA reads them from the environment alone.
    monkeypatch.setattr(names, "symbol", lambda name: None)
    with hardware.simulated(hardware.DEVICES["h100"]), control.enabled("float32"):
        assert "triton" in os.environ["XLA_FLAGS"]
        found = processes.call(find_environment, "XLA_FLAGS").value
    assert found == ["--xla_dump_to=x"]


def test_a_process_has_the_environment_that_is_set_here_and_leaves_it(monkeypatch):
    for given in ("2,1", "5"):  # The second after the server has started.
        monkeypatch.setenv(GPU[0], given)
        monkeypatch.delenv(GPU[1], raising=False)
        assert processes.call(find_environment, *GPU).value == [given[0], "true"]
        assert find_environment(*GPU) == [given, None]


def test_each_call_has_a_process_of_its_own_that_starts_no_others():
    first, second = processes.call(meet, 1), processes.call(meet, (2, "b"))
    assert (first.failure, second.failure) == ("", "")
    assert first.value[:2] == (1, False) and second.value[:2] == ((2, "b"), False)
    assert len({first.value[2], second.value[2], os.getpid()}) == 3
    assert 'below `if __name__ == "__main__":`' in processes.call(start_another).failure


@pytest.mark.parametrize(
    ("how", "told", "lack"),
    [
        ("raise", "ValueError: of two lines", False),
        ("crash", "ended by SIGABRT: check failed: x == y", False),
        ("killed", "killed (SIGKILL), as Linux does", True),
        ("hang", "ended after 1 s without a result", False),
        ("hold", "resident, the limit is", True),
    ],
)
def test_failures_are_told_and_the_next_call_works(how, told, lack):
    memory = process_memory.Memory(2**30 if how == "hold" else None)
    done = processes.call(fail, how, timeout=1 if how == "hang" else 60, memory=memory)
    assert done.value is None and told in done.failure
    assert bool(done.lack) == lack
    assert processes.call(meet, 3).value[0] == 3


def of_a_server(process):
    try:
        return "forkserver" in " ".join(process.parent().cmdline())
    except (AttributeError, psutil.NoSuchProcess):  # It has ended meanwhile.
        return False


def test_a_process_ends_with_the_program_that_asked():
    code = "import time; from tfamp.measuring import processes as p"
    program = subprocess.Popen(
        [sys.executable, "-c", f"{code}; p.call(time.sleep, 300)"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    asker, deadline = psutil.Process(program.pid), time.monotonic() + 120
    started: list[psutil.Process] = []
    try:
        while not any(map(of_a_server, started)):
            started = asker.children(recursive=True)
            assert time.monotonic() < deadline and program.poll() is None
    finally:
        program.kill()
        program.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


# ---- Lack of memory, and what is none ----

# Last words as TensorFlow 2.21 had them on a CPU. Those of a GPU, none of which was at
# hand, are in its libraries.
LACKS = {
    "TensorFlow": (
        f"ResourceExhaustedError: {CUT} OOM when allocating tensor with shape[512] and "
        "type bfloat16 on /device:CPU:0 by allocator mklcpu [[{{node a}}]] Hint: If",
        "OOM when allocating tensor with shape[512] and type bfloat16 on "
        "/device:CPU:0 by allocator mklcpu",
    ),
    "XLA": (
        f"ResourceExhaustedError: {CUT} Out of memory while trying to allocate 1.02GiB."
        " [[{{node StatefulPartitionedCall}}]] Hint: If you want to see a list",
        "Out of memory while trying to allocate 1.02GiB",
    ),
    "XLA on a GPU": (
        "InternalError: RESOURCE_EXHAUSTED: Failed to allocate request for 9.00GiB",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 9.00GiB",
    ),
    "oneDNN": (
        f"AbortedError: {CUT} Compute received an exception:Status:1, message: could "
        "not create a memory object. in file mkl_maxpooling_op.cc:388 [[{{node a}}]]",
        "received an exception:Status:1, message: could not create a memory object. in "
        "file mkl_maxpooling_op.cc:388",
    ),
    "C++": ("ended by SIGABRT:   what():  std::bad_alloc", "std::bad_alloc"),
    "NumPy": ("_ArrayMemoryError: Unable to", "_ArrayMemoryError: Unable to"),
    "cuDNN": (
        "InternalError: in dnn: 'status' CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ),
    "CUDA": (
        "InternalError: failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ),
}
OTHERS = {
    "a bug": "ValueError: Dimensions must be equal, but are 3 and 4",
    "a crash": "ended by SIGSEGV: no reason was reported",
    "oneDNN, wrong arguments": "AbortedError: Operation received an exception:Status: 2"
    ", message: could not create a descriptor",
    "a full disk": "ResourceExhaustedError: /tmp/x; No space left on device",
    "a word": "ValueError: the layer 'MemoryErrorGate' is unknown",
}


def test_lack_of_memory_is_known_by_a_process_last_words():
    for words, told in LACKS.values():
        assert processes.Outcome(None, words).lack == told
    for words in OTHERS.values():
        assert processes.Outcome(None, words).lack == ""
