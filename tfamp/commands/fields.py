"""Which field of a training's configuration a mistyped name may mean."""

import re
import sys

from absl import flags
from ml_collections import config_dict

from tfamp.runs import default_config


def like(name: str) -> list[str]:
    """Returns the fields, with dots, that end in a name; else those that contain it.

    Args:
      name: A field's last name. Empty for a command whose configuration is no
        training's.
    """
    if "job" not in flags.FLAGS:
        return []
    last = {path: path.split(".")[-1] for path in _paths(_part())}
    same = [path for path in last if last[path] == name]
    return same or [path for path in last if name in last[path]]


def hint_of(name: str) -> str:
    """Returns what may be meant by a field that none is spelled like; "" if unknown."""
    if found := like(name):
        return f"Did you mean {' or '.join(f'config.{path}' for path in found)}?"
    given = re.compile(rf"--?config\.((\w+\.)*){re.escape(name)}(=|$)")
    for match in (
        filter(None, map(given.match, sys.argv)) if "job" in flags.FLAGS else ()
    ):
        place = match[1]
        if not place.startswith(("data.", "model.")):  # To those recipes add theirs.
            known = ", ".join(_part(place))
            return f"Expected one of {f'config.{place}'[:-1]}: {known}."
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
