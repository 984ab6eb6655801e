"""The report: rows and answers from figures, and the same as tables, page and JSON."""

import html
import html.parser
import json
import re
import shutil
import subprocess

import helpers
import pytest

from tfamp.measuring.benchmark import accuracy, cells, report, statistics

NOISE = {0: 0.99, 1: 1.0, 2: 1.01}
MACHINE = {
    **{"date": "2026-11-22", "command": "python scripts/benchmark.py"},
    **{"commit": "a1", "machine": "a <b> CPU", "versions": {"keras": "3.15.1"}},
}


def figures(seconds=0.1, loss=2.0, **changes):
    """What one process measured."""
    return {
        "seconds": [seconds] * 4,
        "examples": 8,
        "first_step_seconds": 1.5,
        "losses": [loss + 1, loss, loss, loss, loss],
        "outputs": None,
        "skipped_steps": None,
        "loss_scale": None,
        "host_bytes": 2**30,
        "device_bytes": None,
        "xla": False,
        "tensor_float_32": False,
        "note": "asked for",
        "unit": "images",
        "description": "a <net>",
        "parameters": 1234,
        **changes,
    }


def repeats(seconds, loss=2.0, wobble=0.0, numbers=tuple(NOISE), **changes):
    """A cell's repeats: all cells of a repeat are slow together."""
    return {
        r: figures(seconds * NOISE[r] ** 3, loss * (1 + wobble * (r - 1)), **changes)
        for r in numbers
    }


def make(measured, failures=(), job="train", times=(), **task):
    """A report of {cell: repeats} of one task."""
    config = helpers.configured(cells, name="some", job=job)
    config.tasks.net = cells.get_task("configs/benchmark/models.py:mlp")
    config.tasks.net.update(task)
    failures = dict(failures)
    found = {**{cell: {} for cell in failures}, **measured}
    return report.make(config, found, failures, times, MACHINE, ["a note"])


def cell(mode, framework="tfamp", **fields):
    return cells.Cell("net", framework, mode, **fields)


BASE, FAST = cell("float32"), cell("mixed_bfloat16")
SLOW, PEER = cell("mixed_float16"), cell("float32", "keras")
ALL = {
    BASE: repeats(0.1),
    FAST: repeats(0.05, wobble=0.01, host_bytes=2**29),
    SLOW: repeats(1.0, loss_scale=32768.0, skipped_steps=1),
    PEER: repeats(0.11),
}


@pytest.fixture(scope="module")
def made():
    return make(ALL, {cell("tf32"): "no <GPU>"})


def row_of(made, wanted):
    return next(row for row in made.rows if row.cell == wanted)


def test_speed_up_is_paired_by_repeat_and_loss_of_the_timed_steps(made):
    found = row_of(made, FAST)
    assert found.speed_up.mean == pytest.approx(2.0)
    assert found.speed_up.low == pytest.approx(2.0)  # What slows all is no noise.
    assert found.rate == pytest.approx(160) and found.step_ms[1] == pytest.approx(50)
    assert row_of(made, BASE).is_base and not row_of(made, PEER).is_base
    assert found.loss == pytest.approx(2.0)
    assert found.loss_difference.low < 0 < found.loss_difference.high
    assert found.error == "+0.00 % (-2.48 to +2.48), within noise"
    assert row_of(made, PEER).error == "+0.00 % (+0.00 to +0.00), equal"


def test_answer_says_mode_speed_memory_and_loss(made):
    assert made.answers() == {
        "net": "mixed_bfloat16 is 2.00x (2.00 to 2.00) as fast as float32, peak memory "
        "0.50 GiB instead of 1.00, loss +0.00 % (-2.48 to +2.48), within noise."
    }


@pytest.mark.parametrize(
    ("fast", "words"),
    [
        ({FAST: repeats(0.2)}, "stay in float32: no mode is significantly faster"),
        ({FAST: repeats(0.05, 2.2)}, "stay in float32"),  # Another loss.
        ({FAST: repeats(0.05, 1.8)}, "mixed_bfloat16 is 2.00x"),  # A lower one.
        ({}, "no other mode has figures"),
        ({PEER: repeats(0.01)}, "no other mode has figures"),  # Not ours to set.
        (
            {BASE: repeats(0.1, numbers=(0, 1)), FAST: repeats(0.05, numbers=(0, 1))},
            "^not decided: fewer than 3 repeats; the fastest other mode is mixed_bf",
        ),
    ],
)
def test_answer_is_float32_unless_a_mode_is_faster_with_the_same_loss(fast, words):
    assert re.search(words, make({BASE: repeats(0.1), **fast}).answers()["net"])


def test_answer_compares_with_one_base_and_names_that_of_another_task():
    compiled = {
        BASE._replace(jit="on"): repeats(0.4),
        FAST._replace(jit="on"): repeats(0.1),  # 4 times as fast, of the slow base.
    }
    made = make({**ALL, **compiled}, jit=("auto", "on"))
    assert made.answers()["net"].startswith("mixed_bfloat16 is 2.00x")
    config = helpers.configured(cells, name="some")
    for name in ("net", "other"):
        config.tasks[name] = cells.get_task("configs/benchmark/models.py:mlp")
    config.tasks.other.beside = "net"
    found = {BASE: repeats(0.1), BASE._replace(task="other"): repeats(0.2)}
    answers = report.make(config, found, {}, (), MACHINE, ()).answers()
    assert answers["other"].startswith("float32 is 0.50x (0.50 to 0.50) as fast as net")


def test_speed_up_is_told_over_tf32_where_that_was_measured():
    times = accuracy.summarize("net", {**TIMES, "tf32": TIMES["float32"]}, 0.9)
    made = make({**ALL, cell("tf32"): repeats(0.08)}, times=times)
    assert row_of(made, FAST).speed_up.mean == pytest.approx(1.6)
    assert row_of(made, BASE).speed_up.mean == pytest.approx(0.8)
    assert "mixed_bfloat16 is 1.60x" in made.answers()["net"]
    assert "as fast as tf32" in made.answers()["net"]
    assert "loss - tf32's" in made.tables()["net"][0]
    assert {row.base for row in made.accuracy} == {"tf32"}
    assert "tf32's time over it" in made.accuracy_table()[0]
    assert "Speed-up over tf32" in Page(made.to_html()).text
    slow = make({**ALL, cell("tf32"): repeats(0.01)})
    assert slow.answers()["net"].startswith("stay in tf32")


def test_without_float32_there_is_no_speed_up_and_the_column_says_so():
    made = make({FAST: repeats(0.1)}, {BASE: "OOM"})
    (found,) = [row for row in made.rows if not row.failed]
    assert found.speed_up is None and found.error == "no float32"
    assert "nothing to compare with" in made.answers()["net"]
    text = Page(made.to_html()).text  # Still a page.
    assert "OOM" in text and "nothing to compare with" in text


def test_loss_that_is_not_finite_is_told_and_is_no_answer():
    losses = {r: figures(0.05, losses=[3.0, None, 2.0, 2.0, 2.0]) for r in NOISE}
    made = make({BASE: repeats(0.1), FAST: losses})
    assert row_of(made, FAST).error == "not finite"
    assert "stay in float32" in made.answers()["net"]


def test_batches_of_other_sizes_are_compared_by_examples_and_not_by_loss():
    base, other = BASE._replace(batch_size=8), FAST._replace(batch_size=16)
    made = make({base: repeats(0.1), other: repeats(0.1, examples=16)})
    assert row_of(made, other).speed_up.mean == pytest.approx(2.0)
    assert row_of(made, other).error == "not compared"


def test_inference_has_the_error_of_the_outputs_and_the_average_rate():
    base = repeats(0.1, losses=[], outputs=[1.0, -4.0])
    for each in base.values():
        each["seconds"] = [0.1, 0.1, 0.1, 0.5]
    other = repeats(0.05, losses=[], outputs=[1.1, -4.0])
    made = make({BASE: base, FAST: other}, job="inference")
    assert row_of(made, FAST).output_error == pytest.approx(0.1 / 4)
    assert row_of(made, BASE).rate == pytest.approx(8 / 0.2)
    assert "0.025 of the largest output" in made.answers()["net"]


def test_repeats_before_a_failure_count_and_the_reason_is_told():
    made = make({BASE: repeats(0.1), FAST: {0: figures(0.05)}}, {FAST: "OOM"})
    assert row_of(made, FAST).speed_up.low is None
    assert row_of(made, FAST).error == "+0.00 % (no interval)"
    assert "net: mixed_bfloat16: 1 of 3 repeats, then: OOM" in made.notes


def test_markdown_and_json_have_each_cell_and_no_speed_up_without_its_error(made):
    text = made.to_markdown()
    assert text.startswith("# some\n\n- **net**: mixed_bfloat16 is 2.00x")
    assert "| mixed_float16  | batch 8 | 0.10x (0.10 to 0.10)" in text
    assert "- net: tf32: no <GPU>" in text and "- commit: a1" in text
    assert "32,768" in text and "a note" in text
    for line in made.tables()["net"]:
        assert line["speed-up"] == "-" or line["loss - float32's"] != "-"
    stored = json.loads(json.dumps(made.to_dict()))
    assert stored["schema_version"] == report.SCHEMA_VERSION
    assert stored["rows"][2]["mode"] == "mixed_bfloat16"
    assert stored["rows"][2]["speed_up"]["mean"] == pytest.approx(2.0)
    assert stored["rows"][0]["failed"] == "no <GPU>"


# ---- Time to accuracy ----


def run(reached):
    points = [(1.0, 0.5), (reached or 9.0, 0.9 if reached else 0.8)]
    return {"points": points, "lower": False, "test_score": 0.9}


TIMES = {
    "float32": {0: run(4.0), 1: run(6.0), 2: run(8.0)},
    "mixed_bfloat16": {0: run(2.0), 1: run(3.0), 2: run(4.0)},
}


def test_time_to_accuracy_is_compared_by_seed_if_half_of_them_reach_it():
    base, mixed = accuracy.summarize("net", TIMES, 0.9)
    assert base.ratio is None and base.seconds == 6.0
    assert mixed.ratio == (2.0, 2.0, 2.0, 3) and mixed.reached == 3
    few = {0: run(2.0), 1: run(None), 2: {"failed": "x"}}
    runs = {**TIMES, "mixed_bfloat16": few}
    _, mixed = accuracy.summarize("net", runs, 0.9)
    assert mixed.ratio is None and mixed.reached == 1 and mixed.failed == "x"


@pytest.mark.parametrize(
    ("scores", "target", "lower", "reached"),
    [
        ([0.5, 0.9, 0.95], 0.9, False, 2.0),
        ([0.5, 0.9 - 5e-8, 0.7], 0.9, False, 2.0),  # Its own rounding.
        ([0.5, 0.6, 0.7], 0.9, False, None),
        ([3.0, 2.0, 1.0], 2.5, True, 2.0),
    ],
)
def test_target_is_reached_by_the_first_score_that_is_as_good(
    scores, target, lower, reached
):
    points = [[float(i), score] for i, score in enumerate(scores, 1)]
    found = {"points": points, "lower": lower, "test_score": 0.5}
    assert accuracy.reached(found, target) == reached


# ---- The page ----


class Page(html.parser.HTMLParser):
    """Tags and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_page_begins_with_the_answer_escapes_texts_and_suits_a_phone():
    times = accuracy.summarize("net", TIMES, 0.9)
    page = make(ALL, {cell("tf32"): "no <GPU>"}, times=times).to_html()
    text, tags = Page(page).text, Page(page).tags
    assert text.index("mixed_bfloat16 is 2.00x") < text.index("Speed-up over float32")
    assert "a <net>" in text and "<net>" not in page and "no <GPU>" in text
    assert [tag for tag, _ in tags].count("svg") == 3
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any("http" in (a.get("src") or "") for _, a in tags)
    assert 'name="viewport"' in page and "max-width: 40rem" in page
    labels = [attributes["data-name"] for tag, attributes in tags if tag == "td"]
    assert "speed-up" in labels and "loss - float32's" in labels


def test_page_can_be_read_aloud_and_without_color():
    times = accuracy.summarize("net", TIMES, 0.9)
    page = make(ALL, times=times).to_html()
    tags = Page(page).tags
    assert ("html", {"lang": "en"}) in tags and "prefers-color-scheme: dark" in page
    assert [tag for tag, _ in tags].count("h1") == 1
    assert {a.get("scope") for tag, a in tags if tag == "th"} == {"col"}
    pictures = [a for tag, a in tags if tag == "figure"]
    assert len(pictures) == 3
    assert all(a["role"] == "img" and a["aria-label"] for a in pictures)
    assert "stroke-dasharray" in page[page.index("Score over time") :]
    assert "open: within noise" in page


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FRAME = """<iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const parts = [page.documentElement, ...page.querySelectorAll(".wide")];
  document.title = parts.map(x => x.scrollWidth - x.clientWidth);
}}
</script>"""


@pytest.mark.skipif(not BROWSER, reason="no headless browser is installed")
@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_its_window(width, tmp_path):
    times = accuracy.summarize("net", TIMES, 0.9)
    page = make(ALL, {cell("tf32"): f"no <GPU> in {'folder/' * 40}"}, times=times)
    frame = FRAME.format(width=width, page=html.escape(page.to_html()))
    (tmp_path / "frame.html").write_text(frame)
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"),
            (tmp_path / "frame.html").as_uri(),
        ],
        **{"capture_output": True, "text": True, "timeout": 120},
    )
    beyond = re.search("<title>(.*)</title>", done.stdout)
    assert beyond and set(beyond[1].split(",")) == {"0"}, done.stderr[-500:]


def test_times_are_said_in_few_digits():
    found = statistics.times(statistics.Estimate(0.0333, 0.03, 0.04, 3))
    assert found == "0.033x (0.030 to 0.040)" and statistics.times(None) == "-"
