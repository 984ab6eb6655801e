"""The benchmark as one HTML document: no scripts, nothing fetched from elsewhere."""

import base64
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from tfamp.benchmark import page_details, page_tables, published, records
from tfamp.benchmark import page_markup as markup

# Images are in the document itself; whatever got past the escaping could not load.
_CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_DARK = "(prefers-color-scheme: dark)"
_VERDICTS = {
    "equal": "the same loss as float32 in every seed.",
    "noise": "a difference that chance makes between two seeds as well.",
    "explained": "larger than chance; the reason is below the table.",
    "one seed": "noise is not known from one seed.",
    "unexplained": "larger than chance, and the reason is not known. Be careful.",
    "broken": "the loss became infinite or not a number.",
    "": "there was no float32 run to compare with.",
}


class Figure(NamedTuple):
    """A figure of the page.

    Attributes:
      name: Its name in addresses: letters, digits, "-" and "_".
      title: What it shows.
      alt: What a reader who cannot see it must know.
      caption: A sentence or two below it.
      light_svg, dark_svg: SVG documents for light and dark pages.
    """

    name: str
    title: str
    alt: str
    caption: str
    light_svg: str
    dark_svg: str


def to_html(
    report: records.Report,
    figures: Sequence[Figure] = (),
    others: Sequence[Sequence[str]] = (),
) -> str:
    """Returns the page. It works offline, light and dark, and on a phone.

    Args:
      report: The benchmark. Its texts are not trusted: all are escaped.
      figures: Shown in this order.
      others: Figures of others, as cells with the head first; shown apart and
        marked as not ours.

    Raises:
      ValueError: If a figure has no alternative text.
    """
    sections = [
        ("results", "Results", _results(report)),
        ("figures", "Figures", [_figures(figures)] if figures else []),
        ("accuracy", "Time to accuracy", _accuracy(report)),
        ("limit", "Distance from the machine's limit", _distance(report)),
        ("published", "Published figures: not ours", _published(others)),
        ("method", "How it was measured", page_details.method(report)),
        ("glossary", "Glossary", [page_details.glossary()]),
    ]
    sections = [each for each in sections if any(each[2])]
    body = markup.element(
        "body",
        markup.element("a", "Skip to the advice", href="#main", class_="skip"),
        _header(report, sections),
        markup.element(
            "main", _advice(report.advice), *map(_section, sections), id="main"
        ),
    )
    page = markup.element("html", _head(report), body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _head(report):
    style = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    metas = [
        markup.element("meta", charset="utf-8"),
        markup.element(
            "meta", http_equiv="Content-Security-Policy", content=_CONTENT_POLICY
        ),
        _meta("viewport", "width=device-width, initial-scale=1"),
        _meta("color-scheme", "light dark"),
        _meta("description", report.advice.headline),
        # Else a browser would ask the server for one.
        markup.element("link", rel="icon", href="data:,"),
    ]
    title = f"{_title(report)}, {report.date}"
    return markup.element(
        "head",
        *metas,
        markup.element("title", title),
        markup.element("style", markup.Markup(style)),
    )


def _meta(name, content):
    return markup.element("meta", name=name, content=content)


def _title(report):
    return f"Mixed precision on {report.machine.get('device', 'this machine')}"


def _header(report, sections):
    failed = sum(bool(row.failed) for row in report.rows)
    about = f"{report.name} · {report.date} · {len(report.rows)} ways to train"
    about += f", {failed} failed" if failed else ""
    links = [markup.element("a", title, href=f"#{name}") for name, title, _ in sections]
    return markup.element(
        "header",
        markup.element("p", "tfamp benchmark", class_="kicker"),
        markup.element("h1", _title(report)),
        markup.element("p", about),
        markup.element("nav", markup.items(links), aria_label="Sections"),
    )


def _advice(advice):
    return markup.element(
        "section",
        markup.element("p", "What to use here", class_="kicker"),
        markup.element("h2", advice.headline, id="advice"),
        markup.items([markup.prose(reason) for reason in advice.reasons]),
        *_others(advice),
        class_="advice",
        aria_labelledby="advice",
    )


def _others(advice):
    """What became of the modes that are not advised."""
    if not advice.others:
        return ()
    lines = markup.items([markup.prose(other) for other in advice.others])
    return markup.element("h3", "The other modes"), lines


def _section(section):
    name, title, body = section
    head = markup.element("h2", title, id=f"{name}-title")
    about = {"id": name, "aria_labelledby": f"{name}-title"}
    return markup.element("section", head, *body, **about)


def _results(report):
    if not report.rows:
        return []
    lead = markup.element(
        "p",
        "Each row is the same training, done in one way. The speed-up is how many "
        "times as fast a step is as tfamp's float32 without XLA, repeat by repeat: the "
        "median, and in small type the slowest and the fastest repeat. Beside it is "
        "what that did to the loss, as a change from float32 with the same seeds; in "
        "small type, the 95 % interval. Times and rates are medians over all steps; in "
        "small type, the quartiles.",
        class_="lead",
    )
    return [lead, _key(report.rows), *page_tables.results(report)]


def _key(rows):
    """What the verdicts in the tables mean."""
    found = {r.parity.verdict if r.parity else "": r.parity for r in rows if r.step_ms}
    lines = [
        markup.join(page_tables.badge(found[name]), " ", text)
        for name, text in _VERDICTS.items()
        if name in found
    ]
    return markup.element("div", markup.items(lines), class_="key")


def _figures(figures):
    return markup.element("div", *map(_figure, figures), class_="figures")


def _figure(figure):
    if not figure.alt.strip():
        raise ValueError(
            "A figure must have alternative text, for readers who cannot see it. "
            f"Received: name={figure.name!r}, alt={figure.alt!r}."
        )
    picture = markup.element(
        "picture",
        markup.element("source", media=_DARK, srcset=_address(figure.dark_svg)),
        markup.element("img", alt=figure.alt, src=_address(figure.light_svg)),
    )
    parts = (
        markup.element("h3", figure.title),
        picture,
        markup.element("figcaption", figure.caption),
    )
    return markup.element("figure", *parts, id=f"figure-{figure.name}")


def _address(svg):
    coded = base64.b64encode(svg.encode()).decode()
    return f"data:image/svg+xml;base64,{coded}"


def _accuracy(report):
    tables = list(page_tables.accuracy(report))
    if not any(tables):
        return []
    lead = (
        "A faster step helps only if as many steps are enough. Here each mode trained "
        "until it reached the target; in small type, the fastest and the slowest seed, "
        "and for ratios the 95 % interval. A ratio above 1 is faster than float32. "
        f"{published.SUMMARY}"
    )
    return [markup.element("p", lead, class_="lead"), *tables]


def _distance(report):
    tables = list(page_tables.distance(report))
    if not any(tables):
        return []
    lead = (
        "How much of what this machine can do a training step makes use of. The limits "
        "were measured here, with large matrix products and large copies. Attainable "
        "is the limit for work that moves as many bytes as this does; what is not "
        "matrix work gains nothing from faster products, only from smaller numbers and "
        "better kernels."
    )
    return [markup.element("p", lead, class_="lead"), *tables]


def _published(rows):
    if len(rows) < 2:
        return []
    text = (
        "Others measured these, on other machines and with other programs. They are "
        "here to compare with. Nothing in this section was measured by this benchmark."
    )
    lead = markup.element("p", text, class_="lead warning")
    return [lead, page_tables.published(rows)]
