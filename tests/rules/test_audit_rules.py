"""Thresholds of the audit's rules, and the order of findings, on plain facts."""

import pytest

from tfamp.diagnostics import findings, layer_facts, rules
from tfamp.facts import hardware

BIG = 10**9
GPU = hardware.DeviceDescription("GPU", "NVIDIA A100-SXM4-40GB", (8, 0))
FLAGS = frozenset(("avx512_bf16",))
CPU = hardware.DeviceDescription("CPU", "CPU", None, FLAGS, True)


def layer(path="body", dtype="bfloat16", multiplications=BIG, **fields):
    fields = {"rows": 4096, "elements": 1000, **fields}
    return layer_facts.LayerFacts(
        path, dtype, multiplications=multiplications, **fields
    )


def found(*layers, device=GPU, jit_compile=True, **fields):
    step = rules.TrainingStep(device, layers, 64, jit_compile, **fields)
    return [finding.rule for finding in rules.examine(step)]


# Layers beside a large one in bfloat16, and what is found on an A100.
CASES = {
    "nothing": ([], []),
    "island": ([layer("b", "float32", BIG // 40)], ["float32_islands"]),
    "small island": ([layer("b", "float32", BIG // 60)], []),
    "large output": (
        [layer("b", "float32", BIG // 4, output_dtype="float32")],
        ["float32_islands"],
    ),
    "small output": ([layer("b", "float32", BIG // 20, output_dtype="float32")], []),
    "casts": ([layer("b", casts=210)], ["casts"]),
    "few casts": ([layer("b", casts=190)], []),
    "casts at the output": ([layer("b", casts=999, output_dtype="float32")], []),
    "four image channels": ([layer("b", sizes=(("image channels", 4),))], []),
    "one size that hardly counts": (
        [layer("b", multiplications=BIG // 60, sizes=(("units", 7),))],
        [],
    ),
    "sigmoid": (
        [layer("b", activation="sigmoid", output_dtype="float32")],
        ["outputs"],
    ),
    "relu": ([layer("b", activation="relu", output_dtype="float32")], []),
}


@pytest.mark.parametrize(("layers", "expected"), CASES.values(), ids=CASES)
def test_thresholds(layers, expected):
    assert found(layer(), *layers) == expected


@pytest.mark.parametrize(
    ("work", "rows", "expected"),
    [(12_600_000, 16, []), (12_400_000, 16, ["batch"]), (BIG, 15, ["batch"])],
)
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_least_work(work, rows, expected, device):
    one = layer(multiplications=work, rows=rows)
    assert found(one, device=device, jit_compile=device is GPU) == expected


@pytest.mark.parametrize(("rows", "expected"), [(127, []), (128, ["bias_gradients"])])
def test_least_rows_of_a_bias_gradient(rows, expected):
    one = layer(rows=rows, has_bias=True)
    assert found(one, device=CPU, jit_compile=False) == expected
    assert found(layer("a", "float16", rows=rows, has_bias=True)) == []


def test_order_is_by_share_then_by_rule_and_accuracy_comes_last():
    layers = [
        layer(sizes=(("units", 7),), weights=9, variable_dtype="bfloat16"),
        layer("b", "float32", BIG // 2),
        layer("c", depthwise=True, multiplications=1),
    ]
    assert found(*layers, runs_eagerly=True) == [
        *("eager", "alignment", "depthwise", "float32_islands", "narrow_variables")
    ]
    unknown = hardware.DeviceDescription("GPU", "B9", (12, 0))
    assert found(layer(), device=unknown) == []


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.001, "0.1%"),
        (0.123, "12%"),
        (0.999, "99.9%"),
        (0.9996, "100%"),
        (1.0, "100%"),
    ],
)
def test_shares_for_people(share, text):
    assert findings.percent(share) == text
