"""Which field of a training's configuration a mistyped name may mean."""

import re
import sys

from absl import flags
from ml_collections import config_dict

from tfamp.runs import default_config


def like(name: str) -> list[str]:
    """Returns the fields, with dots, that end in a name; else those that contain it.

    Args:
      name: A field's last name.

    Returns:
      Their paths; none where the command's configuration is no training's.
    """
    if "job" not in flags.FLAGS:
        return []
    last = {path: path.split(".")[-1] for path in _paths(_part())}
    same = [path for path in last if last[path] == name]
    return same or [path for path in last if name in last[path]]


def hint_of(name: str) -> str:
    """Returns a hint at the fields that a mistyped name may mean; "" if there is none.

    Args:
      name: The last name of a field on the command line.
    """
    if fields := like(name):
        return f"Did you mean {' or '.join(f'config.{path}' for path in fields)}?"
    if "job" not in flags.FLAGS:
        return ""
    typed = re.compile(rf"--?config\.((\w+\.)*){re.escape(name)}(=|$)")
    for match in filter(None, map(typed.match, sys.argv)):
        part = match[1]
        if not part.startswith(("data.", "model.")):  # Recipes add theirs to those.
            fields = ", ".join(_part(part))
            return f"Expected one of {f'config.{part}'[:-1]}: {fields}."
    return ""


def _paths(config, start=""):
    for name, value in config.items():
        if isinstance(value, config_dict.ConfigDict):
            # Only other names than elsewhere; those in float32 are the same.
            yield from _paths(value, f"{start}{name}.") if name != "float32" else ()
        else:
            yield f"{start}{name}"


def _part(place=""):
    """Returns the part of the configuration that a path such as "optimizer." names."""
    part = default_config.get_config()
    for name in place.split(".")[:-1]:
        part = part[name]
    return part
