"""What the benchmark's numbers are called in tables: short texts for people.

Each function returns "-" for None.
"""

import math
from collections.abc import Mapping
from typing import Any

from tfamp.benchmark import records

NONE = "-"
_GIB = 2**30
_DIGITS = 3
_MOST_DECIMALS = 6
_PREFIXES = ("", "k", "M", "G", "T", "P")
PEERS = {"keras": "plain Keras", "torch": "PyTorch"}
_FRAMEWORKS = {"tfamp": ""} | {key: f"{name}: " for key, name in PEERS.items()}
_MODES = {
    "float32": "full precision, the base",
    "tf32": "TF32 in matrix products",
    "mixed_bfloat16": "mixed precision, bfloat16",
    "mixed_float16": "mixed precision, float16",
    "rewrite_bfloat16": "graph rewrite to bfloat16",
    "rewrite_float16": "graph rewrite to float16",
}
_VERDICTS = {
    "base": ("●", "the base"),
    "equal": ("=", "equal"),
    "noise": ("≈", "within noise"),
    "explained": ("△", "explained"),
    "unexplained": ("!", "unexplained"),
    "one seed": ("?", "one seed: cannot tell"),
    "broken": ("✗", "not finite"),
    "": (NONE, "not compared"),
}


def number(value: float | None) -> str:
    """Returns a number with three digits or more: "0.31", "23.5", "1,360"."""
    if value is None:
        return NONE
    return _fixed(value, _decimals(value, _DIGITS))


def count(value: float | None) -> str:
    """Returns a whole number: "16,384"."""
    return NONE if value is None else _fixed(value, 0)


def spread(value: records.Spread | None, unit: str) -> str:
    """Returns a median, its unit and the ends: "23.5 ms (22.4 to 25.9)"."""
    if value is None:
        return NONE
    decimals = _decimals(value.median, _DIGITS)
    median, low, high = (_fixed(each, decimals) for each in value)
    return f"{median} {unit} ({low} to {high})"


def milliseconds(value: records.Spread | None) -> str:
    """Returns the time of a step with its quartiles: "23.5 ms (22.4 to 25.9)"."""
    return spread(value, "ms")


def throughput(value: records.Spread | None, unit: str) -> str:
    """Returns examples a second: "1,360 images/s (1,240 to 1,430)"."""
    return spread(value, f"{unit}/s")


def seconds(value: float | None) -> str:
    """Returns a duration: "2.1 s", "130 s"."""
    if value is None:
        return NONE
    return f"{_fixed(value, _decimals(value, 2))} s"


def speed_up(value: records.Spread | None) -> str:
    """Returns a speed-up with its range: "1.70x (1.61 to 1.78)"."""
    return NONE if value is None else ratio(value)


def ratio(value: tuple[float, float | None, float | None] | None) -> str:
    """Returns a ratio with its interval, if any: "1.42x (1.21 to 1.66)", "1.42x"."""
    if value is None:
        return NONE
    middle, low, high = value
    decimals = max(2, _decimals(middle, 2))
    text = f"{_fixed(middle, decimals)}x"
    if low is None or high is None:
        return text
    return f"{text} ({_fixed(low, decimals)} to {_fixed(high, decimals)})"


def gib(value: int | None) -> str:
    """Returns bytes in GiB: "0.52 GiB"."""
    return NONE if value is None else f"{value / _GIB:,.2f} GiB"


def percent(fraction: float | None) -> str:
    """Returns a share: "47.3 %", "< 0.1 %"."""
    if fraction is None:
        return NONE
    if 0 < fraction < 0.0005:
        return "< 0.1 %"
    return f"{_fixed(100 * fraction, 1)} %"


def difference(
    fraction: float | None,
    interval: tuple[float, float] | None = None,
    unit: str = "%",
) -> str:
    """Returns a difference with its interval: "+1.2 % (-0.8 to +3.2)", "0 %".

    Args:
      fraction: The difference; 0.01 is 1 % or one point.
      interval: Its interval in the same unit, or None.
      unit: "%" or "points".
    """
    if fraction is None:
        return NONE
    shown = [100 * each for each in (fraction, *(interval or ()))]
    largest = max(map(abs, shown))
    if largest < 10.0**-_MOST_DECIMALS:
        return f"0 {unit}"
    decimals = _decimals(largest, 2)
    mean, *ends = (_fixed(each, decimals, "+z") for each in shown)
    text = f"{mean} {unit}"
    return f"{text} ({ends[0]} to {ends[1]})" if ends else text


def verdict(parity: records.Parity | None) -> tuple[str, str]:
    """Returns a verdict as a symbol and as words: ("≈", "within noise")."""
    return _VERDICTS[parity.verdict if parity else ""]


def score(value: float | None, is_error: bool) -> str:
    """Returns a score: "96.3 %"; an error is no share: "2.31"."""
    return number(value) if is_error else percent(value)


def target(row: records.AccuracyRow) -> str:
    """Returns what was to be reached: "95.0 % accuracy", "perplexity 900"."""
    if not row.metric:  # No run was made.
        return f"a score of {number(row.target)}"
    shown = score(row.target, row.is_error)
    return f"{row.metric} {shown}" if row.is_error else f"{shown} {row.metric}"


def tensor_float_32(row: records.Row, machine: Mapping[str, Any]) -> str:
    """Returns TF32's state in a cell: asked for, and whether it has an effect.

    Args:
      row: The cell's row.
      machine: What `diagnostics.doctor` says of the host, as a dict.
    """
    if row.tensor_float_32 is None:
        return NONE
    if not row.tensor_float_32:
        return "off"
    supported = any(
        each["format"] == "tf32" and each["speed"] == "fast"
        for each in machine.get("formats", ())
    )
    return "on" if supported else "allowed, but this machine has none"


def mode_in_words(cell: records.Cell) -> str:
    """Returns framework, mode and XLA: "plain Keras: mixed precision, bfloat16"."""
    text = _FRAMEWORKS[cell.framework] + _MODES[cell.mode]
    if cell.mode == "float32" and (cell.framework != "tfamp" or cell.xla):
        text = text.removesuffix(", the base")
    return f"{text}, XLA" if cell.xla else text


def flops(value: float | None) -> str:
    """Returns operations a second: "1.23 TFLOP/s"."""
    return _with_prefix(value, "FLOP/s")


def operations(value: float | None) -> str:
    """Returns a number of operations: "2.00 GFLOP"."""
    return _with_prefix(value, "FLOP")


def bandwidth(value: float | None) -> str:
    """Returns bytes a second, in powers of 1000: "18.0 GB/s"."""
    return _with_prefix(value, "B/s")


def _with_prefix(value, unit):
    if value is None:
        return NONE
    power = 0
    # 999.5 would be shown as 1000.
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{_fixed(value, _decimals(value, _DIGITS))} {_PREFIXES[power]}{unit}"


def _decimals(value, digits):
    """How many decimals show so many digits of a value."""
    if not value or not math.isfinite(value):
        return 0
    # Of the rounded value: 9.996 is shown as 10.0.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return min(max(digits - 1 - exponent, 0), _MOST_DECIMALS)


def _fixed(value, decimals, sign=""):
    return f"{value:{sign},.{decimals}f}" if math.isfinite(value) else "not finite"
