"""The report as Markdown: every figure of the rows, texts that break no table."""

import pathlib
import re

import samples

from tfamp.benchmark import markdown, published, records, report_files


def test_speed_up_never_stands_without_its_error_column():
    report = samples.make_report()
    lines = markdown.main_table(report, "digits")
    head, _, *rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    place = head.index("speed-up")
    assert head[place + 1] == "loss - float32's"
    (mixed,) = [row for row in rows if row[:2] == ["mixed_bfloat16", "32"]]
    assert mixed[place] == "1.70x (1.60 to 1.78)"
    assert mixed[place + 1] == "within noise"
    assert all(row[place + 1] != "-" or row[place] == "failed" for row in rows)


def test_failed_cell_is_a_row_and_its_reason_a_line():
    text = markdown.to_markdown(samples.make_report(), [])
    assert re.search(r"\| mixed_bfloat16 +\| 65536 \| off +\| failed", text)
    assert "batch 65536: failed: MemoryError: 1,600 MiB resident" in text
    assert "<script>" not in text


def test_columns_that_say_nothing_are_left_out():
    rows = [r for r in samples.make_rows() if not r.mode.endswith("_float16")]
    lines = markdown.main_table(samples.make_report(rows=tuple(rows)), "digits")
    assert "loss scale" not in lines[0] and "speed-up" in lines[0]
    assert "loss scale" in markdown.main_table(samples.make_report(), "digits")[0]


def test_text_with_bars_and_line_ends_breaks_no_table():
    row = records.Row("digits", "tfamp", "tf32", 8, False, failed="a | b\nc")
    text = markdown.to_markdown(samples.make_report(rows=(row,)), [])
    assert "failed: a \\| b c" in text


def test_pictures_advice_accuracy_and_others_figures_are_there():
    text = markdown.to_markdown(samples.make_report(), [("Bars.", "figures/a.png")])
    assert "![Bars.](figures/a.png)" in text
    assert "**Use mixed_bfloat16 on this machine" in text
    assert "The other modes:\n\n- mixed_float16: " in text
    assert published.SUMMARY in text and "1.08x to 4.24x" in text
    assert "1.42x (1.21 to 1.66)" in text
    assert "## Published figures: not ours" in text
    assert all(row[0] in text for row in published.ROWS)


def test_texts_of_data_and_commands_are_escaped():
    report = samples.make_report(
        tasks={"digits": "classes <img src=x> | b"}, command="python a `b`"
    )
    text = markdown.to_markdown(report, [])
    assert "classes &lt;img src=x> \\| b" in text
    assert "- `` python a `b` ``, 2026-11-22" in text


def test_error_is_no_share():
    _, rows = samples.make_accuracy()
    made = {"metric": "perplexity", "target": 900.0, "is_error": True}
    rows = tuple(row._replace(**made, test_score=495.7) for row in rows)
    text = markdown.to_markdown(samples.make_report(accuracy_rows=rows), [])
    assert "digits, until perplexity 900 in validation:" in text
    assert re.search(r"\| mixed_bfloat16 .* 496 +\|", text)


def test_ratios_of_the_published_figures_are_those_of_their_numbers():
    for _, _, baseline, mixed, ratio, _ in published.ROWS:
        numbers = (text.split()[0].strip(",") for text in (baseline, mixed))
        before, after = map(float, numbers)
        quotient = before / after if " s, " in baseline else after / before
        assert ratio == f"{quotient:.2f}x"


def test_published_figures_are_those_of_the_documentation():
    page = pathlib.Path(__file__).parents[2] / "docs/benchmark.md"
    assert "\n".join(markdown.published_table()) in page.read_text()


def test_report_without_matplotlib_has_its_tables(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **keywords):
        if name == "tfamp.benchmark" and "plots" in (args[2] or ()):
            raise ImportError("no matplotlib")
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    report_files.write(samples.make_report(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("benchmark.json", "report.html", "report.md")
    ]
