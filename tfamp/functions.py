"""Functions by name: a user's own, as a flag, a file or a fresh process names them."""

import ast
import difflib
import importlib
import importlib.util
import os
import pathlib
import symtable
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

_EXPECTED = (
    "Expected 'module:function' or 'file.py:function', of a function at the top level "
    "of a file."
)
# Frames of other files are of a user's own code.
_NOT_THEIRS = tuple(
    f"{folder}{os.sep}"
    for folder in (pathlib.Path(__file__).parent, sysconfig.get_path("stdlib"))
)
_PACKAGES = {"site-packages", "dist-packages"}
_TRACED = "__autograph_generated_file"  # What TensorFlow makes of a user's file.


def name_of(function: str | Callable[..., Any]) -> str:
    """Returns a function as "module:function" or "/path/file.py:function".

    A fresh process finds it by that name alone, with this folder on its path. A file is
    read here, and not run: that would train where a script has no `main`.

    Args:
      function: A function, or its name.

    Raises:
      ValueError: If there is no such function, or none that a process could import.
    """
    if callable(function):
        module, name = function.__module__, getattr(function, "__qualname__", "")
        if module == "__main__":
            module = getattr(sys.modules["__main__"], "__file__", "")
            module = module and os.path.abspath(module)
        if not module or not name.isidentifier():
            raise ValueError(
                "The function must be at the top level of a file, which each "
                f"process imports. Received: {function!r}. {_EXPECTED} In a "
                "notebook write it to a file by %%writefile."
            )
        return f"{module}:{name}"
    module, _, name = str(function).rpartition(":")
    if module.endswith(".py"):
        module = str(pathlib.Path(module).absolute())
        file = module if os.path.isfile(module) else None
        missing = f"there is no file {module}"
    else:
        file = _file_of(module) if module else None
        missing = f"there is no module {module!r} here or on Python's path"
    if file is None or not name.isidentifier():
        why = f": {missing}" if module and file is None else ""
        raise ValueError(
            f"Function not found{why}. Received: {function!r}. {_EXPECTED}"
        )
    if file.endswith(".py"):
        _check_there(function, name, file)
    return f"{module}:{name}"


def _file_of(module):
    """Returns a module's file, "" if it has none; None if there is no such module."""
    _see_this_folder(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin or ""


def _check_there(function, name, file):
    """Raises ValueError unless a file has a function of a name at its top level."""
    source = pathlib.Path(file).read_bytes()
    try:
        tree = ast.parse(source, filename=file)
        symbols = symtable.symtable(source, file, "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as Python: {error}.") from error
    names = {x.get_name() for x in symbols if x.is_local()}
    imports = {x.name for x in ast.walk(tree) if isinstance(x, ast.alias)}
    # The last two may give any.
    if names.isdisjoint({name, "__getattr__"}) and "*" not in imports:
        functions = ast.FunctionDef, ast.AsyncFunctionDef
        there = [x.name for x in tree.body if isinstance(x, functions)]
        there = difflib.get_close_matches(name, there) or there[:5]
        known = f"one that {file} has: {', '.join(there)}"
        raise ValueError(
            f"Function not found. Received: {str(function)!r}. Expected "
            f"{known if there else f'a function in {file}, which has none'}."
        )


def _see_this_folder(module):
    """A script's own folder stands on the path, and the user's need not."""
    own = module.partition(".")[0] == __package__  # Found from everywhere.
    if not own and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def find(name: str) -> Callable[..., Any]:
    """Returns the function that `name_of` named; imports its file.

    Args:
      name: The name.

    Raises:
      ValueError: If its file has no such function.
    """
    module, _, attribute = name.rpartition(":")
    function = getattr(_load(module), attribute, None)
    if function is None:
        raise ValueError(f"Function not found. Received: {name!r}. {_EXPECTED}")
    return function


def _load(module):
    if not module.endswith(".py"):
        _see_this_folder(module)
        return importlib.import_module(module)
    sys.path.insert(0, os.path.dirname(module))  # For what stands beside it.
    spec = importlib.util.spec_from_file_location(pathlib.Path(module).stem, module)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is not a Python file.")
    script = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, script)
    spec.loader.exec_module(script)
    return script


def place_of(error: BaseException) -> str:
    """Returns the user's function that raised an error, for the end of a message.

    Args:
      error: An error that was caught.

    Returns:
      " (in NAME, FILE, line NUMBER)"; "" if no code of a user's own was running.
    """
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        code, file = frame.f_code, frame.f_code.co_filename
        is_script = frame.f_globals.get("__name__") == "__main__"  # The command itself.
        if is_script or not os.path.isfile(file) or file.startswith(_NOT_THEIRS):
            continue
        if os.path.basename(file).startswith(_TRACED):
            continue  # The message has the place.
        if _PACKAGES.isdisjoint(pathlib.Path(file).parts):
            file = file.removeprefix(f"{os.getcwd()}{os.sep}")
            return f" (in {code.co_name}, {file}, line {line})"
    return ""
