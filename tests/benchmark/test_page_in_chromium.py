"""The benchmark's page as Chromium shows it."""

import html
import json
import re
import types

import pytest
import samples
from matplotlib import image

from tfamp.benchmark import browser, page, records

PHONE = 360
SIZE = (1280, 1000)
WIDTHS = {False: 301, True: 302}  # Of the light and of the dark figure.
ATTACK = '"><img src=x onerror="window.attacked=1"><script>window.attacked=1</script>'
BAD_PAGE = f"<!DOCTYPE html><body><div style='width: 900px'>{ATTACK}</div>"
# Each page tells the one around it what became of it, wide as a phone.
PROBE = """<script data-probe>addEventListener("load", () => parent.postMessage({
  page: location.pathname.split("/").pop(),
  width: document.documentElement.scrollWidth,
  window: innerWidth,
  images: Array.from(document.images, image => image.naturalWidth),
  scripts: document.querySelectorAll("script:not([data-probe])").length,
  handlers: document.querySelectorAll("[onerror]").length,
  attacked: window.attacked === 1,
  scrolling: Array.from(document.querySelectorAll(".scroll"))
    .filter(box => box.scrollWidth > box.clientWidth).length,
}, "*"))</script>"""
FRAMES = f"""<!DOCTYPE html><pre></pre><script>
const found = {{}};
addEventListener("message", event => {{
  found[event.data.page] = event.data;
  document.querySelector("pre").textContent = JSON.stringify(found);
}});
console.error("the console is read");
</script>
<iframe src="probed.html" style="width:{PHONE}px;height:700px;border:0"></iframe>
<iframe src="bad.html" style="width:{PHONE}px;height:700px;border:0"></iframe>"""

pytestmark = pytest.mark.skipif(
    browser.find() is None, reason="Chromium is not installed"
)


def _figures():
    light, dark = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="100">'
        "<style>rect { fill: teal }</style>"
        f'<rect width="{width}" height="100"/></svg>'
        for width in WIDTHS.values()
    )
    return [
        page.Figure(f"figure-{i}", ATTACK, f"Bars {ATTACK}", ATTACK, light, dark)
        for i in range(3)
    ]


def _report():
    """A report whose every text attacks, where one may be too long for a phone."""
    report = samples.make_report()
    rows = [
        row._replace(task=ATTACK, note=ATTACK, failed=row.failed and "x" * 300 + ATTACK)
        for row in report.rows
    ]
    facts = {ATTACK: ATTACK, "flags": "y" * 300}
    return report._replace(
        name=ATTACK,
        command="python scripts/benchmark.py " + "--config.seed=1" * 30 + ATTACK,
        advice=records.Advice(f"Use {ATTACK}", (ATTACK, "z" * 300)),
        rows=tuple(rows),
        tasks={ATTACK: f"{ATTACK} {'w' * 300}"},
        notes=(ATTACK,),
        machine={"device": f"A device {ATTACK}", "facts": facts},
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Four starts of Chromium, which take seconds, for all tests of this file."""
    folder = tmp_path_factory.mktemp("page")
    published = [["what", "speed-up"], [ATTACK, "3.0x"]]
    text = page.to_html(_report(), _figures(), published)
    original, frames = folder / "report.html", folder / "frames.html"
    original.write_text(text, encoding="utf-8")
    # The copies are without the policy: only escaping protects them.
    unprotected = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    unfolded = unprotected.replace("<details>", "<details open>")
    (folder / "probed.html").write_text(unfolded + PROBE, encoding="utf-8")
    (folder / "bad.html").write_text(BAD_PAGE + PROBE)
    frames.write_text(FRAMES)
    pictures, found, messages = {}, {}, []
    for dark in (False, True):
        png = folder / f"{dark}.png"
        messages += browser.screenshot(original, png, *SIZE, dark=dark).messages
        pictures[dark] = image.imread(png)[..., :3]
        frame = browser.show(frames, "--dump-dom", dark=dark)
        written = re.search("<pre>(.*?)</pre>", frame.output, re.DOTALL)
        assert written, frame.output[:500]
        found[dark] = json.loads(html.unescape(written[1]))
    return types.SimpleNamespace(
        pictures=pictures,
        page={dark: each["probed.html"] for dark, each in found.items()},
        bad=found[False]["bad.html"],
        messages=messages,
        control=frame.messages,
    )


def test_it_is_drawn_in_the_size_asked_for_and_not_blank(shown):
    for picture in shown.pictures.values():
        assert picture.shape == (SIZE[1], SIZE[0], 3)
        assert picture.std() > 0.05


def test_it_is_light_or_dark_as_the_reader_prefers(shown):
    assert shown.pictures[False].mean() > 0.85
    assert shown.pictures[True].mean() < 0.25


def test_nothing_is_blocked_and_nothing_fails(shown):
    assert any("the console is read" in line for line in shown.control)
    assert not shown.messages


def test_the_page_is_no_wider_than_a_phone_and_its_tables_scroll(shown):
    assert shown.bad["width"] > PHONE
    found = shown.page[False]
    assert found["window"] == PHONE
    assert found["width"] == PHONE
    assert found["scrolling"] >= 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_are_shown_in_the_colors_of_the_page(shown, dark):
    assert shown.page[dark]["images"] == [WIDTHS[dark]] * 3


def test_a_hostile_text_stays_a_text(shown):
    assert shown.bad["attacked"]
    assert shown.bad["scripts"] == 1
    assert shown.bad["handlers"] == 1
    found = shown.page[False]
    assert not found["attacked"]
    assert found["scripts"] == 0
    assert found["handlers"] == 0
