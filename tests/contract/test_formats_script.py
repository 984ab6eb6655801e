"""scripts/formats.py: the table of formats, and of what they make of numbers."""

import pathlib

import helpers
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "formats.py"
COMMANDS = {
    "limits": [],
    "values": ["--value=1e-7,70000", "--value=-inf", "--value=-0.5"],
    "bad": ["--value=1,x"],
}
FORMATS = ["float64", "float32", "tf32", "float16", "bfloat16"]
FORMATS += ["float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    cases = [(SCRIPT, arguments, folder) for arguments in COMMANDS.values()]
    return dict(zip(COMMANDS, helpers.run_scripts(cases), strict=True))


def test_without_arguments_it_shows_every_format(finished):
    code, stdout, stderr = finished["limits"]
    assert code == 0, stderr
    _, *rows = [line.split() for line in stdout.splitlines()]
    assert [row[0] for row in rows] == FORMATS
    assert ["float16", "16", "2", "65504"] in [row[:4] for row in rows]
    assert ["tf32", "19", "4"] in [row[:3] for row in rows]


def test_values_show_what_each_format_makes_of_each(finished):
    code, stdout, stderr = finished["values"]
    assert code == 0, stderr
    _, *rows = [line.split() for line in stdout.splitlines()]
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert len(found) == 4 * len(FORMATS)
    assert found["70000", "float16"] == ["inf", "inf", "overflow"]
    assert found["70000", "bfloat16"] == ["70144", "0.0021", "rounded"]
    assert found["1e-7", "float8_e5m2"] == ["0", "1", "underflow"]
    assert found["1e-7", "float16"][2] == "subnormal"
    assert found["-inf", "float8_e4m3fn"] == ["nan", "nan", "overflow"]
    assert found["-0.5", "float8_e4m3fn"] == ["-0.5", "0", "exact"]


def test_bad_input_is_one_line_and_exit_code_1(finished):
    code, stdout, stderr = finished["bad"]
    assert (code, stdout) == (1, "")
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert "'x'" in line


def test_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 80
