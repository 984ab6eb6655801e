"""Makes the floating dtypes in a Keras configuration float32; pure functions."""

from typing import Any

from tfamp import formats

_FLOAT32_POLICY = {
    "module": "keras",
    "class_name": "DTypePolicy",
    "config": {"name": "float32"},
    "registered_name": None,
}
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
    if isinstance(config, dict):
        if _is_float_policy(config):
            return dict(_FLOAT32_POLICY)
        return {
            key: dtype_name(value)
            if isinstance(value, str) and str(key).endswith("dtype")
            else convert(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return type(config)(convert(value) for value in config)
    return config


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
