"""Fixtures and markers that every test shares."""

import gc
import os
import pathlib
import re
import socket
import sys
import traceback

# Before TensorFlow and Keras are imported, which read them once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"
# TensorFlow's default only on CPUs with AVX-512; the graph rewrite needs it.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import helpers  # noqa: E402
import hypothesis  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.framework import ops  # noqa: E402

from tfamp.facts import hardware  # noqa: E402

# A host whose AMX is hidden has units for bfloat16, if slow ones: what needs them runs.
_HIDDEN = hardware.DEVICES["cpu-amx-hidden"]
hardware._lacks_amx = lambda device: device == _HIDDEN

# The same examples in every run, and no time limit on a shared machine.
hypothesis.settings.register_profile(
    "tfamp", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("tfamp")

SEED = 20260101
# Folders, and modules, of whole runs and of several processes: most of the time.
TRAININGS = {"gpu", "measuring", "recipes", "runs"}
TRAININGS |= {"test_configs", "test_golden_folders", "test_readme"}
TRAININGS |= {"test_accumulation_replicas", "test_optimizer_replicas"}
TRAININGS |= {"test_backup", "test_fine_tuning"}


@pytest.fixture(autouse=True)
def clean_globals():
    """Seeds, turns TF32 off, and fails the test if it leaves a global changed."""
    keras.utils.set_random_seed(SEED)
    found = helpers.read_globals()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    before = helpers.read_globals()
    if "tfamp" in sys.modules:
        user_code = sys.modules["tfamp.facts.user_code"]
        user_code._said.clear()  # What is told once a process.
    yield
    leaks = helpers.find_leaks(before, helpers.read_globals())
    if leaks and "tfamp" in sys.modules:
        sys.modules["tfamp"].disable()  # Its own record of being enabled.
    helpers.write_globals(found)
    if leaks:
        text = "\n  ".join(["The test leaked (call tfamp.disable()):", *leaks])
        pytest.fail(text, pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def freed_graphs():
    """Frees the graphs that a module's tests have traced.

    TensorFlow 2.21 registers each traced `tf.custom_gradient`, of Keras' GELU say, for
    as long as the process lives, and with it the whole graph: gigabytes in the end.
    """
    yield
    functions = getattr(ops._gradient_registry, "_registry", {})
    for name in [x for x in functions if x.startswith("CustomGradient-")]:
        del functions[name]
    gc.collect()


@pytest.fixture
def disabled():
    """Ends what a test has enabled."""
    yield
    sys.modules["tfamp"].disable()


@pytest.fixture
def no_network(monkeypatch):
    """Has every name of a host be unknown, and nothing downloaded before."""

    def refuse(*_, **__):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("KAGGLEHUB_CACHE", "/no/such/tfamp/cache")


@pytest.fixture
def shared_data():
    """Returns a function: name of a data set -> its folder; skips if it is absent."""

    def find(name: str) -> pathlib.Path:
        root = os.environ.get("TFAMP_SHARED_DATA")
        if not root:
            pytest.skip(f"TFAMP_SHARED_DATA is not set; it should hold {name}/")
        folder = pathlib.Path(root, name)
        if not folder.exists():
            pytest.skip(f"{folder} does not exist (TFAMP_SHARED_DATA={root})")
        return folder

    return find


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test of what an older Keras does not have; docs/maintainers/versions.md.

    And on the GPU that computes nothing, from where a test of `device` compares values.
    """
    try:
        return (yield)
    except (AssertionError, RuntimeWarning, helpers.tfamp.ExportError) as error:
        if "STAND_IN" not in os.environ or not item.get_closest_marker("device"):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        line = [each.lineno for each in frames if each.filename == str(item.path)][-1]
        pytest.skip(f"the stand-in for a GPU has no values: {item.path.name}:{line}")
    except (AttributeError, ValueError) as error:
        lacks = re.match(
            r"(?:module 'keras\.\w+' has no attribute '|Invalid quantization .*mode=)"
            r"(\w+)",
            str(error),
        )
        if not lacks or keras.__version__ >= "3.15":
            raise
        pytest.skip(f"Keras {keras.__version__} has no {lacks[1]}")


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects.
def pytest_collection_modifyitems(items):
    """Marks the tests of whole runs."""
    for item in items:
        is_left_out = any(map(item.get_closest_marker, ("slow", "zoo")))
        names = {item.path.parent.name, item.path.stem}
        if names & TRAININGS and not is_left_out:
            item.add_marker("training")


def pytest_runtest_setup(item):
    if item.get_closest_marker("stand_in"):
        import stand_in  # It is beside the test.

        if why := stand_in.missing():
            pytest.skip(why)
    if not item.get_closest_marker("requires_gpu"):
        return
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip(f"needs a GPU; detected {helpers.describe_support()}")
