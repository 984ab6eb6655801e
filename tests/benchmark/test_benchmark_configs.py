"""Every file in configs/benchmark loads, locks and plans its cells, tiny ones too."""

import pathlib

import pytest

from tfamp.benchmark import plan, suite, suite_config

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "benchmark").glob("*.py"))


@pytest.mark.parametrize("tiny", [False, True], ids=["whole", "tiny"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_configuration_plans_its_cells(path, tiny):
    config = suite_config.load(path).lock()
    if tiny:
        config = suite_config.apply_tiny(config)
    cells = plan.make(config)
    assert {cell.task for cell in cells} == set(config.tasks)
    assert len({cell.key for cell in cells}) == len(cells)
    # Never a mode without the float32 that it is compared with.
    shapes = {(cell.task, cell.batch_size) for cell in cells}
    bases = {
        (cell.task, cell.batch_size)
        for cell in cells
        if (cell.framework, cell.mode, cell.xla) == ("tfamp", "float32", False)
    }
    assert shapes == bases
    assert suite.plan_accuracy(config)
    assert config.name and config.name in suite_config.identity(config).name


def test_docstrings_show_the_command():
    for path in FILES:
        text = path.read_text()
        assert text.startswith('"""') and "python scripts/benchmark.py" in text
