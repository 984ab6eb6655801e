"""Releases of TensorFlow and Keras: the range that works, and what was tested."""

import contextlib
import importlib.metadata
import re

import keras
import tensorflow as tf

# Oldest releases; there is no newest one (setup.cfg says the same).
OLDEST = {"TensorFlow": "2.19", "Keras": "3.10"}
# Pairs whose tests pass: see docs/maintainers/versions.md and the folder constraints/.
TESTED = (("2.19.1", "3.10.0"), ("2.20.0", "3.13.2"), ("2.21.0", "3.15.1"))


def check() -> None:
    """Raises ImportError unless this TensorFlow and Keras, and its backend, will do."""
    backend = keras.backend.backend()
    here = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
    old = [name for name in OLDEST if _numbers(here[name]) < _numbers(OLDEST[name])]
    if not old and backend == "tensorflow":
        return
    wanted = " and ".join(f"{name} {old} or newer" for name, old in OLDEST.items())
    advice = (
        f"Upgrade {' and '.join(old)}."
        if backend == "tensorflow"
        else "Set KERAS_BACKEND=tensorflow before Keras is imported."
    )
    raise ImportError(
        f"tfamp works with {wanted}, with Keras' tensorflow backend. Received: "
        f"TensorFlow {tf.__version__} and Keras {keras.__version__} with the {backend} "
        f"backend. {advice}"
    )


def describe() -> str:
    """Returns the two releases, and whether their pair was tested."""
    here = tf.__version__, keras.__version__
    text = f"TensorFlow {here[0]}, Keras {here[1]}"
    pairs = [tuple(map(_numbers, pair)) for pair in TESTED]
    if tuple(map(_numbers, here)) in pairs:  # Their patch releases included.
        return text
    listed = ", ".join(f"{first} with {second}" for first, second in TESTED)
    return f"{text}: untested; tested are {listed}"


def installed(package: str) -> str | None:
    """Returns the release of a package or of its nightly; None if neither is there."""
    nightly = "tf-nightly" if package == "tensorflow" else f"{package}-nightly"
    for name in (package, nightly):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def keras_is_at_least(release: str) -> bool:
    """Whether Keras is this release, as "3.13", or a newer one."""
    return _numbers(keras.__version__) >= _numbers(release)


def _numbers(version):
    """(3, 15) of "3.15.1": releases of the same two numbers have the same names."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
