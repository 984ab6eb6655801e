"""Configurations that are measured: read from files, and as a process is given them."""

import os
import pathlib
import runpy
from typing import Any

from ml_collections import config_dict


def load(path: str | os.PathLike, beside: str | os.PathLike = ""):
    """Returns the configuration of a file.

    Args:
      path: A file with a function `get_config`.
      beside: A file whose folder `path` is relative to, such as `__file__`.
    """
    file = pathlib.Path(beside).parent / path
    return runpy.run_path(str(file))["get_config"]()


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns a configuration as dicts that a process can be given."""
    return config.copy_and_resolve_references().to_dict()
