"""Processes forked off one that has imported what they need."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tfamp.training import child_process, fork_server

pytestmark = pytest.mark.skipif(
    not fork_server.SUPPORTED, reason="processes are forked off on Linux alone"
)

# Serves a request: writes figures, fails, sleeps or kills itself, as it asks.
SERVED = """
import json, os, signal, sys, time
imported_by = os.getpid()
count = 0
print("printed while it is imported")
def main():
    global count
    count += 1
    request = json.loads(sys.stdin.read())
    if request["do"] == "fail":
        sys.stderr.write("first line\\n")
        os.write(2, b"ValueError: as asked\\n")
        os._exit(1)
    if request["do"] == "sleep":
        time.sleep(60)
    if request["do"] == "raise":
        raise RuntimeError("not caught")
    if request["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    found = {"pid": os.getpid(), "parent": os.getppid(), "told": request["parent"],
             "imported_by": imported_by, "count": count}
    open(request["output"], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The module that is served can be imported."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "served.py").write_text(SERVED)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.fixture(scope="module")
def server(environment):
    """One for all tests: its imports take seconds."""
    names = ("no_such_module",)  # Imported where it is installed.
    with fork_server.ForkServer("served", names, environment) as started:
        yield started


def ask(server, tmp_path, do="write", timeout=60.0):
    output = tmp_path / "figures.json"
    request = child_process.to_request({"do": do}, output, {})
    done = server.launch(request, timeout)
    return done, json.loads(output.read_text()) if output.exists() else None


def test_each_request_has_a_process_of_its_own_that_imports_nothing_again(
    server, tmp_path
):
    first, one = ask(server, tmp_path)
    second, other = ask(server, tmp_path)
    assert (first.returncode, second.returncode) == (0, 0)
    assert one["pid"] != other["pid"] and one["pid"] != one["imported_by"]
    assert one["imported_by"] == other["imported_by"] == one["parent"] == one["told"]
    assert one["count"] == other["count"] == 1  # What one did, the next has not seen.


def test_failures_are_told_and_the_next_request_is_served(server, tmp_path):
    done, _ = ask(server, tmp_path, "fail")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: as asked"
    done, _ = ask(server, tmp_path, "raise")
    assert done.returncode == 1 and "RuntimeError: not caught" in done.stderr
    done, _ = ask(server, tmp_path, "kill")
    assert done.returncode == -signal.SIGKILL
    assert ask(server, tmp_path)[0].returncode == 0


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return state.split()[0] != "Z"


def test_process_that_takes_too_long_is_ended_with_its_server_and_a_new_one_started(
    server, tmp_path
):
    _, before = ask(server, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        ask(server, tmp_path, "sleep", timeout=0.3)
    assert not is_running(before["imported_by"])
    _, after = ask(server, tmp_path)
    assert after["imported_by"] != before["imported_by"]
    os.kill(after["imported_by"], signal.SIGKILL)  # As Linux does without memory.
    os.waitid(os.P_PID, after["imported_by"], os.WEXITED | os.WNOWAIT)
    done, again = ask(server, tmp_path)
    assert done.returncode == 0 and again["imported_by"] != after["imported_by"]
    server.close()
    assert not is_running(again["imported_by"])


@pytest.mark.slow
def test_server_whose_import_fails_tells_by_its_exit_status(tmp_path):
    with fork_server.ForkServer("no_such_module", (), dict(os.environ)) as server:
        done, _ = ask(server, tmp_path)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr.splitlines()[-1]


# A program that uses a server, and is killed while a request is served.
PROGRAM = """
import os, pathlib, sys
from tfamp.training import child_process, fork_server
with fork_server.ForkServer("served", (), dict(os.environ)) as server:
    server.launch(child_process.to_request({"do": "write"}, sys.argv[1], {}), 60)
    print("ready", flush=True)
    server.launch(child_process.to_request({"do": "sleep"}, sys.argv[1], {}), 60)
"""


@pytest.mark.slow
def test_server_and_its_process_end_with_a_killed_program(environment, tmp_path):
    output = tmp_path / "figures.json"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(output)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "ready\n"
    pid = json.loads(output.read_text())["imported_by"]
    assert is_running(pid)
    program.kill()
    program.wait()
    program.stdout.close()
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)
