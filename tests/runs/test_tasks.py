"""Tasks by name: recipes and custom ones alike, with data and without."""

import json
import sys

import helpers
import points
import pytest
import yaml

from tfamp.recipes import images
from tfamp.runs import run_files, tasks

# A file's text -> the description and the unit of what is timed.
OWN = {
    """
from points import create as of_points


def create(config):
    return of_points(config)._replace(description="own")


def synthetic(rows):
    raise AssertionError("a function of the user's own, which is not asked")
""": ("own", "examples"),
    """
import points
from tfamp.runs import tasks


def create(config):
    raise AssertionError("it reads data")


def synthetic(config) -> "tasks.Synthetic":
    task = points.create(config)
    return tasks.Synthetic(
        task.build_model, task.train.batch(8), "made", task.loss, task.metrics, "points"
    )
""": ("made", "points"),
}


def test_a_recipe_is_a_function_by_name():
    digits = {"data__name": "digits", "data__image_size": 8}
    config = helpers.configured(images, **digits)
    assert config.task == "tfamp.recipes.images:create"
    assert "digits" in tasks.from_config(config).description
    before = list(sys.path)
    assert tasks.synthetic(config).unit == "images"
    assert sys.path == before  # What stands in this folder hides no library.


@pytest.mark.parametrize(("text", "expected"), OWN.items(), ids=["data", "batches"])
def test_a_custom_task_is_timed_on_its_data_or_on_batches_beside_it(
    text, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(text)
    config = points.make_config(task=f"{tmp_path / 'own.py'}:create")
    found = tasks.synthetic(config)
    assert (found.description, found.unit) == expected
    assert next(iter(found.batches))[0].shape == (8, 4)


@pytest.mark.parametrize("name", ["chess", "image_classification", "no_module:f", ""])
def test_a_name_that_is_no_function_is_refused(name):
    words = f"config.task: .*Received: {name!r}.*'module:function'.*images:create"
    with pytest.raises(ValueError, match=words):
        tasks.from_config(points.make_config(task=name))
    with pytest.raises(ValueError, match="'tfamp.recipes.images:creat'"):
        tasks.from_config(points.make_config(task="tfamp.recipes.images:creat"))


def test_names_of_before_are_mapped_where_they_name_a_task(tmp_path):
    config = images.get_config()
    config.update({"data": {"task": "segmentation"}})
    run = config.to_dict() | {"task": "image_classification"}
    many = {"task": {"config": run}, "precision": {}, "optimizer": {}}
    written = {"tasks": many, "data": {"task": ["a"]}}
    written = json.loads(json.dumps(written))  # Lists, no tuples.
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    found = run_files.read_config(tmp_path)
    assert found.tasks.task.config.task == "tfamp.recipes.images:create"
    assert found.tasks.task.config.data.task == "segmentation"
    plain = run_files.plain_config(found)
    assert run_files.with_old_names(plain) == written
