"""Numbers as texts of tables."""

import math

import pytest
import samples

from tfamp.benchmark import records, words

GIB = 2**30
CASES = [
    (words.number(0.3104), "0.310"),
    (words.number(0.0), "0"),
    (words.number(math.inf), "not finite"),
    (words.count(16384.0), "16,384"),
    (words.milliseconds(records.Spread(23.53, 22.35, 25.88)), "23.5 ms (22.4 to 25.9)"),
    (words.milliseconds(records.Spread(4567, 4000, 5000)), "4,567 ms (4,000 to 5,000)"),
    (
        words.throughput(records.Spread(1360.0, 1240, 1430), "images"),
        "1,360 images/s (1,240 to 1,430)",
    ),
    (words.speed_up(records.Spread(1.7, 1.61, 1.784)), "1.70x (1.61 to 1.78)"),
    (words.speed_up(records.Spread(0.004, 0.003, 0.005)), "0.0040x (0.0030 to 0.0050)"),
    (words.ratio((1.42, 1.21, 1.66)), "1.42x (1.21 to 1.66)"),
    (words.ratio((1.42, None, None)), "1.42x"),
    (words.seconds(2.13), "2.1 s"),
    (words.seconds(0.0513), "0.051 s"),
    (words.seconds(1234.5), "1,234 s"),
    (words.gib(GIB // 2), "0.50 GiB"),
    (words.percent(0.473), "47.3 %"),
    (words.percent(0.0002), "< 0.1 %"),
    (words.percent(0.0), "0.0 %"),
    (words.percent(1.3), "130.0 %"),
    (words.difference(0.012, (-0.008, 0.032)), "+1.2 % (-0.8 to +3.2)"),
    (words.difference(-0.001, (-0.02, 0.02)), "-0.1 % (-2.0 to +2.0)"),
    (words.difference(1.2e-6), "+0.00012 %"),
    (words.difference(-0.031, unit="points"), "-3.1 points"),
    (words.difference(0.0), "0 %"),
    (words.difference(-1e-5, (-0.1, 0.1)), "+0 % (-10 to +10)"),
    (words.flops(1.234e12), "1.23 TFLOP/s"),
    (words.flops(999.7e9), "1.00 TFLOP/s"),
    (words.operations(2e9), "2.00 GFLOP"),
    (words.score(0.963, False), "96.3 %"),
    (words.score(495.75, True), "496"),
    (words.bandwidth(1.8e10), "18.0 GB/s"),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[e for _, e in CASES])
def test_numbers_are_said_in_few_digits(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    "say",
    [
        *(words.number, words.count, words.milliseconds, words.seconds),
        *(words.speed_up, words.ratio, words.gib, words.percent, words.difference),
        *(words.flops, words.operations, words.bandwidth),
    ],
)
def test_nothing_is_a_dash(say):
    assert say(None) == "-"


def test_a_throughput_that_is_missing_is_a_dash():
    assert words.throughput(None, "images") == "-"


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("noise", ("≈", "within noise")),
        ("broken", ("✗", "not finite")),
        ("", ("-", "not compared")),
    ],
)
def test_a_verdict_has_a_symbol_and_words(verdict, expected):
    parity = samples.make_parity(0.3, 0.1, verdict)
    assert words.verdict(parity) == expected


def test_a_cell_without_parity_was_not_compared():
    assert words.verdict(None) == ("-", "not compared")


@pytest.mark.parametrize(
    ("framework", "mode", "xla", "expected"),
    [
        ("tfamp", "float32", False, "full precision, the base"),
        ("tfamp", "float32", True, "full precision, XLA"),
        ("torch", "float32", False, "PyTorch: full precision"),
        ("keras", "mixed_bfloat16", False, "plain Keras: mixed precision, bfloat16"),
        ("tfamp", "rewrite_float16", True, "graph rewrite to float16, XLA"),
    ],
)
def test_only_the_base_is_called_so(framework, mode, xla, expected):
    cell = records.Cell("digits", framework, mode, 32, xla)
    assert words.mode_in_words(cell) == expected


def test_every_cell_has_words_of_its_own():
    cells = [
        records.Cell("digits", framework, mode, 32, xla)
        for framework in records.FRAMEWORKS
        for mode in records.VARIANTS
        for xla in (False, True)
    ]
    assert len({words.mode_in_words(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("allowed", "speed", "expected"),
    [
        (True, "fast", "on"),
        (True, "no", "allowed, but this machine has none"),
        (False, "fast", "off"),
        (None, "fast", words.NONE),
    ],
)
def test_tf32_is_told_with_its_effect(allowed, speed, expected):
    row = samples.make_row("digits", "tfamp", "float32", tensor_float_32=allowed)
    machine = {"formats": [{"format": "tf32", "speed": speed}]}
    assert words.tensor_float_32(row, machine) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "95.0 % accuracy"),
        ({"metric": "perplexity", "target": 900.0, "is_error": True}, "perplexity 900"),
        ({"metric": ""}, "a score of 0.950"),
    ],
    ids=["score", "error", "no run"],
)
def test_target_is_a_share_or_a_number(changes, expected):
    row = records.AccuracyRow("digits", "float32", "accuracy", 0.95, 3, 3)
    assert words.target(row._replace(**changes)) == expected
