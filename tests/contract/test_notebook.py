"""docs/first_hour.ipynb runs as it is, and holds what it prints."""

import json
import pathlib
import re

import helpers
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "docs/first_hour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


@pytest.mark.training
def test_cells_run_one_after_another(tmp_path):
    script = tmp_path / "first_hour.py"
    script.write_text("\n\n".join(map(source, CODE)))
    (done,) = helpers.run_scripts([(script, [], tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    # What the cells print first, whatever the machine.
    for words in ("effective", "Audit of", "against float32", "verdict on", "reloaded"):
        assert words in done.stdout, words


def test_stored_outputs_are_whole_and_of_no_machine():
    assert 10 <= len(CELLS) <= 28 and 10 <= len(CODE) <= 14
    outputs = [output for cell in CODE for output in cell["outputs"]]
    kinds = [output["output_type"] for output in outputs]
    assert "error" not in kinds
    counts = [cell["execution_count"] for cell in CODE]
    assert counts == [*range(1, len(CODE) + 1)]  # Run once, from top to bottom.
    assert any("image/png" in output.get("data", ()) for output in outputs)
    for cell in CODE:
        shows = re.search(r"print\(|figure|verbose=2", source(cell))
        assert bool(cell["outputs"]) == bool(shows), source(cell)
    text = json.dumps([output.get("text", output.get("data")) for output in outputs])
    assert re.findall(r"[\"' ](/(?:home|tmp|work|root|usr|Users)/\S*)", text) == []
    assert "Traceback" not in text and '"stderr"' not in json.dumps(outputs)
