"""Every file in configs/ loads, locks, and trains under the one `tiny` override."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tfamp.training import base_config, tasks, train_and_evaluate

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").rglob("*.py"))
# Data that no host has without a download: a stand-in is stored as a TFDS folder.
SHARED = {"mnist": "mnist", "sentences": "uci_sentences", "tweets": "tweets"}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cifar10(tmp_path):
    """CIFAR-10's TFDS folder, with patches of scikit-learn's two photographs."""
    import tensorflow_datasets as tfds
    from sklearn import datasets

    photographs = datasets.load_sample_images().images
    corners = np.random.default_rng(0).integers(0, 300, (60, 2))

    def examples(part):
        for index, (row, column) in enumerate(part):
            photograph = photographs[index % 2]
            patch = photograph[row : row + 32, column : column + 32]
            yield index, {"id": str(index), "image": patch, "label": index % 2}

    builder = tfds.builder("cifar10", data_dir=tmp_path)
    tfds.dataset_builders.store_as_tfds_dataset(
        name="cifar10",
        version=builder.version,
        features=builder.info.features,
        data_dir=tmp_path,
        split_datasets={
            "train": examples(corners[:40]),
            "test": examples(corners[40:]),
        },
    )
    return str(tmp_path)


@pytest.fixture
def with_data(request, shared_data, tmp_path):
    """Returns a function that gives a configuration its data."""

    def fill(config):
        if config.name.startswith("cifar10"):
            config.data_dir = request.getfixturevalue("cifar10")
        elif config.name.startswith("mnist"):
            config.manual_dir = str(shared_data("mnist"))
            config.data_dir = str(tmp_path / "tfds")
        else:
            stem = config.name.removeprefix("bert-").removesuffix("-tiny")
            if stem in SHARED:
                config.data_dir = str(shared_data(SHARED[stem]))
        return config

    return fill


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_loads_locks_and_has_the_shared_fields(path):
    module = load(path)
    config = module.get_config().lock()
    assert config.name.removeprefix("bert-") == path.stem
    assert config.task in tasks.TASKS
    assert set(base_config.get_config()) <= set(config)
    with pytest.raises(AttributeError, match="Did you mean"):
        config.epoch = 1
    assert f"python scripts/train_{path.parent.name}.py" in module.__doc__


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_trains_under_the_tiny_override(path, with_data, tmp_path):
    config = base_config.apply_tiny(load(path).get_config())
    result = train_and_evaluate(with_data(config), tmp_path / "run")
    assert np.isfinite(result.final_loss)
    assert result.mode in ("float32", "mixed_bfloat16", "mixed_float16")


def test_tiny_leaves_its_argument_alone():
    config = load(ROOT / "configs/cnn/digits.py").get_config()
    before = config.to_json()
    small = base_config.apply_tiny(config)
    assert config.to_json() == before
    assert small.epochs == 1 and small.name == "digits-tiny"
