"""Each rule finds what it is for, says what to do, and is silent where all is well."""

from typing import NamedTuple

import pytest

from tfamp import device_table, hardware
from tfamp.diagnostics import alignment, audit, devices, estimates, model_facts

Dim = alignment.Dimension
BIG = 4096


def product(layer="body", dtype="bfloat16", m=BIG, n=BIG, k=BIG, roles=()):
    return alignment.Product(
        *(layer, "MatMul", dtype, m, n, k, 1, tuple(Dim(*role) for role in roles)),
        activations=m * k + m * n,
        weights=k * n,
    )


def layer(path="body", dtype="bfloat16", products=None, **fields):
    if products is None:
        products = (product(path, dtype),)
    return model_facts.LayerFacts(
        path, "Dense", dtype, "float32", products=tuple(products), kernels=2, **fields
    )


def facts(*layers, **fields):
    return model_facts.ModelFacts("net", 64, layers or (layer(),), **fields)


def on(key, **fields):
    fields.setdefault("jit_compile", not key.startswith("cpu"))
    return estimates.Situation(devices.subject(key), **fields)


def test_a_well_set_model_has_no_finding():
    for key in ("a100", "h100", "cpu-amx", "tpu"):
        assert audit.examine(facts(), on(key)).findings == ()
    half = facts(layer(dtype="float16"))
    assert audit.examine(half, on("v100")).findings == ()


def test_float32_is_well_set_where_nothing_is_fast():
    for key in ("p100", "gtx1660", "cpu-avx512"):
        assert audit.examine(facts(layer(dtype="float32")), on(key)).findings == ()


# 56 ms of work at the peak rates of an A100.
SEQUENTIAL = layer(products=(product(m=2**21, n=2**11, k=2**11),))._replace(
    kernels=20000
)


class Case(NamedTuple):
    """Facts, a situation, the rule that finds something, words of it, other rules."""

    facts: model_facts.ModelFacts
    situation: estimates.Situation
    rule: str
    words: tuple[str, ...]
    others: tuple[str, ...] = ()


ISLAND = layer("island", "float32")
TIED = product("tied", "float32")
CASES = {
    "bfloat16 on V100": Case(
        facts(), on("v100"), "fast_unit", ("bfloat16 is not fast", "'mixed_float16'")
    ),
    "float16 on GTX 1660": Case(
        facts(layer(dtype="float16")), on("gtx1660"), "fast_unit", ("'float32'",)
    ),
    "float16 on a TPU": Case(
        facts(layer(dtype="float16")), on("tpu"), "fast_unit", ("does not run",)
    ),
    "bfloat16 on an old CPU": Case(
        facts(), on("cpu-avx512"), "fast_unit", ("no native bfloat16",)
    ),
    "float32 on A100": Case(
        facts(layer(dtype="float32")),
        on("a100"),
        "fast_unit",
        ("though mixed_bfloat16 is fast", "tfamp.enable('mixed_bfloat16')"),
    ),
    "nothing to speed up": Case(
        facts(layer(products=())), on("a100"), "fast_unit", ("no matrix product",)
    ),
    "TF32 off": Case(
        facts(layer(), ISLAND._replace(is_output=True)),
        on("a100", tensor_float_32=False),
        "tf32",
        # Half of the operations, at 19.5 against 312 TFLOP/s: 94% of the time.
        ("94%", "mode 'tf32'"),
        others=("float32_islands",),
    ),
    "XLA on a CPU": Case(
        facts(), on("cpu-amx", jit_compile=True), "xla", ("jit_compile=False", "0.9")
    ),
    "no XLA on a GPU": Case(
        facts(layer(elements=10**9)),
        on("a100", jit_compile=False),
        "xla",
        ("jit_compile=True",),
    ),
    "XLA bypasses the rewrite": Case(
        facts(layer(dtype="float32")),
        on("a100", graph_rewrite="float16"),
        "xla",
        ("bypasses", "jit_compile=False"),
    ),
    "eager": Case(
        facts(runs_eagerly=True), on("a100"), "eager", ("run_eagerly=False",)
    ),
    "island": Case(
        facts(layer(), layer("b"), layer("c"), ISLAND),
        on("cpu-amx"),
        "float32_islands",
        # A quarter of the operations at half the speed: 2 of 5 parts of the time.
        ("25% of the operations", "40%", "island (25%)", "overrides"),
    ),
    "large output layer": Case(
        facts(layer(), ISLAND._replace(is_output=True)),
        on("cpu-amx"),
        "float32_islands",
        ("output layer", "Activation('linear', dtype='float32')"),
    ),
    "float32 products in a 16-bit layer": Case(
        facts(layer(products=(product(), product(dtype="float32")))),
        on("cpu-amx"),
        "float32_islands",
        ("bfloat16 layers", "body (50%)"),
    ),
    "element-wise work": Case(
        facts(
            layer(),
            layer("net", products=(), is_model=True, float32_elements=9 * 10**8),
            layer("norm", products=(), elements=10**9, float32_elements=10**8),
        ),
        on("a100"),
        "element_wise",
        ("90%", "net (90%)"),
    ),
    "element-wise work of float32 layers": Case(
        facts(
            layer(),
            layer("norm", "float32", products=(), float32_elements=10**9),
            layer("rest", products=(), elements=10**9),
        ),
        on("a100"),
        "element_wise",
        ("norm (100%)", "drop their dtype='float32'"),
    ),
    "an island with element-wise work": Case(
        facts(
            layer(elements=10**9),
            ISLAND._replace(elements=10**9, float32_elements=10**9),
        ),
        on("a100"),
        "float32_islands",
        ("island",),
    ),
    "tied output layer": Case(
        facts(layer(), layer("tied", products=(TIED,), ties_output=True)),
        on("a100"),
        "float32_islands",
        ("tied to its embedding", "reverse_dtype='bfloat16'"),
    ),
    "casts": Case(
        facts(
            layer(elements=10**9),
            casts=(
                model_facts.CastFacts("input", "a", "float32", "bfloat16", 10**9),
                model_facts.CastFacts("a", "b", "bfloat16", "float32", 2 * 10**8),
                model_facts.CastFacts("b", "c", "float32", "bfloat16", 2 * 10**8),
            ),
        ),
        on("cpu-amx"),
        "casts",
        ("2 casts", "40%", "a -> b (bfloat16 to float32)"),
    ),
    "alignment": Case(
        facts(
            layer(products=(product(n=30522, roles=[("vocabulary", 30522)]),)),
            layer("rest"),
        ),
        on("a100"),
        "alignment",
        ("16 bytes (8 elements", "vocabulary 30522 -> 30528 in body", "NVIDIA"),
    ),
    "alignment of TF32": Case(
        facts(
            layer(),
            layer(
                "head",
                "float32",
                (product("head", "float32", n=4002, roles=[("units", 4002)]),),
                is_output=True,
            ),
        ),
        on("a100"),
        "alignment",
        ("4 elements of tf32", "units 4002 -> 4008"),
        others=("float32_islands",),
    ),
    "head size beside a large float32 layer": Case(
        facts(
            layer(dtype="float16", products=[product(dtype="float16")]),
            layer(
                "mha",
                "float16",
                [product("mha", "float16", 512, 2**11, roles=[("head size", 60)])],
            ),
            *(layer(name, "float32", is_output=True) for name in "ab"),
        ),
        on("v100"),
        "alignment",
        ("head size 60 -> 64 in mha",),
        others=("float32_islands",),
    ),
    "alignment under XLA": Case(
        facts(layer(products=(product(n=4095, roles=[("units", 4095)]),))),
        on("a100"),
        "alignment",
        ("XLA pads such operands itself",),
    ),
    "alignment of a sequence": Case(
        facts(layer(products=(product(n=4095, roles=[("sequence length", 4095)]),))),
        on("a100", jit_compile=False),
        "alignment",
        ("must be masked",),
    ),
    "alignment of gates": Case(
        facts(layer(products=(product(n=3 * 1370, roles=[("units", 1370, 3)]),))),
        on("a100"),
        "alignment",
        ("units 1370 -> 1376",),
    ),
    "128 bytes from A100 on": Case(
        facts(layer(products=(product(n=1000, roles=[("units", 1000)]),))),
        on("a100"),
        "alignment_best",
        ("128 bytes (64 elements", "1000 -> 1024"),
    ),
    "channels first on a GPU": Case(
        facts(layer(data_format="channels_first")),
        on("a100"),
        "data_format",
        ("channels_last", "Tensor Cores"),
    ),
    "channels first on a CPU": Case(
        facts(layer(data_format="channels_first")),
        on("cpu-amx"),
        "data_format",
        ("channels_last", "3 times slower"),
    ),
    "small batch": Case(
        # 256 rows of 16,384 x 16,384 weights: 250 operations a byte, and at four
        # times the rows 920; A100 wants 201, H100 295.
        facts(layer(products=[product(m=128, n=2**14, k=2**14)])),
        on("h100"),
        "batch",
        ("a batch of 64 is too small", "a batch of 128"),
    ),
    "narrow layers": Case(
        facts(layer(products=[product(m=2**22, n=64, k=64)])),
        on("a100"),
        "batch",
        ("too narrow", "201 operations"),
    ),
    "little work": Case(
        facts(layer(products=[product(m=256, n=256, k=256)])),
        on("a100"),
        "batch",
        ("too little work", "rule of thumb"),
    ),
    "few rows on a CPU": Case(
        facts(layer(products=[product(m=4)])),
        on("cpu-amx"),
        "batch",
        ("4 rows or fewer", "a batch of about 256"),
    ),
    "little work on a CPU": Case(
        facts(layer(products=[product(m=64, n=128, k=128)])),
        on("cpu-amx"),
        "batch",
        ("2.1 MFLOP", "a batch of about"),
    ),
    "slow input": Case(
        facts(),
        on("a100", pipeline_seconds=0.02, step_seconds=0.005),
        "pipeline",
        ("20.0 ms", "5.0 ms", "prefetch"),
    ),
    "no loss scaling": Case(
        facts(layer(dtype="float16", trains=True), scales_loss=False),
        on("a100"),
        "loss_scaling",
        ("3.0e-08", "body", "wrap_optimizer"),
    ),
    "no loss scaling in a rewrite": Case(
        facts(layer(dtype="float32"), scales_loss=False),
        on("v100", graph_rewrite="float16", jit_compile=False),
        "loss_scaling",
        ("the graph rewrite",),
    ),
    "16-bit weights": Case(
        facts(layer(narrow_variables=1234)._replace(variable_dtype="bfloat16")),
        on("a100"),
        "narrow_variables",
        ("1,234", "3.9e-03", "mixed_bfloat16"),
    ),
    "16-bit weights where that format does not run": Case(
        facts(
            layer(dtype="float16", narrow_variables=9)._replace(
                variable_dtype="float16"
            )
        ),
        on("tpu"),
        "narrow_variables",
        ("use 'mixed_bfloat16'",),
        others=("fast_unit",),
    ),
    "16-bit weights where no format is fast": Case(
        facts(layer(narrow_variables=9)._replace(variable_dtype="bfloat16")),
        on("p100"),
        "narrow_variables",
        ("use 'float32'",),
        others=("fast_unit",),
    ),
    "a loop without cuDNN": Case(
        facts(SEQUENTIAL),
        on("a100", jit_compile=False),
        "batch",
        ("the 20000 kernels",),
    ),
    "bias gradients": Case(
        facts(layer(bias_rows=4096, trains=True)),
        on("cpu-amx"),
        "bias_gradients",
        ("body (4,096 rows)", "tfamp.enable()"),
    ),
    "16-bit output": Case(
        facts(outputs=(model_facts.OutputFacts("body", "bfloat16"),)),
        on("a100"),
        "outputs",
        ("body (bfloat16)", "dtype='float32'"),
    ),
    "16-bit softmax": Case(
        facts(
            outputs=(model_facts.OutputFacts("end", "float32", "Softmax", "bfloat16"),)
        ),
        on("a100"),
        "outputs",
        ("end (Softmax in bfloat16)",),
    ),
    "16-bit loss": Case(
        facts(loss_dtype="bfloat16"), on("a100"), "outputs", ("the loss (bfloat16)",)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rule_finds(case):
    report = audit.examine(case.facts, case.situation)
    found = {finding.rule: finding for finding in report.findings}
    assert found.keys() == {case.rule, *case.others}
    assert len(found) == len(report.findings)
    finding = found[case.rule]
    text = f"{finding.what} {finding.evidence} {finding.advice}"
    assert [word for word in case.words if word not in text] == []
    assert (finding.about == "speed") == (finding.effect is not None)
    assert finding.effect is None or 0 < finding.effect <= 1


SILENT = {
    "four image channels": (
        facts(layer(products=(product(roles=[("image channels", 4)]),))),
        on("a100"),
    ),
    "sizes on a CPU": (
        facts(layer(products=(product(roles=[("units", 4095)]),))),
        on("cpu-amx"),
    ),
    "sizes without Tensor Cores": (
        facts(layer(dtype="float32", products=(product(dtype="float32"),))),
        on("p100"),
    ),
    "128 bytes before A100": (
        facts(
            layer(
                dtype="float16",
                products=(product(dtype="float16", roles=[("units", 1000)]),),
            )
        ),
        on("v100"),
    ),
    "a small float32 output layer": (
        facts(
            layer(),
            layer(
                "head", "float32", (product("head", "float32", n=16),), is_output=True
            ),
        ),
        on("a100"),
    ),
    "element-wise work of a float32 output": (
        facts(
            layer(),
            layer(
                "end",
                "float32",
                products=(),
                elements=10**9,
                float32_elements=10**9,
                is_output=True,
            ),
        ),
        on("a100"),
    ),
    "bias gradients under enable": (
        facts(layer(bias_rows=4096, trains=True)),
        on("cpu-amx", bias_gradient_fixed=True),
    ),
    "bias gradients under XLA": (
        facts(layer(dtype="float32", bias_rows=4096, trains=True)),
        on("cpu-avx512", jit_compile=True),
    ),
    "bias gradients of few rows": (
        facts(layer(bias_rows=64, trains=True)),
        on("cpu-amx"),
    ),
    "bias gradients on a GPU": (
        facts(layer(bias_rows=4096, trains=True)),
        on("a100"),
    ),
    "fast input": (facts(), on("a100", pipeline_seconds=0.004, step_seconds=0.005)),
    "loss scaling": (
        facts(layer(dtype="float16", trains=True), scales_loss=True),
        on("v100"),
    ),
    "not compiled": (facts(layer(dtype="float16", trains=True)), on("v100")),
    "a rewrite takes the float32 products": (
        facts(layer(dtype="float32")),
        on("cpu-amx", graph_rewrite="bfloat16"),
    ),
    "TF32 off where there is none": (
        facts(layer(dtype="float16")),
        on("v100", tensor_float_32=False),
    ),
    "a loop in one kernel of cuDNN": (
        facts(SEQUENTIAL._replace(cudnn_kernels=1)),
        on("a100", jit_compile=False),
    ),
    "TF32 left in a 16-bit model, hardly any": (
        facts(
            layer(),
            layer(
                "head",
                "float32",
                (product("head", "float32", n=10, roles=[("units", 10)]),),
                is_output=True,
            ),
        ),
        on("a100"),
    ),
    "what was not counted may be a product": (
        facts(layer(products=()), all_counted=False),
        on("a100"),
    ),
    "XLA off where Keras keeps it off": (
        facts(layer(elements=10**9)),
        on("a100", jit_compile=False, xla_possible=False),
    ),
    "channels first on a TPU": (facts(layer(data_format="channels_first")), on("tpu")),
    "a GPU that is in no table": (
        facts(layer(products=[product(m=256, n=256, k=256)])),
        estimates.Situation(
            devices.subject(hardware.DeviceDescription("GPU", "B9999", (12, 0))),
            jit_compile=True,
        ),
    ),
}


@pytest.mark.parametrize(("found", "situation"), SILENT.values(), ids=SILENT)
def test_rules_are_silent(found, situation):
    assert audit.examine(found, situation).findings == ()


def test_findings_are_ordered_by_effect_and_accuracy_comes_last():
    found = facts(
        layer(products=(product(n=4095, roles=[("units", 4095)]),)),
        *(layer(name) for name in "abcd"),
        ISLAND,
        outputs=(model_facts.OutputFacts("body", "bfloat16"),),
        runs_eagerly=True,
    )
    report = audit.examine(found, on("a100"))
    rules = [finding.rule for finding in report.findings]
    assert rules == ["eager", "float32_islands", "alignment", "outputs"]
    effects = [x.effect for x in report.findings if x.effect is not None]
    assert effects == sorted(effects, reverse=True)


def test_shares_of_formats_name_tf32():
    report = audit.examine(facts(layer(), layer("b"), layer("c"), ISLAND), on("a100"))
    assert report.formats == {"bfloat16": 0.75, "tf32": 0.25}


def test_unaligned_share_counts_a_product_once():
    both = product(n=4095, k=4095, roles=[("units", 4095), ("input features", 4095)])
    (finding,) = audit.examine(facts(layer(products=(both,))), on("a100")).findings
    assert finding.effect == pytest.approx(1.0)


def test_roofline_of_one_product_by_hand():
    peaks = device_table.get("a100").peaks
    one = product(m=8, n=1024, k=1024)
    line = estimates.roofline([one], on("a100"))
    moved = 2 * (8 * 1024 + 1024 * 1024 + 8 * 1024)
    assert line.seconds == pytest.approx(moved / (1e9 * peaks.bandwidth))
    assert line.ideal == pytest.approx(one.flops / (1e12 * peaks.half))
    assert line.lost == pytest.approx(1 - line.ideal / line.seconds)
