"""A benchmark's tables from fixed measurements: layout, medians, errors, failures."""

import pytest

from tfamp.training import benchmark_cell, benchmark_figures, benchmark_report


def make_cell(mode, job="train", length=128):
    return benchmark_cell.Cell(job, mode, 8, length, "auto")


def measured(*seconds, **fields):
    defaults = {
        "batches_per_step": 1,
        "first_step_seconds": 3.0,
        "loss": 0.7,
        "skipped_steps": None,
        "loss_scale": None,
        "tensor_float_32": False,
        "xla": False,
        "host_bytes": 2**30,
        "device_bytes": None,
    }
    return {"seconds": list(seconds), **defaults, **fields}


TRAINING = {
    # Two repeats: medians 0.2 and 0.25 seconds a step, 0.4 in all but one.
    make_cell("float32"): [measured(0.2, 0.2, 0.4), measured(0.25, 0.25, 0.3)],
    make_cell("mixed_float16"): [
        measured(0.1, 0.1, loss=0.71, skipped_steps=1, loss_scale=16384.0, xla=True),
        measured(0.1, 0.1, loss=0.71, skipped_steps=0, loss_scale=16384.0, xla=True),
    ],
}
OUTPUTS = {
    # Medians 0.1 and 0.09, averages 0.2 and 0.08 seconds a step.
    make_cell("float32", "inference"): [
        measured(0.1, 0.1, 0.4, loss=None, outputs=[1.0, -2.0])
    ],
    make_cell("mixed_bfloat16", "inference"): [
        measured(0.09, 0.09, 0.06, loss=None, outputs=[1.01, -2.0])
    ],
}


def make_report(cells, failures=None, unit="sequences"):
    rows = benchmark_figures.summarize(
        [*cells, *(failures or ())], cells, failures or {}
    )
    job = next(iter(cells)).job
    machine = {"device": "A CPU"}
    return benchmark_report.Report("tiny", job, unit, {}, rows, ["a note"], machine)


def test_throughput_is_the_median_over_repeats_of_the_median_step():
    base, mixed = make_report(TRAINING).rows
    assert base.throughput == pytest.approx((8 / 0.2 + 8 / 0.25) / 2)
    assert base.throughput_average == pytest.approx(8 / (1.6 / 6))
    assert base.throughput_range == pytest.approx((32, 40))
    assert base.latency_ms["50"] == pytest.approx(250)
    assert base.latency_ms["100"] == pytest.approx(400)
    assert mixed.speed_up == pytest.approx(80 / 36)
    assert mixed.error == pytest.approx(0.01)
    assert mixed.skipped_steps == 1


def test_step_of_several_batches_counts_them_all():
    cells = {
        make_cell(mode): [measured(0.4, 0.4, 0.8, batches_per_step=4)]
        for mode in ("float32", "mixed_float16")
    }
    row = make_report(cells).rows[1]
    assert row.throughput == pytest.approx(4 * 8 / 0.4)
    assert row.throughput_average == pytest.approx(4 * 8 / (1.6 / 3))


def test_training_table_is_laid_out_as_the_published_ones():
    first, rest = make_report(TRAINING).tables()
    assert first == [
        [
            "GPU/CPU",
            "sequence length",
            "batch size (mode, FP32)",
            "mode",
            "XLA",
            "throughput mode (sequences/s)",
            "throughput FP32 (sequences/s)",
            "speed-up",
            "loss minus FP32's",
        ],
        [
            *("A CPU", "128", "8, 8", "mixed_float16", "on"),
            *("80.00", "36.00", "2.22", "+0.01"),
        ],
    ]
    cells = dict(zip(rest[0], rest[2], strict=True))
    assert cells["latency 95 % (ms)"] == "100.0"
    assert (cells["skipped steps"], cells["loss scale"]) == ("1", "16384")
    assert cells["host memory (GiB)"] == "1.00"
    assert "device memory (GiB)" not in cells  # Nothing to say.


def test_failed_cell_of_the_same_shapes_is_not_replaced_by_another():
    cells = {
        make_cell("float32"): [measured(0.2)],
        make_cell("mixed_float16")._replace(batch_size=16): [measured(0.2)],
    }
    alone = make_report(cells).rows[1]
    assert alone.speed_up == pytest.approx(2)
    failed = {make_cell("float32")._replace(batch_size=16): "out of memory"}
    assert make_report(cells, failed).rows[1].speed_up is None


def test_inference_table_has_the_published_columns_and_the_error():
    first, _ = make_report(OUTPUTS).tables()
    assert first[0] == [
        *("sequence length", "batch size", "precision", "XLA"),
        "throughput avg (sequences/s)",
        *(f"latency {x} (ms)" for x in ("avg", "50 %", "90 %", "95 %", "99 %")),
        *("speed-up", "output error"),
    ]
    assert [row[4] for row in first[1:]] == ["40.00", "100.00"]
    assert first[2][-2:] == ["2.50", "0.005"]  # The quotient of what is shown.


def test_speed_up_over_tf32_is_shown_where_it_was_measured():
    cells = {**TRAINING, make_cell("tf32"): [measured(0.16), measured(0.16)]}
    first, _ = make_report(cells).tables()
    by_mode = {row[3]: dict(zip(first[0], row, strict=True)) for row in first[1:]}
    assert by_mode["mixed_float16"]["speed-up over TF32"] == "1.60"
    assert by_mode["tf32"]["speed-up"] == "1.39"
    column = "throughput TF32 (sequences/s)"
    assert by_mode["mixed_float16"][column] == "50.00"
    assert by_mode["tf32"][column] == "-"


@pytest.mark.parametrize(
    ("base", "loss", "shown"),
    [(True, None, "not finite"), (False, 0.7, "no FP32")],
    ids=["not finite", "no float32"],
)
def test_speed_up_never_stands_without_its_error(base, loss, shown):
    cells = {make_cell("mixed_float16"): [measured(0.1, loss=loss)]}
    if base:
        cells[make_cell("float32")] = [measured(0.2)]
    first, _ = make_report(cells).tables()
    assert first[1][-1] == shown


def test_failed_cell_is_a_line_with_its_reason_and_the_rest_is_shown():
    failed = make_cell("mixed_bfloat16")
    report = make_report(TRAINING, {failed: "out of memory"})
    assert "- failed: mixed_bfloat16, batch 8, length 128, XLA auto: out of memory" in (
        report.to_markdown().splitlines()
    )
    assert report.to_dict()["rows"][2]["failed"] == "out of memory"
    assert len(report.tables()[1]) == 3


def test_nothing_but_failures_is_still_a_report():
    report = benchmark_report.Report(
        *("tiny", "train", "sequences", {}),
        benchmark_figures.summarize([make_cell("tf32")], {}, {make_cell("tf32"): "no"}),
        [],
        {"device": "A CPU"},
    )
    assert report.tables() == []
    assert "failed: tf32" in report.to_markdown()


def test_images_have_no_sequence_length():
    cell = make_cell("float32", length=None)
    report = make_report({cell: [measured(0.1)]}, unit="images")
    (table,) = report.tables()
    assert "sequence length" not in table[0]
    assert "median (images/s)" in table[0]


def test_markdown_is_aligned():
    lines = make_report(TRAINING).to_markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 7
    assert len({len(line) for line in table[:3]}) == 1
