"""The search for the largest batch size that fits: doubling, then bisection."""

from collections.abc import Callable
from typing import NamedTuple

# Tensor Cores work on multiples of 8; batches between them would gain nothing.
MULTIPLE = 8


class Bracket(NamedTuple):
    """What a search found; multiples of `MULTIPLE`.

    Attributes:
      largest: Largest batch size that fits; 0 if none does.
      failing: Smallest that was found not to fit; None if the largest allowed fits.
    """

    largest: int
    failing: int | None


def search(
    fits: Callable[[int], bool],
    allowed: int,
    known: int = MULTIPLE,
    tolerance: float = 0.0,
) -> Bracket:
    """Searches for the largest batch size that fits.

    | trial                     | fits       | does not fit                     |
    |---------------------------|------------|----------------------------------|
    | `MULTIPLE`, then `known`  | go on      | bisect between this and the last |
    | the double of the last    | double     | bisect between this and the last |
    | the middle of the bracket | upper half | lower half                       |

    The bisection ends where the bracket is a `MULTIPLE` or a share `tolerance` of its
    lower end wide.

    Args:
      fits: Whether a batch size fits; that of a larger one implies a smaller one's.
      allowed: Largest batch size that is tried, rounded down to a multiple.
      known: A size that is expected to fit; a search from there is shorter.
      tolerance: Width of the final bracket, as a share of `largest`; 0 is exact.

    Returns:
      A `Bracket`; every size in it but 0 was tried.

    Raises:
      ValueError: If `allowed` is below `MULTIPLE`, or the tolerance is no share.
    """
    if allowed < MULTIPLE or not 0 <= tolerance < 1:
        raise ValueError(
            f"The largest batch size must be at least {MULTIPLE}, and the tolerance in "
            f"[0, 1). Received: {allowed} and {tolerance}."
        )
    top = _rounded(allowed)
    low, high = 0, None
    size = MULTIPLE
    while high is None and low < top:
        if fits(size):
            low, size = size, min(max(2 * size, _rounded(known)), top)
        else:
            high = size
    while high is not None and high - low > max(MULTIPLE, tolerance * low):
        middle = _rounded((low + high) // 2)
        if fits(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high)


def _rounded(size):
    return size // MULTIPLE * MULTIPLE
