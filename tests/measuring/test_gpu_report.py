"""`tfamp gpu-report`: its parts, what is kept when it is killed, its page."""

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
from tfamp.measuring.device import networks, outside, page, parts, plan, steps

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


def test_an_unknown_part_is_an_error(tmp_path):
    done = run(tmp_path, "--parts=speed")
    assert done.returncode == 1 and "Unknown parts. Received: speed" in done.stderr
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


def of_jobs(*jobs):
    return lambda asked: [
        parts.Job("tests", name, limit, lambda f=f, a=a: processes.Process(f, *a))
        for name, limit, f, a in jobs
    ]


def test_a_process_that_hangs_or_dies_ends_alone(tmp_path, monkeypatch):
    jobs = ("hangs", 3, hang, ()), ("dies", 60, die, ()), ("works", 60, work, (1,))
    monkeypatch.setattr(parts, "PARTS", {"tests": of_jobs(*jobs)})
    monkeypatch.setattr(page, "_texts", lambda *given: "")
    said = []
    plan.run(tmp_path, (), 2, True, "", "command", said.append)
    folder, content = report(tmp_path)
    assert [*content["figures"]] == [
        *("tests-hangs-000", "tests-works-000", "tests-works-001"),
    ]
    missing = content["missing"]
    assert missing.keys() == {"tests: hangs", "tests: dies"}
    assert "ended after" in missing["tests: hangs"]
    assert "SIGKILL" in missing["tests: dies"]
    assert "## Not measured" in (folder / "report.md").read_text()


def test_what_there_is_no_time_for_is_named(tmp_path, monkeypatch):
    jobs = (("late", 60, work, (1,)),)
    monkeypatch.setattr(parts, "PARTS", {"tests": of_jobs(*jobs)})
    plan.run(tmp_path, ("tests",), 0.1, True, "", "command", print)
    folder, content = report(tmp_path)
    assert content["missing"] == {"tests: late": "no time left"}


def test_what_a_command_could_not_do_is_tried_again(tmp_path, monkeypatch):
    command = [sys.executable, "-c", "print('1 failed'); raise SystemExit(3)"]
    jobs = [parts.Job("tests", "some", 60, lambda: outside.Command(command, tmp_path))]
    monkeypatch.setattr(parts, "PARTS", {"tests": lambda asked: jobs})
    for _ in range(2):
        said = []
        plan.run(tmp_path, ("tests",), 1, True, "", "command", said.append)
        assert any("exit code 3" in line for line in said)
    figures = report(tmp_path)[1]["figures"]["tests-some-000"]
    assert (figures["code"], figures["text"]) == (3, "1 failed")


def test_a_python_that_is_none_is_an_error(tmp_path):
    done = run(tmp_path, "--torch_python=/no/python -S")
    assert done.returncode == 1 and "torch_python='/no/python -S'" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_silence_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 1)
    jobs = (("hangs", 4, hang, ()),)
    monkeypatch.setattr(parts, "PARTS", {"tests": of_jobs(*jobs)})
    monkeypatch.setattr(page, "_texts", lambda *given: "")
    said = []
    plan.run(tmp_path, (), 2, True, "", "command", said.append)
    assert any("... still measuring (" in line for line in said)


# ---- What is timed ----


def test_variants_are_timed_in_turns_beside_their_base(tmp_path, monkeypatch):
    """One that does not end is left out; one without PyTorch says so."""
    variants = (
        parts.Variant("keras", "float32", False),
        parts.Variant("tfamp", "mixed_bfloat16", False),
        parts.Variant("tfamp", "mixed_bfloat16", True),
        parts.Variant("torch", "float32", False),
    )
    group = parts.Group("time", "bert_base", "some", variants, 120)
    (job,) = of_jobs(("beside", 60, work, (1,)))(None)
    monkeypatch.setattr(parts, "PARTS", {"time": lambda asked: [job, group]})
    monkeypatch.setattr(page, "_texts", lambda *given: "")
    given, said = (5, True, f"{sys.executable} -S", "command"), []
    plan.run(tmp_path, (), *given, said.append)
    # Its processes are prepared meanwhile.
    assert "time: bert_base" in said[0] and "tests: beside" in said[1]
    folder, content = report(tmp_path)
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
def test_a_gpu_times_as_many_at_once_as_it_has_room_for(tmp_path, monkeypatch, room):
    """Each beside the base: that of its set, or the one that came first."""
    modes = ("float32", "tf32", "mixed_bfloat16")
    variants = [parts.Variant("keras", mode, False) for mode in modes]
    group = parts.Group("time", "bert_base", "some", tuple(variants), 120)
    monkeypatch.setattr(parts, "PARTS", {"time": lambda asked: [group]})
    monkeypatch.setattr(parts.Asked, "together", room)
    started, start = [], parts.start
    note = lambda *given: started.append(given[1].mode) or start(*given)  # noqa: E731
    monkeypatch.setattr(parts, "start", note)
    plan.run(tmp_path, (), 5, True, "", "command", print)
    folder, content = report(tmp_path)
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


def test_an_interrupt_leaves_the_page(tmp_path, monkeypatch):
    def broken(asked):
        yield from of_jobs(("first", 60, work, (1,)))(asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "PARTS", {"tests": broken})
    monkeypatch.setattr(page, "_texts", lambda *given: "")
    with pytest.raises(KeyboardInterrupt):
        plan.run(tmp_path, (), 5, True, "", "command", print)
    assert (report(tmp_path)[0] / "report.md").exists()


def test_tests_that_do_not_end_say_what_failed(tmp_path, monkeypatch):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import time\ndef test_fails():\n    assert 1 > 2\n"
        "def test_hangs():\n    time.sleep(100)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-c",
        os.devnull,
        str(file),
    ]
    jobs = [parts.Job("tests", "some", 8, lambda: outside.Command(command, tmp_path))]
    monkeypatch.setattr(parts, "PARTS", {"tests": lambda asked: jobs})
    plan.run(tmp_path / "out", (), 5, True, "", "command", print)
    folder, content = report(tmp_path / "out")
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


def test_a_base_that_is_measured_again_never_loses_what_there_was(
    tmp_path, monkeypatch
):
    variants = [parts.Variant("keras", mode, False) for mode in ("float32", "tf32")]
    group = parts.Group("time", "bert_base", "some", tuple(variants), 60)
    monkeypatch.setattr(parts, "PARTS", {"time": lambda asked: [group]})

    def measure(*rounds):
        left = iter(rounds)
        start = lambda *given: processes.Process(timed, next(left))  # noqa: E731
        monkeypatch.setattr(parts, "start", start)
        plan.run(tmp_path, (), 2, True, "", "command", print)
        figures = report(tmp_path)[1]["figures"].values()
        return [len(each["seconds"]) for each in figures]

    assert measure(3, 1) == [3, 1]
    assert measure(1, 0) == [3, 1]
    assert measure(3, 3) == [3, 3]


def test_figures_of_other_sizes_or_another_place_are_not_mixed(tmp_path, monkeypatch):
    group = parts.Group(
        "time", "bert_base", "some", (parts.Variant("keras", "float32", False),), 60
    )
    monkeypatch.setattr(parts, "PARTS", {"time": lambda asked: [group]})
    started = []

    def start(*given):
        started.append(given)
        return processes.Process(timed, 3)

    monkeypatch.setattr(parts, "start", start)
    for sizes in (networks.TINY, networks.TINY, networks.TINY._replace(batch=3)):
        monkeypatch.setattr(parts.Asked, "sizes", sizes)
        plan.run(tmp_path, (), 2, True, "", "command", print)
    assert len(started) == 2
    folder, content = report(tmp_path)
    (name,) = content["figures"]
    file = folder / "cells" / f"{name}.json"
    file.write_text(file.read_text().replace(tf.__version__, "2.0.0"))
    plan.run(tmp_path, (), 0, True, "", "command", print)
    assert report(tmp_path)[1]["figures"] == {}


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
