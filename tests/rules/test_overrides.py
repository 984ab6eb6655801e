"""Per-layer modes by themselves: what patterns mean, and what is refused."""

import pytest

from tfamp import errors, modes
from tfamp.precision import overrides


def parsed(asked, mode="mixed_bfloat16"):
    return overrides.parse(modes.get_mode(mode), asked)


# --- overrides by themselves ------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "asked", "messages"),
    [
        pytest.param(
            "mixed_bfloat16",
            {"(": "float32", "": "float32", 3: "float32", "head": "fp16"},
            [
                r"'(': not a regular expression",
                "'': a pattern must be a non-empty string",
                "3: a pattern must be a non-empty string. Received: 3 (int)",
                "'head': Unknown precision mode. Received: mode='fp16'",
            ],
            id="all at once",
        ),
        pytest.param(
            "mixed_float16",
            {"head": "tf32"},
            ["'head': TF32 is a flag of the whole process", "mode='tf32'"],
            id="tf32 for a layer",
        ),
        pytest.param(
            "tf32", {"head": "float32"}, ["beside mode='tf32'"], id="float32 in tf32"
        ),
        pytest.param("float32", {"head": None}, ["mode=None"], id="no mode"),
        pytest.param("float32", {"head": []}, ["mode=[]"], id="unhashable mode"),
        pytest.param("float32", [("head", "float32")], ["must be a dict"], id="list"),
    ],
)
def test_malformed_overrides_are_refused(mode, asked, messages):
    with pytest.raises(overrides.OverrideError) as caught:
        overrides.parse(modes.get_mode(mode), asked)
    assert [m for m in messages if m not in str(caught.value)] == []
    assert isinstance(caught.value, errors.TfampError)
    assert isinstance(caught.value, ValueError)


# --- matching ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("head", "head", True),
        ("head", "heads", False),
        ("head", "model/head", False),
        (".*head", "model/head", True),
        ("a|b", "b", True),
        ("(?i)HEAD", "head", True),
        (r"(\w)\1", "aa", True),
    ],
)
def test_pattern_matches_a_whole_path(pattern, path, matches):
    assert (overrides.find([path], parsed({pattern: "float32"})) is not None) == matches
    assert overrides.find(["other", path], parsed({pattern: "float32"})) or not matches


def test_patterns_that_agree_are_not_ambiguous_and_others_are():
    assert overrides.find(["head"], parsed({"head": "float32", "he.*": "float32"}))
    asked = {"head": "float32", "he.*": "mixed_float16"}
    with pytest.raises(overrides.OverrideError, match="2 patterns match 'head' with"):
        overrides.find(["head"], parsed(asked))


@pytest.mark.parametrize(
    ("paths", "asked", "message"),
    [
        pytest.param(
            ["body", "head"],
            {"decoder/.*": "float32", "hed": "float32"},
            "2 patterns matched no layer: 'decoder/.*', 'hed'. "
            "Known paths: 'body', 'head'.",
            id="unmatched",
        ),
        pytest.param([], {"a": "float32"}, "Known paths: none.", id="no layers"),
        pytest.param(
            [f"block_{i}/dense" for i in range(40)],
            {"blok_7/dense": "float32"},
            "'block_7/dense', ",
            id="the nearest",
        ),
        pytest.param(
            [f"block_{i}/dense" for i in range(40)],
            {"blok": "float32"},
            "and 32 more.",
            id="count of the rest",
        ),
    ],
)
def test_patterns_without_a_layer_are_told_with_known_paths(paths, asked, message):
    assert message in overrides.unmatched(list(asked), paths)
