"""Each public name has a docstring whose parts match its signature."""

import dataclasses
import importlib
import inspect
import re

import pytest

import tfamp
import tfamp.benchmark
import tfamp.training

MODULES = (tfamp, tfamp.benchmark, tfamp.training)
NAMES = ("images", "language_model", "question_answering", "segmentation")
RECIPES = [f"tfamp.recipes.{x}" for x in (*NAMES, "tabular", "text_classification")]
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
}
PUBLIC |= {
    f"{path}.{name}": getattr(importlib.import_module(path), name)
    for path in RECIPES
    for name in ("get_config", "create", "synthetic")
}
PARTS = "Args|Attributes|Returns|Yields|Raises|Example|References"
FIELD = r"(?m)^  (\*{0,2}\w+(?:, \*{0,2}\w+)*):"
NOTHING = (None, "None", inspect.Signature.empty)


def parts_of(text):
    """Returns {heading: its text} of a docstring; "" is what stands before."""
    found, heading = {"": ""}, ""
    for line in text.splitlines():
        if match := re.fullmatch(f"({PARTS}):", line):
            heading = match[1]
            found[heading] = ""
        else:
            found[heading] += f"{line}\n"
    return found


def names_in(part):
    listed = re.findall(FIELD, part)
    return [name.strip("*") for each in listed for name in each.split(", ")]


def parameters(value):
    given = inspect.signature(value).parameters.values()
    return [each.name for each in given if each.name != "self"]


def wrong(value):
    """Yields what a docstring lacks, or names that is not there."""
    text = inspect.getdoc(value)
    if not text or (inspect.isclass(value) and not vars(value).get("__doc__")):
        yield "no docstring"
        return
    if not re.match(r"[A-Z`][^\n]*[.:]$", text.splitlines()[0]):
        yield "the first line is no sentence"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return
    parts, fields = parts_of(text), getattr(value, "_fields", None)
    if fields is None and dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
    if fields is not None:
        # A row of few fields says them in its sentence.
        listed = names_in(parts.get("Attributes", ""))
        if listed != list(fields) and (listed or len(fields) > 3):
            yield f"Attributes are {listed}, the fields {list(fields)}"
        return
    listed, expected = names_in(parts.get("Args", "")), parameters(value)
    if listed != expected:
        yield f"Args are {listed}, the parameters {expected}"
    if inspect.isclass(value):
        return
    returned = inspect.signature(value).return_annotation
    says = parts.keys() & {"Returns", "Yields"}
    begins = text.startswith(("Returns", "Whether"))
    if returned in NOTHING and "Returns" in says and returned is not inspect._empty:
        yield "it returns nothing"
    if returned not in NOTHING and not says and not begins:
        yield "it does not say what it returns"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_matches_its_signature(name):
    value = PUBLIC[name]
    assert list(wrong(value)) == []
    if not inspect.isclass(value):
        return
    for own, method in vars(value).items():
        function = inspect.unwrap(getattr(method, "__func__", method))
        if own.startswith("_") or not inspect.isfunction(function):
            continue
        text = inspect.getdoc(function)
        assert text, f"{own} has no docstring"
        listed = names_in(parts_of(text).get("Args", ""))
        assert listed in ([], parameters(function)), own


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_docstring_says_of_errors_are_errors(name):
    text = parts_of(inspect.getdoc(PUBLIC[name]) or "").get("Raises", "")
    for error in names_in(text):
        places = (tfamp, importlib.import_module("builtins"))
        assert error == "error" or any(hasattr(x, error) for x in places), error


def example(first, second=1):
    """Adds.

    Args:
      first: A number.
    """
    return first + second


def test_the_check_finds_what_is_missing():
    assert list(wrong(example)) == [
        "Args are ['first'], the parameters ['first', 'second']"
    ]
    example.__doc__ = ""
    assert list(wrong(example)) == ["no docstring"]
