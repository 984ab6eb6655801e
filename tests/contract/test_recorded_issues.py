"""A thread of docs/maintainers/recorded-issues.md has tests as its class says.

By the marks `@pytest.mark.issue("keras#15012")`; one thread of a row stands for all.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TESTED = {"prevented", "explained"}
CLASSES = {*TESTED, "fixed upstream", "out of scope"}
LINK = re.compile(r"\[(\S+)#(\d+)\]\(https://github\.com/(\S+)/issues/(\d+)\)")
PAGE = (ROOT / "docs/maintainers/recorded-issues.md").read_text()
# (threads, class) of each row.
ROWS = [
    ([f"{name}#{number}" for name, number, *_ in LINK.findall(cells[0])], cells[2])
    for line in PAGE.splitlines()
    if line.startswith("| [") and (cells := line.strip("| ").split(" | "))
]
THREADS = [thread for threads, _ in ROWS for thread in threads]


def marks_of(source):
    """Yields the threads that a file of tests is marked with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.issue":
            yield from map(ast.literal_eval, node.args)


FILES = (ROOT / "tests").rglob("test_*.py")
MARKED = {thread for path in FILES for thread in marks_of(path.read_text())}


def test_marks_are_found_in_decorators_and_in_parameters():
    source = """
@pytest.mark.issue("a#1", "b#2")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.issue("c#3"))])
def test_it(x): ...
"""
    assert sorted(marks_of(source)) == ["a#1", "b#2", "c#3"]


def test_rows_are_tested_that_say_so_and_no_others():
    assert {kind for _, kind in ROWS} == CLASSES
    tested = [(threads, kind) for threads, kind in ROWS if MARKED & {*threads}]
    assert tested == [(threads, kind) for threads, kind in ROWS if kind in TESTED]


def test_marks_name_a_row():
    assert MARKED - {*THREADS} == set()


def test_each_thread_is_there_once_and_its_link_is_its_name():
    assert len(THREADS) == len({*THREADS}) == PAGE.count("](https")
    for name, number, repository, of_link in LINK.findall(PAGE):
        assert number == of_link and f"/{repository}".endswith(f"/{name}")


def test_counts_are_those_of_the_rows():
    for kind in CLASSES:
        found = [threads for threads, each in ROWS if each == kind]
        counts = f"{len(found)} | {sum(map(len, found))}"
        assert re.search(rf"(?m)^\| {kind} \| .* \| {re.escape(counts)} \|$", PAGE)
