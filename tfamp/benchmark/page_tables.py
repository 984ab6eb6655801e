"""The tables of the benchmark's page, and the lines below them."""

from collections.abc import Iterator, Sequence

from tfamp.benchmark import page_markup as markup
from tfamp.benchmark import records, side_by_side, words

_TONES = {
    **dict.fromkeys(("equal", "noise"), "good"),
    "explained": "fair",
    **dict.fromkeys(("unexplained", "broken"), "bad"),
}
_NO_EXPLANATION = "No explanation was recorded."


def badge(parity: records.Parity | None) -> markup.Markup:
    """Returns a verdict as a symbol and words, colored."""
    symbol, text = words.verdict(parity)
    tone = _TONES.get(parity.verdict if parity else "", "none")
    return _badge(symbol, text, tone)


def results(report: records.Report) -> Iterator[markup.Markup]:
    """Yields a table for each task, and what its losses have to be told about."""
    for task, rows in _by_task(report.rows).items():
        fastest = max((r.speed_up.median for r in rows if r.speed_up), default=1.0)
        names = {row.parity.metric_name for row in rows if row.parity}
        score = max(names, default="") or "score"
        lines = [
            _failed(row) if row.failed else _measured(row, fastest, score)
            for row in rows
        ]
        caption = _caption(task, report.tasks.get(task, ""))
        yield markup.table(f"Results of {task}", caption, lines)
        yield _explanations(rows)
        yield _beside_peers(report, task)


def _beside_peers(report, task):
    lines = side_by_side.table(report, task)
    if not lines:
        return markup.Markup()
    head, *body = lines
    caption = _caption(
        f"{task}: tfamp beside its peers",
        "The median step, and the loss beside float32's.",
    )
    rows = [dict(zip(head, line, strict=True)) for line in body]
    return markup.table(f"tfamp beside its peers, {task}", caption, rows)


def accuracy(report: records.Report) -> Iterator[markup.Markup]:
    """Yields the time to accuracy of each task, and the runs that failed."""
    for task, rows in _by_task(report.accuracy_rows).items():
        text = f"The target: {words.target(rows[0])} or better in validation."
        caption = _caption(task, text)
        lines = [_accuracy_line(row) for row in rows]
        yield markup.table(f"Time to accuracy of {task}", caption, lines, ["note"])
    failed = [
        f"{run.task}: {run.mode}, seed {run.seed} failed: {run.failed}"
        for run in report.accuracy_runs
        if run.failed
    ]
    yield markup.items(failed)


def distance(report: records.Report) -> Iterator[markup.Markup]:
    """Yields what the machine gives, and how near the cells of each task come."""
    yield from _calibration(report.calibration)
    rows = [row for row in report.rows if row.distance is not None and not row.failed]
    for task, group in _by_task(rows).items():
        lines = [_distance_line(row, row.distance) for row in group if row.distance]
        label = f"Distance from the limit of {task}"
        caption = _caption(task, "Matrix products and convolutions of a training step.")
        yield markup.table(label, caption, lines, ["what took the rest"])


def published(rows: Sequence[Sequence[str]]) -> markup.Markup:
    """Returns the figures of others.

    Args:
      rows: Cells, the head first.
    """
    head, *body = rows
    lines = [dict(zip(head, line, strict=True)) for line in body]
    table = markup.table("Published figures, not ours", "", lines, head)
    return markup.element("div", table, class_="narrow")


def _by_task(rows):
    return {
        task: [row for row in rows if row.task == task]
        for task in dict.fromkeys(row.task for row in rows)
    }


def _caption(task, about):
    return markup.join(markup.element("h3", task), markup.element("p", about))


def _badge(symbol, text, tone):
    mark = markup.element("span", symbol, aria_hidden="true")
    return markup.element("span", mark, " ", text, class_=f"badge {tone}")


def _what(row):
    """A row's head: in words, and as the command line spells it."""
    text = words.mode_in_words(row.cell)
    if row.xla and row.xla_in_force is False:
        text += " (asked for, not in force)"
    return _head(text, row.cell.column, f"batch {words.count(row.batch_size)}")


def _head(text, name, more=""):
    what = markup.element("span", text, class_="what")
    lines = [what, markup.element("code", name), markup.element("small", more)]
    return markup.join(*lines, separator=" ")


def _failed(row):
    reason = markup.join(_badge("✗", "failed", "bad"), " ", row.failed)
    return {
        "how it was trained": _what(row),
        "outcome": markup.element("div", reason, class_="reason"),
    }


def _measured(row, fastest, score):
    """Cells of a row. A speed-up has its error beside it."""
    parity = row.parity
    return {
        "how it was trained": _what(row),
        "speed-up": _speed_up(row.speed_up, fastest),
        "loss beside float32": _loss_difference(parity),
        f"{score} beside float32": _metric_difference(parity),
        "speed-up over TF32": _lines(words.speed_up(row.speed_up_over_tf32)),
        "mean loss": _loss(parity),
        "time of a step": _lines(words.milliseconds(row.step_ms)),
        "throughput": _lines(words.throughput(row.throughput, row.unit)),
        "peak memory": _memory(row),
        "loss scale": _loss_scale(row),
        "compile time": words.seconds(row.compile_seconds),
        "input share": words.percent(row.pipeline_share),
        **_shares(row.distance),
    }


def _lines(text):
    return text if text == words.NONE else markup.two_lines(text)


def _speed_up(value, fastest):
    if value is None:
        return words.NONE
    style = f"--share:{value.median / fastest:.3f};--one:{min(1 / fastest, 1):.3f}"
    bar = markup.element("span", class_="bar", style=style)
    return markup.join(markup.two_lines(words.speed_up(value)), bar)


def _loss_difference(parity):
    if parity is None:
        return badge(parity)
    text = words.difference(parity.loss_difference, parity.loss_interval)
    shown = [] if text == words.NONE else [markup.two_lines(text), " "]
    return markup.join(*shown, badge(parity))


def _metric_difference(parity):
    if parity is None:
        return words.NONE
    change, interval = parity.metric_difference, parity.metric_interval
    return _lines(words.difference(change, interval, "points"))


def _loss(parity):
    if parity is None or parity.verdict == "":
        return words.number(parity and parity.loss)
    return "not finite" if parity.loss is None else words.number(parity.loss)


def _memory(row):
    if row.memory is None:
        return words.NONE
    place = "host" if row.device_bytes is None else "device"
    return markup.two_lines(f"{words.gib(row.memory)} ({place})")


def _loss_scale(row):
    if row.loss_scale is None:
        return words.NONE
    text = f"{words.count(row.loss_scale)} ({words.count(row.skipped_steps)} skipped)"
    return markup.two_lines(text)


def _shares(distance):
    return {
        "of the machine's peak": words.percent(distance and distance.peak_share),
        "matrix work": words.percent(distance and distance.matrix_share),
    }


def _explanations(rows):
    """Explanations and the cells they are for, each said once."""
    groups: dict[tuple[str, str], list[records.Row]] = {}
    for row in rows:
        if row.parity is not None and row.parity.verdict != "base":
            key = row.parity.verdict, _reason(row.parity)
            groups.setdefault(key, []).append(row)
    lines = [_explanation(text, group) for (_, text), group in groups.items() if text]
    if not lines:
        return markup.Markup()
    head = markup.element("h4", "Why these losses differ")
    return markup.element("div", head, markup.items(lines), class_="why")


def _reason(parity):
    """Why a loss differs; nothing where that is the noise of the seeds."""
    if _TONES.get(parity.verdict) not in ("fair", "bad"):
        return ""
    return parity.explanation or _NO_EXPLANATION


def _explanation(text, group):
    names = "; ".join(row.cell.label.removeprefix(f"{row.task}: ") for row in group)
    return markup.join(
        badge(group[0].parity),
        " ",
        markup.prose(text),
        " ",
        markup.element("small", names),
    )


def _accuracy_line(row):
    cell = records.Cell(row.task, "tfamp", row.mode, 0, False)
    return {
        "how it was trained": _head(words.mode_in_words(cell), row.mode),
        "times as fast": _lines(words.ratio(row.ratio)),
        "test score": words.score(row.test_score, row.is_error),
        "time to target": _lines(words.spread(row.seconds, "s")),
        "without compilation": _lines(words.spread(row.without_first_step, "s")),
        "times as fast, without compilation": _lines(
            words.ratio(row.ratio_without_first_step)
        ),
        "epochs": words.number(row.epochs),
        "seeds that got there": f"{row.reached} of {row.seeds}",
        "note": row.note or words.NONE,
    }


def _calibration(found):
    if found.failed:
        yield markup.element("p", _badge("✗", "not measured", "bad"), " ", found.failed)
        return
    lines = [
        {"limit": name, "measured": words.flops(peak), "with": _product(found, name)}
        for name, peak in found.peaks.items()
    ]
    if found.bandwidth is not None:
        speed, size = words.bandwidth(found.bandwidth), words.gib(found.bandwidth_bytes)
        about = f"{size} read and written"
        lines.append({"limit": "memory", "measured": speed, "with": about})
    if not lines:
        return
    clock = found.clock_mhz
    about = found.device if clock is None else f"{found.device}, {clock:,.0f} MHz"
    caption = _caption("What this machine gives at most", about)
    table = markup.table("Measured limits", caption, lines, ["with"])
    yield markup.element("div", table, class_="narrow")


def _product(found, name):
    sizes = " x ".join(map(words.count, found.sizes.get(name, ())))
    return f"a matrix product of {sizes}" if sizes else words.NONE


def _distance_line(row, found):
    gained = found.attainable and found.flops_per_second / found.attainable
    others = [
        f"{name} {words.percent(share)}".replace(" ", "\N{NO-BREAK SPACE}")
        for name, share in found.others
    ]
    return {
        "how it was trained": _what(row),
        "work of a step": words.operations(found.flops),
        "achieved": words.flops(found.flops_per_second),
        "of the peak": words.percent(found.peak_share),
        "FLOP for each byte": words.number(found.intensity),
        "attainable": words.flops(found.attainable),
        "of attainable": words.percent(gained),
        "matrix work": words.percent(found.matrix_share),
        "what took the rest": ", ".join(others) or words.NONE,
    }
