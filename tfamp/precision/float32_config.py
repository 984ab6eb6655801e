"""Changes the floating dtypes in a Keras configuration; pure functions."""

from collections.abc import Callable
from typing import Any

from tfamp import formats

_POLICY_CLASSES = ("DTypePolicy", "FloatDTypePolicy", "DTypePolicyMap")


def convert(config: Any) -> Any:
    """Returns a Keras configuration with every floating dtype made float32.

    Dtype policies become the float32 policy wherever they stand, and so do strings
    under a key that ends in "dtype". Integers, strings and booleans stay.

    Args:
      config: What `keras.saving.serialize_keras_object` returns, or a part of it;
        it is not changed.

    Returns:
      A new configuration.
    """
    return _convert(config, "float32", lambda key: key.endswith("dtype"))


def with_policy(config: Any, policy: str) -> Any:
    """Returns the configuration of a layer with another floating dtype policy.

    Dtype policies become this one wherever they stand (in layers that the layer
    wraps, too), and so do strings under the key "dtype". Other dtypes stay: they say
    what a layer computes, not how. What Keras records beside the configuration of a
    layer that is wrapped goes: built by it, the layer would have another path.

    Args:
      config: As for `convert`.
      policy: Name of a Keras policy, for example "mixed_bfloat16".

    Returns:
      A new configuration.
    """
    return _convert(_unbuilt(config), policy, lambda key: key == "dtype")


def _unbuilt(config):
    if isinstance(config, dict):
        dropped = ("build_config", "compile_config") if "class_name" in config else ()
        return {k: _unbuilt(v) for k, v in config.items() if k not in dropped}
    if isinstance(config, list | tuple):
        return type(config)(map(_unbuilt, config))
    return config


def _convert(config, policy, is_dtype: Callable[[str], bool]):
    if isinstance(config, dict):
        if _is_float_policy(config):
            return _policy(policy)
        return {
            key: (policy if is_floating(value) else value)
            if isinstance(value, str) and is_dtype(str(key))
            else _convert(value, policy, is_dtype)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return type(config)(_convert(value, policy, is_dtype) for value in config)
    return config


def _policy(name):
    return {
        "module": "keras",
        "class_name": "DTypePolicy",
        "config": {"name": name},
        "registered_name": None,
    }


def dtype_name(dtype: str) -> str:
    """Returns "float32" for the name of a floating dtype or policy, else the name."""
    return "float32" if is_floating(dtype) else dtype


def is_floating(name: str | None) -> bool:
    """Whether the name of a dtype or policy is floating; None: the global policy."""
    if name is None or name.startswith("mixed_"):
        return True
    return name in formats.FORMAT_NAMES


def _is_float_policy(config: dict) -> bool:
    if config.get("class_name") not in _POLICY_CLASSES:
        return False
    return is_floating((config.get("config") or {}).get("name"))
