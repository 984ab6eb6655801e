"""Per-layer modes by themselves: what patterns mean, and what is refused."""

import pytest

from tfamp import errors
from tfamp.facts import modes
from tfamp.precision import overrides


def parsed(asked, mode="mixed_bfloat16"):
    return overrides.parse(modes.get_mode(mode), asked)


ALL_AT_ONCE = {"(": "float32", "": "float32", 3: "float32", "head": "fp16"}


@pytest.mark.parametrize(
    ("mode", "asked", "messages"),
    [
        (
            "mixed_bfloat16",
            ALL_AT_ONCE,
            [
                r"'(': not a regular expression",
                "'': a pattern must be a non-empty string",
                "3: a pattern must be a non-empty string. Received: 3 (int)",
                "'head': Unknown precision mode. Received: mode='fp16'",
            ],
        ),
        (
            "mixed_float16",
            {"head": "tf32"},
            ["'head': TF32 is a flag of the whole process", "mode='tf32'"],
        ),
        ("tf32", {"head": "float32"}, ["beside mode='tf32'"]),
        ("float32", {"head": None}, ["mode=None"]),
        ("float32", {"head": []}, ["mode=[]"]),
        ("float32", [("head", "float32")], ["must be a dict"]),
    ],
    ids=str,
)
def test_malformed_overrides_are_refused(mode, asked, messages):
    with pytest.raises(overrides.OverrideError) as caught:
        parsed(asked, mode)
    assert [m for m in messages if m not in str(caught.value)] == []
    assert isinstance(caught.value, errors.TfampError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("head", "head", True),
        ("head", "heads", False),
        ("head", "model/head", True),
        ("block/head", "model/block/head", True),
        ("head", "model/a_head", False),
        ("head", "head/query", False),
        ("^head", "head", True),
        ("^head", "model/head", False),
        (".*head", "model/head", True),
        ("a|b", "b", True),
        ("(?i)HEAD", "head", True),
        (r"(\w)\1", "aa", True),
    ],
)
def test_a_pattern_matches_a_path_or_its_end(pattern, path, matches):
    found = overrides.find(["other", path], parsed({pattern: "float32"}))
    assert (found is not None) == matches


def test_patterns_that_agree_are_not_ambiguous_and_others_are():
    assert overrides.find(["head"], parsed({"head": "float32", "he.*": "float32"}))
    asked = {"head": "float32", "he.*": "mixed_float16"}
    with pytest.raises(overrides.OverrideError, match="2 patterns match 'head' with"):
        overrides.find(["head"], parsed(asked))


BLOCKS = [f"block_{i}/dense" for i in range(40)]


@pytest.mark.parametrize(
    ("paths", "patterns", "message"),
    [
        (
            ["body", "head"],
            ["decoder/.*", "hed"],
            "2 patterns matched no layer: 'decoder/.*', 'hed'. "
            "Known paths: 'body', 'head'.",
        ),
        ([], ["a"], "Known paths: none."),
        (BLOCKS, ["blok_7/dense"], "'block_7/dense', "),
        (BLOCKS, ["blok"], "and 32 more."),
    ],
    ids=["all", "no layers", "the nearest", "count of the rest"],
)
def test_patterns_without_a_layer_are_told_with_known_paths(paths, patterns, message):
    assert message in overrides.unmatched(patterns, paths)
