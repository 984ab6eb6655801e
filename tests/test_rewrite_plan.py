import keras
import pytest

from tfamp import errors, hardware
from tfamp.graph_rewrite import lists as rewrite_lists
from tfamp.graph_rewrite import plan as rewrite_plan
from tfamp.graph_rewrite.plan import LEVEL, LOG_PATH, PREFIX, RewriteConfig

CPU = hardware.DeviceDescription(
    "CPU", "Some CPU", None, frozenset({"avx512f", "avx512_bf16"}), onednn=True
)
PLAIN = CPU._replace(cpu_flags=frozenset({"avx512f"}))
V100 = hardware.DeviceDescription("GPU", "Tesla V100", (7, 0))


def plan(config=None, devices=(CPU,), environ=(), options=(), **keywords):
    return rewrite_plan.make_plan(
        config or RewriteConfig(**keywords), devices, dict(environ), dict(options)
    )


def written(result):
    shown = {k: v for k, v in result.environ.items() if k != rewrite_plan.REPLACED}
    return {k.removeprefix(PREFIX): v for k, v in shown.items() if v}


FLAGS = {
    "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
    "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE": "1",
}


def test_default_plan_on_a_cpu():
    result = plan()
    assert result.dtype == "bfloat16" and result.warnings == ()
    assert set(result.environ) == set(rewrite_plan.VARIABLES)
    assert written(result) == {**FLAGS, "INFERLIST_REMOVE": "BiasAddGrad,Mean,Sum"}


def test_default_plan_on_a_gpu():
    # Mean and Sum are on CUDA's deny list: they are in float32 as it is.
    result = plan(devices=(CPU, V100))
    assert result.dtype == "float16"
    assert written(result) == {**FLAGS, "INFERLIST_REMOVE": "BiasAddGrad"}


def test_tensorflows_own_painting():
    assert written(plan(float32_ops=())) == FLAGS


def test_level_and_folder_of_the_user_hold_unless_given():
    environ = {LEVEL: "treat_infer_as_deny", LOG_PATH: "/tmp/a"}
    result = plan(environ=environ)
    assert (result.environ[LEVEL], result.environ[LOG_PATH]) == tuple(environ.values())
    result = plan(environ=environ, level="TENSOR_CORES_ONLY", log_path="/tmp/b")
    assert result.environ[LEVEL] == "TENSOR_CORES_ONLY"
    assert result.environ[LOG_PATH] == "/tmp/b"
    assert "TENSOR_CORES_ONLY has no effect" in result.warnings[0]


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"environ": {LEVEL: "MUCH"}}, [LEVEL, "Received: 'MUCH'"]),
        ({"environ": {LEVEL: "Unsafe_Force_All"}}, [LEVEL, "gives up a rewrite"]),
        ({"level": "UNSAFE_FORCE_ALL"}, ["`level`", "gives up a rewrite"]),
        ({"environ": {f"{PREFIX}SIMULATE_GPU": "yes"}}, ["SIMULATE_GPU", "ends the"]),
        ({"environ": {f"{PREFIX}EMULATE_FP16": ""}}, ["EMULATE_FP16", "ends the"]),
        ({"environ": {f"{PREFIX}IGNORE_PERFORMANCE": "2"}}, ["IGNORE_PERFORMANCE"]),
        ({"environ": {"TF_ENABLE_AUTO_MIXED_PRECISION": "on"}}, ["Received: 'on'"]),
        ({"options": {"disable_meta_optimizer": True}}, ["are switched off"]),
        ({"allowlist_add": "Exp"}, ["'Exp' would be on 2 lists", "`denylist_remove`"]),
        ({"environ": {f"{PREFIX}WHITELIST_ADD": "Nix"}}, ["WHITELIST_ADD", "'Nix'"]),
    ],
)
def test_what_tensorflow_would_ignore_or_end_over_is_refused(keywords, parts):
    with pytest.raises(ValueError) as caught:
        plan(**keywords)
    assert not isinstance(caught.value, errors.UnsupportedModeError)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, caught.value


@pytest.mark.parametrize(
    "policy",
    ["mixed_bfloat16", "float16", "float64", "map", "map_of_mixed"],
)
def test_policy_that_does_not_compute_in_float32_is_refused(policy):
    before = keras.config.dtype_policy()
    if policy.startswith("map"):
        default = "float32" if policy == "map" else "mixed_float16"
        made = keras.dtype_policies.DTypePolicyMap(keras.dtype_policies.get(default))
        made["body/.*"] = keras.dtype_policies.get("mixed_bfloat16")
    else:
        made = keras.dtype_policies.get(policy)
    keras.config.set_dtype_policy(made)
    try:
        with pytest.raises(ValueError, match="must compute in float32. Received: '"):
            plan()
    finally:
        keras.config.set_dtype_policy(before)


def test_map_of_float32_policies_is_accepted():
    before = keras.config.dtype_policy()
    made = keras.dtype_policies.DTypePolicyMap(keras.dtype_policies.get("float32"))
    made["body/.*"] = keras.dtype_policies.get("float32")
    keras.config.set_dtype_policy(made)
    try:
        assert plan().dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy(before)


def test_all_problems_are_told_at_once():
    with pytest.raises(errors.UnsupportedModeError) as caught:
        plan(
            devices=(PLAIN,),
            allowlist_add="Nix",
            environ={LEVEL: "MUCH", f"{PREFIX}SIMULATE_GPU": "yes"},
            options={"disable_meta_optimizer": True},
        )
    text = str(caught.value)
    assert "cannot be enabled, for 5 reasons:\n- " in text
    for part in ("no native bfloat16", "'Nix'", "'MUCH'", "'yes'", "switched off"):
        assert part in text


def test_what_has_no_effect_is_a_warning():
    result = plan(
        devices=(PLAIN,),
        dtype="bfloat16",
        clearlist_remove="MatMul",
        environ={rewrite_plan.DEAD_VARIABLE: "1"},
    )
    text = " ".join(result.warnings)
    assert len(result.warnings) == 3
    assert "expect it slower than float32" in text
    assert "`clearlist_remove` removes MatMul" in text
    assert f"{rewrite_plan.DEAD_VARIABLE} is set; nothing" in text


def test_lists_that_cannot_be_read_are_a_warning(monkeypatch):
    unread = rewrite_lists.InstalledLists(None, "TensorFlow's operation lists are gone")
    monkeypatch.setattr(rewrite_lists, "installed", lambda: unread)
    result = plan()
    assert result.warnings == (
        "TensorFlow's operation lists are gone: changes of them are not checked.",
    )
    assert result.environ[f"{PREFIX}INFERLIST_REMOVE"] == "BiasAddGrad,Mean,Sum"


ON = {"auto_mixed_precision_onednn_bfloat16": True}


@pytest.mark.parametrize(
    ("options", "environ", "devices", "part"),
    [
        ({}, {}, (CPU,), "'auto_mixed_precision_onednn_bfloat16' is off"),
        ({**ON, "min_graph_nodes": 99}, {}, (CPU,), "below min_graph_nodes=99"),
        ({**ON, "disable_meta_optimizer": True}, {}, (CPU,), "switched off"),
        (ON, {LEVEL: "UNSAFE_FORCE_ALL"}, (CPU,), "gives up a rewrite"),
        (ON, {f"{PREFIX}ALLOWLIST_ADD": "Exp"}, (CPU,), "'Exp' would be on 2"),
        (ON, {}, (CPU._replace(onednn=False),), "oneDNN is off"),
        (ON, {}, (CPU, V100), "for CPUs only"),
    ],
)
def test_obstacle_is_found(options, environ, devices, part):
    (found,) = rewrite_plan.find_obstacles("bfloat16", devices, environ, options)
    assert part in found


@pytest.mark.parametrize("name", ["onednn_bfloat16", "mkl"])
def test_no_obstacle(name):
    options = {f"auto_mixed_precision_{name}": True, "min_graph_nodes": -7}
    assert rewrite_plan.find_obstacles("bfloat16", (PLAIN,), {}, options) == []
