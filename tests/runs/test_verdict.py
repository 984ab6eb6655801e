"""Paired differences over seeds: the interval as SciPy has it, the verdict by rule."""

import json
import math

import hypothesis
import pytest
from hypothesis import strategies
from scipy import stats

from tfamp.runs import paired, results


def compare(base, other):
    """Compares scores of seeds 0, 1, ...; given in percent."""
    runs = [
        (mode, {seed: score / 100 for seed, score in enumerate(scores)})
        for mode, scores in (("float32", base), ("mixed_bfloat16", other))
    ]
    return paired.compare("accuracy", *runs)


def compare_errors(base, other):
    runs = (("float32", base), ("mixed_float16", other))
    runs = [(mode, dict(enumerate(scores))) for mode, scores in runs]
    return paired.compare("perplexity", *runs, relative=True)


STEEP = [88.9, 90.1, 90.9, 92.1]
CASES = {
    # Base, other (percent), how the verdict starts, and the difference in words.
    "one seed": ([90], [88], "unknown with one seed: use seeds=3", "-2.00 points"),
    "noise": (
        [90, 91, 92],
        [91, 90.5, 92.5],
        "within seed noise",
        # Deviation 0.764; t = 4.303 for two degrees of freedom.
        "+0.33 ± 0.76 points of accuracy (mean and deviation of 3 seeds), 95% interval "
        "-1.56 to +2.23",
    ),
    "lower": ([90, 91, 92, 93], STEEP, "lower than float32 by 0.82 to 1.18 points", ""),
    "higher": (STEEP, [90, 91, 92, 93], "higher than float32 by 0.82 to 1.18", ""),
    "equal": ([90, 91], [90, 91], "equal to float32 in each of the 2 seeds", "+0.00 ±"),
    "below rounding": ([90], [90 - 1e-7], "unknown with one seed", "+0.00 points"),
    "the same step": (
        [90, 91, 92],
        [89, 90, 91],
        "no interval: -1.00 points in ea",
        "",
    ),
    "small": (
        [90, 91, 92],
        [90.002, 91.0022, 92.0018],
        "higher than float32 by 0.0015 to 0.0025 points",
        "",
    ),
    "not finite": (
        [90, 91, 92],
        [90, math.nan, math.inf],
        "no verdict: the difference is not finite with seed 1, 2",
        "no mean of accuracy",
    ),
    "two, noise": ([90, 91], [91, 91.5], "within seed noise (two seeds say little", ""),
    "two": (
        [90, 91],
        [88, 88.99],
        "lower than float32 by 1.94 to 2.07 points (two",
        "",
    ),
}


@pytest.mark.parametrize(("base", "other", "start", "text"), CASES.values(), ids=CASES)
def test_verdict_and_text_follow_the_rules(base, other, start, text):
    found = compare(base, other)
    assert found.verdict.startswith(start)
    assert found.to_text().startswith(f"mixed_bfloat16 minus float32: {text}")
    assert "NaN" not in json.dumps(found.to_dict())


scores = strategies.floats(0, 100, allow_nan=False)


@hypothesis.given(strategies.lists(strategies.tuples(scores, scores), min_size=2))
def test_interval_is_that_of_scipy_and_its_verdict_agrees_with_the_t_test(pairs):
    base, other = zip(*pairs, strict=True)
    found = compare(base, other)
    hypothesis.assume(found.interval is not None)
    expected = stats.ttest_rel(
        [score / 100 for score in other], [score / 100 for score in base]
    )
    assert found.interval == pytest.approx(
        tuple(expected.confidence_interval(0.95)), rel=1e-6, abs=1e-9
    )
    if abs(expected.pvalue - 0.05) > 1e-6:
        assert ("within" in found.verdict) == (expected.pvalue > 0.05)


def test_errors_are_compared_in_percent_of_the_base_mode():
    found = compare_errors([200.0, 100.0, 50.0], [202.0, 102.0, 51.5])
    assert found.differences == pytest.approx((0.01, 0.02, 0.03))
    assert "+2.00 ± 1.00 % of perplexity" in found.to_text()
    assert found.verdict == "within seed noise" and found.to_dict()["relative"]
    lower = compare_errors([200, 100, 50], [198, 98.9, 49.55]).verdict
    assert lower.startswith("lower than float32 by 0.") and lower.endswith(" %")
    missing = compare_errors([0.0, 1.0], [0.1, 1.5])  # Nothing is a percentage of 0.
    assert missing.differences == (None, 0.5) and "seed 0" in missing.verdict


# Score, that of a constant answer, examples, whether it is an error; at chance?
CHANCE = {
    "a constant answer": (0.525, 0.525, 598, False, True),
    "below": (0.1, 0.525, 598, False, True),
    "within two standard errors": (0.565, 0.525, 598, False, True),
    "better": (0.567, 0.525, 598, False, False),
    "better, of many": (0.535, 0.525, 60_000, False, False),
    "of no known number": (0.526, 0.525, -2, False, False),
    "nothing is known": (0.1, None, 598, False, False),
    "not finite": (None, 0.5, 598, False, False),
    "a correlation": (0.0, 0.0, 598, False, True),
    "an error": (0.4, 0.5, 598, True, False),
    "an error of a mean": (0.5, 0.5, 598, True, True),
    "no fraction": (60.0, 50.0, 10, False, False),
}


@pytest.mark.parametrize(
    ("score", "chance", "examples", "is_error", "expected"), CHANCE.values(), ids=CHANCE
)
def test_score_is_at_chance_up_to_two_standard_errors(
    score, chance, examples, is_error, expected
):
    assert results.at_chance(score, chance, examples, is_error) == expected
