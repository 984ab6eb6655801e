"""The benchmark jobs of the training scripts: which cells, and NVIDIA's tables."""

import helpers
import pytest

from tfamp.commands import benchmark_jobs
from tfamp.measuring.benchmark import cells, report
from tfamp.recipes import images, text_classification
from tfamp.runs import base_config

MACHINE = {"machine": "a CPU", "versions": {}, "date": "2026-11-22"}


FIELDS = {"name": "tiny", "data__name": "digits", "data__image_size": 8}


def make_config(**fields):
    given = {**FIELDS, "precision__mode": "mixed_bfloat16", **fields}
    return helpers.configured(images, **given)


def make_texts():
    config = helpers.configured(text_classification, data__sequence_length=16)
    return base_config.apply_tiny(config)


def plan(config, **fields):
    return [
        cell[2:] for cell in benchmark_jobs.plan(config, {"job": "train", **fields})
    ]


def test_cells_by_default_are_those_of_the_configuration():
    assert plan(make_config(float32__batch_size=24)) == [
        ("float32", 24, None, "auto"),
        ("mixed_bfloat16", 32, None, "auto"),
    ]


def test_cells_are_all_combinations_with_the_modes_next_to_each_other():
    found = plan(
        make_texts(),
        modes=("float32", "mixed_float16"),
        batch_sizes=(8, 16),
        sequence_lengths=(16, 32),
        jit=("off", "on"),
    )
    assert found[:2] == [("float32", 8, 16, "off"), ("mixed_float16", 8, 16, "off")]
    assert len(found) == len(set(found)) == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data__name": "unheard_of"}, "unheard_of"),  # No cell could build it.
        ({"modes": ("fp16",)}, "some of 'float32'"),
        ({"jit": ("maybe",)}, "some of 'auto'"),
        ({"batch_sizes": (0,)}, "at least 1"),
        ({"sequence_lengths": (8,)}, "Only texts have a sequence length"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    name = fields.pop("data__name", "digits")
    with pytest.raises(ValueError, match=message):
        plan(make_config(data__name=name), **fields)


def test_folder_does_not_depend_on_what_no_cell_uses():
    one, other = make_config(), make_config(epochs=7, data_dir="/elsewhere")
    few = {"job": "train"}
    many = {**few, "batch_sizes": (8,), "modes": ("tf32",), "repeats": 5}
    assert benchmark_jobs.identity(one, few) == benchmark_jobs.identity(other, many)
    assert benchmark_jobs.identity(one, few) != benchmark_jobs.identity(
        one, {**few, "steps": 7}
    )


# ---- The tables ----


def figures(seconds, **changes):
    return {
        **{"seconds": seconds, "losses": [2.0] * len(seconds), "examples": 8},
        **{"first_step_seconds": 1.5, "skipped_steps": None, "loss_scale": None},
        **{"host_bytes": 2**30, "device_bytes": None, "xla": False, "note": ""},
        **{"tensor_float_32": False, "unit": "images", "description": "net"},
        **{"parameters": 7, "outputs": None, **changes},
    }


def test_tables_are_laid_out_as_the_published_ones():
    settings = {"job": "train", "modes": ("float32", "tf32", "mixed_bfloat16")}
    measured = {
        cells.Cell("tiny", "tfamp", mode, size): dict.fromkeys(range(3), each)
        for mode, size, each in (
            ("float32", 8, figures([0.1] * 3)),
            ("tf32", 8, figures([0.08] * 3)),
            ("mixed_bfloat16", 16, figures([0.1] * 9 + [0.2], examples=16)),
        )
    }
    config = benchmark_jobs._benchmark(make_config(), **settings)
    base, tf32, mixed = benchmark_jobs.published(
        report.make(config, measured, {}, (), MACHINE, ())
    )
    assert mixed["batch size (mode, TF32)"] == "16, 8" and mixed["GPU/CPU"] == "a CPU"
    assert mixed["throughput mode (images/s)"] == "160.00"
    assert mixed["throughput TF32 (images/s)"] == "100.00"
    assert mixed["speed-up"] == "1.60x (1.60 to 1.60)"
    assert base["speed-up"] == "0.80x (0.80 to 0.80)" and tf32["error"] == "the base"
    assert "throughput FP32 (images/s)" not in mixed
    assert mixed["error"] == "not compared"  # Batches of other sizes.
    assert mixed["latency average (ms)"] == "110.0"
    assert mixed["latency 90 % (ms)"] == "110.0"
    assert mixed["latency 100 % (ms)"] == "200.0"
    assert base["error"] == "+0.00 % (+0.00 to +0.00), equal"
    assert "sequence length" not in tf32
