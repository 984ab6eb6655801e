"""Paired differences over seeds: the interval as SciPy has it, the verdict by rule."""

import json
import math

import hypothesis
import pytest
from hypothesis import strategies
from scipy import stats

from tfamp.training import (
    verdict,
)


def compare(base, other):
    """Compares scores of seeds 0, 1, ...; given in percent."""
    runs = [
        (mode, {seed: score / 100 for seed, score in enumerate(scores)})
        for mode, scores in (("float32", base), ("mixed_bfloat16", other))
    ]
    return verdict.compare("accuracy", *runs)


CASES = {
    # Base, other (percent), and how the verdict starts.
    "one seed": ([90], [80], "one seed shows no noise: use --seeds=3 or more"),
    "noise": ([90, 91, 92], [91, 90.5, 92.5], "within seed noise"),
    "lower": (
        [90, 91, 92, 93],
        [88.9, 90.1, 90.9, 92.1],
        "lower than float32 by 0.82 to 1.18 points",
    ),
    "higher": (
        [70, 71, 72, 73],
        [71.1, 71.9, 73.1, 73.9],
        "higher than float32 by 0.82 to 1.18 points",
    ),
    "equal": ([90, 91, 92], [90, 91, 92], "equal to float32 in each of the 3 seeds"),
    "the same step": (
        [90, 91, 92],
        [89, 90, 91],
        "no interval: -1.00 points in each of the 3 seeds",
    ),
    "small": (
        [90, 91, 92],
        [90.002, 91.0022, 92.0018],
        "higher than float32 by 0.0015 to 0.0025 points",
    ),
    "not finite": (
        [90, 91, 92],
        [90, math.nan, math.inf],
        "no verdict: the score of mixed_bfloat16 is not finite with seed 1, 2",
    ),
    "one, not finite": (
        [math.nan],
        [90],
        "no verdict: the score of float32 is not finite with seed 0",
    ),
    "two, noise": ([90, 91], [91, 91.5], "within seed noise (two seeds say little"),
    "two, lower": ([90, 91], [88, 88.99], "lower than float32 by 1.94 to 2.07 points"),
}


@pytest.mark.parametrize(("base", "other", "start"), CASES.values(), ids=CASES.keys())
def test_verdict_follows_the_rules(base, other, start):
    assert compare(base, other).verdict.startswith(start)


def test_texts_give_the_interval_and_the_scale_of_the_noise():
    found = compare([90, 91, 92], [91, 90.5, 92.5])
    # Differences 1.0, -0.5, 0.5; deviation 0.764; t = 4.303 for two degrees of freedom.
    assert found.to_text() == (
        "mixed_bfloat16 minus float32: +0.33 ± 0.76 points of accuracy (mean and "
        "deviation of 3 seeds), 95% interval -1.56 to +2.23"
    )
    assert found.to_verdict() == (
        "verdict on accuracy: within seed noise; float32 alone deviates by 1.00 points "
        "from seed to seed; the interval's half width, below which a mean difference "
        "counts as noise, is 1.90 points"
    )


def test_base_that_never_moves_has_no_deviation_to_tell_of():
    verdict = compare([90, 90], [90, 90]).to_verdict()
    assert "deviates" not in verdict


def test_difference_below_rounding_has_no_sign():
    assert "+0.00 points" in compare([90], [90 - 1e-7]).to_text()


def test_scores_that_are_not_finite_leave_no_number_but_the_other_differences():
    found = compare([90, 91], [math.nan, 90.5])
    assert found.differences == (None, pytest.approx(-0.005))
    assert found.to_text() == "mixed_bfloat16 minus float32: no mean of accuracy"
    assert found.to_verdict().endswith("is not finite with seed 0")
    assert "NaN" not in json.dumps(found.to_dict())


def test_one_seed_has_a_difference_and_no_interval():
    found = compare([90], [88])
    assert (found.deviation, found.interval, found.detectable) == (None, None, None)
    assert found.to_text() == "mixed_bfloat16 minus float32: -2.00 points of accuracy"


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


def errors(base, other):
    runs = (("float32", base), ("mixed_float16", other))
    runs = [(mode, dict(enumerate(scores))) for mode, scores in runs]
    return verdict.compare("perplexity", *runs, relative=True)


def test_errors_are_compared_in_percent_of_the_base_mode():
    found = errors([200.0, 100.0, 50.0], [202.0, 102.0, 51.5])
    assert found.differences == pytest.approx((0.01, 0.02, 0.03))
    assert found.base_deviation == pytest.approx(stats.tstd([200, 100, 50]) / (350 / 3))
    assert "+2.00 ± 1.00 % of perplexity" in found.to_text()
    assert found.verdict == "within seed noise"
    assert "points" not in found.to_text() + found.to_verdict()
    assert found.to_dict()["relative"]
    lower = errors([200, 100, 50], [198, 98.9, 49.55])
    assert lower.verdict.startswith("lower than float32 by 0.")
    assert lower.verdict.endswith(" %")


def test_error_of_nothing_has_no_percentage():
    assert "is 0 with a seed" in errors([0.0, 1.0], [0.1, 1.0]).verdict
