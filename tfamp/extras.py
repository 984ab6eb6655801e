"""Packages that only some tasks need: each is imported where it is used, by name."""

import importlib
from typing import Any

# Package -> the extra of setup.cfg that brings it.
EXTRAS = {
    package: extra
    for extra, packages in {
        "data": "PIL filelock pandas psutil pyarrow scipy sklearn tensorflow_datasets",
        "bert": "huggingface_hub keras_hub safetensors tokenizers",
        "plot": "jinja2 matplotlib",
        "onnx": "onnx onnxruntime tf2onnx",
    }.items()
    for package in packages.split()
}


def require(module: str) -> Any:
    """Returns a package of an extra, or a module of one.

    Args:
      module: Its name, such as "sklearn.datasets".

    Raises:
      ImportError: If it cannot be imported; the message has the command that installs
        it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{package} is needed here, and cannot be imported: {error}. Install it: "
            f'pip install "tfamp[{EXTRAS[package]}]".',
            name=error.name,
        ) from error
