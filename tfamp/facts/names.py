"""Private names of Keras and TensorFlow that are only called, and how they are found.

They are looked up when they are used: where a release lacks one, what needs it is off,
and `status()` says so. As read in TensorFlow 2.21 and Keras 3.15, and where Keras 3.16
has moved them.
"""

import contextlib
import ctypes
import functools
import pathlib
import pkgutil
from typing import Any

import keras
import tensorflow as tf

_COUNTS = "audits that count launches"
_CONFIG = "tensorflow.python.framework.config"
_KEPT = "XLA's programs kept on disk"
# What is only called, and what is off, or guessed, without it.
NAMES = {
    "keras:Layer._flatten_layers": "layers nested in custom layers",
    "keras.src.backend.common.name_scope:current_path": (
        "overrides of layers whose first call fails"
    ),
    "tensorflow.python.eager.context:context": "custom kernels in graphs",
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext": (
        "loss scaling compiled by XLA"
    ),
    "tensorflow.python.distribute.merge_call_interim:strategy_supports_no_merge_call": (
        "loss scaling compiled by XLA on several GPUs"
    ),
    "tensorflow.python.framework.smart_cond:smart_constant_value": (
        "small operators of computed shapes in programs"
    ),
    f"{_CONFIG}:is_op_determinism_enabled": "compiled updates outside of XLA",
    f"{_CONFIG}:disable_op_determinism": "switching op determinism off",
    "tensorflow.python.pywrap_tfe:TF_GetXlaConstantFoldingDisabled": _KEPT,
    "tensorflow.python.pywrap_tfe:TF_SetXlaConstantFoldingDisabled": _KEPT,
    "tensorflow.python.grappler.tf_optimizer:OptimizeGraph": "previews of the rewrite",
    "tensorflow.python.grappler.cluster:Cluster": _COUNTS,
    "tensorflow.python.framework.kernels:get_registered_kernels_for_op": (
        "audits that count launches, float32 for operators without 16 bits"
    ),
    "tensorflow.python.framework.op_def_registry:get": (
        "float32 for operators without 16 bits"
    ),
    "tensorflow.python.ops.handle_data_util:get_resource_handle_data": _COUNTS,
    "tensorflow.core.protobuf.device_properties_pb2:NamedDevice": _COUNTS,
    "tensorflow.python.ops.resource_variable_ops:UninitializedVariable": (
        "audits without memory for the optimizer"
    ),
    "tensorflow.compiler.xla.service.hlo_pb2:HloProto": (
        "what a step holds under XLA, from XLA's own analysis"
    ),
    "tensorflow.python.client.device_lib:list_local_devices": (
        "sizes of `tfamp gpu-report` by a GPU's memory"
    ),
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace": (
        "profiles of `tfamp gpu-report`"
    ),
    "tensorflow.python.util._pywrap_util_port:IsMklEnabled": "detection of oneDNN",
    "keras.src.export.tf2onnx_lib:patch_tf2onnx": "ONNX by tf2onnx, with NumPy 2",
}


# Keras 3.16 has them in `backend.ops`, which imports those of `core` by name.
_MOVED = {
    f"keras.src.backend:{name}": f"keras.src.backend:ops.{name}"
    for name in ("image", "linalg", "math", "nn", "numpy")
} | {"keras.src.backend:core": "keras.src.backend:ops"}


def moved(name: str) -> str:
    """Returns a name as Keras 3.16 has it."""
    for old, new in _MOVED.items():
        name = name.replace(old, new)
    return name


def resolve(name: str, otherwise: Any = None) -> Any:
    """Returns what a name stands for, as `pkgutil.resolve_name`; else `otherwise`."""
    for each in (name, moved(name)):
        with contextlib.suppress(AttributeError, ImportError):
            return pkgutil.resolve_name(each)
    return otherwise


# Functions of TensorFlow's library, of one bool, by their C++ names.
SYMBOLS = {
    "_ZN3xla28ParseDebugOptionFlagsFromEnvEb": (
        "XLA's flags where JAX is imported, too, or XLA has compiled something"
    ),
}


@functools.cache
def symbol(name: str) -> Any:
    """Returns a function of `SYMBOLS`, or None where the library lacks it."""
    file = pathlib.Path(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2")
    try:
        function = getattr(ctypes.CDLL(str(file)), name)
    except (AttributeError, OSError):  # Also on Windows and macOS.
        return None
    function.argtypes, function.restype = (ctypes.c_bool,), None
    return function


def flatten_layers(layer: keras.layers.Layer, **keywords) -> list[keras.layers.Layer]:
    """Returns a layer and those in it: Keras' own, else those that models list.

    Args:
      layer: The layer.
      **keywords: include_self and recursive, both True unless given.
    """
    keras_own = resolve("keras:Layer._flatten_layers", _listed_layers)
    return list(keras_own(layer, **keywords))


def _listed_layers(layer, include_self=True, recursive=True):
    layers = {id(layer): layer} if include_self else {}
    # The layers of a sequential model are without its input.
    for each in getattr(getattr(layer, "_functional", None) or layer, "layers", ()):
        inner = _listed_layers(each) if recursive else [each]
        layers |= {id(x): x for x in inner}
    return layers.values()
