"""What a comparison sets side by side: modes, with and without loss scaling."""

from typing import NamedTuple

from tfamp import modes

_UNSCALED = "_unscaled"
# Names of a comparison's folders, one for each variant that there can be.
FOLDERS = frozenset(modes.MODES) | {
    name + _UNSCALED for name, mode in modes.MODES.items() if mode.needs_loss_scale
}


class Variant(NamedTuple):
    """A column of a comparison.

    Attributes:
      mode: A precision mode.
      loss_scaling: Whether loss scaling is allowed where the mode needs it.
    """

    mode: str
    loss_scaling: bool = True

    @property
    def label(self) -> str:
        """How reports name it."""
        return label(self.mode, self.loss_scaling)

    @property
    def folder(self) -> str:
        """Name of the folder with its runs."""
        return self.mode if self.loss_scaling else self.mode + _UNSCALED


def label(mode: str, loss_scaling: bool) -> str:
    """Returns how reports name a mode with or without loss scaling."""
    return mode if loss_scaling else f"{mode}, no loss scaling"


def create(mixed: str, scaled: bool = True, unscaled: bool = False) -> list[Variant]:
    """Returns what is compared, float32 first.

    Args:
      mixed: The mixed mode.
      scaled: Whether loss scaling is allowed where the mode needs it.
      unscaled: Whether the mode is run without loss scaling, too.

    Raises:
      ValueError: If the mode has no loss scaling to leave out.
    """
    needed = modes.get_mode(mixed).needs_loss_scale
    if unscaled and not needed:
        raise ValueError(
            "Only modes with loss scaling can be compared without it. Received: "
            f"config.compare_unscaled=True and the mode {mixed!r}. Expected "
            "config.precision.mode='mixed_float16'."
        )
    scaling = {scaled or not needed} | ({False} if unscaled else set())
    return [Variant("float32"), *(Variant(mixed, each) for each in sorted(scaling))]
