"""The benchmark's page as a document; what browsers make of it is tested apart."""

import html.parser
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest
import samples

from tfamp.benchmark import page, records
from tfamp.benchmark import page_markup as markup

VOID = {"img", "link", "meta", "source"}
FIGURE = page.Figure(
    "bars", "Speed-up", "Two bars.", "Longer is faster.", "<a/>", "<b/>"
)
PUBLISHED = [["what", "speed-up"], ["BERT on a V100", "3.0x"]]
ATTACK = "\"'><img src=x onerror=alert(1)></style></table><script>alert(1)</script>&lt;"
CSS = pathlib.Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")


class TreeParser(html.parser.HTMLParser):
    """Builds a tree, and takes no element that is not closed in its place."""

    def __init__(self):
        super().__init__()
        self.builder = ET.TreeBuilder()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.builder.end(tag)

    def handle_data(self, data):
        if self.open:
            self.builder.data(data)


def parse(text):
    parser = TreeParser()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser.builder.close()


def render(report=None, figures=(FIGURE,), published=PUBLISHED):
    return page.to_html(report or samples.make_report(), figures, published)


def text_of(element):
    return " ".join(" ".join(element.itertext()).split())


def section(tree, name):
    return tree.find(f".//section[@id='{name}']")


def make_rows(**changes):
    """A base and one row of another mode that is changed."""
    base = samples.make_parity(0.3, 0.0, "base", "")
    return (
        samples.make_row("digits", "tfamp", "float32", parity=base),
        samples.make_row("digits", "tfamp", "mixed_bfloat16", speed=1.7, **changes),
    )


def results_text(**changes):
    report = samples.make_report(rows=make_rows(**changes))
    return text_of(section(parse(render(report)), "results"))


@pytest.fixture(scope="module")
def tree():
    return parse(render())


def test_it_is_a_document_with_language_title_and_both_color_schemes(tree):
    assert render().startswith("<!DOCTYPE html>\n<html lang=")
    assert tree.get("lang") == "en"
    assert tree.findtext("head/title") == "Mixed precision on AMD EPYC, 2026-11-22"
    metas = {meta.get("name"): meta.get("content") for meta in tree.iter("meta")}
    assert metas["color-scheme"] == "light dark"
    assert "width=device-width" in metas["viewport"]
    assert text_of(tree.find(".//h1")) == "Mixed precision on AMD EPYC"
    about = "sample <b> · 2026-11-22 · 16 ways to train, 2 failed"
    assert about in text_of(tree.find(".//header"))


def test_it_runs_nothing_and_fetches_nothing(tree):
    policies = [m for m in tree.iter("meta") if m.get("http-equiv")]
    assert [m.get("content") for m in policies] == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ]
    assert not list(tree.iter("script"))
    for element in tree.iter():
        assert not [name for name in element.keys() if name.startswith("on")]
        for name in {"src", "srcset", "href"} & set(element.keys()):
            assert element.get(name).startswith(("data:", "#"))
    assert not re.search(r"url\(|@import|https?:", tree.findtext("head/style"))


def test_links_and_labels_lead_somewhere_and_names_are_unique(tree):
    names = [e.get("id") for e in tree.iter() if e.get("id")]
    assert len(set(names)) == len(names)
    links = [e.get("href")[1:] for e in tree.iter("a")]
    labels = [e.get("aria-labelledby") for e in tree.iter("section")]
    assert len(links) > 5
    assert {*links, *labels} <= set(names)


def test_headings_skip_no_level(tree):
    levels = [int(e.tag[1]) for e in tree.iter() if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


def test_sections_come_in_the_order_of_a_reader(tree):
    names = [e.get("id") for e in tree.iter("section")]
    assert names == [
        *(None, "results", "figures", "accuracy", "limit", "published", "method"),
        "glossary",
    ]
    advice = text_of(next(tree.iter("section")))
    assert "Use mixed_bfloat16 on this machine" in advice
    assert "a < b & c" in advice
    assert "The other modes" in advice and "<b>0.60x</b>" in advice  # As text.


def test_tables_are_regular_and_their_heads_have_a_scope(tree):
    tables = list(tree.iter("table"))
    assert len(tables) >= 6
    for table in tables:
        heads = table.findall("thead/tr/th")
        assert {th.get("scope") for th in heads} == {"col"}
        for row in table.findall("tbody/tr"):
            assert row[0].tag == "th"
            assert row[0].get("scope") == "row"
            assert sum(int(cell.get("colspan", 1)) for cell in row) == len(heads)


def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(tree):
    boxes = [e for e in tree.iter("div") if e.get("class") == "scroll"]
    assert all(table in {t for b in boxes for t in b} for table in tree.iter("table"))
    for box in boxes:
        assert box.get("tabindex") == "0"
        assert box.get("role") == "region"
        assert box.get("aria-label")


def test_a_task_is_a_table_with_a_row_a_cell(tree):
    tables = section(tree, "results").findall(".//table")
    captions = [text_of(table.find("caption")) for table in tables]
    assert captions[2] == "bert <small> & co a small BERT"
    assert captions[1].startswith("digits: tfamp beside its peers")
    (beside,) = tables[1].findall("tbody/tr")
    assert "mixed_bfloat16" in text_of(beside) and "1.42x" in text_of(beside)
    first = [text_of(row) for row in tables[0].findall("tbody/tr")]
    assert len(first) == 8
    for part in (
        *("mixed precision, bfloat16 mixed_bfloat16 batch 32", "1.70x 1.60 to 1.78"),
        *("within noise", "23.5 ms 22.4 to 25.9", "1,360 images/s", "0.50 GiB host"),
        *("2.1 s", "3.0 %", "56.7 %", "70.0 %"),
    ):
        assert part in first[1]
    assert "16,384 1 skipped" in first[2]


def test_a_failed_cell_is_a_row_with_its_reason(tree):
    row = section(tree, "results").findall(".//table/tbody/tr")[7]
    assert len(row) == 2
    assert "MemoryError: 1,600 MiB resident, <script>" in text_of(row[1])


def test_failed_cells_alone_are_a_table_as_well():
    failed = records.Row("digits", "tfamp", "float32", 8, False, failed="no memory")
    found = results_of(failed)
    assert [text_of(th) for th in found.findall(".//thead/tr/th")][1:] == ["outcome"]
    assert "no memory" in text_of(found)


def results_of(*rows):
    return section(parse(render(samples.make_report(rows=rows))), "results")


def test_no_speed_up_is_without_its_error():
    bare = samples.make_row("digits", "tfamp", "tf32", parity=None)
    for row in results_of(*make_rows(), bare).findall(".//tbody/tr"):
        speed, error = row[1], row[2]
        assert re.match(r"\d\.\d\dx ", text_of(speed))
        assert re.search("the base|within noise|not compared", text_of(error))


def test_a_verdict_is_never_color_alone(tree):
    badges = [e for e in tree.iter("span") if "badge" in e.get("class", "")]
    assert badges
    for badge in badges:
        symbol, words = text_of(badge).split(" ", 1)
        assert not symbol.isalnum()
        assert words.replace(" ", "").isalpha()


def test_differences_are_explained_below_their_table():
    parity = samples.make_parity(0.4, 0.3, "explained", "The softmax was rounded.")
    text = results_text(parity=parity)
    assert "explained The softmax was rounded. mixed_bfloat16, batch 32" in text


@pytest.mark.parametrize("verdict", ["unexplained", "broken", "explained"])
def test_a_difference_without_explanation_is_told(verdict):
    parity = samples.make_parity(0.4, 0.3, verdict, "")
    assert "No explanation was recorded." in results_text(parity=parity)


def test_noise_without_explanation_is_not_told():
    parity = samples.make_parity(0.4, 0.3, "noise", "")
    assert "Why the losses" not in results_text(parity=parity)


def test_xla_that_did_not_run_is_told():
    text = results_text(xla=True, xla_in_force=False)
    assert "XLA (asked for, not in force)" in text


def test_a_loss_that_is_not_finite_is_told():
    parity = records.Parity(*[None] * 3, "", *[None] * 3, "broken", "NaN at step 3.")
    assert results_text(parity=parity).count("not finite") >= 3


def test_the_time_to_accuracy_has_ratio_interval_score_and_failures():
    report = samples.make_report()
    run = report.accuracy_runs[0]._replace(failed="it ran out of <time>")
    rows = [
        row._replace(note="Seed 2 never got there.") for row in report.accuracy_rows
    ]
    report = report._replace(accuracy_runs=(run,), accuracy_rows=tuple(rows))
    text = text_of(section(parse(render(report)), "accuracy"))
    assert "1.42x 1.21 to 1.66" in text
    assert "97.0 %" in text
    assert "The target: 95.0 % accuracy or better" in text
    assert "Seed 2 never got there." in text
    assert "digits: float32, seed 0 failed: it ran out of <time>" in text


def test_the_distance_names_limits_and_what_took_the_rest(tree):
    text = text_of(section(tree, "limit"))
    for part in ("200 GFLOP/s", "18.0 GB/s", "3,200 MHz", "85.0 GFLOP/s", "56.7 %"):
        assert part in text
    assert "Adam 10.0 %, MaxPoolGrad 8.0 %" in text.replace("\N{NO-BREAK SPACE}", " ")


def test_figures_have_both_schemes_and_alternative_text(tree):
    figure = tree.find(".//figure")
    image, source = figure.find(".//img"), figure.find(".//source")
    assert image.get("alt") == "Two bars."
    assert image.get("src") == "data:image/svg+xml;base64,PGEvPg=="
    assert source.get("srcset") == "data:image/svg+xml;base64,PGIvPg=="
    assert source.get("media") == "(prefers-color-scheme: dark)"
    assert text_of(figure.find("h3")) == "Speed-up"
    assert text_of(figure.find("figcaption")) == "Longer is faster."


def test_a_figure_without_alternative_text_is_refused():
    with pytest.raises(ValueError, match="name='bars', alt=' '"):
        render(figures=[FIGURE._replace(alt=" ")])


def test_published_figures_are_marked_as_not_ours(tree):
    text = text_of(section(tree, "published"))
    assert text.startswith("Published figures: not ours Others measured these")
    assert "BERT on a V100" in text


def test_how_it_was_measured_is_there(tree):
    text = text_of(section(tree, "method"))
    for part in (
        *("python scripts/benchmark.py", "warmup", "A note with <i>markup</i>."),
        *("2.21.0", "compared with torch", "CPU 3,200 MHz", "float32: asked for"),
    ):
        assert part in text


def test_the_glossary_takes_the_range_of_float16_from_its_format(tree):
    assert "nothing above 65,504" in text_of(section(tree, "glossary"))


def test_what_was_not_measured_has_no_section():
    report = samples.make_report(
        rows=(), accuracy_rows=(), accuracy_runs=(), calibration=records.Calibration()
    )
    tree = parse(render(report, figures=[], published=[]))
    names = [e.get("id") for e in tree.iter("section")]
    assert names == [None, "method", "glossary"]
    assert [text_of(a) for a in tree.find(".//nav").iter("a")] == [
        *("How it was measured", "Glossary")
    ]


def test_a_calibration_that_failed_is_told():
    calibration = records.Calibration(failed="The process died.")
    report = samples.make_report(calibration=calibration)
    assert "The process died." in text_of(section(parse(render(report)), "limit"))


def attacked(value):
    """The value with all its texts hostile; the names of modes and verdicts stay."""
    if isinstance(value, str):
        return ATTACK
    if hasattr(value, "_replace"):
        kept = {"framework", "mode", "verdict", "failed"}
        names = [name for name in value._fields if name not in kept]
        changes = {name: attacked(getattr(value, name)) for name in names}
        if getattr(value, "failed", ""):
            changes["failed"] = ATTACK
        return value._replace(**changes)
    if isinstance(value, dict):
        read = {"device", "facts"}
        return {k if k in read else ATTACK: attacked(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(attacked, value))
    return value


def test_no_text_becomes_markup():
    report = attacked(samples.make_report())
    figure = FIGURE._replace(name=ATTACK, title=ATTACK, alt=ATTACK, caption=ATTACK)
    tree = parse(render(report, [figure], [[ATTACK, "b"], [ATTACK, ATTACK]]))
    plain = parse(render())
    assert {e.tag for e in tree.iter()} == {e.tag for e in plain.iter()}
    attributes = {name for e in plain.iter() for name in e.keys()}
    assert {name for e in tree.iter() for name in e.keys()} == attributes
    assert len(list(tree.iter("img"))) == 1
    assert tree.find(".//img").get("alt") == ATTACK
    assert text_of(tree.find(".//h1")).endswith(ATTACK)
    assert text_of(tree).count(ATTACK) > 50


def luminance(color):
    """Relative luminance of "#rrggbb", WCAG 2.2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("ink", "back"),
    [
        *(("ink", "page"), ("ink", "card"), ("ink", "advice"), ("ink", "none-back")),
        *(("muted", "page"), ("muted", "card"), ("muted", "head")),
        *(("accent", "page"), ("accent", "advice"), ("ink", "fair-back")),
        *(("good", "good-back"), ("fair", "fair-back"), ("bad", "bad-back")),
    ],
)
def test_contrast_is_enough_for_text(scheme, ink, back):
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[scheme]))
    assert contrast(colors[ink], colors[back]) >= 4.5  # WCAG 2.2, level AA.


def test_code_in_a_sentence_is_code_and_stays_escaped():
    text = markup.prose("one `a < b` two <i>`")
    assert text == "one <code>a &lt; b</code> two &lt;i&gt;`"
