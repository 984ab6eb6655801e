"""The `tfamp` command: what it prints is its own, as far as the user does not ask."""

import os

import pytest
import workers

DRIVER = "/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"
NOISE = "oneDNN custom operations", "cudart_stub", "cuInit"


def run(*arguments, level=None):
    """Runs Python, without the level that tests set."""
    return workers.run_python(*arguments, TF_CPP_MIN_LOG_LEVEL=level)


@pytest.mark.skipif(any(map(os.path.exists, DRIVER)), reason="has NVIDIA's driver")
def test_without_a_gpu_the_command_writes_nothing_to_stderr():
    done = run("-m", "tfamp", "status")
    assert done.stdout.startswith("requested:            auto\n")
    assert done.stderr == ""


@pytest.mark.training
@pytest.mark.skipif(any(map(os.path.exists, DRIVER)), reason="has NVIDIA's driver")
def test_a_level_that_hides_more_adds_no_lines():
    assert run("-m", "tfamp", "status", level="3").stderr == ""


@pytest.mark.training
def test_the_users_level_counts():
    done = run("-m", "tfamp", "status", level="0")
    assert any(words in done.stderr for words in NOISE)


@pytest.mark.training
def test_an_import_sets_no_level():
    code = "import os, tfamp; print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    assert run("-c", code).stdout == "None\n"
