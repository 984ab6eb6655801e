"""The table of precision modes. A mode has one spelling and no alias."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tfamp import checks


class Mode(NamedTuple):
    """What one precision mode means.

    Attributes:
      name: The mode's only spelling.
      compute_format: Format that layers compute in.
      policy: Name of the Keras dtype policy.
      tensor_float_32: Whether float32 matrix work may use TF32. Mixed modes leave
        it on for their float32 remainder, as TensorFlow does.
      needs_loss_scale: Whether small gradients underflow without loss scaling.
      product_format: Format of the large products, where it is another one.
    """

    name: str
    compute_format: str
    policy: str
    tensor_float_32: bool
    needs_loss_scale: bool
    product_format: str = ""

    @property
    def fastest_format(self) -> str:
        """The format that decides how fast the mode is."""
        return self.product_format or self.compute_format


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("float32", "float32", "float32", False, False),
        Mode("tf32", "tf32", "float32", True, False),
        Mode("mixed_bfloat16", "bfloat16", "mixed_bfloat16", True, False),
        Mode("mixed_float16", "float16", "mixed_float16", True, True),
        Mode("float8", "bfloat16", "mixed_bfloat16", True, False, "float8"),
    )
}


def check_several(modes: Sequence[str]) -> None:
    """Raises TypeError for one name in place of several, ValueError for an unknown one.

    "auto" is a name, too.
    """
    checks.check_names("modes", modes)
    for name in modes:
        if name != "auto":
            get_mode(name)


def get_mode(name: str) -> Mode:
    """Returns a mode by its name.

    Raises:
      ValueError: If there is no such mode.
    """
    text = name if isinstance(name, str) else ""
    if text in MODES:
        return MODES[text]
    # A batch would be long.
    shown = f"a {type(name).__name__}" if hasattr(name, "shape") else repr(name)
    if short := re.fullmatch(r"(b?)fp?16", text):
        hint = f" Did you mean 'mixed_{short[1]}float16'?"
    elif text in ("float16", "bfloat16"):
        hint = (
            f" Did you mean 'mixed_{name}'? In pure {name} the weights have 16 bits, "
            "too: an update smaller than half an epsilon of its weight is rounded "
            "away, so that training stalls."
        )
    else:
        hint = checks.nearest(text, MODES)
    raise ValueError(
        f"Unknown precision mode. Received: mode={shown}. Expected one of "
        f"{', '.join(map(repr, MODES))}, or 'auto' in `enable` and in "
        f"configurations.{hint}"
    )
