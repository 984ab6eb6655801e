import dataclasses

import pytest

from tfamp import errors, hardware
from tfamp.graph_rewrite import config as rewrite_config
from tfamp.graph_rewrite.switch import RewriteConfig, choose_dtype


def gpu(name, *capability):
    return hardware.DeviceDescription("GPU", name, capability or None)


def cpu(*flags, onednn=True):
    return hardware.DeviceDescription(
        "CPU", "Some CPU", None, frozenset(("avx512f", *flags)), onednn
    )


V100, A100 = gpu("Tesla V100", 7, 0), gpu("NVIDIA A100", 8, 0)
P100, GTX_1660 = gpu("Tesla P100", 6, 0), gpu("NVIDIA GeForce GTX 1660 Ti", 7, 5)
TPU = hardware.DeviceDescription("TPU")
BF16, PLAIN, FP16 = cpu("avx512_bf16"), cpu(), cpu("amx_fp16", "amx_bf16")
IGNORE = {f"{rewrite_config.PREFIX}IGNORE_PERFORMANCE": "1"}


@pytest.mark.parametrize(
    ("asked", "devices", "environ", "dtype", "reason"),
    [
        ("auto", [BF16], {}, "bfloat16", "native bfloat16 (avx512_bf16)"),
        ("auto", [BF16, V100], {}, "float16", "float16 tensor cores (capability 7.0"),
        ("auto", [BF16, A100, V100], {}, "float16", "capability"),
        ("auto", [FP16], {}, "bfloat16", "native bfloat16 (amx_bf16)"),
        ("bfloat16", [PLAIN], {}, "bfloat16", "warning: no native bfloat16"),
        ("bfloat16", [BF16], {"ONEDNN_MAX_CPU_ISA": "ALL"}, "bfloat16", "native"),
        (
            "bfloat16",
            [BF16],
            {"ONEDNN_MAX_CPU_ISA": "avx512_core"},
            "bfloat16",
            "warning: oneDNN is held to avx512_core: expect it slower than float32",
        ),
        ("float16", [FP16], {}, "float16", "native float16 (amx_fp16) through oneDNN"),
        ("float16", [GTX_1660], {}, "float16", "warning: NVIDIA GeForce GTX 1660"),
        ("float16", [P100], IGNORE, "float16", "warning: no tensor cores"),
        ("float16", [gpu("AMD")], {}, "float16", "warning: the compute capability is"),
    ],
)
def test_dtype_is_chosen(asked, devices, environ, dtype, reason):
    chosen, why = choose_dtype(asked, devices, environ)
    assert chosen == dtype
    assert why.startswith(reason) or reason in why
    assert why.startswith("warning:") is reason.startswith("warning:")


@pytest.mark.parametrize(
    ("asked", "devices", "environ", "parts"),
    [
        ("auto", [PLAIN], {}, ["no native bfloat16", "0.38", "bfloat16 by name"]),
        ("auto", [P100], {}, ["no tensor cores (capability 6.0"]),
        ("auto", [A100, P100], {}, ["capability 6.0"]),
        ("auto", [GTX_1660], {}, ["no tensor cores despite 7.5"]),
        ("auto", [], {}, ["none has none"]),
        ("auto", [cpu("avx512_bf16", onednn=False)], {}, ["oneDNN is off"]),
        ("bfloat16", [BF16, A100], {}, ["CPUs only", 'enable("mixed_bfloat16")']),
        ("bfloat16", [cpu(onednn=False)], {}, ["oneDNN", "TF_ENABLE_ONEDNN_OPTS=1"]),
        ("bfloat16", [BF16], {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ["held to AVX2", "ends"]),
        ("auto", [BF16], {"DNNL_MAX_CPU_ISA": "avx2_vnni"}, ["held to avx2_vnni"]),
        ("float16", [BF16], {}, ["no amx_fp16 or avx_ne_convert", "Ask for bfloat16"]),
        ("float16", [PLAIN], {}, ["amx_fp16", "Train in float32"]),
        ("float16", [P100], {}, ["capability 6.0 < 7.0", "IGNORE_PERFORMANCE=1"]),
        ("float16", [BF16, TPU], {}, ["TPU has none"]),
    ],
)
def test_dtype_without_effect_is_refused(asked, devices, environ, parts):
    with pytest.raises(errors.UnsupportedModeError) as caught:
        choose_dtype(asked, devices, environ)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, caught.value


def test_unknown_dtype_is_an_error():
    with pytest.raises(ValueError, match="Received: dtype='mixed_bfloat16'"):
        choose_dtype("mixed_bfloat16", [BF16], {})


def test_names_and_path_are_normalized(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = RewriteConfig(
        allowlist_add="Sin, Cos",
        denylist_remove=["Exp"],
        float32_ops=(),
        log_path="~/d",
    )
    assert config.allowlist_add == ("Sin", "Cos")
    assert config.denylist_remove == ("Exp",)
    assert config.float32_ops == ()
    assert config.log_path == "/home/someone/d"
    assert hash(config) == hash(dataclasses.replace(config))
    assert [(c.list, c.add, c.ops, c.source) for c in config.changes()] == [
        ("allowlist", True, ("Sin", "Cos"), "allowlist_add"),
        ("denylist", False, ("Exp",), "denylist_remove"),
    ]


def test_every_list_argument_is_a_change():
    fields = [f.name for f in dataclasses.fields(RewriteConfig) if "list_" in f.name]
    config = RewriteConfig(**dict.fromkeys(fields, "Sin"))
    assert [change.source for change in config.changes()] == fields
    assert len(fields) == 8


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"dtype": "half"}, ["`dtype` must be one of", "dtype='half'"]),
        ({"level": "all"}, ["`level` must be one of", "level='all'"]),
        ({"dtype": "bfloat16", "level": "UNSAFE_FORCE_ALL"}, ["gives up a rewrite by"]),
        ({"allowlist_add": 3}, ["`allowlist_add` must be names", "allowlist_add=3"]),
        ({"float32_ops": None}, ["`float32_ops` must be names"]),
        ({"log_path": 3}, ["`log_path` must be one of"]),
        ({"log_path": ""}, ["`log_path` must be one of"]),
        ({"dtype": "x", "level": "y", "log_path": 1}, ["dtype", "level", "log_path"]),
    ],
)
def test_bad_request_is_refused(keywords, parts):
    with pytest.raises(ValueError) as caught:
        RewriteConfig(**keywords)
    assert all(part in str(caught.value) for part in parts)
    assert len(str(caught.value).splitlines()) == (3 if len(parts) == 3 else 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("TRUE", True), ("0", False), ("False", False), (None, False)],
)
def test_bool_is_read_as_by_tensorflow(value, expected):
    environ = {} if value is None else {"X": value}
    assert rewrite_config.read_bool(environ, "X") is expected


@pytest.mark.parametrize("value", ["yes", "", "on", " 1"])
def test_what_is_no_bool_names_its_variable(value):
    with pytest.raises(ValueError, match="variable X must be one of .* Received"):
        rewrite_config.read_bool({"X": value}, "X")
