"""Tasks by name: recipes and custom ones alike, with data and without."""

import sys

import points
import pytest

from tfamp.recipes import images
from tfamp.runs import run_files, tasks

HELPER = """
from points import create


def create_own(config):
    return create(config)._replace(description="own")


def synthetic(rows):
    raise AssertionError("a function of the user's own, which is not asked")
"""


def test_a_recipe_is_a_function_by_name():
    config = images.get_config()
    assert config.task == "tfamp.recipes.images:create"
    config.data.name, config.data.image_size = "digits", 8
    assert "digits" in tasks.from_config(config).description
    before = list(sys.path)
    assert tasks.synthetic(config).unit == "images"
    assert sys.path == before  # What stands in this folder hides no library.


def test_a_custom_task_is_timed_on_its_data_whatever_stands_beside_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(HELPER)
    config = points.make_config(task=f"{tmp_path / 'own.py'}:create_own")
    found = tasks.synthetic(config)
    assert (found.description, found.unit) == ("own", "examples")
    assert next(iter(found.batches))[0].shape == (8, 4)


def test_a_task_may_have_batches_without_data_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = """
import points
from tfamp.runs import tasks

def create(config):
    raise AssertionError("it reads data")

def synthetic(config) -> tasks.Synthetic:
    task = points.create(config)
    return tasks.Synthetic(
        task.build_model, task.train.batch(2), "made", task.loss, task.metrics, "points"
    )
"""
    (tmp_path / "own.py").write_text(text)
    config = points.make_config(task=f"{tmp_path / 'own.py'}:create")
    assert tasks.synthetic(config).unit == "points"


@pytest.mark.parametrize("name", ["chess", "image_classification", "no_module:f"])
def test_a_name_that_is_no_function_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*Expected 'module:function'"):
        tasks.from_config(points.make_config(task=name))


def test_names_of_before_are_mapped_where_they_name_a_task():
    run = {"task": "segmentation", "precision": {}, "data": {"task": "segmentation"}}
    new = run_files.rename_tasks({"tasks": {"task": {"config": run}}})
    found = new["tasks"]["task"]["config"]
    assert found["task"] == "tfamp.recipes.segmentation:create"
    assert found["data"] == run["data"]
    assert run_files.rename_tasks(found, old=True) == run
    own = {"task": "points:create", "precision": {}}
    assert run_files.rename_tasks(own) == run_files.rename_tasks(own, old=True) == own
