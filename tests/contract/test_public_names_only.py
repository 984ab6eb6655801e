"""Contract tests know the public names alone, so that they survive any rebuild."""

import ast
import pathlib

import pytest

import tfamp

HERE = pathlib.Path(__file__).parent
PUBLIC = {"tfamp", "tfamp.training", "tfamp.benchmark"}


def private_names(source):
    """Yields what a test imports, or reads, of tfamp that is not public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.startswith("tfamp") and alias.name not in PUBLIC
            )
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("tfamp.") and node.module not in PUBLIC:
                yield node.module
            if node.module == "tfamp":
                names = [*tfamp.__all__, "training", "benchmark"]
                yield from (a.name for a in node.names if a.name not in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            public = [*tfamp.__all__, "__all__", "__version__", "__file__"]
            if node.value.id == "tfamp" and node.attr not in [*public, "training"]:
                yield f"tfamp.{node.attr}"


@pytest.mark.parametrize("path", sorted(HERE.glob("test_*.py")), ids=lambda p: p.name)
def test_a_contract_test_uses_public_names_only(path):
    assert sorted(set(private_names(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    ["from tfamp import modes", "import tfamp.modes", "tfamp.modes.MODES"],
)
def test_private_names_are_found(source):
    assert list(private_names(source))
