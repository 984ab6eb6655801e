"""A made-up report with everything in it, for tests of what shows reports."""

import math

from tfamp.benchmark import records

GIB = 2**30


def make_parity(loss, difference=None, verdict="noise", text="Within seed noise."):
    interval = None if difference is None else (difference - 0.02, difference + 0.02)
    return records.Parity(
        *(loss, difference, interval, "accuracy", 0.9, difference and -difference / 10),
        *(interval, verdict, text),
    )


def make_row(task, framework, mode, xla=False, speed=1.0, **changes):
    step = 40.0 / speed
    rate = 32e3 / step
    losses = {
        str(seed): [2.3 * math.exp(-i / 12) + 0.02 * seed / speed for i in range(30)]
        for seed in range(3)
    }
    scaled = mode.endswith("float16") and not mode.endswith("bfloat16")
    row = records.Row(
        *(task, framework, mode, 32, xla),
        unit="images",
        repeats=3,
        step_ms=records.Spread(step, 0.95 * step, 1.1 * step),
        throughput=records.Spread(rate, rate / 1.1, rate / 0.95),
        speed_up=records.Spread(speed, 0.94 * speed, 1.05 * speed),
        compile_seconds=2.1,
        host_bytes=int(0.8 * GIB),
        pipeline_share=0.03,
        parity=make_parity(0.31),
        distance=records.Distance(
            *(2.0e9, 2.0e9 / step * 1e3, records.format_of(mode)),
            *(1.5e11, 2.0e9 / step * 1e3 / 1.5e11, 40.0, 1.5e11, 0.7),
            others=(("Adam", 0.1), ("MaxPoolGrad", 0.08)),
        ),
        loss_scale=2.0**14 if scaled else None,
        skipped_steps=1 if scaled else None,
        tensor_float_32=mode != "float32",
        xla_in_force=xla,
        note=f"{mode}: asked for",
        losses=losses,
        repeat_ms=dict.fromkeys(losses, step),
        loss_scales=(
            {seed: [2.0**15] * 9 + [2.0**14] * 21 for seed in losses} if scaled else {}
        ),
    )
    return row._replace(**changes)


def make_rows():
    base = make_parity(0.30, 0.0, "base", "The base.")
    for task in ("digits", "bert <small> & co"):
        yield make_row(task, "tfamp", "float32", parity=base)
        yield make_row(task, "tfamp", "mixed_bfloat16", speed=1.7, host_bytes=GIB // 2)
        yield make_row(task, "tfamp", "mixed_float16", speed=0.6)
        yield make_row(task, "tfamp", "rewrite_bfloat16", speed=1.4)
        yield make_row(task, "tfamp", "float32", xla=True, speed=0.8)
        yield make_row(task, "keras", "mixed_bfloat16", speed=1.2)
        yield make_row(task, "torch", "mixed_bfloat16", speed=1.1)
        yield records.Row(
            *(task, "tfamp", "mixed_bfloat16", 65536, False),
            unit="images",
            failed="MemoryError: 1,600 MiB resident, <script>alert(1)</script>",
        )


def make_accuracy():
    runs, rows = [], []
    for mode, step in (("float32", 2.0), ("mixed_bfloat16", 1.3)):
        for seed in range(3):
            points = tuple(
                (1.5 + step * (i + 1), 1 - 0.5 * math.exp(-(i + seed / 3) / 2))
                for i in range(8)
            )
            reached = next(i for i, (_, y) in enumerate(points) if y >= 0.95)
            runs.append(
                records.AccuracyRun(
                    *("digits", mode, seed, points, 1.5, points[reached][0]),
                    *(reached + 1, 0.97),
                )
            )
        ratio = None if mode == "float32" else (1.42, 1.21, 1.66)
        rows.append(
            records.AccuracyRow(
                *("digits", mode, "accuracy", 0.95, 3, 3),
                *(records.Spread(11.0, 10.0, 12.0), records.Spread(9.5, 8.5, 10.5)),
                *(5.0, ratio, ratio, 0.97),
            )
        )
    return tuple(runs), tuple(rows)


def make_report(**changes):
    runs, rows = make_accuracy()
    report = records.Report(
        name="sample <b>",
        command="python scripts/benchmark.py",
        date="2026-11-22",
        advice=records.Advice(
            "Use mixed_bfloat16 on this machine: 1.7 times as fast as float32.",
            ("Losses differ by no more than those of two seeds.", "a < b & c"),
            ("mixed_float16: <b>0.60x</b>.",),
        ),
        rows=tuple(make_rows()),
        accuracy_runs=runs,
        accuracy_rows=rows,
        calibration=records.Calibration(
            {"float32": 1.0e11, "bfloat16": 2.0e11, "float16": 5.0e10},
            {name: (2048, 2048, 2048) for name in ("float32", "bfloat16", "float16")},
            *(1.8e10, 3 * 2**28, 3200.0, "AMD EPYC"),
        ),
        tasks={"digits": "digits", "bert <small> & co": "a small BERT"},
        settings={"steps": 20, "warmup": 10, "repeats": 3, "seed": 0},
        notes=("A note with <i>markup</i>.",),
        machine={
            "device": "AMD EPYC",
            "facts": {"tensorflow": "2.21.0", "keras": "3.15.1", "CPU cores": "2"},
        },
        peers={"torch": "2.13.0"},
        clocks="CPU 3,200 MHz",
    )
    return report._replace(**changes)
