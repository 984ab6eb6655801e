"""`tfamp gpu-report`: its parts, what is kept when it is killed, its page."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from tfamp import progress
from tfamp.measuring import processes
from tfamp.measuring.device import networks, outside, parts, plan, steps

FLAGS = "--tiny", "--minutes=5", "--parts=numerics,float8,rewrite"


def command(output, *more):
    given = ["-m", "tfamp", "gpu-report", *FLAGS, f"--output={output}", *more]
    return [sys.executable, *given]


def run(output, *more):
    return subprocess.run(command(output, *more), capture_output=True, text=True)


def cells(output):
    """Name -> (contents, time of writing) of all figures that there are."""
    return {
        file.name: (file.read_text(), file.stat().st_mtime_ns)
        for file in pathlib.Path(output).glob("*/cells/*.json")
        if not file.name.startswith("new-")  # It is being written.
    }


def report(output):
    (folder,) = pathlib.Path(output).iterdir()
    return folder, json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A report that was killed three times, and what there was each time."""
    output = tmp_path_factory.mktemp("report")
    before = []
    for least in (1, 20, 60):
        process = subprocess.Popen(
            command(output), stderr=subprocess.PIPE, start_new_session=True
        )
        while len(cells(output)) < least and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        before.append(cells(output))
    done = run(output)
    assert done.returncode == 0, done.stderr
    return output, before, done


def test_nothing_that_was_measured_is_lost(killed):
    output, before, _ = killed
    after = cells(output)
    assert [len(each) > 0 for each in before] == [True] * 3
    for some in before:
        for name, (text, _) in some.items():
            assert json.loads(text)["identity"]
            assert name in after, name
    # What a whole part had measured was not measured again.
    last = before[-1]
    whole = [name for name in last if name.endswith("-done.json")]
    assert whole
    for part in (name.removesuffix("-done.json") for name in whole):
        for name in (each for each in last if each.startswith(part)):
            assert last[name] == after[name]


def test_the_page_and_the_file_to_send(killed):
    output, _, done = killed
    folder, content = report(output)
    assert {"schema_version", "date", "command", "device", "facts"} <= content.keys()
    assert content["tiny"] and content["missing"] == {}
    numerics = [x for k, x in content["figures"].items() if k.startswith("numerics")]
    layers = {each["name"] for each in numerics}
    assert {"dense", "attention", "einsum dense", "codes SIGNED"} <= layers
    for each in numerics:
        assert each["error"] <= each["expected"], each
    text = (folder / "report.md").read_text()
    assert "Small models, as a check" in text and "## Numerics" in text
    assert "nodes converted" in text and "| float8-dense-float8" in text
    assert "report.json" in done.stderr


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--parts=speed", "Unknown parts. Received: speed"),
        ("--torch_python=/no/python -S", "torch_python='/no/python -S'"),
    ],
)
def test_a_wrong_flag_is_an_error_before_any_work(flag, words, tmp_path):
    done = run(tmp_path, flag)
    assert done.returncode == 1 and words in done.stderr
    assert not [*tmp_path.iterdir()]


# ---- Processes that fail ----


def hang():
    yield {"name": "first"}
    time.sleep(100)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def work(value):
    for number in range(2):
        yield {"name": f"{value} {number}"}


def jobs(*rows):
    """Returns jobs from rows of a name, the limit, a function and its arguments."""
    return [
        parts.Job("own", name, limit, functools.partial(processes.Process, *called))
        for name, limit, *called in rows
    ]


def group_of(*variants, limit=120):
    found = [parts.Variant(*variant) for variant in variants]
    return parts.Group("time", "bert_base", "some", tuple(found), limit)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Returns a function that measures jobs and groups in place of the parts.

    It returns the report's folder and content, and what was said.
    """

    def make(measured, minutes=2, torch=""):
        monkeypatch.setattr(parts, "PARTS", {"own": lambda asked: measured})
        output, said = tmp_path / "out", []
        plan.run(output, (), minutes, True, torch, "command", said.append)
        return *report(output), said

    return make


def test_a_process_that_hangs_or_dies_ends_alone_and_silence_is_broken(
    measure, monkeypatch
):
    monkeypatch.setattr(progress, "SILENCE", 1)
    rows = ("hangs", 4, hang), ("dies", 60, die), ("works", 60, work, 1)
    folder, content, said = measure(jobs(*rows))
    assert [*content["figures"]] == [
        *("own-hangs-000", "own-works-000", "own-works-001"),
    ]
    missing = content["missing"]
    assert missing.keys() == {"own: hangs", "own: dies"}
    assert "ended after" in missing["own: hangs"]
    assert "SIGKILL" in missing["own: dies"]
    assert "## Not measured" in (folder / "report.md").read_text()
    assert any("... still measuring (" in line for line in said)


def test_what_there_is_no_time_for_is_named(measure):
    _, content, _ = measure(jobs(("late", 60, work, 1)), minutes=0.1)
    assert content["missing"] == {"own: late": "no time left"}


def test_what_a_command_could_not_do_is_tried_again(measure, tmp_path):
    command = [sys.executable, "-c", "print('1 failed'); raise SystemExit(3)"]
    job = parts.Job("own", "some", 60, lambda: outside.Command(command, tmp_path))
    for _ in range(2):
        _, content, said = measure([job])
        assert any("exit code 3" in line for line in said)
        figures = content["figures"]["own-some-000"]
        assert (figures["code"], figures["text"]) == (3, "1 failed")


# ---- What is timed ----


def test_variants_are_timed_in_turns_beside_their_base(measure):
    """One that does not end is left out; one without PyTorch says so."""
    group = group_of(
        ("keras", "float32", False),
        ("tfamp", "mixed_bfloat16", False),
        ("tfamp", "mixed_bfloat16", True),
        ("torch", "float32", False),
    )
    measured = [*jobs(("beside", 60, work, 1)), group]
    folder, content, said = measure(measured, 5, f"{sys.executable} -S")
    # Its processes are prepared meanwhile.
    assert "time: bert_base" in said[0] and "own: beside" in said[1]
    names = [
        "time-bert_base-some-keras-float32-plain",
        "time-bert_base-some-tfamp-mixed_bfloat16-compiled",
        "time-bert_base-some-tfamp-mixed_bfloat16-plain",
    ]
    timed = {k: v for k, v in content["figures"].items() if k.startswith("time")}
    assert [*timed] == names and len(content["figures"]) == 5
    for each in timed.values():
        assert [len(some) for some in each["seconds"]] == [parts.COUNT] * parts.ROUNDS
        assert each["base_seconds"] == content["figures"][names[0]]["seconds"]
    assert "torch" in content["missing"]["time: bert_base, torch float32"]
    text = (folder / "report.md").read_text()
    assert "stock Keras float32" in text and "tfamp mixed_bfloat16, XLA" in text
    assert (folder / "steps.png").stat().st_size > 1000


@pytest.mark.parametrize("room", [1, 2])
def test_a_gpu_times_as_many_at_once_as_it_has_room_for(measure, monkeypatch, room):
    """Each beside the base: that of its set, or the one that came first."""
    modes = ("float32", "tf32", "mixed_bfloat16")
    monkeypatch.setattr(parts.Asked, "together", room)
    started, start = [], parts.start
    note = lambda *given: started.append(given[1].mode) or start(*given)  # noqa: E731
    monkeypatch.setattr(parts, "start", note)
    group = group_of(*(("keras", mode, False) for mode in modes))
    folder, content, _ = measure([group], 5)
    assert started == {1: [*modes], 2: [*modes[:2], modes[0], modes[2]]}[room]
    base, *others = (
        content["figures"][f"time-bert_base-some-keras-{m}-plain"] for m in modes
    )
    assert [x["base_seconds"] == base["seconds"] for x in others] == [room == 1, True]
    assert all(len(x["base_seconds"]) == parts.ROUNDS and x["date"] for x in others)
    assert " - " not in (folder / "report.md").read_text().split("speed-up")[1][:400]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_page(tmp_path, number):
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True)
    while not cells(tmp_path) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    folder, content = report(tmp_path)
    assert content["figures"] and str(folder / "report.md") in said


def test_an_interrupt_leaves_the_page(measure, tmp_path):
    def broken():
        yield from jobs(("first", 60, work, 1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(broken())
    assert (report(tmp_path / "out")[0] / "report.md").exists()


def test_tests_that_do_not_end_say_what_failed(measure, tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import time\ndef test_fails():\n    assert 1 > 2\n"
        "def test_hangs():\n    time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-c", os.devnull]
    command += [str(file)]
    start = functools.partial(outside.Command, command, tmp_path)
    folder, content, _ = measure([parts.Job("tests", "some", 8, start)], 5)
    assert content["figures"]["tests-some-000"]["code"] is None
    assert "FAILED" in (folder / "report.md").read_text()
    assert "1 failed" in content["missing"]["tests: some"]
    # The next call runs it again.
    assert not [*folder.glob("cells/*-done.json")]


def timed(rounds):
    yield {"first_step_seconds": 1.0, "device_bytes": None}
    for _ in range(rounds):
        yield {"seconds": [1.0] * parts.COUNT}
    if rounds < parts.ROUNDS:
        raise RuntimeError("no more")
    yield {}


@pytest.fixture
def left(monkeypatch):
    """How many rounds the processes that are started have, each once."""
    rounds = []
    start = lambda *given: processes.Process(timed, rounds.pop(0))  # noqa: E731
    monkeypatch.setattr(parts, "start", start)
    return rounds


def test_a_base_that_is_measured_again_never_loses_what_there_was(measure, left):
    group = group_of(("keras", "float32", False), ("keras", "tf32", False), limit=60)
    for rounds, known in (((3, 1), [3, 1]), ((1, 0), [3, 1]), ((3, 3), [3, 3])):
        left[:] = rounds
        figures = measure([group])[1]["figures"].values()
        assert [len(each["seconds"]) for each in figures] == known


def test_figures_of_other_sizes_or_another_place_are_not_mixed(
    measure, left, monkeypatch
):
    left[:] = 3, 3
    group = group_of(("keras", "float32", False), limit=60)
    for sizes in (networks.TINY, networks.TINY, networks.TINY._replace(batch=3)):
        monkeypatch.setattr(parts.Asked, "sizes", sizes)
        folder, content, _ = measure([group])
    assert left == []
    (name,) = content["figures"]
    file = folder / "cells" / f"{name}.json"
    file.write_text(file.read_text().replace(tf.__version__, "2.0.0"))
    assert measure([group], 0)[1]["figures"] == {}


def test_a_wrapper_that_leaves_processes_ends_in_time(tmp_path):
    script = tmp_path / "slow.sh"
    script.write_text("sleep 60 &\nsleep 60\n")
    begun = time.monotonic()
    with outside.TorchSteps(f"bash {script}", ()) as process:
        assert "ended after 1 s" in process.result(1).failure
    assert time.monotonic() - begun < 20


def test_figures_of_another_python_come_one_by_one(tmp_path):
    script = tmp_path / "some.sh"
    script.write_text("""echo 'FIGURES {"a": 1}'; read x; echo 'FIGURES {}'; read x""")
    with outside.TorchSteps(f"bash {script}", ()) as process:
        for expected in ({"a": 1}, {}, None):
            assert process.result(20) == (expected, "")
            process.proceed()


def test_a_profile_tells_kernels_and_waiting(tmp_path):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:CPU")
    plane = space.planes.add(name="/device:GPU:0")
    plane.event_metadata[1].name = "gemm"
    plane.event_metadata[2].name = "copy"
    # Microseconds: 0 to 10, 5 to 15 on another stream, 40 to 50.
    streams = {"Stream #1": [(1, 0, 10), (1, 40, 10)], "Stream #2": [(2, 5, 10)]}
    for name, events in streams.items():
        line = plane.lines.add(name=name, timestamp_ns=1000)
        for number, begin, length in events:
            line.events.add(
                metadata_id=number, offset_ps=begin * 10**6, duration_ps=length * 10**6
            )
    derived = plane.lines.add(name="XLA Ops", timestamp_ns=1000)
    derived.events.add(metadata_id=1, offset_ps=0, duration_ps=10**9)
    (tmp_path / "host.xplane.pb").write_bytes(space.SerializeToString())
    found = steps.read_profile(tmp_path, 2)
    assert found["busy"] == pytest.approx(0.025 / 2)
    assert found["launches"] == 1.5
    assert found["kernels"] == [
        ["gemm", pytest.approx(0.01), 1.0],
        ["copy", pytest.approx(0.005), 0.5],
    ]


def test_a_profile_without_a_gpu_is_none(tmp_path):
    assert steps.read_profile(tmp_path, 1) is None
