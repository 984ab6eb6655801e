"""What an audit finds."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One reason why training is slower, or less accurate, than it could be.

    Attributes:
      rule: Name of the rule, such as "alignment".
      share: Share of the model it concerns, from 0 to 1; None if it costs accuracy.
      what: The finding in one phrase.
      evidence: Why it matters, and the layers it was found in.
      advice: What to change.
      layers: Paths of the layers, most work first; empty if it concerns the whole step.
    """

    rule: str
    share: float | None
    what: str
    evidence: str
    advice: str
    layers: tuple[str, ...] = ()


def percent(share: float) -> str:
    """Returns a share for people: 0.123 -> "12%", 0.999 -> "99.9%"."""
    is_round = 0.0995 <= share < 0.995 or share >= 0.9995
    return f"{100 * share:.{0 if is_round else 1}f}%"
