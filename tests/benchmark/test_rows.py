"""Rows of the report, from what the processes measured."""

import pytest

from tfamp.benchmark import records, rows

BASE = records.Cell("task", "tfamp", "float32", 8, False)
MIXED = BASE._replace(mode="mixed_bfloat16")
TORCH = MIXED._replace(framework="torch")
CALIBRATED = records.Calibration({"float32": 1e11, "bfloat16": 2e11}, {}, 1e9)


def figures(seconds, **changes):
    plain = {
        **{"seconds": seconds, "losses": [1.0] * len(seconds), "metric": None},
        **{"first_step_seconds": 2.5, "metric_name": "", "loss_scales": []},
        **{"loss_scale": None, "skipped_steps": None, "host_bytes": 100},
        **{"device_bytes": None, "tensor_float_32": False, "xla": False, "note": "n"},
        **{"unit": "images", "pipeline_seconds": 0.01, "batches_per_step": 1},
        **{"kernels": None, "operations": None},
    }
    return plain | changes


def summarize(measured, failures=None, calibrated=CALIBRATED, dropout=0.0):
    cells, rates = list(measured), {"task": dropout}
    return rows.summarize(cells, measured, failures or {}, calibrated, rates)


def test_step_is_over_all_repeats_and_throughput_follows():
    found = {0: figures([0.1, 0.2, 0.3]), 1: figures([0.4, 0.5])}
    (row,) = summarize({BASE: found})
    assert row.step_ms == pytest.approx((300, 200, 400))
    assert row.throughput == pytest.approx((8 / 0.3, 8 / 0.4, 8 / 0.2))
    assert row.repeats == 2 and row.unit == "images"


def test_compile_time_is_the_first_step_without_a_step():
    (row,) = summarize({BASE: {0: figures([0.5, 0.5])}})
    assert row.compile_seconds == pytest.approx(2.0)
    (row,) = summarize({BASE: {0: figures([0.5], first_step_seconds=0.4)}})
    assert row.compile_seconds == 0


def test_speed_up_is_of_repeats_that_stood_next_to_each_other():
    base = {0: figures([1.0]), 1: figures([2.0]), 2: figures([4.0])}
    mixed = {0: figures([0.5]), 1: figures([0.8]), 3: figures([0.1])}
    first, second = summarize({BASE: base, MIXED: mixed})
    assert first.speed_up == (1.0, 1.0, 1.0)
    assert second.speed_up == pytest.approx((2.25, 2.0, 2.5))


def test_speed_up_needs_float32_of_the_same_task_and_batch_size():
    other = MIXED._replace(batch_size=16)
    found = summarize({BASE: {0: figures([1.0])}, other: {0: figures([1.0])}})
    assert found[1].speed_up is None and found[1].parity.verdict == ""


def test_peers_and_xla_are_compared_with_tfamps_float32_without_xla():
    xla = BASE._replace(xla=True)
    one = {0: figures([1.0])}
    found = summarize(
        {BASE: one, xla: {0: figures([0.5])}, TORCH: {0: figures([0.25])}}
    )
    assert [row.speed_up.median for row in found] == [1.0, 2.0, 4.0]


def test_tf32_is_a_base_of_its_own():
    tf32 = BASE._replace(mode="tf32")
    found = summarize(
        {cell: {0: figures([s])} for cell, s in ((BASE, 4.0), (tf32, 2.0), (MIXED, 1))}
    )
    assert [row.speed_up_over_tf32.median for row in found] == [0.5, 1.0, 2.0]


def test_share_of_the_input_is_of_a_batch():
    found = {0: figures([0.1], pipeline_seconds=0.02, batches_per_step=4)}
    (row,) = summarize({BASE: found})
    assert row.pipeline_share == pytest.approx(0.8)
    assert row.throughput.median == pytest.approx(4 * 8 / 0.1)
    (row,) = summarize({BASE: {0: figures([0.1], pipeline_seconds=None)}})
    assert row.pipeline_share is None


def test_operations_of_one_cell_are_those_of_its_shape():
    counted = {"flops": 1e9, "elements": 1e7, "uncounted": []}
    kernels = {"matrix_share": 0.6, "others": [["Adam", 0.2]], "reason": ""}
    base, mixed, torch, other = summarize(
        {
            BASE: {0: figures([0.1], operations=counted), 1: figures([0.1])},
            MIXED: {0: figures([0.05], kernels=kernels), 1: figures([0.05])},
            TORCH: {0: {**figures([0.05]), "kernels": None}},
            BASE._replace(batch_size=16): {0: figures([0.1])},
        }
    )
    assert base.distance.flops_per_second == pytest.approx(1e10)
    assert base.distance.peak_share == pytest.approx(0.1)
    assert base.distance.intensity == 25 and mixed.distance.intensity == 50
    assert base.distance.attainable == 25e9  # Memory is the limit.
    assert mixed.distance.matrix_share == 0.6
    assert mixed.distance.others == (("Adam", 0.2),)
    assert torch.distance.flops == 1e9 and torch.distance.matrix_share is None
    assert other.distance is None


def test_without_a_calibration_there_is_no_share_of_the_peak():
    counted = {"flops": 1e9, "elements": 1e7, "uncounted": []}
    found = {BASE: {0: figures([0.1], operations=counted)}}
    (row,) = summarize(found, calibrated=records.Calibration(failed="no"))
    assert (row.distance.peak, row.distance.peak_share) == (None, None)
    assert row.distance.attainable is None and row.distance.flops_per_second


def test_cell_without_figures_has_its_reason_and_one_with_some_has_those():
    found = summarize(
        {BASE: {}, MIXED: {0: figures([1.0])}}, {BASE: "no memory", MIXED: "no memory"}
    )
    assert (found[0].failed, found[0].step_ms) == ("no memory", None)
    assert (found[1].failed, found[1].repeats) == ("", 1)


def test_memory_and_skipped_steps_are_the_most_and_the_scale_the_last():
    found = {
        0: figures([1.0], host_bytes=5, skipped_steps=3, loss_scale=8.0),
        1: figures([1.0], host_bytes=7, skipped_steps=1, loss_scale=4.0),
    }
    (row,) = summarize({BASE: found})
    assert (row.host_bytes, row.skipped_steps, row.loss_scale) == (7, 3, 4.0)
    assert row.memory == 7
    (row,) = summarize({BASE: {0: figures([1.0], device_bytes=3)}})
    assert row.memory == 3


def test_units_of_a_task_are_those_of_pytorch_too():
    torch = figures([0.1])
    del torch["unit"]
    found = summarize({BASE: {0: figures([0.1])}, TORCH: {0: torch}})
    assert [row.unit for row in found] == ["images", "images"]


@pytest.mark.parametrize(("dropout", "verdict"), [(0.0, "unexplained"), (0.3, "noise")])
def test_dropout_masks_are_noise_that_the_other_cells_tell_of(dropout, verdict):
    """One cell's seeds agree by chance; those of the others tell of the masks."""

    def losses(*values):
        return {seed: figures([0.1], losses=[v]) for seed, v in enumerate(values)}

    steady = losses(1.011, 1.010, 1.012)
    *_, rewrite, torch = summarize(
        {
            BASE: losses(1.0, 1.0, 1.0),
            BASE._replace(framework="keras"): losses(1.0, 1.0, 1.0),
            MIXED: losses(1.03, 0.96, 1.01),
            BASE._replace(xla=True): losses(1.02, 0.98, 0.96),
            BASE._replace(mode="rewrite_bfloat16"): steady,
            TORCH: steady,
        },
        dropout=dropout,
    )
    assert torch.parity.verdict == verdict
    assert ("dropout masks" in torch.parity.explanation) == (dropout > 0)
    # It draws float32's own masks.
    assert rewrite.parity.verdict == "explained"
    assert "dropout" not in rewrite.parity.explanation
