"""scripts/formats.py: the table of formats, and of what they make of numbers."""

import pathlib

import helpers
import pytest

from tfamp import formats

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "formats.py"
COMMANDS = {
    "limits": [],
    "values": ["--value=1e-7,70000", "--value=-inf", "--value=-0.5"],
    "bad": ["--value=1,x", "--value=1e999999999"],
    "stray": ["70000"],
    "unknown": ["--valeu=1"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    cases = [(SCRIPT, arguments, folder) for arguments in COMMANDS.values()]
    return dict(zip(COMMANDS, helpers.run_scripts(cases), strict=True))


def rows(text):
    """The table's rows below the head, split where two blanks are."""
    head, _, *lines = text.splitlines()
    return head, [line.split() for line in lines]


def test_without_arguments_it_shows_every_format(finished):
    code, stdout, stderr = finished["limits"]
    assert code == 0, stderr
    head, found = rows(stdout)
    assert head.startswith("format") and head.endswith("computed by")
    assert [row[0] for row in found] == list(formats.FORMAT_NAMES)
    assert ["float16", "16", "2", "65504"] in [row[:4] for row in found]
    assert ["tf32", "19", "4"] in [row[:3] for row in found]


def test_values_show_what_each_format_makes_of_each(finished):
    code, stdout, stderr = finished["values"]
    assert code == 0, stderr
    found = {(row[0], row[1]): row[2:] for row in rows(stdout)[1]}
    assert len(found) == 4 * len(formats.FORMAT_NAMES)
    assert found["70000", "float16"] == ["inf", "inf", "overflow"]
    assert found["70000", "bfloat16"] == ["70144", "0.0021", "rounded"]
    assert found["1e-7", "float8_e5m2"] == ["0", "1", "underflow"]
    assert found["1e-7", "float16"][2] == "subnormal"
    assert found["-inf", "float8_e4m3fn"] == ["nan", "nan", "overflow"]
    assert found["-0.5", "float8_e4m3fn"] == ["-0.5", "0", "exact"]


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("bad", ["'x'", "'1e999999999'"]),
        ("stray", ["70000"]),
        ("unknown", ["valeu"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(name, phrases, finished):
    code, stdout, stderr = finished[name]
    assert (code, stdout) == (1, "")
    assert "Traceback" not in stderr
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert all(phrase in line for phrase in phrases)


def test_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 80
