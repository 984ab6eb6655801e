"""The batch-size finder: the search, what counts as lack of memory, real processes."""

import json
import math
import resource
import sys

import hypothesis
import pytest
from hypothesis import strategies

from tfamp import errors
from tfamp.diagnostics import doctor
from tfamp.training import (
    batch_size_finder,
    batch_size_report,
    batch_size_search,
    batch_size_trials,
    find_batch_size,
    memory_limit,
    run_files,
    step_benchmark,
)
from tfamp.training.tasks import images

MIB = memory_limit.MIB
# Stands for the process of a trial: takes 100 MiB, and of an example 2 MiB in float32
# and 1 MiB in other modes; ends as DIES says where that is more than the limit.
STAND_IN = """
import json, os, sys
request = json.load(sys.stdin)
cell, limit = request["cell"], request["memory"]["host"]
each = 2 if cell["mode"] == "float32" else 1
held = (100 + each * cell["batch_size"]) * 2**20
if cell["mode"] == "tf32":
    sys.exit("ValueError: no TF32 here")
if held > limit and os.environ["DIES"] == "killed":
    os.kill(os.getpid(), 9)
if held > limit and os.environ["DIES"]:
    sys.exit(os.environ["DIES"])
figures = {"host_bytes": held, "device_bytes": None, "identity": request["identity"],
           "batches_per_step": 1, "mode": cell["mode"], "reason": "asked for",
           "graph_rewrite": "", "parameters": 7, "description": "stand-in"}
open(request["output"], "w").write(json.dumps(figures))
"""
COMMAND = (sys.executable, "-S", "-c", STAND_IN)
MODES = ("float32", "mixed_bfloat16")
CUT = "Graph execution error: Detected at node a/MaxPool2d: <stack traces unavailable>"


@pytest.fixture(autouse=True)
def way_to_die(monkeypatch):
    monkeypatch.setenv("DIES", "killed")


def make_config():
    config = images.get_config()
    config.name, config.data.name, config.data.image_size = "tiny", "digits", 8
    return config


def find(folder, said=None, **fields):
    """Searches with the stand-in in 612 MiB: 256 examples in float32, 512 in others."""
    asked = {"modes": MODES, "memory_limit_mb": 612, **fields}
    return batch_size_finder.run(
        *(make_config(), folder, batch_size_finder.Settings(**asked)),
        report=(said if said is not None else []).append,
        command=COMMAND,
    )


# ---- The search ----


def search(threshold, allowed=4096, **keywords):
    """Returns the bracket for sizes that fit up to a threshold, and what was tried."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= threshold

    return batch_size_search.search(fits, allowed, **keywords), tried


@pytest.mark.parametrize(
    ("threshold", "keywords", "bracket", "tried"),
    [
        (100, {}, (96, 104), [8, 16, 32, 64, 128, 96, 112, 104]),
        (100, {"known": 96}, (96, 104), [8, 96, 192, 144, 120, 104]),
        (100, {"known": 999}, (96, 104), [8, 992, 496, 248, 128, 64, 96, 112, 104]),
        (100, {"tolerance": 0.25}, (96, 112), [8, 16, 32, 64, 128, 96, 112]),
        (7, {}, (0, 8), [8]),
        (8, {}, (8, 16), [8, 16]),
        (500, {"allowed": 63}, (56, None), [8, 16, 32, 56]),
        (500, {"allowed": 63, "known": 99}, (56, None), [8, 56]),
    ],
    ids=str,
)
def test_search_doubles_then_bisects(threshold, keywords, bracket, tried):
    assert search(threshold, **keywords) == (bracket, tried)


@hypothesis.given(
    threshold=strategies.integers(0, 2**17),
    allowed=strategies.integers(8, 2**17),
    known=strategies.integers(0, 2**17),
    tolerance=strategies.sampled_from([0.0, 0.03, 0.5]),
)
def test_search_brackets_the_threshold_in_few_trials(
    threshold, allowed, known, tolerance
):
    (low, high), tried = search(threshold, allowed, known=known, tolerance=tolerance)
    assert low <= threshold and all(size % 8 == 0 for size in tried)
    assert len(set(tried)) == len(tried) and max(tried) <= allowed
    if high is None:
        assert low == allowed // 8 * 8
    else:
        assert threshold < high <= low + max(8, tolerance * low)
    assert {low, high} - {0, None} <= set(tried)
    assert len(tried) <= 2 * math.log2(allowed / 8 + 2) + 3


@pytest.mark.parametrize("wrong", [{"allowed": 7}, {"tolerance": 1.0}], ids=str)
def test_search_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="largest batch size must be at least 8"):
        search(1, **wrong)


# ---- Lack of memory, and what is none ----

# Last words as TensorFlow 2.21 had them under `RLIMIT_DATA` on a CPU. Those of a GPU,
# none of which was at hand, are in its libraries.
LACKS = {
    "SIGKILL": (
        "killed (SIGKILL), as Linux does with a process when memory runs out",
        "killed (SIGKILL), as Linux does with a process when memory runs out",
    ),
    "TensorFlow": (
        f"ResourceExhaustedError: {CUT} OOM when allocating tensor with shape[512,8,8,"
        "128] and type bfloat16 on /job:localhost/replica:0/task:0/device:CPU:0 by "
        "allocator mklcpu [[{{node a/MaxPool2d}}]] Hint: If you want to see a list",
        "OOM when allocating tensor with shape[512,8,8,128] and type bfloat16 on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator mklcpu",
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
        f"AbortedError: {CUT} Operation received an exception:Status: 1, message: could"
        " not create a memory object, in file tensorflow/core/kernels/mkl/mkl_conv_grad"
        "_filter_ops.cc:685 [[{{node a/MaxPool2d}}]]",
        "received an exception:Status: 1, message: could not create a memory object, in"
        " file tensorflow/core/kernels/mkl/mkl_conv_grad_filter_ops.cc:685",
    ),
    "oneDNN's pooling": (
        f"AbortedError: {CUT} Compute received an exception:Status:1, message: could "
        "not create a memory object. in file mkl_maxpooling_op.cc:388 [[{{node a}}]]",
        "received an exception:Status:1, message: could not create a memory object. in "
        "file mkl_maxpooling_op.cc:388",
    ),
    "C++": ("ended by SIGABRT:   what():  std::bad_alloc", "std::bad_alloc"),
    "Python": ("MemoryError: ", "MemoryError:"),
    "numpy": (
        "_ArrayMemoryError: Unable to allocate 8.00 GiB for an array",
        "_ArrayMemoryError: Unable to allocate 8.00 GiB for an array",
    ),
    "another": (
        "ResourceExhaustedError: " + 300 * "x",
        f"ResourceExhaustedError: {176 * 'x'} ...",
    ),
    "cuDNN": (
        "InternalError: in dnn: 'status' CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ),
    "CUDA": (
        "InternalError: failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ),
    "a copy to a GPU": (
        "InternalError: Failed copying input tensor: Dst tensor is not initialized.",
        "Dst tensor is not initialized.",
    ),
    "cuDNN's scratch": (
        "UnknownError: CUDNN failed to allocate the scratch space for the runner",
        "failed to allocate the scratch space for the runner",
    ),
}
OTHERS = {
    "a bug": "ValueError: Dimensions must be equal, but are 3 and 4",
    "a crash": "ended by SIGSEGV: no reason was given",
    "an abort": "ended by SIGABRT: Check failed: ret == 0 (11 vs. 0) Thread creation "
    "via pthread_create() failed.",
    "oneDNN, wrong arguments": "AbortedError: Operation received an exception:Status: 2"
    ", message: could not create a descriptor",
    "a full disk": "ResourceExhaustedError: /tmp/x; No space left on device",
    "too many files": "ResourceExhaustedError: /tmp/x; Too many open files",
    "time": "ended after 3600 s without figures",
    "a word": "ValueError: the layer 'MemoryErrorGate' is unknown",
}


@pytest.mark.parametrize(("reason", "told"), LACKS.values(), ids=LACKS.keys())
def test_lack_of_memory_is_known_by_a_process_last_words(reason, told):
    assert memory_limit.lack(reason) == told


@pytest.mark.parametrize("reason", OTHERS.values(), ids=OTHERS.keys())
def test_other_failures_are_no_lack_of_memory(reason):
    assert memory_limit.lack(reason) == ""


# ---- What a host has ----


def make_host(root, **files):
    """Writes the files of a host with 8,000 MiB available."""
    files = {"proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {8000 * 1024} kB", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


CGROUP = "sys/fs/cgroup"
HOSTS = {
    "no groups": ({}, 8000),
    "a group without a limit": (
        {
            "proc/self/cgroup": "0::/a",
            f"{CGROUP}/a/memory.max": "max",
            f"{CGROUP}/a/memory.current": f"{500 * MIB}",
        },
        8000,
    ),
    "a container": (
        {
            "proc/self/cgroup": "0::/",
            f"{CGROUP}/memory.max": f"{2000 * MIB}",
            f"{CGROUP}/memory.current": f"{700 * MIB}",
            f"{CGROUP}/memory.stat": f"file 9\ninactive_file {100 * MIB}",
        },
        1400,
    ),
    "a group above": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{CGROUP}/a/memory.max": f"{900 * MIB}",
            f"{CGROUP}/a/memory.current": f"{100 * MIB}",
        },
        800,
    ),
    "the first version": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/a\n0::/",
            f"{CGROUP}/memory/a/memory.limit_in_bytes": f"{1000 * MIB}",
            f"{CGROUP}/memory/a/memory.usage_in_bytes": f"{300 * MIB}",
            f"{CGROUP}/memory/a/memory.stat": f"total_inactive_file {50 * MIB}",
        },
        750,
    ),
    "a full group": (
        {
            "proc/self/cgroup": "0::/",
            f"{CGROUP}/memory.max": f"{100 * MIB}",
            f"{CGROUP}/memory.current": f"{101 * MIB}",
        },
        0,
    ),
}


@pytest.mark.parametrize(("files", "left"), HOSTS.values(), ids=HOSTS.keys())
def test_available_memory_heeds_control_groups(files, left, tmp_path):
    assert memory_limit.available(make_host(tmp_path, **files)) == left * MIB


def test_host_that_is_not_linux_is_refused(tmp_path):
    with pytest.raises(errors.RunError, match="Expected a Linux host"):
        memory_limit.available(tmp_path)


def test_limit_is_a_share_of_what_is_available_and_never_more(monkeypatch):
    monkeypatch.setattr(memory_limit, "available", lambda: 1000 * MIB)
    limits = batch_size_trials.limits(None)
    assert limits.host == 800 * MIB
    assert batch_size_trials.limits(700).searched == 700 * MIB
    if limits.place == "CPU":
        assert "80% of the 1,000 MiB available" in limits.text
        with pytest.raises(ValueError, match="Received: memory_limit_mb=801.*most 800"):
            batch_size_trials.limits(801)


def test_limit_under_which_tensorflow_crashes_is_refused(monkeypatch):
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: 2**30}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind],) * 2)
    with pytest.raises(errors.RunError, match="`ulimit -d 1048576`"):
        memory_limit.check_allocations()


# ---- A search in a folder, its processes stood for ----


def test_float32_and_mixed_are_found_and_compared(tmp_path):
    said = []
    found = find(tmp_path, said)
    first, second = found.sizes
    assert first[:4] == ("float32", 256, 264, None)
    assert second[:3] == ("mixed_bfloat16", 512, 520)
    assert second.ratio == 2
    assert second.bytes_per_example == pytest.approx(MIB)
    assert second.fixed_bytes == pytest.approx(100 * MIB)
    assert first.peak_bytes == 612 * MIB and "SIGKILL" in first.reason
    assert said[0] == "float32, batch 8: fits: 116 MiB at most"
    # The second search starts from what the first has found.
    tried = [trial.batch_size for trial in second.trials]
    assert tried[:3] == [8, 256, 512]
    assert len(said) == len(first.trials) + len(second.trials)


def test_report_has_the_figures_and_what_was_expected(tmp_path):
    found = find(tmp_path)
    stored = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert stored == json.loads(json.dumps(found.to_dict()))
    assert stored["schema_version"] == 1 and stored["limit_bytes"] == 612 * MIB
    assert stored["sizes"][1]["peak_bytes"] == 612 * MIB
    text = (tmp_path / "report.md").read_text()
    assert text == found.to_markdown() and found.to_text() in text
    (row,) = [line for line in text.splitlines() if line.startswith("| mixed")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:5] == ["mixed_bfloat16", "512", "520", "2.00", "612 MiB"]
    assert cells[5:7] == ["1.00 MiB", "100 MiB"]
    assert "An example takes 2.00 MiB in float32 and 1.00 MiB here" in text
    assert "tends to 2.00. Beside that, 100 MiB and 100 MiB do not depend" in text
    assert "stand-in; 7 parameters" in text


def test_ratio_beyond_what_the_width_gives_is_told():
    def size(mode, largest, each, base):
        trials = [
            batch_size_report.Trial(n, (100 + each * n) * MIB) for n in (8, largest)
        ]
        bracket = batch_size_search.Bracket(largest, largest + 8)
        return batch_size_report.summarize(mode, bracket, trials, base)

    first = size("float32", 200, 3, None)
    told = [
        next(batch_size_report._expectation(first, size("mixed", 400, each, first)))
        for each in (2, 1)
    ]
    assert ["above 2" in line for line in told] == [False, True]
    assert "tends to 3.00 (above 2" in told[1]


def test_peak_that_the_process_missed_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("DIES", "")
    found = find(tmp_path)
    assert [size.batch_size for size in found.sizes] == [256, 512]
    assert found.sizes[0].reason == "628 MiB resident, the limit is 612 MiB"


def test_finished_trials_are_not_repeated_and_the_folder_is_known(tmp_path):
    folder = tmp_path / "found"
    before = find(folder)
    said = []
    assert find(folder, said) == before
    assert all("(tried before)" in line for line in said)
    said.clear()
    more = find(folder, said, modes=("float32", "mixed_float16"))
    assert more.sizes[0] == before.sizes[0]
    assert [line for line in said if "(tried before)" not in line] == [
        line for line in said if line.startswith("mixed_float16")
    ]
    with pytest.raises(errors.RunError, match="memory_limit_mb: 612 -> 700"):
        find(folder, memory_limit_mb=700)
    with pytest.raises(errors.RunError, match="find_batch_size"):
        step_benchmark.run(make_config(), folder, step_benchmark.Settings("train"))
    run_files.delete_run(folder)
    assert not folder.exists()


def test_trial_that_failed_under_a_lower_limit_is_made_again(tmp_path, monkeypatch):
    fields = {"memory_limit_mb": None, "max_batch_size": 64, "modes": ("float32",)}
    for available, largest in ((200, 24), (400, 64), (200, 24)):
        free = available * MIB
        monkeypatch.setattr(memory_limit, "available", lambda free=free: free)
        assert find(tmp_path, **fields).sizes[0].batch_size == largest


def test_largest_batch_that_is_allowed_ends_the_search(tmp_path):
    found = find(tmp_path, max_batch_size=260)
    first, second = found.sizes
    assert (first.batch_size, first.failing) == (256, None)
    assert (second.batch_size, second.ratio) == (256, None)
    assert "260 was the largest batch allowed" in found.to_text()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"memory_limit_mb": 115},
            errors.RunError,
            r"8 is the smallest batch size.*float32.*SIGKILL.*CPU: 115 MiB",
        ),
        (
            {"modes": ("float32", "tf32")},
            errors.RunError,
            "not for lack of memory: tf32, batch 8.*ValueError: no TF32 here",
        ),
        ({"max_batch_size": 7}, ValueError, "`max_batch_size` must be at least 8"),
        ({"steps": 1}, ValueError, "`steps` must be at least 2"),
        ({"memory_limit_mb": 0}, ValueError, "`memory_limit_mb` must be at least 1"),
        ({"memory_limit_mb": 10**9}, ValueError, "more than this host can spare"),
        ({"modes": ("fp16",)}, ValueError, "mixed_float16"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_what_no_search_can_answer_is_an_error(fields, error, message, tmp_path):
    with pytest.raises(error, match=message):
        find(tmp_path / "run", **fields)
    assert not (tmp_path / "run/batch_sizes.json").exists()


def test_search_of_several_replicas_is_refused():
    config = make_config()
    config.strategy = "mirrored"
    with pytest.raises(ValueError, match="one device"):
        find_batch_size(config)


# ---- Real processes ----


def make_wide_config():
    """An example takes over 1 MiB: a convolution, its gradient, and their pooling."""
    config = make_config()
    config.data.image_size = 64
    config.model.blocks, config.model.dense = ((32,),), 0
    return config


def make_trials(config, folder, limit):
    (folder / "cells").mkdir()
    limits = batch_size_trials.limits(limit)
    return batch_size_trials.Trials(
        config, 2, limits, folder, doctor.describe(), [].append, None
    )


def test_real_process_is_held_to_the_limit_and_takes_nothing_down(tmp_path):
    limit = 1200
    before = resource.getrlimit(resource.RLIMIT_AS)
    config = make_wide_config()
    (cell,) = batch_size_finder.plan(config, batch_size_finder.Settings(MODES[:1]))
    trials = make_trials(config, tmp_path, limit)
    small = trials.make(cell)
    assert small.reason == ""
    assert small.peak_bytes and small.peak_bytes <= limit * MIB
    assert trials.found[0]["batches_per_step"] == 1
    large = trials.make(cell._replace(batch_size=2048))
    assert large.peak_bytes is None and large.reason
    if trials.limits.place == "CPU":
        assert "resident, the limit is 1,200 MiB" in large.reason
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_real_failure_that_is_no_lack_of_memory_is_raised(tmp_path):
    config = make_wide_config()
    (cell,) = batch_size_finder.plan(config, batch_size_finder.Settings(MODES[:1]))
    config.data.name = "imagenet"
    trials = make_trials(config, tmp_path, None)
    with pytest.raises(errors.RunError, match="not for lack.*ValueError: .*'imagenet'"):
        trials.make(cell)
    assert list((tmp_path / "cells").iterdir()) == []
