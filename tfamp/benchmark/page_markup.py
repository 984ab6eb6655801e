"""HTML from text that is not trusted: what is not `Markup` is escaped."""

import html
import re
from collections.abc import Collection, Mapping, Sequence

from tfamp.benchmark import words

_CODE = re.compile(r"`([^`]+)`")
_VOID = ("img", "link", "meta", "source")


class Markup(str):
    """Text that is HTML already."""


def element(name: str, /, *children: str, **attributes: str | int | None) -> Markup:
    """Returns an element; children and attributes are escaped.

    Args:
      name: Name of the element.
      *children: Texts, and `Markup`, which stays as it is.
      **attributes: Values by name, `aria_label` for `aria-label` and `class_` for
        `class`; those that are None are left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: str, separator: str = "") -> Markup:
    """Returns texts and `Markup` one after the other."""
    return Markup(separator.join(map(_escaped, children)))


def prose(text: str) -> Markup:
    """Returns a text with what stands between backticks as code."""
    parts = _CODE.split(text)
    return join(*(element("code", p) if i % 2 else p for i, p in enumerate(parts)))


def items(children: Sequence[str], name: str = "ul") -> Markup:
    """Returns a list; nothing for no children."""
    if not children:
        return Markup()
    return element(name, *(element("li", child) for child in children))


def pairs(values: Mapping[str, object], class_: str | None = None) -> Markup:
    """Returns names and what they are as a description list."""
    lines = [
        element("div", element("dt", name), element("dd", _plain(value)))
        for name, value in values.items()
    ]
    return element("dl", *lines, class_=class_) if lines else Markup()


def two_lines(text: str) -> Markup:
    """Returns "23.5 ms (22.4 to 25.9)" with what is in parentheses below the rest."""
    first, parenthesis, rest = text.partition(" (")
    lines = [element("span", first, class_="first")]
    if parenthesis:
        lines += [" ", element("small", rest.removesuffix(")"))]
    return join(*lines)


def scrolled(label: str, *children: str) -> Markup:
    """Returns what may be wider than a phone, to be scrolled by keyboard as well."""
    about = {"tabindex": 0, "role": "region", "aria_label": label, "class_": "scroll"}
    return element("div", *children, **about)


def table(
    label: str,
    caption: str,
    rows: Sequence[Mapping[str, str]],
    texts: Collection[str] = (),
) -> Markup:
    """Returns a table in a container that scrolls, without columns that say nothing.

    Args:
      label: What a screen reader calls the container.
      caption: The caption; "" for none.
      rows: Cells by their heads, at least one row; the first of each row names it. The
        last cell of a row with fewer cells than the longest spans the rest.
      texts: Heads of columns with text; the others have numbers.
    """
    names = list(max(rows, key=len))
    full = [row for row in rows if len(row) == len(names)]
    heads = [n for n in names if any(row[n] != words.NONE for row in full)]
    classes = {n: "text" if n in texts or n == heads[0] else None for n in heads}
    head = [element("th", n, scope="col", class_=classes[n]) for n in heads]
    body = [_line(row, classes, len(row) < len(names)) for row in rows]
    return scrolled(
        label,
        element(
            "table",
            element("caption", caption) if caption else Markup(),
            element("thead", element("tr", *head)),
            element("tbody", *body),
        ),
    )


def _line(row, classes, short):
    if not short:
        row = {name: row[name] for name in classes}
    (_, first), *rest = row.items()
    cells = [element("th", first, scope="row", class_="text")]
    cells += [element("td", text, class_=classes.get(name)) for name, text in rest]
    if short:
        span = len(classes) - len(row) + 1
        cells[-1] = element("td", row[list(row)[-1]], colspan=span, class_="text")
    return element("tr", *cells)


def _escaped(text):
    return text if isinstance(text, Markup) else html.escape(text)


def _plain(value):
    """Text of a setting; Booleans as people say them."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return words.NONE if value is None else str(value)
