"""Paired ratios and differences: the intervals are scipy's, of small samples none."""

import numpy as np
import pytest
from scipy import stats

from tfamp.measuring.benchmark import statistics

BASE = {0: 1.0, 1: 2.0, 2: 4.0, 3: 1.0}
OTHER = {0: 1.5, 1: 3.3, 2: 5.0, 3: 1.4}


def test_ratio_is_the_geometric_mean_with_a_paired_interval():
    found = statistics.ratio(BASE, OTHER)
    logs = np.log([OTHER[k] / BASE[k] for k in BASE])
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)))
    inverse = statistics.ratio(OTHER, BASE)
    assert 1 / inverse.mean == pytest.approx(found.mean)


def test_difference_is_of_the_same_repeats():
    found = statistics.difference(BASE, {**OTHER, 7: 100.0})
    changes = [OTHER[k] / BASE[k] - 1 for k in BASE]
    interval = stats.ttest_rel(
        [OTHER[k] / BASE[k] for k in BASE], [1.0] * 4
    ).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(changes)) and found.repeats == 4
    assert (found.low, found.high) == pytest.approx(tuple(interval))


def test_few_repeats_have_no_interval_and_none_no_mean():
    assert statistics.ratio({0: 1.0}, {0: 2.0}) == (2.0, None, None, 1)
    assert statistics.ratio({0: 1.0}, {1: 2.0}) is None
    equal = dict.fromkeys(range(3), 2.0)
    assert statistics.ratio(equal, equal) == (1.0, 1.0, 1.0, 3)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.0, 0.0, 0.0), "equal"),
        ((0.01, -0.01, 0.03), "within noise"),
        ((0.01, 0.005, 0.02), "higher"),
        ((-0.01, -0.02, -0.005), "lower"),
        ((0.01, None, None), "no interval"),
    ],
)
def test_verdict_says_what_the_interval_allows(interval, expected):
    assert statistics.judge(statistics.Estimate(*interval, 3)) == expected
    assert statistics.difference({0: 0.0}, {0: 1.0}) is None
