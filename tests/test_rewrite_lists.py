import pathlib

import pytest
import tensorflow as tf

from tfamp.graph_rewrite import lists as rewrite_lists
from tfamp.graph_rewrite.lists import PREFIX, Change

# Printed by TensorFlow 2.21's own binary: allow, infer, deny, clear.
SIZES = {
    "bfloat16": (14, 48, 7, 111),
    "float16": (39, 43, 9, 110),
    "float16_cpu": (15, 46, 9, 110),
}
BASE = {
    "allowlist": frozenset({"MatMul", "Conv2D"}),
    "inferlist": frozenset({"Mean", "BiasAddGrad", "Tanh"}),
    "denylist": frozenset({"Exp"}),
    "clearlist": frozenset({"Relu"}),
}
KNOWN = {"MatMul", "Exp", "Mean", "Sin", "Cos", "AddV2", "Tanh"}.__contains__


def merge(*changes, base=BASE, float32_ops=(), environ=()):
    changes = [*rewrite_lists.changes_of_environment(dict(environ)), *changes]
    return rewrite_lists.merge(base, changes, float32_ops, KNOWN)


def change(name, *ops):
    kind, end = name.split("_")
    return Change(kind, end == "add", ops, name)


def changed(merged):
    return {
        name.removeprefix(PREFIX): value
        for name, value in merged.environ.items()
        if value is not None
    }


def test_installed_lists_are_those_of_the_binary():
    modes, reason = rewrite_lists.installed()
    assert reason == ""
    sizes = {
        mode: tuple(len(lists[name]) for name in rewrite_lists.LISTS)
        for mode, lists in modes.items()
    }
    assert sizes == SIZES


@pytest.mark.parametrize(
    ("mode", "name", "op", "expected"),
    [
        ("bfloat16", "allowlist", "FusedPadConv2D", True),
        ("bfloat16", "inferlist", "Mean", True),
        ("bfloat16", "denylist", "Mean", False),
        ("bfloat16", "clearlist", "TensorListStack", True),
        ("float16", "denylist", "Mean", True),
        ("float16", "allowlist", "CudnnRNNV3", True),
        ("float16", "inferlist", "Rsqrt", False),
        ("float16_cpu", "allowlist", "CudnnRNNV3", False),
        ("float16_cpu", "allowlist", "BatchMatMulV2", True),
        ("float16_cpu", "inferlist", "Rsqrt", True),
    ],
)
def test_operation_is_on_the_list_of_its_mode(mode, name, op, expected):
    assert (op in rewrite_lists.installed().modes[mode][name]) is expected


def test_no_operation_is_on_two_of_tensorflows_lists():
    for mode, lists in rewrite_lists.installed().modes.items():
        total = sum(len(ops) for ops in lists.values())
        assert len(set().union(*lists.values())) == total, mode


def test_missing_header_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(tf.sysconfig, "get_include", lambda: str(tmp_path))
    rewrite_lists.installed.cache_clear()
    try:
        modes, reason = rewrite_lists.installed()
    finally:
        rewrite_lists.installed.cache_clear()
    assert modes is None
    assert "could not be read" in reason and "auto_mixed_precision_lists.h" in reason


def installed_header():
    return pathlib.Path(tf.sysconfig.get_include(), rewrite_lists.HEADER).read_text()


@pytest.mark.parametrize("old", ["class AutoMixedPrecisionListsMkl", "DenyList()"])
def test_another_header_is_refused(old):
    with pytest.raises(ValueError, match="expected three classes|found no Deny"):
        rewrite_lists.parse_header(installed_header().replace(old, "X"))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("Tanh, AddV2 ,,Tanh", ("Tanh", "AddV2")),
        ("", ()),
        (["Tanh ", "AddV2"], ("Tanh", "AddV2")),
        (iter(("Tanh",)), ("Tanh",)),
    ],
    ids=["blanks", "empty", "list", "iterator"],
)
def test_names_are_split_and_stripped(value, names):
    assert rewrite_lists.split_names(value) == names


def test_changes_come_to_additions_and_removals():
    merged = merge(change("inferlist_remove", "Mean"), change("clearlist_add", "Sin"))
    assert merged.problems == ()
    assert changed(merged) == {"INFERLIST_REMOVE": "Mean", "CLEARLIST_ADD": "Sin"}


def test_all_variables_are_written_or_unset():
    assert set(merge().environ) == set(rewrite_lists.variable_names())
    assert len(rewrite_lists.variable_names()) == 14


def test_environment_is_merged_under_the_newer_names():
    merged = merge(
        change("allowlist_add", "Cos"),
        environ={
            f"{PREFIX}WHITELIST_ADD": " Sin",
            f"{PREFIX}INFERLIST_REMOVE": "Tanh, Mean",
            f"{PREFIX}BLACKLIST_REMOVE": "Exp",
        },
    )
    assert merged.problems == ()
    assert changed(merged) == {
        "ALLOWLIST_ADD": "Cos,Sin",
        "INFERLIST_REMOVE": "Mean,Tanh",
        "DENYLIST_REMOVE": "Exp",
    }


def test_argument_comes_after_the_environment():
    environ = {f"{PREFIX}GRAYLIST_REMOVE": "Mean"}
    merged = merge(change("inferlist_add", "Mean"), environ=environ)
    assert changed(merged) == {}


def test_float32_operations_leave_each_list_that_converts_them():
    merged = merge(float32_ops=("Mean", "MatMul", "Exp"))
    assert merged.problems == ()
    assert changed(merged) == {"ALLOWLIST_REMOVE": "MatMul", "INFERLIST_REMOVE": "Mean"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            [change("allowlist_add", "Exp")],
            ["'Exp' would be on 2 lists, allowlist and denylist", "`denylist_remove`"],
        ),
        (
            [change("allowlist_add", "Sin"), change("clearlist_add", "Sin")],
            ["'Sin' would be on 2 lists", "Add it to one list only"],
        ),
        (
            [change("allowlist_add", "MatMull")],
            ["`allowlist_add` names unknown operations: 'MatMull' (close: MatMul"],
        ),
        ([change("denylist_remove", "??")], ["unknown operations: '??'."]),
    ],
    ids=["deny", "both_added", "typo", "nonsense"],
)
def test_problem_says_what_to_do(given, parts):
    (problem,) = merge(*given).problems
    assert all(part in problem for part in parts), problem


def test_conflict_is_solved_as_the_message_says():
    merged = merge(change("allowlist_add", "Exp"), change("denylist_remove", "Exp"))
    assert merged.problems == ()
    assert changed(merged) == {"ALLOWLIST_ADD": "Exp", "DENYLIST_REMOVE": "Exp"}


def test_adding_what_stays_in_float32_is_a_problem():
    (problem,) = merge(
        change("allowlist_add", "Mean"),
        change("inferlist_remove", "Mean"),
        float32_ops=("Mean",),
    ).problems
    assert "`allowlist_add` adds Mean, which `float32_ops` keeps" in problem


def test_all_problems_are_told_at_once():
    merged = merge(
        change("allowlist_add", "Exp", "MatMull"),
        float32_ops=("Meen",),
        environ={f"{PREFIX}CLEARLIST_ADD": "Nix"},
    )
    text = "\n".join(merged.problems)
    assert len(merged.problems) == 4
    for part in (f"`{PREFIX}CLEARLIST_ADD`", "'MatMull'", "`float32_ops`", "'Exp'"):
        assert part in text


def test_removal_without_effect_is_noted():
    merged = merge(change("clearlist_remove", "Sin"))
    assert merged.problems == () and changed(merged) == {}
    (note,) = merged.notes
    assert "`clearlist_remove` removes Sin, which the clearlist does not have" in note


def test_unknown_lists_are_changed_without_a_check_for_conflicts():
    merged = merge(
        change("allowlist_add", "Exp"), base=None, float32_ops=("Mean", "Tanh")
    )
    assert merged.problems == ()
    assert changed(merged) == {
        "ALLOWLIST_ADD": "Exp",
        "ALLOWLIST_REMOVE": "Mean,Tanh",
        "INFERLIST_REMOVE": "Mean,Tanh",
        "CLEARLIST_REMOVE": "Mean,Tanh",
    }
    assert merge(change("allowlist_add", "Nix"), base=None).problems
