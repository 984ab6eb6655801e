"""What long work says meanwhile: lines for its parts, and one at least every while."""

import io
import sys
import time
import types

import helpers
import keras
import numpy as np
import pytest

import tfamp
from tfamp import progress


@pytest.fixture
def impatient(monkeypatch):
    """Has a hundredth of a second of silence be too much."""
    monkeypatch.setattr(progress, "SILENCE", 0.01)


def work(lines, seconds=0.05):
    with lines:
        lines.total = 3
        for number in range(3):
            note = "measured before" * (number == 1)
            with lines.part(f"batch {number}", note):
                time.sleep(0 if note else seconds)
            lines.result(f"fits: {number} MiB")


def test_in_a_file_each_part_has_lines(capsys):
    work(progress.Progress(at_most=True))
    assert capsys.readouterr().err.splitlines() == [
        *("1 of at most 3: batch 0", "  fits: 0 MiB"),
        *("2 of at most 3: batch 1 (measured before)", "  fits: 1 MiB"),
        "3 of at most 3: batch 2 (at most 1 min left)",
        "  fits: 2 MiB",
    ]


def test_the_minutes_left_go_by_the_parts_that_took_time(monkeypatch, capsys):
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(progress, "time", clock)
    with progress.Progress(ticks=False) as lines:
        lines.total = 72
        for seconds in (30.0, 50.0, 0.0):
            with lines.part("step_adam: float32"):
                now[0] += seconds
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "1 of 72: step_adam: float32"
    assert second.endswith("(about 36 min left)")  # 71 of 30 seconds.
    assert third.endswith("(about 47 min left)")  # 70 of 40 seconds.
    with progress.Progress(ticks=False, seconds=600.0) as lines:
        now[0] += 300.0
        with lines.part("all mixed_float16"):
            pass
    said = capsys.readouterr().err
    assert said == "all mixed_float16 (at most 5 min left)\n"


def test_what_takes_long_is_said_to_run(impatient, capsys):
    work(progress.Progress())
    said = capsys.readouterr().err.splitlines()
    assert said.count("... still running (0 s)") >= 2
    with progress.Progress(what="exporting 'a'"):
        time.sleep(0.05)
    assert set(capsys.readouterr().err.splitlines()) == {
        "... still exporting 'a' (0 s)"
    }
    with pytest.raises(KeyError), progress.Progress():
        raise KeyError
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # After an error, too, nothing runs.


def test_nothing_is_said_if_it_is_not_wanted(impatient, capsys):
    work(progress.Progress(0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("notebook", [False, True])
def test_a_terminal_and_a_notebook_have_one_line_that_is_rewritten(
    notebook, impatient, monkeypatch
):
    stream = io.StringIO()
    stream.isatty = lambda: not notebook
    monkeypatch.setattr(sys, "stderr", stream)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    work(progress.Progress())
    shown = [line.split("\r")[-1].rstrip() for line in stream.getvalue().split("\n")]
    assert shown == [*(f"{n + 1} of 3: batch {n}: fits: {n} MiB" for n in range(3)), ""]
    assert "\r1 of 3: batch 0 (0 s)" in stream.getvalue()


def test_a_signal_while_a_line_is_written_says_something(capsys):
    with progress.Progress(say=lambda line: line == "a" and lines.say("b")) as lines:
        lines.say("a")  # It would wait for itself.


# ---- What users call ----


def network():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.compile("sgd", "mse", jit_compile=False)
    return model


X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
CALLS = {
    "compare_precision": lambda **given: tfamp.compare_precision(
        network(), X, "mixed_bfloat16", **given
    ),
    "search_precision": lambda **given: tfamp.search_precision(
        network(), [X] * 4, "mixed_bfloat16", **given
    ),
    "audit": lambda **given: tfamp.audit(network(), device="a100", **given),
    "memory": lambda **given: tfamp.memory(network(), (X, Y), **given),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_function_is_silent_for_long(name, impatient, capsys):
    CALLS[name]()
    said = capsys.readouterr().err
    assert "... still " in said
    CALLS[name](verbose=0)
    assert "... still " not in capsys.readouterr().err


def test_an_export_says_that_it_runs(impatient, capsys, tmp_path):
    tfamp.export_float32(network(), tmp_path / "one")
    assert f"... still exporting '{tmp_path / 'one'}' (0 s)" in capsys.readouterr().err
    tfamp.export(network(), tmp_path / "two", "mixed_bfloat16", verbose=0)
    assert "... still " not in capsys.readouterr().err


def test_a_search_has_a_line_for_each_trial(capsys):
    tfamp.search_precision(network(), [X] * 4, "mixed_bfloat16", seconds=120.0)
    first, error, *_ = capsys.readouterr().err.splitlines()
    assert first == "all mixed_bfloat16 (at most 2 min left)"
    assert error.startswith("  error ")


def test_xla_says_that_it_still_compiles(impatient, caplog):
    with helpers.enabled("float32"):
        model = network()
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(X, Y, verbose=0)
    said = [record.getMessage() for record in caplog.records]
    still = "... still compiling the training step of model 'net' (0 s)"
    assert still in said and said[-1].startswith("XLA compiled")
