"""The house plan: folders import downward, each global has one owner, files are short.

Read from the source as it stands, without importing it.
"""

import ast
import pathlib
import re

import pytest

import tfamp
from tfamp import extras

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Lower first; folders of one row do not import one another.
FLOORS = (
    {"checks", "errors", "extras", "functions", "progress", "quiet", "records"}
    | {"tables"},
    {"facts"},
    {"inspect", "keras_patches"},
    {"updates"},
    {"loss_scaling", "graph_rewrite", "kernels", "operators", "storage"},
    {"precision"},
    {"serving", "numerics", "diagnostics"},
    {"resume"},
    {"runs"},
    {"recipes"},
    {"measuring"},
    {"public"},
    {"", "training", "benchmark"},  # The public names: `tfamp` itself, and two more.
    {"commands"},
    {"scripts", "configs", "__main__"},
)
OWNERS = {
    "enable_tensor_float_32_execution": "tfamp/precision/policy.py",
    "set_dtype_policy": "tfamp/precision/policy.py",
    "set_experimental_options": "tfamp/graph_rewrite/switch.py",
}
# By `extras.require`, where they are needed; the twin's process has safetensors.
OPTIONAL = {*extras.EXTRAS} - {"safetensors"}
FILES = sorted(
    path
    for pattern in ("tfamp/**/*.py", "scripts/*.py", "configs/*/*.py")
    for path in ROOT.glob(pattern)
)


def name_of(path):
    return str(path.relative_to(ROOT))


def folder_of(module):
    """Returns "precision" for "tfamp.precision.policy", "" for tfamp itself."""
    parts = [*module.split("."), ""]
    return parts[1] if parts[0] == "tfamp" else parts[0]


def floor_of(folder):
    known = [index for index, names in enumerate(FLOORS) if folder in names]
    assert known, f"{folder!r} is on no floor of the house"
    return known[0]


def imports_of(path):
    """Yields the modules that a file imports, but for annotations.

    A string that is the name of a module, or of a function in one, is an import.
    """
    tree = ast.parse(path.read_text())
    typing = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for node in {*ast.walk(tree)} - {x for each in typing for x in ast.walk(each)}:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tfamp":
            names = [f"tfamp.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module]
        elif isinstance(node, ast.Constant):
            found = re.findall(r"\A(tfamp(?:\.\w+)+)(?::\w+)?\Z", str(node.value))
            names = [name for name in found if folder_of(name) in set().union(*FLOORS)]
        yield from names


def wrong_imports(path, module=None):
    module = module or name_of(path).removesuffix(".py").replace("/", ".")
    here = folder_of(module.removesuffix(".__init__"))
    for name in imports_of(path):
        top = name.split(".")[0]
        if top in OPTIONAL:
            yield f"{name} is imported by `extras.require` where it is needed"
        if top != "tfamp":
            continue
        there = folder_of(name)
        if there != here and floor_of(there) >= floor_of(here):
            yield f"{name} is not below"


def test_imports_go_downward():
    wrong = {name_of(p): found for p in FILES if (found := list(wrong_imports(p)))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("tfamp.facts.modes", "from tfamp.precision import policy", True),
        ("tfamp.loss_scaling.rule", "from tfamp.precision import policy", True),
        ("tfamp.kernels.fused", "import tfamp", True),
        ("tfamp.runs.tasks", "from tfamp.recipes import images", True),
        ("tfamp.serving.export", "from tfamp.training import trainer", True),
        ("tfamp.recipes.data", "import pandas", True),
        ("tfamp.recipes.data", "def f():\n import pandas", True),
        ("tfamp.recipes.data", "if TYPE_CHECKING:\n import pandas", False),
        ("tfamp.precision.control", "from tfamp.loss_scaling import rule", False),
        ("tfamp.serving.export", "from tfamp.precision import assign", False),
    ],
)
def test_the_rule_on_imports_finds_what_is_not_below(module, source, wrong, tmp_path):
    path = tmp_path / "some.py"
    path.write_text(source)
    assert bool(list(wrong_imports(path, module))) == wrong


def test_each_global_is_written_by_its_owner_only():
    wrong = [
        f"{name_of(path)}: {node.attr} belongs to {OWNERS[node.attr]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and OWNERS.get(node.attr, name_of(path)) != name_of(path)
    ]
    assert wrong == []


LARGER = {"runs", "recipes"}


def test_files_are_short_and_folders_hold_a_dozen():
    """Besides `__init__`; some hold 15."""
    long = {name_of(p): n for p in FILES if (n := p.read_text().count("\n")) > 330}
    assert long == {}
    folders = [p.parent for p in FILES if p.name != "__init__.py"]
    limits = {p: 15 if LARGER & {*p.relative_to(ROOT).parts} else 12 for p in folders}
    full = {name_of(p): n for p in limits if (n := folders.count(p)) > limits[p]}
    assert full == {}


def test_functions_are_short():
    def lines(function):
        body = function.body[ast.get_docstring(function) is not None :]
        return function.end_lineno - body[0].lineno if body else 0

    long = {
        f"{name_of(path)}: {node.name}": lines(node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and lines(node) > 75
    }
    assert long == {}


def test_no_folder_has_the_name_of_a_public_function():
    folders = {p.parent.name for p in FILES if p.is_relative_to(ROOT / "tfamp")}
    assert (folders - {"tfamp"}) & set(tfamp.__all__) == set()
