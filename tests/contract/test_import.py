"""Importing tfamp does no work; its public names are listed, sorted and documented."""

import ast
import json
import pathlib
import re

import pytest
import workers

import tfamp

ROOT = pathlib.Path(__file__).resolve().parents[2]

# TensorFlow and Keras do work when they are imported; what counts is the difference
# that tfamp makes after them.
_PROBE = """
import json, logging, os, re, sys, warnings
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
from tfamp.facts import hardware
hardware.detect_support()
print("RESULT" + json.dumps({
    "before": before, "after": after, "added": added, "configurable": configurable,
    "configurable after detect_support": can_configure(),
    "above": [n for n in sys.modules if re.match("tfamp.(runs|measuring)", n)],
}))
"""


def test_import_does_no_work():
    printed, _, result = workers.run_python("-c", _PROBE).stdout.partition("RESULT")
    found = json.loads(result)
    assert printed == ""
    assert found["after"] == found["before"]
    assert found["configurable"] is True  # No device is initialized.
    assert found["configurable after detect_support"] is True
    # Keras itself loads some; tests/rules/test_house.py reads tfamp's own imports.
    optional = {"keras_hub", "matplotlib", "sklearn", "tensorflow_datasets"}
    assert optional.isdisjoint(found["added"])
    assert found["above"] == []  # No training and no benchmark.


@pytest.mark.training
def test_a_folder_of_the_same_name_does_not_hide_an_installed_tfamp(tmp_path):
    """A checkout beside the user's script, say."""
    (tmp_path / "tfamp" / "docs").mkdir(parents=True)
    code = "import tfamp; print(tfamp.__version__)"
    run = workers.run_python("-c", code, cwd=tmp_path, PYTHONPATH=None)
    assert run.stdout.strip() == tfamp.__version__


def test_public_names_are_listed_sorted_and_in_the_reference():
    assert tfamp.__all__ == sorted(set(tfamp.__all__))
    assert [name for name in tfamp.__all__ if not hasattr(tfamp, name)] == []
    page = (ROOT / "docs/api.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| \S", page, flags=re.M)
    assert sorted(listed) == tfamp.__all__


# ---- Contract tests survive any rebuild: they know the public names alone ----

HERE = pathlib.Path(__file__).parent
PUBLIC = {"tfamp", "tfamp.training", "tfamp.recipes", "tfamp.benchmark"}
NAMES = {
    *tfamp.__all__,
    "training",
    "recipes",
    "benchmark",
    "__all__",
    "__version__",
    "__file__",
}


def private_names(source):
    """Yields what a test imports, or reads, of tfamp that is not public."""
    for node in ast.walk(ast.parse(source)):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and node.module == "tfamp":
            found = [f"tfamp.{x.name}" for x in node.names if x.name not in NAMES]
        elif isinstance(node, ast.ImportFrom):
            found = {node.module} - PUBLIC
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = [f"{node.value.id}.{node.attr}"] * (node.attr not in NAMES)
        yield from (name for name in found if f"{name}.".startswith("tfamp."))


def test_contract_tests_use_public_names_only():
    found = {p.name: {*private_names(p.read_text())} for p in HERE.glob("test_*.py")}
    assert {name: names for name, names in found.items() if names} == {}
    for source in (
        "import tfamp.facts",
        "tfamp.facts.modes",
        "from tfamp import facts",
    ):
        assert [*private_names(source)] == ["tfamp.facts"]
    for source in ("import tfamp.facts.modes", "from tfamp.facts.modes import MODES"):
        assert [*private_names(source)] == ["tfamp.facts.modes"]
