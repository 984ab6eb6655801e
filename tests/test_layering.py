"""Imports point downward, optional packages stay where they belong, no `assert`.

Read from the source as it stands, without importing it.
"""

import ast
import graphlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Lower first. A name is a module of tfamp, or a package with all that is in it;
# "" is tfamp itself, which holds the public names.
LAYERS: dict[str, set[str]] = {
    "0: facts": {
        "checks",
        "device_table",
        "errors",
        "formats",
        "hardware",
        "modes",
        "rewrite_lists",
        "switch_table",
    },
    "1: mechanisms": {
        "alignment",
        "bias_gradient",
        "float32_config",
        "fused_adam",
        "fused_ops",
        "graph_rewrite",
        "growth_interval",
        "kernel_switches",
        "loss_scale",
        "model_structure",
        "overrides",
        "policy",
        "rewrite_config",
        "rewrite_graphs",
        "rewrite_plan",
        "saved_graph",
        "switch_effects",
        "tracing",
    },
    "2: Keras and TensorFlow objects": {
        "checkpoint",
        "control",
        "convert",
        "copied_weights",
        "diagnostics",
        "enable_request",
        "export",
        "export_report",
        "gated_update",
        "keras_hooks",
        "keras_kernels",
        "layer_policies",
        "mode_choice",
        "model_inputs",
        "optimizer",
        "optimizer_settings",
        "optimizer_state",
        "overflow_counts",
        "precision_plan",
        "rebuild",
        "replicas",
        "rewrite_control",
        "rewrite_record",
        "rewrite_report",
        "row_gradients",
        "training_hooks",
        "unscaled",
    },
    "public names": {""},
    "3: applications": {"training"},
    "4: benchmark": {"benchmark"},
    "scripts": {"scripts"},
}
ORDER = list(LAYERS)
FACTS = ORDER[0]
# Where a module may import another of its own layer, if not in a circle.
INNER_IMPORTS = {"2: Keras and TensorFlow objects", "3: applications", "4: benchmark"}
# A module split off another: that one alone may import it within their layer.
PARTS = {
    "tfamp.growth_interval": "tfamp.loss_scale",
    "tfamp.rewrite_config": "tfamp.rewrite_plan",
    "tfamp.rewrite_plan": "tfamp.graph_rewrite",
    "tfamp.switch_effects": "tfamp.kernel_switches",
}

# Optional: imported inside functions of tfamp.training only.
TRAINING_PACKAGES = {
    "keras_hub",
    "pandas",
    "pyarrow",
    "sklearn",
    "tensorflow_datasets",
    "tokenizers",
}
SCRIPT_LINES = 80

# Each global has one owner: no other module may name what writes it.
OWNERS = {
    "enable_tensor_float_32_execution": "tfamp.policy",
    "set_dtype_policy": "tfamp.policy",
    "set_global_policy": "tfamp.policy",
    "set_experimental_options": "tfamp.graph_rewrite",
    "enable_op_determinism": "tfamp.kernel_switches",
    "disable_op_determinism": "tfamp.kernel_switches",
}


class Import(NamedTuple):
    """One imported module: its full name, its line, and whether in a function."""

    name: str
    line: int
    in_function: bool


def module_name(path: pathlib.Path) -> str:
    """Returns "tfamp.training.data" for tfamp/training/data.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
LIBRARY = sorted((ROOT / "tfamp").rglob("*.py"))
MODULES = {module_name(path): path for path in LIBRARY}
every_module = pytest.mark.parametrize("module", MODULES)


def layer_of(module: str) -> str:
    """Returns the key in `LAYERS` of "tfamp.training.data" or "scripts.train"."""
    top, _, rest = module.partition(".")
    name = "scripts" if top == "scripts" else rest.split(".")[0]
    for layer, names in LAYERS.items():
        if name in names:
            return layer
    raise LookupError(
        f"{module} is in no layer. Add {name!r} to LAYERS in {__file__}, to the lowest "
        "layer that it fits."
    )


def find_imports(source: str, module: str, is_package: bool) -> list[Import]:
    """Returns every import; `from tfamp import modes` is one of `tfamp.modes`."""
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for node, in_function in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            names = [_imported_module(base, alias.name) for alias in node.names]
        else:
            continue
        found += [Import(name, node.lineno, in_function) for name in names]
    return found


def _walk(node: ast.AST, in_function=False) -> Iterator[tuple[ast.AST, bool]]:
    yield node, in_function
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, inside)


def _imported_module(base: str, name: str) -> str:
    """A name imported from a package of tfamp may be a module or something in it."""
    full = f"{base}.{name}"
    return full if full in MODULES or base == "tfamp" and _is_listed(name) else base


def _is_listed(name: str) -> bool:
    return any(name in names for names in LAYERS.values())


def find_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Returns one line for each import that the layers do not allow."""
    layer = layer_of(module)
    violations = []
    for item in find_imports(source, module, is_package):
        top = item.name.split(".")[0]
        if top in ("tfamp", "scripts"):
            message = _layer_message(module, layer, item.name)
        else:
            message = _package_message(module, layer, item, top)
        if message:
            violations.append(f"line {item.line}: {message}")
    return violations


def _layer_message(module, layer, imported):
    target = layer_of(imported)
    if imported == module or imported == "tfamp.errors":
        return ""
    if PARTS.get(imported) == module:
        return ""
    if layer == target and (layer in INNER_IMPORTS or layer == "scripts"):
        return ""
    if ORDER.index(target) < ORDER.index(layer):
        return ""
    return f"{module} ({layer}) must not import {imported} ({target})"


def _package_message(module, layer, item, top):
    if top in TRAINING_PACKAGES:
        if layer != "3: applications":
            return f"only tfamp.training may import {top}"
        if not item.in_function:
            return f"import {top} inside the function that needs it"
    if top == "matplotlib" and module.rpartition(".")[2] != "plots":
        return "only modules named plots.py may import matplotlib"
    return ""


@every_module
def test_module_is_in_a_layer(module):
    assert layer_of(module)


@every_module
def test_module_imports_only_what_its_layer_may(module):
    path = MODULES[module]
    source, is_package = path.read_text(), path.name == "__init__.py"
    assert find_violations(source, module, is_package) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_imports_only_what_scripts_may(path):
    assert find_violations(path.read_text(), module_name(path)) == []


def test_no_module_imports_itself_in_a_circle():
    graph = {
        module: {
            item.name
            for item in find_imports(
                path.read_text(), module, path.name == "__init__.py"
            )
            if item.name in MODULES and item.name != module
        }
        for module, path in MODULES.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("Circular import: " + " -> ".join(error.args[1]))


@every_module
def test_module_has_no_assert(module):
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert lines == [], f"raise an error that says what was received: lines {lines}"


@every_module
def test_globals_are_written_by_their_owner_only(module):
    writes = [
        f"line {node.lineno}: {node.attr} belongs to {OWNERS[node.attr]}"
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute) and OWNERS.get(node.attr, module) != module
    ]
    assert writes == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= SCRIPT_LINES, "move logic to the library"


# ---- The checker itself ----


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("tfamp.formats", "from tfamp import modes", "must not import tfamp.modes"),
        ("tfamp.formats", "import tfamp.policy", "must not import tfamp.policy"),
        ("tfamp.formats", "from tfamp.policy import read", "import tfamp.policy"),
        ("tfamp.formats", "from . import modes", "must not import tfamp.modes"),
        ("tfamp.formats", "from .policy import read", "import tfamp.policy"),
        ("tfamp.modes", "import tfamp", "must not import tfamp (public names)"),
        ("tfamp.policy", "from tfamp import enable", "import tfamp (public names)"),
        ("tfamp.policy", "from tfamp import loss_scale", "import tfamp.loss_scale"),
        ("tfamp.policy", "from tfamp import growth_interval", "tfamp.growth_interval"),
        ("tfamp.growth_interval", "from tfamp import loss_scale", "tfamp.loss_scale"),
        ("tfamp.policy", "from tfamp import control", "import tfamp.control"),
        ("tfamp.policy", "def f():\n from tfamp import control", "line 2"),
        ("tfamp.control", "from tfamp.training import tasks", "tfamp.training.tasks"),
        ("tfamp", "from tfamp import training", "must not import tfamp.training"),
        ("tfamp.training.data", "from tfamp import benchmark", "tfamp.benchmark"),
        ("tfamp.benchmark.runner", "import scripts.train", "import scripts.train"),
        ("tfamp.training.data", "import sklearn.metrics", "inside the function"),
        ("tfamp.training.data", "from keras_hub import models", "inside the function"),
        ("tfamp.export", "def f():\n import tokenizers", "only tfamp.training may"),
        ("tfamp.training.data", "import matplotlib.pyplot", "plots.py"),
        ("tfamp.training.data", "def f():\n from matplotlib import cm", "plots.py"),
    ],
)
def test_checker_finds(module, source, message):
    (violation,) = find_violations(source, module, is_package=module == "tfamp")
    assert message in violation


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfamp.formats", "import numpy\nfrom tfamp import errors"),
        ("tfamp.policy", "from tfamp import errors, modes"),
        ("tfamp.loss_scale", "from tfamp import growth_interval"),
        ("tfamp.control", "from tfamp import optimizer, policy"),
        ("tfamp", "from tfamp.control import disable, enable"),
        ("tfamp", "from tfamp import errors, formats"),
        ("tfamp.training.data", "import tfamp\nfrom tfamp import policy"),
        ("tfamp.training.data", "from tfamp.training import tasks"),
        ("tfamp.training.data", "def f():\n import keras_hub, sklearn.metrics"),
        ("tfamp.benchmark.runner", "from tfamp.benchmark import timing"),
        ("tfamp.benchmark.plots", "import matplotlib"),
        ("tfamp.diagnostics.plots", "def f():\n from matplotlib import figure"),
        ("scripts.train", "import tfamp\nfrom tfamp.training import trainer"),
    ],
)
def test_checker_allows(module, source):
    assert find_violations(source, module, is_package=module == "tfamp") == []


def test_checker_asks_for_an_unlisted_module_to_be_added():
    with pytest.raises(LookupError, match="Add 'novelty' to LAYERS"):
        layer_of("tfamp.novelty.part")
