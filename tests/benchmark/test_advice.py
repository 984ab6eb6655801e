"""What to use on a machine, and why."""

import re

import pytest
import samples

from tfamp.benchmark import advice, records

MACHINE = {
    "device": "AMD EPYC",
    "formats": [
        {
            **{"device": "AMD EPYC", "format": "bfloat16", "speed": "fast"},
            "reason": "native bfloat16",
        },
        {
            **{"device": "AMD EPYC", "format": "float16", "speed": "slow"},
            "reason": "up to 7 times slower",
        },
    ],
}


def rows_of(speeds, verdicts=None, task="digits"):
    """Rows of {(mode, xla): speed-up}, after float32."""
    base = samples.make_parity(0.3, 0.0, "base", "The base.")
    made = [samples.make_row(task, "tfamp", "float32", parity=base)]
    for (mode, xla), speed in speeds.items():
        verdict = (verdicts or {}).get(mode, "noise")
        own = samples.make_parity(0.3, 0.01, verdict, "Why.")
        made.append(samples.make_row(task, "tfamp", mode, xla, speed, parity=own))
    return made


def headline(rows):
    return advice.make(rows, (), MACHINE).headline


BFLOAT16, FLOAT16 = ("mixed_bfloat16", False), ("mixed_float16", False)


def test_fastest_mode_that_keeps_the_loss_is_advised():
    rows = rows_of({BFLOAT16: 1.7, FLOAT16: 0.5, ("rewrite_bfloat16", False): 1.4})
    text = headline(rows)
    assert text.startswith("Train in mixed_bfloat16 on this machine (AMD EPYC): 1.70")
    found = advice.make(rows, (), MACHINE)
    reasons, others = "\n".join(found.reasons), "\n".join(found.others)
    assert 'tfamp.enable("mixed_bfloat16")' in reasons
    assert "native bfloat16" in reasons
    repeats = "0.47 to 0.53 in the repeats of 1 workload"
    assert f"mixed_float16: 0.50x ({repeats}), slower than float32" in others
    assert "up to 7 times slower" in others


@pytest.mark.parametrize("verdict", ["unexplained", "broken"])
def test_fast_mode_with_another_loss_is_not_advised(verdict):
    rows = rows_of({BFLOAT16: 3.0, FLOAT16: 1.2}, {"mixed_bfloat16": verdict})
    found = advice.make(rows, (), MACHINE)
    assert found.headline.startswith("Train in mixed_float16")
    assert any("a loss that is not float32's" in other for other in found.others)


def test_small_gain_is_not_worth_a_change():
    text = headline(rows_of({BFLOAT16: 1.04, FLOAT16: 0.5}))
    assert text.startswith("Stay with float32") and "mixed_bfloat16: 1.04 " in text


def test_mode_whose_slowest_repeats_are_slower_than_float32_is_not_advised():
    rows = rows_of({BFLOAT16: 1.3})
    assert headline(rows).startswith("Train in mixed_bfloat16")
    noisy = rows[1]._replace(speed_up=records.Spread(1.3, 0.9, 1.9))
    assert headline([rows[0], noisy]).startswith("Stay with float32")


def test_mode_measured_on_one_of_two_tasks_is_not_the_advice():
    rows = rows_of({BFLOAT16: 1.7, ("mixed_bfloat16", True): 2.5})
    rows += rows_of({BFLOAT16: 1.5}, task="bert")
    text = headline(rows)
    assert "mixed_bfloat16 on this machine" in text and "XLA" not in text
    # The geometric mean, and how far the repeats reach: 0.94 and 1.05 of each.
    assert "1.60 times" in text and "(1.41 to 1.78 in the repeats of 2" in text


def test_xla_must_be_faster_by_more_than_noise():
    assert "XLA" not in headline(
        rows_of({BFLOAT16: 1.7, ("mixed_bfloat16", True): 1.75})
    )
    rows = rows_of({BFLOAT16: 1.7, ("mixed_bfloat16", True): 2.0})
    assert "with XLA" in headline(rows)
    assert any("jit_compile=True" in r for r in advice.make(rows, (), MACHINE).reasons)


def test_rewrite_is_asked_for_by_its_own_argument():
    rows = rows_of({("rewrite_bfloat16", False): 1.5})
    text = advice.make(rows, (), MACHINE).reasons[0]
    assert 'tfamp.enable("mixed_bfloat16", graph_rewrite=True)' in text


def test_without_another_mode_there_is_no_advice():
    assert "no other mode has figures" in headline(rows_of({}))
    failed = records.Row("digits", "tfamp", "tf32", 32, False, failed="not there")
    found = advice.make([failed], (), MACHINE)
    assert "float32 has no figures" in found.headline
    assert found.reasons == (
        "1 of 1 cells has no figures; each is a row with its reason.",
    )


@pytest.mark.parametrize("repeats", [1, 2])
def test_few_repeats_are_not_enough_for_advice(repeats):
    rows = [row._replace(repeats=repeats) for row in rows_of({BFLOAT16: 2.0})]
    found = advice.make(rows, (), MACHINE)
    assert found.headline.startswith("No advice") and "--config.repeats=3" in (
        found.headline
    )
    (other,) = found.others
    assert "mixed_bfloat16: 2.00x" in other and "too few repeats" in other


def test_mode_with_fewer_repeats_than_the_others_is_not_advised():
    rows = rows_of({BFLOAT16: 2.0, FLOAT16: 1.5})
    rows[1] = rows[1]._replace(repeats=1)
    assert headline(rows).startswith("Train in mixed_float16")


def test_noise_that_hides_anything_is_no_parity():
    rows = rows_of({BFLOAT16: 2.0})
    wide = rows[1].parity._replace(loss_interval=(-0.8, 1.2))
    found = advice.make([rows[0], rows[1]._replace(parity=wide)], (), MACHINE)
    assert found.headline.startswith("Stay with float32")
    assert found.others[0].endswith("its loss too noisy to tell (up to 120.0 %).")
    # 0.01 and 0.02 to each side.
    assert "beyond noise, at most 3.0 %" in headline(rows)


def test_fast_format_is_no_reason_for_a_slow_mode():
    found = advice.make(rows_of({BFLOAT16: 0.8, FLOAT16: 0.5}), (), MACHINE)
    first, second = found.others
    assert first.startswith("mixed_bfloat16") and first.endswith("than float32.")
    assert second.endswith("than float32 (float16: up to 7 times slower).")


def test_accuracy_alone_times_no_steps():
    assert "no steps were timed" in headline([])


def test_mode_that_is_slower_on_one_workload_is_not_advised():
    rows = rows_of({BFLOAT16: 4.0}) + rows_of({BFLOAT16: 0.8}, task="bert")
    assert headline(rows).startswith("Stay with float32")


@pytest.mark.parametrize(
    "changes",
    [{"reached": 0, "ratio": None}, {"ratio": (0.5, 0.45, 0.55)}],
    ids=["missed the target", "later"],
)
def test_mode_that_takes_longer_to_its_accuracy_is_not_advised(changes):
    _, accuracy = samples.make_accuracy()
    accuracy = [
        row._replace(**changes) if row.mode == "mixed_bfloat16" else row
        for row in accuracy
    ]
    found = advice.make(rows_of({BFLOAT16: 2.0}), accuracy, MACHINE)
    assert found.headline.startswith("Stay with float32")
    assert any("mixed_bfloat16 is not advised" in each for each in found.others)


def test_mode_measured_on_fewer_workloads_is_not_named_as_the_fastest():
    rows = rows_of({BFLOAT16: 1.01, ("mixed_bfloat16", True): 3.0})
    rows += rows_of({BFLOAT16: 1.01}, task="bert")
    assert "mixed_bfloat16: 1.01 times" in headline(rows)


def test_peers_memory_time_and_limit_are_told():
    report = samples.make_report()
    own = samples.make_parity(0.3, 0.01)
    rows = [r if r.failed else r._replace(parity=own) for r in report.rows]
    found = advice.make(rows, report.accuracy_rows, MACHINE)
    text = "\n".join(found.reasons)
    assert "plain Keras in the same mode: 1.42x (1.42 to 1.42) on digits" in text
    assert "plain Keras has in the same mode 1.20x (1.13 to 1.26) on digits" in text
    assert "PyTorch in the same mode: 1.55x" in text  # 1.7 / 1.1
    assert re.search(r"0.6[23] times float32's", text)  # 0.5 / 0.8 GiB.
    assert "sooner than float32 at 95.0 % accuracy: 1.42x (1.21 to 1.66)" in text
    equal = [
        r._replace(ratio=r.ratio and (1.1, 0.9, 1.3)) for r in report.accuracy_rows
    ]
    found = advice.make(rows, equal, MACHINE)
    assert any("no clear difference in the time" in each for each in found.reasons)
    assert "30.0 % of the kernels' time is no matrix work" in text
    assert "2 of 16 cells have no figures" in text
