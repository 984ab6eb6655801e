"""The error column: verdicts and their reasons."""

import pytest

from tfamp import formats
from tfamp.benchmark import parity, records

BASE = records.Cell("task", "tfamp", "float32", 8, False)
MIXED = BASE._replace(mode="mixed_bfloat16")
SEED_LOSSES = {0: 1.0, 1: 1.2, 2: 0.9}


def figures(loss, metric=0.9, skipped=None, metric_name="accuracy", warmup=(9.0,)):
    steps = loss if isinstance(loss, list) else [loss, loss]
    return {
        "losses": [*warmup, *steps],
        "seconds": [0.1] * len(steps),
        "metric": metric,
        "metric_name": metric_name,
        "loss_scales": [] if skipped is None else [1.0],
        "skipped_steps": skipped,
    }


def compare(factors, cell=MIXED, **fields):
    """Of losses that are float32's times a factor for each seed."""
    base = {seed: figures(loss) for seed, loss in SEED_LOSSES.items()}
    found = {
        seed: figures(SEED_LOSSES[seed] * factor, **fields)
        for seed, factor in enumerate(factors)
    }
    return parity.compare(cell, base, found)


def test_base_is_what_the_others_are_compared_with():
    found = parity.compare(BASE, {}, {0: figures(1.0), 1: figures(3.0)})
    assert (found.verdict, found.loss, found.loss_difference) == ("base", 2.0, 0.0)
    assert (found.metric_name, found.metric) == ("accuracy", 0.9)


def test_equal_losses_are_equal():
    found = compare([1.0, 1.0, 1.0])
    assert found.verdict == "equal" and found.loss_difference == 0


def test_difference_with_an_interval_around_zero_is_noise():
    found = compare([1.05, 0.96, 1.01])
    assert found.verdict == "noise"
    assert found.loss_difference == pytest.approx(0.0067, abs=1e-4)
    low, high = found.loss_interval
    assert low < 0 < high
    assert "interval contains 0" in found.explanation


def test_only_timed_steps_count():
    base = {0: figures(1.0, warmup=(5.0,))}
    found = parity.compare(MIXED, base, {0: figures(1.0, warmup=(7.0,))})
    assert found.verdict == "equal"


BFLOAT16_ROUNDING = formats.float_format("bfloat16").epsilon / 2


@pytest.mark.parametrize(
    ("cell", "size", "fields", "verdict", "words"),
    [
        (MIXED, 0.9 * BFLOAT16_ROUNDING, {}, "explained", "One rounding of bfloat16"),
        (MIXED, 1.5 * BFLOAT16_ROUNDING, {}, "unexplained", "No known cause"),
        (
            MIXED._replace(mode="rewrite_bfloat16"),
            *(3 * BFLOAT16_ROUNDING, {}, "explained", "mean of the loss"),
        ),
        (
            MIXED._replace(mode="mixed_float16"),
            *(0.2, {"skipped": 1}, "explained", "1 steps were skipped"),
        ),
        (
            MIXED._replace(mode="mixed_float16"),
            *(3.0, {"skipped": 1}, "unexplained", "No known cause"),
        ),
        (
            MIXED._replace(mode="mixed_float16"),
            *(0.2, {"skipped": 0}, "unexplained", "No known cause"),
        ),
        (BASE._replace(xla=True), 5e-4, {}, "explained", "another order"),
        (BASE._replace(xla=True), 5e-3, {}, "unexplained", "No known cause"),
        (
            MIXED._replace(framework="keras"),
            *(0.2, {}, "unexplained", "sums bias gradients in bfloat16"),
        ),
    ],
    ids=[
        "a rounding",
        "more than a rounding",
        "rewrite",
        "skipped steps",
        "more than they can cost",
        "no skipped steps",
        "order of sums",
        "more than that",
        "plain Keras",
    ],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["higher", "lower"])
def test_difference_above_the_noise_has_a_cause_or_none(
    cell, size, fields, verdict, words, sign
):
    factors = [1 + sign * size * f for f in (0.99, 1.0, 1.01)]
    found = compare(factors, cell, **fields)
    assert (found.verdict, words in found.explanation) == (verdict, True)
    side = "higher" if sign > 0 else "lower"
    assert "Above the noise" in found.explanation and side in found.explanation
    assert found.loss_difference == pytest.approx(sign * size)


def test_one_seed_shows_no_noise():
    found = compare([1.5])
    assert found.verdict == "one seed" and found.loss_interval is None
    assert "One seed shows no noise" in found.explanation


@pytest.mark.parametrize(
    ("mode", "words"),
    [("mixed_float16", "65,504"), ("mixed_bfloat16", "from step 3 on")],
)
def test_loss_that_is_not_finite_is_told_with_its_step(mode, words):
    found = parity.compare(
        MIXED._replace(mode=mode),
        {0: figures(1.0)},
        {0: figures([1.0, None]), 1: figures(1.0)},
    )
    assert found.verdict == "broken" and found.loss is None
    assert words in found.explanation


def test_nothing_to_compare_with_is_said():
    found = parity.compare(MIXED, {}, {0: figures(2.0)})
    assert (found.verdict, found.loss, found.loss_difference) == ("", 2.0, None)
    broken = parity.compare(MIXED, {0: figures([None, 1.0])}, {0: figures(2.0)})
    assert broken.verdict == "" and "no finite loss of tfamp's" in broken.explanation


def test_metric_is_compared_in_points_where_both_have_it():
    assert compare([1.0, 1.0, 1.1], metric=0.88).metric_difference == (
        pytest.approx(-0.02)
    )
    other = compare([1.0, 1.0, 1.1], metric_name="")
    assert (other.metric_name, other.metric_difference) == ("", None)


def test_rows_are_safe_unless_their_loss_is_lost_or_not_explained():
    known = ("base", "equal", "noise", "explained")
    verdicts = (*known, "unexplained", "one seed", "broken", "")
    rows = [
        records.Row(*MIXED, parity=compare([1.0])._replace(verdict=verdict))
        for verdict in verdicts
    ]
    assert [parity.is_safe(row) for row in rows] == [True] * 4 + [False] * 4
    assert not parity.is_safe(records.Row(*MIXED, failed="no"))


def test_masks_are_pooled_over_cells_without_their_means():
    base = {seed: figures(1.0) for seed in range(3)}
    shifted = [
        {seed: figures(mean + d) for seed, d in enumerate((-0.01, 0.0, 0.01))}
        for mean in (1.0, 1.5)
    ]
    found = parity.pool(base, shifted)
    assert found == (pytest.approx(0.01), 4)
    assert found.reach(4) == pytest.approx(2.776 * 0.01 / 2, rel=1e-3)
    assert parity.pool(base, [{0: figures(1.2)}]) is None


def test_masks_explain_no_more_than_they_reach():
    cell, masks = MIXED._replace(framework="torch"), parity.Masks(0.01, 20)
    base = {seed: figures(loss) for seed, loss in SEED_LOSSES.items()}
    for shift, verdict in ((0.011, "noise"), (0.02, "unexplained")):
        found = {
            seed: figures(loss * (1 + shift * factor))
            for (seed, loss), factor in zip(
                SEED_LOSSES.items(), (0.99, 1.0, 1.01), strict=True
            )
        }
        compared = parity.compare(cell, base, found, masks)
        assert compared.verdict == verdict


def test_cells_with_float32s_own_masks_are_of_one_stream():
    streams = {
        cell: parity.mask_stream(cell)
        for cell in (
            BASE,
            BASE._replace(framework="keras"),
            BASE._replace(mode="rewrite_bfloat16"),
            MIXED,
            MIXED._replace(mode="mixed_float16"),
            MIXED._replace(framework="keras"),
            MIXED._replace(framework="torch"),
            BASE._replace(framework="torch"),
            MIXED._replace(xla=True),
        )
    }
    assert list(streams.values()) == [
        *["float32"] * 3,
        *["fused"] * 2,
        "keras mixed_bfloat16",
        *["torch"] * 2,
        "XLA",
    ]
