"""Which dtype graphs can be rewritten to on which device, and which lists result."""

import re

import helpers
import pytest
import tensorflow as tf

import tfamp
from tfamp import errors, hardware
from tfamp.graph_rewrite.choice import choose_dtype
from tfamp.graph_rewrite.switch import PREFIX, RewriteConfig


def gpu(name, *capability):
    return hardware.DeviceDescription("GPU", name, capability or None)


def cpu(*flags, onednn=True):
    return hardware.DeviceDescription(
        "CPU", "Some CPU", None, frozenset(("avx512f", *flags)), onednn
    )


V100, A100 = gpu("Tesla V100", 7, 0), gpu("NVIDIA A100", 8, 0)
P100, GTX_1660 = gpu("Tesla P100", 6, 0), gpu("NVIDIA GeForce GTX 1660 Ti", 7, 5)
TPU = hardware.DeviceDescription("TPU")
BF16, PLAIN = cpu("avx512_bf16"), cpu()


@pytest.mark.parametrize(
    ("asked", "devices", "dtype", "reason"),
    [
        ("auto", [BF16], "bfloat16", "native bfloat16 (avx512_bf16)"),
        ("auto", [BF16, A100, V100], "float16", "float16 tensor cores (capability"),
        ("bfloat16", [PLAIN], "bfloat16", "warning: no native bfloat16"),
        ("float16", [GTX_1660], "float16", "warning: NVIDIA GeForce GTX 1660"),
        ("float16", [gpu("AMD")], "float16", "warning: the compute capability is"),
    ],
)
def test_dtype_is_chosen(asked, devices, dtype, reason):
    chosen, why = choose_dtype(asked, devices, {"ONEDNN_MAX_CPU_ISA": "ALL"})
    assert chosen == dtype
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("asked", "devices", "environ", "part"),
    [
        ("auto", [PLAIN], {}, "no native bfloat16"),
        ("auto", [A100, P100], {}, "no tensor cores (capability 6.0"),
        ("auto", [GTX_1660], {}, "no tensor cores despite 7.5"),
        ("auto", [], {}, "no device was found"),
        ("auto", [cpu("avx512_bf16", onednn=False)], {}, "TF_ENABLE_ONEDNN_OPTS=1"),
        ("bfloat16", [BF16, A100], {}, "for CPUs only, and here is NVIDIA A100"),
        ("auto", [BF16], {"ONEDNN_MAX_CPU_ISA": "avx2"}, "held to avx2"),
        ("float16", [BF16], {}, "for GPUs only"),
        ("float16", [P100], {}, "capability 6.0 < 7.0"),
        ("auto", [BF16, TPU], {}, "here is TPU"),
    ],
)
def test_dtype_without_effect_is_refused(asked, devices, environ, part):
    with pytest.raises(errors.UnsupportedModeError, match=re.escape(part)):
        choose_dtype(asked, devices, environ)


def test_unknown_dtype_is_an_error():
    with pytest.raises(ValueError, match="Received: dtype='mixed_bfloat16'"):
        choose_dtype("mixed_bfloat16", [BF16], {})


# ---- Hosts that the tests do not run on ----


def test_float16_is_asked_for_on_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [BF16, V100])
    with tfamp.graph_rewrite_scope() as status:
        options = tf.config.optimizer.get_experimental_options()
        assert options["auto_mixed_precision"] is True
        assert options["auto_mixed_precision_onednn_bfloat16"] is False
        assert "float16 requested" in status.graph_rewrite
        assert "added by compile()" in status.loss_scaling


def test_a_slow_rewrite_is_warned_about_and_an_impossible_one_refused(monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [PLAIN])
    before = helpers.read_globals()
    with pytest.raises(errors.UnsupportedModeError, match="no native bfloat16"):
        tfamp.enable_graph_rewrite()
    with pytest.raises(UserWarning, match="expect 0.4 times"):  # An error here.
        tfamp.enable_graph_rewrite("bfloat16")
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    with pytest.warns(UserWarning, match="expect 0.4 times"):
        tfamp.enable_graph_rewrite("bfloat16")
    tfamp.disable_graph_rewrite()


# ---- Lists ----

FLOAT32 = "BiasAddGrad,Mean,Sum"
KEPT = {
    "ALLOWLIST_REMOVE": FLOAT32,
    "INFERLIST_REMOVE": FLOAT32,
    "CLEARLIST_REMOVE": FLOAT32,
}
EDITS = {
    "default": ({}, {}, KEPT),
    "TensorFlow's own": ({"float32_ops": ()}, {}, {}),
    "added to one, off the others": (
        {"allowlist_add": "Exp, Cos", "float32_ops": ()},
        {},
        {
            "ALLOWLIST_ADD": "Cos,Exp",
            "INFERLIST_REMOVE": "Cos,Exp",
            "DENYLIST_REMOVE": "Cos,Exp",
            "CLEARLIST_REMOVE": "Cos,Exp",
        },
    ),
    "added though kept in float32": (
        {"denylist_add": "Mean", "allowlist_add": "Sum", "float32_ops": "Mean,Sum"},
        {},
        {
            "ALLOWLIST_ADD": "Sum",
            "DENYLIST_ADD": "Mean",
            "ALLOWLIST_REMOVE": "Mean",
            "INFERLIST_REMOVE": "Mean,Sum",
            "DENYLIST_REMOVE": "Sum",
            "CLEARLIST_REMOVE": "Mean,Sum",
        },
    ),
    "beside the user's": (
        {"denylist_remove": ["Exp"], "float32_ops": ()},
        {"DENYLIST_REMOVE": "Pow, Exp", "INFERLIST_REMOVE": "Tanh"},
        {"DENYLIST_REMOVE": "Exp,Pow", "INFERLIST_REMOVE": "Tanh"},
    ),
}


@pytest.mark.parametrize(("keywords", "environ", "expected"), EDITS.values(), ids=EDITS)
def test_lists_are_merged_with_the_users(keywords, environ, expected):
    config = RewriteConfig.from_keywords("auto", keywords)
    found = config.merged({PREFIX + k: environ[k] for k in environ})
    assert {k.removeprefix(PREFIX): v for k, v in found.items() if v} == expected


@pytest.mark.parametrize(
    ("keywords", "environ"),
    [
        ({"allowlist_add": "Cos", "denylist_add": "Cos"}, {}),
        ({"allowlist_add": "Cos"}, {"CLEARLIST_ADD": "Cos"}),
        ({"inferlist_add": "Cos", "inferlist_remove": "Cos"}, {}),
    ],
)
def test_one_operation_on_two_lists_is_refused(keywords, environ):
    config = RewriteConfig.from_keywords("auto", keywords)
    with pytest.raises(ValueError, match="Cos: added to the"):
        config.merged({PREFIX + k: environ[k] for k in environ})
