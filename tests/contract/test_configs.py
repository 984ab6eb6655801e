"""Every file in configs/ loads, locks, and trains under the one `tiny` override."""

import functools
import importlib
import itertools
import pathlib

import helpers
import made_tables
import numpy as np
import pytest

from tfamp.training import base_config, train_and_evaluate

ROOT = pathlib.Path(__file__).parents[2]
# Those of benchmarks are not of a run: tests/measuring/test_cells.py.
FILES = sorted(
    path for path in (ROOT / "configs").rglob("*.py") if path.parent.name != "benchmark"
)
SIZES = {"mrpc": ("tiny",), "squad": ("large", "tiny"), "sst2": ("tiny",)}
SIZES |= {"tweets": ("tiny", "base")}
# Each file, and each with the arguments it takes: `FILE:SIZE` on the command line.
CONFIGS = [
    pytest.param(path, args, id="_".join((path.stem, *args)))
    for path in FILES
    for args in [(), *((size,) for size in SIZES.get(path.stem, ()))]
]
SHARED = {  # Folders of the data sets that every host can have.
    "bike_sharing": "bike_sharing",
    "dsb2018": "dsb2018_256",
    "sentences": "uci_sentences",
    "tweets": "tweets",
}
SLOW = ("cifar10_efficientnet", "mnist")
WORDS = "a the film phone was is very not good bad fine poor in it and of".split()


# ---- Stand-ins for data that no host has without a download ----


def store(folder, name, train, test, test_split="validation"):
    """Writes a TFDS folder of the registered data set, with other examples."""
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=folder)
    tfds.dataset_builders.store_as_tfds_dataset(
        name=builder.name,
        config=builder.builder_config,
        version=builder.version,
        features=builder.info.features,
        data_dir=folder,
        split_datasets={"train": enumerate(train), test_split: enumerate(test)},
    )
    return str(folder)


def store_cifar10(folder):
    """Patches of scikit-learn's two photographs."""
    from sklearn import datasets

    photographs = datasets.load_sample_images().images
    corners = np.random.default_rng(0).integers(0, 300, (60, 2))
    examples = [
        {
            "id": str(index),
            "image": photographs[index % 2][row : row + 32, column : column + 32],
            "label": index % 2,
        }
        for index, (row, column) in enumerate(corners)
    ]
    return store(folder, "cifar10", examples[:40], examples[40:], "test")


def store_mnist(folder):
    """Digits of scikit-learn, enlarged; the real ones take TFDS ten seconds."""
    from sklearn import datasets

    digits = datasets.load_digits()
    examples = [
        {"image": np.kron(image, np.ones((4, 4)))[2:-2, 2:-2, None], "label": label}
        for image, label in zip(digits.images[:80], digits.target, strict=False)
    ]
    for example in examples:
        example["image"] = (15 * example["image"]).astype("uint8")
    return store(folder, "mnist", examples[:40], examples[40:], "test")


def store_pets(folder):
    """Parts of scikit-learn's two photographs; the mask follows their brightness."""
    import tensorflow_datasets as tfds
    from sklearn import datasets

    photographs, examples = datasets.load_sample_images().images, []
    for index in range(60):
        image = photographs[index % 2][: 40 + index, :50]
        examples.append(
            {
                "image": image,
                "label": index % 37,
                "species": index % 2,
                "file_name": f"{index}.jpg",
                "segmentation_mask": 1 + image[..., :1] // 86,
                "head_bbox": tfds.features.BBox(0.0, 0.0, 0.5, 0.5),
            }
        )
    return store(folder, "oxford_iiit_pet", examples[:40], examples[40:], "test")


def sentences(count):
    """Random words."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, 9)) for _ in range(count)]


def store_sst2(folder):
    """Single sentences of two classes."""
    examples = [
        {"sentence": text, "label": index % 2, "idx": index}
        for index, text in enumerate(sentences(60))
    ]
    return store(folder, "glue/sst2", examples[:40], examples[40:])


def store_mrpc(folder):
    """Pairs of sentences, half of them the same."""
    texts = sentences(61)
    examples = [
        {"sentence1": a, "sentence2": (a, b)[index % 2], "label": 1 - index % 2}
        | {"idx": index}
        for index, (a, b) in enumerate(itertools.pairwise(texts))
    ]
    return store(folder, "glue/mrpc", examples[:40], examples[40:])


def store_squad(folder):
    """Paragraphs of random words; the answer is one of them."""
    examples = []
    for index, context in enumerate(sentences(60)):
        answer = context.split()[index % 9]
        examples.append(
            {
                "id": str(index),
                "title": f"Article {index // 2}",
                "context": context,
                "question": f"Where is {answer}?",
                "answers": {
                    "text": [answer],
                    "answer_start": [context.index(answer)],
                },
            }
        )
    return store(folder, "squad", examples[:40], examples[40:])


def write_spans(folder):
    """Tweets of random words; one of them carries the sentiment."""
    rows = ["textID,text,sentiment,selected_text"]
    for index, text in enumerate(sentences(60)):
        rows.append(f"{index},{text},positive,{text.split()[index % 9]}")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


def write_csv(folder):
    """Texts of random words of two classes."""
    rows = [f"{text},{index % 2}" for index, text in enumerate(sentences(60))]
    (folder / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return str(folder)


def write_text(folder):
    """Lines of random words."""
    (folder / "words.txt").write_text("\n".join(sentences(60)))
    return str(folder)


STAND_INS = {
    "cifar10": store_cifar10,
    "cifar10_efficientnet": store_cifar10,
    "cifar10_resnet": store_cifar10,
    "cifar10_resnet_tiny": store_cifar10,
    "csv": write_csv,
    "mnist_wide": store_mnist,
    "mrpc": store_mrpc,
    "oxford_iiit_pet": store_pets,
    "rossmann": made_tables.write_rossmann,
    "squad": store_squad,
    "sst2": store_sst2,
    "text_file": write_text,
    "tweets_spans": write_spans,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Returns a function of a writer above: the folder, written once."""
    return functools.cache(lambda write: write(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize(("path", "args"), CONFIGS)
def test_config_loads_locks_and_has_the_shared_fields(path, args):
    module = helpers.load_module(path)
    config = module.get_config(*args).lock()
    size = args or (("base",) if path.stem in ("mrpc", "squad", "sst2") else ())
    assert config.name.removeprefix("bert-") == "_".join((path.stem, *size))
    module_name, _, name = config.task.partition(":")
    assert callable(getattr(importlib.import_module(module_name), name))
    assert set(base_config.get_config()) <= set(config)
    with pytest.raises(AttributeError, match="Did you mean"):
        config.epoch = 1
    assert f"python scripts/train_{path.parent.name}.py" in module.__doc__
    if path.parent.name == "bert":  # An example fits a new encoder.
        assert config.data.sequence_length <= config.model.max_sequence_length
    # The one size that is trained below stands for all.
    small, trained = map(base_config.apply_tiny, (config, module.get_config()))
    names = set(small.model) - {"max_sequence_length"}
    assert [small.model[k] for k in names] == [trained.model[k] for k in names]


@pytest.mark.parametrize(
    "path",
    [
        # EfficientNet's graph alone takes 20 s, and so do MNIST's 70,000 images; that
        # network, and other sets of TFDS, have tests of their own.
        pytest.param(
            path,
            id=path.stem if path.parent.name != "lm" else f"lm_{path.stem}",
            marks=pytest.mark.slow if path.stem in SLOW else (),
        )
        for path in FILES
    ],
)
def test_config_trains_under_the_tiny_override(path, stored, shared_data, tmp_path):
    config = base_config.apply_tiny(helpers.load_module(path).get_config())
    if path.stem in STAND_INS:
        config.data_dir = str(stored(STAND_INS[path.stem]))
    elif path.stem == "mnist":
        config.manual_dir = str(shared_data("mnist"))
        config.data_dir = str(tmp_path / "tfds")
    elif path.stem in SHARED:
        config.data_dir = str(shared_data(SHARED[path.stem]))
    elif path.stem == "docstrings":
        config.data.libraries = ("absl", "hypothesis")  # Those of the recipe are large.
    result = train_and_evaluate(config, tmp_path / "run")
    assert np.isfinite(result.final_loss)
    assert result.mode in ("float32", "mixed_bfloat16", "mixed_float16")


@pytest.mark.parametrize(
    ("path", "args"),
    [
        each
        for each in CONFIGS
        if each.id in ("mrpc", "squad", "sst2") or each.id.endswith(("_base", "_large"))
    ],
)
def test_recipe_as_published_starts_from_weights_and_selects_nothing(path, args):
    config = helpers.load_module(path).get_config(*args)
    size = config.name.rsplit("_", 1)[1]
    assert config.model.preset == f"bert_{size}_en_uncased"
    assert config.validation_fraction == 0
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.schedule) == ("adamw", "linear")
    assert (optimizer.warmup_fraction, optimizer.weight_decay) == (0.1, 0.01)
    assert (optimizer.clip_global_norm, optimizer.epsilon) == (1.0, 1e-6)
    assert "https://" in helpers.load_module(path).__doc__
    # Of a new encoder: the same shapes, as https://arxiv.org/abs/1810.04805 has them.
    model = config.model
    sizes = {"base": (12, 12, 768, 3072), "large": (24, 16, 1024, 4096)}[size]
    assert sizes == (
        *(model.num_layers, model.num_heads),
        *(model.hidden_dim, model.intermediate_dim),
    )
    assert (model.max_sequence_length, model.vocabulary_size) == (512, 30522)


def test_tiny_leaves_its_argument_alone():
    config = helpers.load_module(ROOT / "configs/cnn/digits.py").get_config()
    before = config.to_json()
    small = base_config.apply_tiny(config)
    assert config.to_json() == before
    assert small.epochs == 1 and small.name == "digits-tiny"
