"""Importing tfamp does no work; its public names are listed, sorted and documented."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tfamp

ROOT = pathlib.Path(__file__).resolve().parents[2]

# TensorFlow and Keras do work when they are imported; what counts is the difference
# that tfamp makes after them.
_PROBE = """
import json, logging, os, sys, warnings
import keras
import tensorflow as tf

def read():
    names = [None, *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names]
    return {
        "dtype policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "TF32 flag": tf.config.experimental.tensor_float_32_execution_enabled(),
        "Grappler options": tf.config.optimizer.get_experimental_options(),
        "environment": dict(os.environ),
        "logging": {
            x.name: [x.level, x.propagate, x.disabled, list(map(repr, x.handlers))]
            for x in loggers if x.handlers or x.level or not x.propagate
        },
        "warning filters": list(map(repr, warnings.filters)),
        "compile": repr(keras.Model.compile),
    }

def loaded():
    return {name.split(".")[0] for name in sys.modules}

before, stock = read(), loaded()
import tfamp
after, added = read(), sorted(loaded() - stock)

def can_configure():  # Only as long as no device is initialized.
    cpu = tf.config.list_physical_devices("CPU")[0]
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    try:
        tf.config.set_logical_device_configuration(cpu, halves)
    except RuntimeError as error:
        return str(error)
    return True

configurable = can_configure()
from tfamp import hardware
hardware.detect_support()
print("RESULT" + json.dumps({
    "before": before, "after": after, "added": added, "configurable": configurable,
    "configurable after detect_support": can_configure(),
    "above": [n for n in sys.modules if n.startswith(("tfamp.t", "tfamp.b"))],
}))
"""


@pytest.fixture(scope="module")
def probe():
    """What a fresh process finds before and after `import tfamp`."""
    run = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    printed, _, result = run.stdout.partition("RESULT")
    return {"printed": printed, **json.loads(result)}


@pytest.mark.parametrize(
    "name",
    [
        "dtype policy",
        "floatx",
        "TF32 flag",
        "Grappler options",
        "environment",
        "logging",
        "warning filters",
        "compile",
    ],
)
def test_import_changes_nothing(probe, name):
    assert probe["after"][name] == probe["before"][name]


def test_import_initializes_no_device(probe):
    assert probe["configurable"] is True


def test_detect_support_initializes_no_device(probe):
    assert probe["configurable after detect_support"] is True


def test_import_loads_no_optional_package(probe):
    # Keras itself loads some of them; test_layering.py reads tfamp's own imports.
    optional = {"keras_hub", "matplotlib", "sklearn", "tensorflow_datasets"}
    assert optional.isdisjoint(probe["added"])


def test_import_loads_no_training_and_no_benchmark(probe):
    assert probe["above"] == []


def test_import_prints_nothing(probe):
    assert probe["printed"] == ""


def test_public_names_are_listed_and_sorted():
    assert tfamp.__all__ == sorted(set(tfamp.__all__))


def test_every_public_name_resolves():
    missing = [name for name in tfamp.__all__ if not hasattr(tfamp, name)]
    assert missing == []


def test_api_reference_lists_the_public_names():
    page = (ROOT / "docs/api.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| \S", page, flags=re.M)
    assert sorted(listed) == tfamp.__all__
