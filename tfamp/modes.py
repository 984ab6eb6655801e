"""The table of precision modes. A mode has one spelling and no alias."""

import difflib
from typing import Literal, NamedTuple

ModeName = Literal["float32", "tf32", "mixed_bfloat16", "mixed_float16"]


class Mode(NamedTuple):
    """What one precision mode means.

    Attributes:
      name: The mode's only spelling.
      compute_format: Format that matrix products and convolutions run in.
      policy: Name of the Keras dtype policy.
      tensor_float_32: Whether float32 matrix work may use TF32. Mixed modes leave
        it on for their float32 remainder, as TensorFlow does.
      needs_loss_scale: Whether small gradients underflow without loss scaling.
    """

    name: str
    compute_format: str
    policy: str
    tensor_float_32: bool
    needs_loss_scale: bool


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("float32", "float32", "float32", False, False),
        Mode("tf32", "tf32", "float32", True, False),
        Mode("mixed_bfloat16", "bfloat16", "mixed_bfloat16", True, False),
        Mode("mixed_float16", "float16", "mixed_float16", True, True),
    )
}


# What they are called elsewhere; for the suggestion in the error only.
_OTHER_NAMES = {
    **dict.fromkeys(("fp32", "float", "full", "o0"), "float32"),
    **dict.fromkeys(("bf16",), "mixed_bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "o1", "o2", "o3"), "mixed_float16"),
}


def get_mode(name: str) -> Mode:
    """Returns a mode by its name.

    Args:
      name: "float32", "tf32", "mixed_bfloat16" or "mixed_float16".

    Returns:
      A `Mode`.

    Raises:
      ValueError: If there is no such mode; a near miss is suggested.
    """
    if isinstance(name, str) and name in MODES:
        return MODES[name]
    # By format first: by its letters, "float16" is nearer to "float32".
    near = [mode.name for mode in MODES.values() if mode.compute_format == name]
    other = _OTHER_NAMES.get(str(name).lower())
    near = near or ([other] if other else [])
    near = near or difflib.get_close_matches(str(name), MODES, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if name in ("float16", "bfloat16"):
        hint += (
            f" In pure {name} the weights have 16 bits, too: an update smaller than "
            "half an epsilon of its weight is rounded away, so that training stalls. "
            "The mixed mode computes in 16 bits and keeps float32 weights."
        )
    raise ValueError(
        f"Unknown precision mode. Received: mode={name!r}. Expected 'auto' where "
        f"a choice is made, or one of {', '.join(map(repr, MODES))}.{hint}"
    )
