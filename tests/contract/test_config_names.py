"""What the configurations' and recipes' texts name exists: fields, files, flags."""

import ast
import inspect
import pathlib
import re
import runpy

import pytest
from ml_collections import config_dict

from tfamp.benchmark import cells
from tfamp.recipes import (
    images,
    language_model,
    question_answering,
    segmentation,
    tabular,
    text_classification,
)

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.py"))
READERS = sorted(
    path
    for folder in ("recipes", "runs", "measuring", "commands")
    for path in (ROOT / "tfamp" / folder).rglob("*.py")
)
MADE = {
    "cnn": [images.get_config()],
    "lm": [language_model.get_config(name) for name in ("docstrings", "text_file")],
    "tabular": [tabular.get_config()],
    "unet": [segmentation.get_config()],
    "bert": [
        *(
            text_classification.get_config(x)
            for x in ("docstrings", "csv", "glue/sst2")
        ),
        *(question_answering.get_config(x) for x in ("squad", "csv")),
        # It has the settings of fine-tuning, too.
        runpy.run_path(str(ROOT / "configs/bert/csv.py"))["get_config"](),
    ],
    "benchmark": [cells.get_config()],
}
ALL = [config for made in MADE.values() for config in made]
FIELD = r"config\.([a-z0-9_]+(?:\.[a-z0-9_]+)*)(?![a-z0-9_(])"
NO_FIELDS = {"json", "yaml", "py"}  # Files.
# Names of others: columns and files of data sets, presets, metrics, methods.
OTHERS = {
    *("Customers", "casual", "registered", "instant", "sentiment", "text"),
    *("selected_text", "squad", "fit", "kept_gradients", "bert_base_en_uncased"),
}


def texts(path):
    """Yields the docstrings and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text
    yield from re.findall(r"(?m)#(.*)$", source)


def has(config, field):
    """Whether a configuration has a field; a benchmark's tasks are named by users."""
    first, *_ = names = field.split(".")
    if first in ("tasks", "time_to_accuracy"):
        names = [first]
    for name in names:
        if not isinstance(config, config_dict.ConfigDict) or name not in config:
            return False
        config = config[name]
    return True


def fields_of(config):
    """Returns the last names of all fields."""
    found = set()
    for name, value in config.items():
        found.add(name)
        if isinstance(value, config_dict.ConfigDict):
            found |= fields_of(value)
    return found


def missing(found, configs):
    return [
        field
        for text in found
        for field in re.findall(FIELD, text)
        if field.split(".")[0] not in NO_FIELDS
        and not any(has(config, field) for config in configs)
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "_".join(path.parts[-2:]))
def test_fields_that_a_configuration_names_exist(path):
    assert missing(texts(path), MADE[path.parent.name]) == []


@pytest.mark.parametrize("path", READERS, ids=lambda path: "_".join(path.parts[-2:]))
def test_fields_that_a_recipe_names_exist(path):
    assert missing(texts(path), ALL) == []


def test_what_reads_the_data_lists_fields_that_exist():
    known, listed = set().union(*map(fields_of, ALL)), {}
    for path in READERS:
        for text in texts(path):
            _, _, after = text.partition("`config.data` has")
            names = re.findall(
                r"(?m)^ {4}((?:\w+, )*\w+):", after.split("\nReturns")[0]
            )
            for name in ", ".join(names).split(", "):
                listed[name] = path.name
    assert {"name", "doc_stride", "sequence_length", "loss"} <= set(listed)
    assert {name for name in listed if name and name not in known} == set()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "_".join(path.parts[-2:]))
def test_names_in_backticks_exist(path):
    source = path.read_text()
    known = set().union(*map(fields_of, MADE[path.parent.name])) | OTHERS
    known |= {node.arg for node in ast.walk(ast.parse(source)) if hasattr(node, "arg")}
    known |= {node.id for node in ast.walk(ast.parse(source)) if hasattr(node, "id")}
    for name in re.findall(r"`([^`\s]+)`", "\n".join(texts(path))):
        if re.fullmatch(r"[A-Za-z_]+", name):
            assert name in known or f'"{name}"' in source, name
        elif match := re.fullmatch(r"([\w/]+\.py)(?::(\w+))?", name):
            beside = [path.parent / match[1], ROOT / match[1]]
            assert any(each.exists() for each in beside), name
            if match[2]:
                found = next(each for each in beside if each.exists())
                assert f'"{match[2]}"' in found.read_text(), name


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_the_check_finds_what_is_gone(made):
    assert missing(["`--config.model.gone=3`, config.gone"], made) == [
        "model.gone",
        "gone",
    ]
    assert missing(["config.name, `config.tiny`, config.json"], made) == []


def test_flags_that_a_configuration_names_exist():
    sources = [*(ROOT / "tfamp").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    defined = r"flags\.DEFINE_\w+\(\s*\"(\w+)\""
    known = {name for path in sources for name in re.findall(defined, path.read_text())}
    named = {
        name
        for path in CONFIGS
        for text in texts(path)
        for name in re.findall(r"--(\w+)(?!\.)\b", text)
        if name != "config"
    }
    assert {"data_dir", "preset", "seeds"} <= named
    assert named - known == set()


def test_pooling_is_documented_where_its_default_is():
    source = inspect.getsource(text_classification.get_config)
    assert '"mean"' in source.partition('"pooling":')[0] and "MiniLM" in source
