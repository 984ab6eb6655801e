"""Functions by name: a user's own, as a flag, a file or a fresh process names them."""

import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

_EXPECTED = (
    "Expected 'module:function' or 'file.py:function', of a function at the top level "
    "of a file."
)


def name_of(function: str | Callable[..., Any]) -> str:
    """Returns a function as "module:function" or "/path/file.py:function".

    A fresh process finds it by that name alone, with this folder on its path.

    Args:
      function: A function, or its name.

    Raises:
      ValueError: If there is no such function, or none that a process could import.
    """
    if callable(function):
        module, name = function.__module__, function.__qualname__
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
        exists = os.path.exists(module)
    else:
        exists = bool(module) and _module_exists(module)
    if not exists or not name.isidentifier():
        raise ValueError(f"Function not found. Received: {function!r}. {_EXPECTED}")
    return f"{module}:{name}"


def _module_exists(name):
    _see_this_folder(name)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


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
