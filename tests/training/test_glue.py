import socket

import numpy as np
import pytest

from tfamp import errors
from tfamp.training import bert_config, glue, tasks, text, tfds_folder

tfds = pytest.importorskip("tensorflow_datasets")

SENTENCES = [(f"sentence {n} of a kind", n % 2) for n in range(16)]
PAIRS = [(f"first {n}", f"second {n}", n % 2) for n in range(8)]


# Name -> type of the label, examples of text and label; the last one is the test split.
ODD = {
    "one_class": (np.int32, [(f"t {n}", 7) for n in range(4)]),
    "no_test": (np.int32, [("a", 0), ("b", 1), ("c", 0), (" ", 1)]),
    "latin_1": (np.int32, [("a", 0), (b"caf\xe9", 1), ("c", 0)]),
    "vectors": (tfds.features.Tensor(shape=(2,), dtype=np.int32), [("a", [0, 1])] * 2),
    "unnamed": (tfds.features.Text(), [("a", "x"), ("b", "y"), ("c", ""), ("d", "y")]),
}


def store(folder, name, splits, features=None):
    """Stores lists of feature dictionaries as a TFDS data set."""
    target = tfds_folder.find_target(name)
    features = features or target.registered.info.features
    source = tfds_folder.Source(splits, features)
    tfds_folder.write(target, source, folder / target.folder)


def sentences(rows):
    names = ("sentence", "label")
    return [dict(zip(names, r, strict=True), idx=n) for n, r in enumerate(rows)]


def pairs(rows):
    names = ("sentence1", "sentence2", "label")
    return [dict(zip(names, r, strict=True), idx=n) for n, r in enumerate(rows)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared data: GLUE's names, and sets of our own."""
    folder = tmp_path_factory.mktemp("tfds")
    hidden = sentences([("hidden one", -1), ("hidden two", -1)])
    sst2 = {"train": SENTENCES[:12], "validation": [("  ", 1), *SENTENCES[12:]]}
    sst2 = {split: sentences(rows) for split, rows in sst2.items()}
    store(folder, "glue/sst2", {**sst2, "test": hidden})
    mrpc = {"train": pairs(PAIRS[:6]), "validation": pairs(PAIRS[6:])}
    store(folder, "glue/mrpc", mrpc)
    store(folder, "glue/rte", {"train": pairs(PAIRS[:6])})
    words = {"words": tfds.features.Text(), "size": np.int32, "share": np.float32}
    rows = [{"words": f"w {n}", "size": 10 * (n % 3), "share": n / 9} for n in range(9)]
    store(folder, "sizes", {"train": rows}, tfds.features.FeaturesDict(words))
    named = {"text": tfds.features.Text()}
    named["label"] = tfds.features.ClassLabel(names=["7", "5"])
    splits = {
        "train": [{"text": f"t {n}", "label": n % 2} for n in range(8)],
        "test": [{"text": "a", "label": -1}, {"text": "b", "label": 1}],
    }
    store(folder, "masked", splits, tfds.features.FeaturesDict(named))
    for name, (label, examples) in ODD.items():
        features = {"text": tfds.features.Text(), "label": label}
        rows = [dict(zip(("text", "label"), row, strict=True)) for row in examples]
        splits = {"train": rows[:-1], "test": rows[-1:]}
        store(folder, name, splits, tfds.features.FeaturesDict(features))
    return folder


def glue_config(name, **data):
    config = bert_config.get_glue_config(name)
    config.validation_fraction = 0.25
    config.data.update(data)
    return config


def load(folder, name, **data):
    return glue.load(glue_config(name, **data), str(folder), None)


def test_validation_split_of_glue_is_the_test_data(folder):
    corpus = load(folder, "glue/sst2", on_bad_rows="skip")
    assert corpus.classes == ("negative", "positive")
    sizes = [len(p) for p in (corpus.train, corpus.validation, corpus.test)]
    assert sizes == [9, 3, 4]
    trained = {tuple(e[:2]) for e in corpus.train + corpus.validation}
    assert trained == set(SENTENCES[:12])
    assert {tuple(e[:2]) for e in corpus.test} == set(SENTENCES[12:])
    assert corpus.notes == (
        "1 bad row(s) skipped",
        "unused: test of glue/sst2/2.0.0",
    )


def test_empty_texts_are_named(folder):
    expected = "glue/sst2 validation, row .*: a text is empty.*on_bad_rows='skip'"
    with pytest.raises(errors.DataError, match=expected):
        load(folder, "glue/sst2")


@pytest.mark.parametrize("name", ["glue/mrpc", "glue/mrpc:2.0.0"])
def test_pairs_keep_their_order(folder, name):
    corpus = load(folder, name)
    assert corpus.classes == ("not_equivalent", "equivalent")
    expected = [text.Example(first, label, second) for first, second, label in PAIRS]
    assert sorted(corpus.test) == expected[6:]
    assert sorted(corpus.train + corpus.validation) == expected[:6]


def test_any_set_is_read_by_the_names_of_its_columns(folder):
    columns = {"text_column": "words", "label_column": "size", "test_fraction": 0.4}
    corpus = load(folder, "sizes", **columns)
    assert corpus.classes == ("0", "10", "20")  # The feature has no names.
    assert len(corpus.test) == 4  # Held out: the set has the split "train" only.
    everything = corpus.train + corpus.validation + corpus.test
    expected = [text.Example(f"w {n}", n % 3) for n in range(9)]
    assert sorted(everything) == expected


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("masked", {}, "masked test: 1 of 2 labels are hidden"),
        ("sizes", {}, "'sizes' has no feature 'text', 'label'. Found: "),
        (
            "sizes",
            {"text_column": "words", "label_column": "share"},
            "'share' of sizes/1.0.0 is not a class: .* Received: .*float32",
        ),
        (
            "sizes",
            {"text_column": "share", "label_column": "size"},
            "'share' of sizes/1.0.0 is not text. Received: .*float32",
        ),
        ("glue/rte", {}, "'glue/rte' in .* has no split 'validation'. Found: train"),
        ("glue/stsb", {}, "'glue/stsb' is a regression"),
        ("glue/stsb:2.0.0", {}, "'glue/stsb:2.0.0' is a regression"),
        ("glue/ax", {}, "'glue/ax' hides all its labels"),
        ("one_class", {}, r"one_class has 1 class\(es\) in 3 .*: 7. Expected at le"),
        ("no_test", {"on_bad_rows": "skip"}, "no_test has no usable row to score"),
        ("latin_1", {}, "latin_1/1.0.0 train, row .*: 'utf-8' codec can't decode"),
        ("vectors", {}, "'label' of vectors/1.0.0 is not a class: .*shape=\\(2,\\)"),
        ("unnamed", {}, "unnamed train, row .*: label '' is not one of x, y"),
        ("glue/sst3", {}, "Unknown data set.*'glue/sst3'"),
        ("no_such_set", {}, "Unknown data set.*'no_such_set'.*prepare_data.py"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else None,
)
def test_unusable_set_is_a_line(folder, name, data, expected):
    with pytest.raises(errors.DataError, match=expected) as caught:
        load(folder, name, **data)
    assert "\n" not in str(caught.value)


def test_unprepared_set_without_a_network_names_the_script(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(errors.DataError, match="scripts/prepare_data.py"):
        load(tmp_path, "glue/sst2")


def test_columns_of_each_task_are_features_of_tfds(tmp_path):
    for name, columns in glue.GLUE.items():
        builder = tfds.builder(name, data_dir=tmp_path)
        assert set(columns.features) <= set(builder.info.features), name
        assert set(builder.info.features) - {*columns.features, "idx"} == set(), name


def test_task_reads_a_tfds_name(folder):
    pytest.importorskip("keras_hub")
    config = glue_config("glue/mrpc", sequence_length=16)
    config.data_dir = str(folder)
    config.model.vocabulary_size = 100
    task = tasks.from_config(config)
    features, _ = next(iter(task.test.batch(2)))
    assert features["segment_ids"].numpy().any()
    assert "2 classes (not_equivalent, equivalent); 4 train / 2" in task.description
