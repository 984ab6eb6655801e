"""The modes of a benchmark: a column each, and what others are compared with."""

from ml_collections import config_dict

from tfamp import errors
from tfamp.facts import hardware, modes
from tfamp.precision import settings
from tfamp.runs import compare

# Columns -> (mode, dtype that graphs are rewritten to or None).
VARIANTS = {
    "float32": ("float32", None),
    "tf32": ("tf32", None),
    "mixed_bfloat16": ("mixed_bfloat16", None),
    "mixed_float16": ("mixed_float16", None),
    "rewrite_bfloat16": ("mixed_bfloat16", "bfloat16"),
    "rewrite_float16": ("mixed_float16", "float16"),
}
# What a mode is compared with: the first that has figures. TF32 is what users have
# where the device has it; "float32" switches it off.
BASES = ("tf32", "float32")


def plain_modes() -> tuple[str, ...]:
    """Returns "float32", and "tf32" where this host's devices have it."""
    fast = hardware.format_support("tf32", hardware.read_devices()).fast
    return ("float32", "tf32") if fast else ("float32",)


def default_modes(slow: bool = False) -> list[str]:
    """Returns the columns that the devices of this host can compute, float32 first.

    Args:
      slow: Whether those are among them whose format is slow here, and the rewrites.
        Else one slow mixed mode is, where no mixed mode is fast.
    """
    support = {
        name: hardware.format_support(
            modes.get_mode(mode).compute_format, hardware.read_devices()
        )
        for name, (mode, _) in VARIANTS.items()
    }
    if slow:
        return [name for name, each in support.items() if _computed(name, each)]
    plain = [name for name, (_, rewrite) in VARIANTS.items() if rewrite is None]
    columns = [name for name in plain if name == "float32" or support[name].fast]
    mixed = any(name.startswith("mixed") for name in columns)
    return columns if mixed else [*columns, "mixed_bfloat16"]


def _computed(variant, support):
    rewrite = VARIANTS[variant][1]
    try:
        if rewrite:
            settings.resolve_rewrite(rewrite)
    except (errors.UnsupportedModeError, ValueError):
        return False
    return variant == "float32" or support.supported


def with_mode(config, variant: str, seed: int) -> config_dict.ConfigDict:
    """Returns a training configuration in a column's mode.

    Args:
      config: The configuration of a run.
      variant: A key of `VARIANTS`.
      seed: The run's seed.
    """
    mode, rewrite = VARIANTS[variant]
    one = config.copy_and_resolve_references()
    one.precision.graph_rewrite = rewrite is not None
    if rewrite:
        one.precision.overrides = ()  # A rewrite knows no layers.
    return compare.config_of(one, mode, seed)
