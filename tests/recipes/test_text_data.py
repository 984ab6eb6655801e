import re

import helpers
import pandas
import pytest
import tensorflow as tf

from tfamp import errors
from tfamp.recipes import text_classification
from tfamp.recipes.texts import docstrings, text_data, text_sources

GOOD = 'id,text,label\n1,"a ""quoted"", text",neg\n2,NA,pos\n3,third,pos\n4,d,neg\n'


def load(name, folder="", **fields):
    """Returns what is read from a folder with these fields of the configuration."""
    given = {"data_dir": str(folder), **fields}
    return text_data.load(helpers.configured(text_classification, name, **given))


def load_csv(folder, validation=0.34, **data):
    data = {f"data__{k}": v for k, v in {"test_fraction": 0.25, **data}.items()}
    return load("csv", folder, validation_fraction=validation, **data)


def rows_of(corpus):
    """Returns the rows of each split as sets of tuples, with names of classes."""
    return [
        {(*row[:-1], corpus.classes[row[-1]]) for row in part.itertuples(index=False)}
        for part in (corpus.train, corpus.validation, corpus.test)
    ]


# ---- CSV and TSV files ----


def test_csv_reads_quoted_text_into_three_disjoint_splits(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD, encoding="utf-8-sig")
    corpus = load_csv(tmp_path)
    assert corpus.classes == ("neg", "pos") and corpus.notes == ()
    parts = rows_of(corpus)
    assert list(map(len, parts)) == [1, 2, 1]
    assert set.union(*parts) == {
        ('a "quoted", text', "neg"),
        ("NA", "pos"),  # A word, and no missing value.
        ("third", "pos"),
        ("d", "neg"),
    }


def test_tsv_without_header_keeps_quotes_and_odd_line_separators(tmp_path):
    lines = 'say "hi\t1\nodd\x85 one\r inside\t0\n  spaced  \t1\r\nlast\t0\n'
    (tmp_path / "a.txt").write_bytes(lines.encode())
    columns = {"text_column": "0", "label_column": "1", "header": False}
    form = {"delimiter": r"\t", "quoted": False, "train_file": "*.txt"}
    parts = rows_of(load_csv(tmp_path, **columns, **form))
    texts = {row[0] for part in parts for row in part}
    assert texts == {'say "hi', "odd\x85 one\r inside", "spaced", "last"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("id,text,sentiment\n", r"no column 'label'. Found: 'id', 'text'"),
        (GOOD + "5,,pos\n", "train.csv, row 6: a field is empty.*on_bad_rows='skip'"),
        (GOOD + "5,  ,pos\n", "row 6: a field is empty"),
        (GOOD + "5,fifth,\n", "row 6: a field is empty"),
        (GOOD + "5,fifth\n", "row 6: a field is empty"),
        (GOOD + "5,a,b,c\n", "line 6"),
        ("id,text,label\n1,a,b,c\n", "rows with more fields than its header"),
        (GOOD + '5,"open,pos\n6,next,neg\n', "EOF inside string starting at row 5"),
        (GOOD + "5,,a\n" * 7, r"7 bad row\(s\).*row 10: .*; and 2 more"),
        ("", "No columns to parse"),
        (
            "id,text,label\n",
            "no usable row to train on: .*column 'label'. Exp",
        ),
        ("id,text,label\n1,a,x\n2,b,x\n", r"1 class\(es\) in 2"),
        (
            "text,label\n" + "".join(f"t{n},c{n}\n" for n in range(30)),
            r"30 class\(es\) in 30 .*c26, \.\.\. \(30\)\. Expected .* several rows",
        ),
        ("text,label\nsame,x\nSame,y\n", r"1 distinct text\(s\) cannot be split"),
        (
            GOOD + "5,caf\xe9,pos\n",
            "train.csv cannot be read: .*0xe9.*save it as UTF-8",
        ),
        (None, "No file train.csv in .*--data_dir=FOLDER"),
    ],
    ids=[
        "missing column",
        "empty text",
        "blank text",
        "missing label",
        "too few fields",
        "too many fields",
        "too many fields in all rows",
        "open quote",
        "at most five are listed",
        "nothing",
        "no rows",
        "one class",
        "a column of ids",
        "one text",
        "not UTF-8",
        "no file",
    ],
)
def test_csv_errors_name_file_row_and_reason(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "train.csv").write_text(content, encoding="latin-1")
    with helpers.one_line(errors.DataError, expected):
        load_csv(tmp_path)


def test_skipped_rows_are_counted_in_the_notes(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD + "5,,pos\n6,sixth\n7,x,pos\n")
    (tmp_path / "test_a.csv").write_text("text,label\nq,neg\nr,odd\n")
    (tmp_path / "test_b.csv").write_text("text,label\ns,neg\n")
    (tmp_path / "other.csv").write_text("text,label\nr,odd\n")
    asked = {"test_file": "test_*.csv", "on_bad_rows": "skip"}
    corpus = load_csv(tmp_path, **asked)
    assert rows_of(corpus)[2] == {("q", "neg"), ("s", "neg")}
    assert len(corpus.train) + len(corpus.validation) == 5
    assert corpus.notes == ("3 bad row(s) skipped",)
    for changes, error, words in (
        (
            {"on_bad_rows": "raise"},
            errors.DataError,
            "3 bad row.*test_a.csv, row 3: .*'odd'",
        ),
        (
            {"test_file": "other.csv"},
            errors.DataError,
            "other.csv has no usable row .*neg, p",
        ),
    ):
        with pytest.raises(error, match=words):
            load_csv(tmp_path, **{**asked, **changes})


def test_texts_in_both_files_are_reported(tmp_path):
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(GOOD)
    corpus = load_csv(tmp_path, test_file="test.csv")
    assert corpus.notes == ("4 text(s) are in both the train and the test file",)


def test_equal_texts_stay_together_and_splits_depend_on_the_split_seed_alone(tmp_path):
    rows = [f"text {n // 2},{'xyz'[n % 3]}" for n in range(100)] + ["TEXT  7,x"]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    first, again = (load_csv(tmp_path, 0.2) for _ in range(2))
    texts = [{" ".join(t.lower().split()) for t in p.text} for p in first[:3]]
    assert list(map(len, texts)) == [29, 8, 13] and len(set.union(*texts)) == 50
    assert all(a.equals(b) for a, b in zip(first[:3], again[:3], strict=True))
    other = load_csv(tmp_path, 0.2, split_seed=1)
    assert not other.test.equals(first.test)
    assert set(first.train.label[:9]) == {0, 1, 2}  # Shuffled: a limit takes the first.
    given = {"validation_fraction": 0.0, "data__test_fraction": 0.25}
    limited = load("csv", tmp_path, limit_examples=5, **given)
    assert [len(part) for part in limited[:3]] == [5, 0, 5]


def test_pairs_keep_their_order_and_count_as_one_text(tmp_path):
    content = "b,a,label\nx,one,p\nx,two,q\none,x,q\nX ,ONE,p\nq,r,p\n"
    (tmp_path / "train.csv").write_text(content)
    parts = rows_of(load_csv(tmp_path, text_column="a", second_text_column="b"))
    assert {("one", "x", "p"), ("x", "one", "q")} <= set.union(*parts)
    keys = [{(a.lower(), b.lower()) for a, b, _ in part} for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 4


# ---- GLUE's own files ----

SINGLE = [(f"he said {n}", n % 2) for n in range(12)]
PAIRS = [(f"first {n}", f'second "{n}', n % 2) for n in range(12)]
TSV = {  # Header, and a row of texts and the number of the class.
    "glue/sst2": ("sentence\tlabel", lambda a, label: f"{a} \t{label}"),
    "glue/cola": (None, lambda a, label: f"gj04\t{label}\t*\t{a}"),
    "glue/mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        lambda a, b, label: f"{label}\t1\t2\t{a}\t{b}",
    ),
    "glue/qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        lambda a, b, label: f"0\t1\t2\t{a}\t{b}\t{label}",
    ),
    "glue/mnli": (
        "index\tsentence1\tsentence2\tgold_label",
        lambda a, b, label: f"0\t{a}\t{b}\t{('entailment', 'neutral')[label]}",
    ),
    "glue/rte": (
        "index\tsentence1\tsentence2\tlabel",
        lambda a, b, label: f"0\t{a}\t{b}\t{('entailment', 'not_entailment')[label]}",
    ),
    "glue/qnli": (
        "index\tquestion\tsentence\tlabel",
        lambda a, b, label: f"0\t{a}\t{b}\t{('entailment', 'not_entailment')[label]}",
    ),
    "glue/wnli": (
        "index\tsentence1\tsentence2\tlabel",
        lambda a, b, label: f"0\t{a}\t{b}\t{label}",
    ),
}


def write_tsv(folder, name, train="train.tsv", dev="dev.tsv"):
    """Writes a task's files; returns the rows of both splits, with class numbers."""
    header, line = TSV[name]
    rows = SINGLE if name in ("glue/sst2", "glue/cola") else PAIRS
    for file, part in ((train, rows[:8]), (dev, rows[8:])):
        lines = [*([header] if header else []), *(line(*row) for row in part)]
        (folder / file).write_text("\n".join(lines) + "\n")
    return rows[:8], rows[8:]


@pytest.mark.parametrize("name", text_sources.GLUE)
def test_files_of_glue_are_read_like_the_set_of_tfds(name, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    dev = "dev_matched.tsv" if name == "glue/mnli" else "dev.tsv"
    train, test = write_tsv(tmp_path, name, dev=dev)
    corpus = load(name, manual_dir=str(tmp_path))
    names = tfds.builder(name, data_dir=tmp_path).info.features["label"].names
    assert corpus.classes == tuple(names)
    expected = [{(*r[:-1], names[r[-1]]) for r in part} for part in (train, test)]
    found = rows_of(corpus)
    assert [found[0] | found[1], found[2]] == expected


def test_raw_files_of_mrpc_are_read(tmp_path):
    files = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
    _, test = write_tsv(tmp_path, "glue/mrpc", *files)
    corpus = load("glue/mrpc", manual_dir=str(tmp_path))
    names = ("not_equivalent", "equivalent")
    assert rows_of(corpus)[2] == {(*row[:2], names[row[2]]) for row in test}


def test_folder_without_the_files_says_what_was_looked_for(tmp_path):
    expected = "train.tsv and dev.tsv or msr_paraphrase_train.txt and msr_paraphrase_te"
    with pytest.raises(errors.DataError, match=expected):
        load("glue/mrpc", manual_dir=str(tmp_path))


# ---- TFDS ----

# Name -> type of the label, examples of text and label; the last one is the test split.
ODD = {
    "hidden": ("names", [("a", 0), ("b", 1), ("c", 0), ("d", -1)]),
    "one_class": (tf.int32, [(f"t {n}", 7) for n in range(4)]),
    "no_test": (tf.int32, [("a", 0), ("b", 1), ("c", 0), (" ", 1)]),
    "latin_1": (tf.int32, [("a", 0), (b"caf\xe9", 1), ("c", 0)]),
    "vectors": ("vector", [("a", [0, 1])] * 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared data: GLUE's names, and sets of our own."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder, text = tmp_path_factory.mktemp("tfds"), tfds.features.Text()

    def store(name, splits, features=None):
        known = tfds.builder(name, data_dir=folder) if "/" in name else None
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name.split("/")[0],
            config=known.builder_config if known else None,
            version=known.version if known else "1.0.0",
            features=known.info.features if known else features,
            data_dir=folder,
            split_datasets={k: list(enumerate(rows)) for k, rows in splits.items()},
        )

    mrpc = [
        {"sentence1": a, "sentence2": b, "label": label, "idx": 0}
        for a, b, label in PAIRS
    ]
    store("glue/mrpc", {"train": mrpc[:8], "validation": mrpc[8:]})
    store("glue/rte", {"train": mrpc[:8]})
    rows = [{"words": f"w {n}", "size": 10 * (n % 3), "share": n / 9} for n in range(9)]
    types = {"words": text, "size": tf.int32, "share": tf.float32}
    store("sizes", {"train": rows}, tfds.features.FeaturesDict(types))
    kinds = {
        "names": tfds.features.ClassLabel(names=["7", "5"]),
        "vector": tfds.features.Tensor(shape=(2,), dtype=tf.int32),
    }
    for name, (kind, examples) in ODD.items():
        types = {"text": text, "label": kinds.get(kind, kind)}
        rows = [dict(zip(types, row, strict=True)) for row in examples]
        splits = {"train": rows[:-1], "test": rows[-1:]}
        store(name, splits, tfds.features.FeaturesDict(types))
    return folder


def test_validation_split_of_glue_is_the_test_data(folder):
    for name in ("glue/mrpc", "glue/mrpc:2.0.0"):
        corpus = load(name, folder, validation_fraction=0.25)
        names = corpus.classes
        assert names == ("not_equivalent", "equivalent")
        assert rows_of(corpus)[2] == {(*r[:2], names[r[2]]) for r in PAIRS[8:]}
        assert [len(part) for part in corpus[:2]] == [6, 2]


def test_any_set_is_read_by_the_names_of_its_columns(folder):
    columns = {"data__text_column": "words", "data__label_column": "size"}
    corpus = load("sizes", folder, **columns, data__test_fraction=0.4)
    assert corpus.classes == ("0", "10", "20")  # The feature has no names.
    assert len(corpus.test) == 4  # Held out: the set has the split "train" only.
    expected = {(f"w {n}", ("0", "10", "20")[n % 3]) for n in range(9)}
    assert set.union(*rows_of(corpus)) == expected


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("hidden", {}, "hidden/1.0.0 test, row 1: label -1 is not one of 7, 5"),
        ("sizes", {}, "'sizes' in .* has no feature 'text', feature 'label'. Found: "),
        (
            "sizes",
            {"data__text_column": "share", "data__label_column": "size"},
            "'share' of 'sizes' is not text. Received: .*float32",
        ),
        ("glue/rte", {}, "'glue/rte' in .* has no split 'validation'. Found: .*train"),
        ("one_class", {}, r"one_class has 1 class\(es\) in 3 .*: 7. Expected at le"),
        (
            "no_test",
            {"data__on_bad_rows": "skip"},
            "no_test has no usable row to score",
        ),
        ("latin_1", {}, "latin_1/1.0.0 train: 'utf-8' codec can't decode"),
        ("vectors", {}, "'label' of 'vectors' is not a class. .*shape=\\(2,\\)"),
        ("no_such_set", {}, "Unknown data set.*'no_such_set'"),
    ],
)
def test_unusable_set_is_a_line(folder, name, data, expected):
    with helpers.one_line(errors.DataError, expected):
        load(name, folder, **data)


def test_unprepared_set_without_a_network_names_manual_dir(tmp_path, no_network):
    with pytest.raises(errors.DataError, match="--manual_dir with the original files"):
        load("glue/sst2", tmp_path)
    with pytest.raises(ValueError, match="'docstrings', 'csv' or a name in TFDS"):
        load("", tmp_path)


# ---- Docstrings ----


@pytest.fixture(scope="module")
def found():
    return docstrings.collect(("sklearn", "keras"), 300)


def test_docstrings_are_prose_in_a_fixed_order(found):
    assert list(found.columns) == ["text", "label", "file"]
    assert found.label.value_counts().to_dict() == {"keras": 300, "sklearn": 300}
    assert found.label.is_monotonic_increasing and found.text.is_unique
    pandas.testing.assert_frame_equal(
        found, docstrings.collect(("keras", "sklearn"), 300)
    )
    assert found.text.str.split().str.len().min() >= 8
    headings = found.text.str.contains(r"Args:|Parameters -{3}|>>>|```")
    assert not headings.any()


def test_docstrings_as_classes_are_balanced_without_names_or_shared_files(found):
    asked = {"data__libraries": ("keras", "sklearn"), "data__texts_per_library": 300}
    corpus = load("docstrings", **asked)
    assert corpus.classes == ("keras", "sklearn")
    texts = pandas.concat(corpus[:3])
    assert texts.label.value_counts().nunique() == 1
    names = re.compile(r"keras|numpy|scikit|sklearn|scipy|\b(tf|np|plt)\b", re.I)
    assert [text for text in texts.text if names.search(text)] == []
    file = found.set_index("text").file
    files = [set(file.reindex(part.text).dropna()) for part in corpus[:3]]
    assert all(files) and not files[0] & files[2] and not files[0] & files[1]


def test_library_that_is_not_installed_is_an_error():
    with pytest.raises(errors.DataError, match=r"'no_such_library'.*tfamp\[all\]"):
        docstrings.collect(("no_such_library",))
