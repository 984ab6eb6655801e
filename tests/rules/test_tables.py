"""Tables: columns line up in a terminal, and wide ones stay narrow in Markdown."""

import pytest

from tfamp import tables

WIDE = "x" * 70


@pytest.mark.parametrize(("markdown", "width"), [(False, 70), (True, 3)])
def test_a_wide_column_lines_up_in_a_terminal_alone(markdown, width):
    text = tables.table(("error of", "relative"), [(WIDE, "1"), ("b", "2")], markdown)
    assert {"-" * width} <= set(text.splitlines()[1].replace("|", " ").split())


def test_a_wide_last_column_is_not_padded():
    text = tables.table(("a", "why"), [("1", WIDE)])
    assert text.splitlines()[1] == "-  ---"
