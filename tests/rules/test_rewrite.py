"""Which dtype graphs can be rewritten to on which device."""

import re

import helpers
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import hardware
from tfamp.graph_rewrite.choice import choose_dtype


def cpu(*flags, onednn=True):
    return hardware.DeviceDescription("CPU", "CPU", None, frozenset(flags), onednn)


P100, V100, A100, GTX_1660, TPU = (
    hardware.DEVICES[key] for key in ("p100", "v100", "a100", "gtx1660", "tpu")
)
AMD = hardware.DeviceDescription("GPU", "AMD")
BF16, PLAIN, OFF = cpu("avx512_bf16"), cpu(), cpu("avx512_bf16", onednn=False)
NO = tfamp.UnsupportedModeError


@pytest.mark.parametrize(
    ("asked", "devices", "expected", "reason"),
    [
        ("auto", [BF16], "bfloat16", "native bfloat16 (avx512_bf16)"),
        ("auto", [BF16, A100, V100], "float16", "it has float16 tensor cores"),
        ("bfloat16", [PLAIN], "bfloat16", "warning: no native bfloat16"),
        ("float16", [GTX_1660], "float16", "warning: NVIDIA GeForce GTX 1660"),
        ("float16", [AMD], "float16", "warning: the compute capability is"),
        ("auto", [PLAIN], NO, "no native bfloat16"),
        ("auto", [A100, P100], NO, "no tensor cores (capability 6.0"),
        ("auto", [GTX_1660], NO, "no tensor cores despite 7.5"),
        ("auto", [], NO, "no device was found"),
        ("auto", [OFF], NO, "TF_ENABLE_ONEDNN_OPTS=1"),
        ("auto", [BF16, TPU], NO, "this device is TPU"),
        ("bfloat16", [BF16, A100], NO, "for CPUs only; this device is NVIDIA A100"),
        ("float16", [BF16], NO, "for GPUs only"),
        ("float16", [P100], NO, "capability 6.0 < 7.0"),
        ("mixed_bfloat16", [BF16], ValueError, "Received: dtype='mixed_bfloat16'"),
    ],
)
def test_dtype_is_chosen_or_refused_with_the_reason(asked, devices, expected, reason):
    if isinstance(expected, type):
        with pytest.raises(expected, match=re.escape(reason)):
            choose_dtype(asked, devices, {})
        return
    chosen, why = choose_dtype(asked, devices, {"ONEDNN_MAX_CPU_ISA": "ALL"})
    assert chosen == expected and why.startswith(reason)


def test_bfloat16_is_refused_where_onednn_is_held_below_it():
    with pytest.raises(NO, match="limited to avx2"):
        choose_dtype("auto", [BF16], {"ONEDNN_MAX_CPU_ISA": "avx2"})


# ---- Hosts that the tests do not run on ----


def test_float16_is_asked_for_on_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [BF16, V100])
    with tfamp.graph_rewrite_scope() as status:
        options = tf.config.optimizer.get_experimental_options()
        assert options["auto_mixed_precision"] is True
        assert options["auto_mixed_precision_onednn_bfloat16"] is False
        assert "float16 requested" in status.graph_rewrite
        assert "added by compile()" in status.loss_scaling


@pytest.mark.filterwarnings("error:.*no native bfloat16")
def test_a_slow_rewrite_is_warned_about_and_an_impossible_one_refused(monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [PLAIN])
    before = helpers.read_globals()
    with pytest.raises(NO, match="no native bfloat16"):
        tfamp.enable_graph_rewrite()
    with pytest.raises(UserWarning, match="expect 0.4 to 0.8 times"):  # An error here.
        tfamp.enable_graph_rewrite("bfloat16")
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    with pytest.warns(UserWarning, match="expect 0.4 to 0.8 times"):
        tfamp.enable_graph_rewrite("bfloat16")
    tfamp.disable_graph_rewrite()
