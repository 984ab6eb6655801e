import csv
import os
import re

import pytest
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import docstrings, tables, text

GOOD = 'id,text,label\n1,"a ""quoted"", text",neg\n2,second,pos\n3,third,pos\n4,d,neg\n'


def csv_config(**data):
    defaults = {
        "train_file": "train.csv",
        "test_file": "",
        "test_fraction": 0.25,
        "text_column": "text",
        "second_text_column": "",
        "label_column": "label",
        "delimiter": ",",
        "header": True,
        "quoted": True,
        "on_bad_rows": "raise",
        "split_seed": 0,
    }
    return config_dict.ConfigDict(
        {"validation_fraction": 0.34, "data": defaults | data}
    )


def docstrings_config(limit_examples=12):
    data = {
        "libraries": ("matplotlib", "sklearn", "keras"),
        "texts_per_library": 1000,
        "min_words": 8,
        "test_fraction": 0.2,
        "split_seed": 0,
    }
    return config_dict.ConfigDict(
        {"limit_examples": limit_examples, "validation_fraction": 0.2, "data": data}
    )


@pytest.fixture(scope="module")
def corpus():
    for library in docstrings_config().data.libraries:
        pytest.importorskip(library)
    return docstrings.load(docstrings_config())


def parts_of(corpus):
    return corpus.train, corpus.validation, corpus.test


def test_csv_reads_quoted_text_into_three_disjoint_splits(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD, encoding="utf-8-sig")
    corpus = text.load_csv(csv_config(), str(tmp_path))
    assert corpus.classes == ("neg", "pos")
    assert [len(part) for part in parts_of(corpus)] == [2, 1, 1]
    examples = {e for part in parts_of(corpus) for e in part}
    assert examples == {
        text.Example('a "quoted", text', 0),
        text.Example("second", 1),
        text.Example("third", 1),
        text.Example("d", 0),
    }
    assert corpus.notes == ()


def test_tsv_without_header_keeps_quotes_and_odd_line_separators(tmp_path):
    lines = 'say "hi\t1\nodd\x85 one\r inside\t0\n  spaced  \t1\nlast\t0\n'
    (tmp_path / "a.txt").write_bytes(lines.encode())
    config = csv_config(
        train_file="*.txt",
        text_column="0",
        label_column="1",
        delimiter="\t",
        header=False,
        quoted=False,
    )
    corpus = text.load_csv(config, str(tmp_path))
    texts = {e.text for part in parts_of(corpus) for e in part}
    assert texts == {'say "hi', "odd\x85 one\r inside", "spaced", "last"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("id,text,sentiment\n", r"row 1: no column 'label'. Found: 'id', 'text'"),
        (GOOD + "5,,pos\n", r"train.csv, row 6: column 'text' is empty"),
        (GOOD + "5,  ,pos\n", r"row 6: column 'text' is empty"),
        (GOOD + "5,fifth,\n", r"row 6: column 'label' is empty"),
        (GOOD + "5,fifth\n", r"row 6: 2 field\(s\), expected 3"),
        (GOOD + "5,a,b,c\n", r"row 6: 4 field\(s\), expected 3"),
        (GOOD + '5,"open,pos\n6,next,neg\n', r"row 6: unexpected end of data"),
        (GOOD + "5,,a\n" * 7, r"7 bad row\(s\).*row 10: .*; and 2 more"),
        ("id,text,label\n", r"no usable row"),
        ("id,text,label\n1,a,x\n2,b,x\n", r"1 class\(es\)"),
        ("text,label,label\na,x,y\n", "row 1: two columns 'label'"),
        (
            "text,label\n" + "".join(f"t{n},c{n}\n" for n in range(30)),
            r"30 class\(es\) in 30 .*c26, \.\.\. \(30\)\. Expected several rows",
        ),
    ],
    ids=[
        "missing column",
        "empty text",
        "blank text",
        "missing label",
        "too few fields",
        "too many fields",
        "open quote",
        "at most five are listed",
        "no rows",
        "one class",
        "a name twice",
        "a column of ids",
    ],
)
def test_csv_errors_name_file_row_and_reason(tmp_path, content, expected):
    (tmp_path / "train.csv").write_text(content)
    with pytest.raises(errors.DataError, match=expected) as caught:
        text.load_csv(csv_config(), str(tmp_path))
    assert "train.csv" in str(caught.value)


def test_pairs_keep_their_order_and_count_as_one_text(tmp_path):
    rows = "b,a,label\nx,one,p\nx,two,q\none,x,q\nX ,ONE,p\nq,r,p\n"
    (tmp_path / "train.csv").write_text(rows)
    config = csv_config(text_column="a", second_text_column="b")
    corpus = text.load_csv(config, str(tmp_path))
    parts = parts_of(corpus)
    examples = [e for part in parts for e in part]
    assert text.Example("one", 0, "x") in examples  # Text "a", label "p", second "b".
    assert text.Example("x", 1, "one") in examples
    keys = [{text.example_key(e) for e in part} for part in parts]
    assert [len(k) for k in keys] == [2, 1, 1]  # "one / x" twice, on one side.
    assert len(set.union(*keys)) == 4


def test_second_column_must_be_there_and_filled(tmp_path):
    (tmp_path / "train.csv").write_text("text,second,label\na,,x\nb,c,y\nd,e,x\n")
    with pytest.raises(errors.DataError, match="row 1: no column 'absent'"):
        text.load_csv(csv_config(second_text_column="absent"), str(tmp_path))
    with pytest.raises(errors.DataError, match="row 2: column 'second' is empty"):
        text.load_csv(csv_config(second_text_column="second"), str(tmp_path))


def test_without_a_validation_share_all_rows_train(tmp_path):
    rows = "".join(f"{n},row {n},pos\n" for n in range(20))
    (tmp_path / "train.csv").write_text(GOOD + rows)
    (tmp_path / "test.csv").write_text("text,label\nq,neg\n")
    config = csv_config(test_file="test.csv")
    config.validation_fraction = 0
    corpus = text.load_csv(config, str(tmp_path))
    assert [len(part) for part in parts_of(corpus)] == [24, 0, 1]
    assert corpus.train != sorted(corpus.train)  # Shuffled: a limit takes the first.
    assert text.load_csv(config, str(tmp_path)) == corpus


def test_test_file_with_other_labels_only_is_an_error(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD)
    (tmp_path / "test.csv").write_text("text,label\nq,-1\n")
    config = csv_config(test_file="test.csv", on_bad_rows="skip")
    with pytest.raises(errors.DataError, match="test.csv has no usable row .*neg, pos"):
        text.load_csv(config, str(tmp_path))


def test_columns_come_in_the_order_they_are_asked_for(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,c\n1, 2 ,3\n4,5\n6,7,\n")
    records, bad = tables.read_table(
        csv_config(), str(tmp_path), "train.csv", ("c", "a", "b")
    )
    assert [(r.number, r.values) for r in records] == [(2, ("3", "1", "2"))]
    assert [(b.number, b.reason) for b in bad] == [
        (3, "2 field(s), expected 3"),
        (4, "column 'c' is empty"),
    ]


@pytest.mark.parametrize("quoted", [True, False])
def test_csv_that_is_not_utf8_names_the_line(tmp_path, quoted):
    rows = "".join(f"{n},row {n},pos\n" for n in range(5000))  # More than a buffer.
    content = "\ufeffid,text,label\n" + rows
    (tmp_path / "train.csv").write_bytes(content.encode() + b"5,caf\xe9,pos\n")
    expected = "train.csv, line 5002: the byte 0xe9 is not UTF-8"
    with pytest.raises(errors.DataError, match=expected):
        text.load_csv(csv_config(quoted=quoted), str(tmp_path))


@pytest.mark.parametrize("quoted", [True, False])
def test_blank_lines_are_no_rows_but_count(tmp_path, quoted):
    (tmp_path / "a").write_text("text,label\na,x\n\nb,y\n,z\n\n\n")
    columns = ("text", "label")
    found = tables.read_table(csv_config(quoted=quoted), str(tmp_path), "a", columns)
    assert [[item.number for item in part] for part in found] == [[2, 4], [5]]


@pytest.mark.parametrize("pattern", ["a.csv", "*.csv"])
def test_folder_is_no_pattern(tmp_path, pattern):
    folder = tmp_path / "data[1]*"
    folder.mkdir()
    (folder / "a.csv").write_text(GOOD)
    records, _ = tables.read_table(csv_config(), str(folder), pattern, ("text",))
    assert {record.file for record in records} == {str(folder / "a.csv")}


@pytest.mark.parametrize("delimiter", ["\t", r"\t"], ids=["tab", "escape"])
@pytest.mark.parametrize("quoted", [True, False])
def test_tab_may_be_an_escape(tmp_path, delimiter, quoted):
    (tmp_path / "train.csv").write_text("text\tlabel\na\tx\nb\ty\nc\tx\n")
    config = csv_config(delimiter=delimiter, quoted=quoted)
    assert text.load_csv(config, str(tmp_path)).classes == ("x", "y")


@pytest.mark.parametrize(
    ("delimiter", "quoted"), [("", True), ("", False), (";;", True), ("\n", False)]
)
def test_delimiter_that_separates_nothing_is_refused(tmp_path, delimiter, quoted):
    (tmp_path / "train.csv").write_text(GOOD)
    expected = re.escape(f"Received: delimiter={delimiter!r}, quoted={quoted}")
    with pytest.raises(ValueError, match=expected):
        text.load_csv(csv_config(delimiter=delimiter, quoted=quoted), str(tmp_path))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("text_column", "label_column"), "set config.data.label_column, .*text_colu"),
        (("context_column",), "set config.data.context_column.$"),
        ((), "Correct the file.$"),
    ],
    ids=["classes", "spans", "no setting"],
)
def test_missing_column_recommends_settings_that_there_are(tmp_path, names, expected):
    (tmp_path / "a").write_text("x\n1\n")
    data = {"delimiter": ",", "header": True, "quoted": True}
    config = config_dict.ConfigDict({"data": data | dict.fromkeys(names, "")})
    with pytest.raises(errors.DataError, match=expected):
        tables.read_table(config, str(tmp_path), "a", ("y",))


@pytest.mark.parametrize(
    ("data_dir", "expected"),
    [(None, "Pass their folder: --data_dir"), ("", "--data_dir"), (".", "No file")],
)
def test_missing_folder_or_file_says_what_data_dir_needs(
    tmp_path, monkeypatch, data_dir, expected
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.DataError, match=expected):
        text.load_csv(csv_config(), data_dir)


def test_skipped_rows_are_counted_in_the_notes(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD + "5,,pos\n6,sixth\n7,x,pos\n")
    (tmp_path / "test.csv").write_text("text,label\nq,neg\nr,odd\n")
    config = csv_config(test_file="test.csv")
    with pytest.raises(errors.DataError, match="3 bad row.*'odd' is not one of neg"):
        text.load_csv(config, str(tmp_path))
    config.data.on_bad_rows = "skip"
    corpus = text.load_csv(config, str(tmp_path))
    assert corpus.test == [text.Example("q", 0)]
    assert len(corpus.train) + len(corpus.validation) == 5
    assert corpus.notes == ("3 bad row(s) skipped",)


def test_bad_row_of_one_test_file_costs_no_row_of_another(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD)
    (tmp_path / "test_a.csv").write_text("text,label\nq,neg\nr,odd\n")
    (tmp_path / "test_b.csv").write_text("text,label\ns,neg\nt,pos\n")
    config = csv_config(test_file="test_*.csv")
    with pytest.raises(errors.DataError, match="test_a.csv, row 3: label 'odd'"):
        text.load_csv(config, str(tmp_path))
    config.data.on_bad_rows = "skip"
    corpus = text.load_csv(config, str(tmp_path))
    assert {example.text for example in corpus.test} == {"q", "s", "t"}


@pytest.mark.parametrize("content", ["", "id,text,label\n"], ids=["empty", "header"])
def test_file_without_rows_behind_a_pattern_is_an_error(tmp_path, content):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(content)
    with pytest.raises(errors.DataError, match=r"b\.csv has no row"):
        text.load_csv(csv_config(train_file="*.csv"), str(tmp_path))


def test_long_field_is_text_and_pythons_limit_stays(tmp_path):
    limit = csv.field_size_limit()
    long = "word " * 40_000
    (tmp_path / "train.csv").write_text(GOOD + f'5,"{long}",pos\n')
    records, bad = tables.read_table(
        csv_config(), str(tmp_path), "train.csv", ["text", "label"]
    )
    assert (records[-1].values[0], bad) == (long.strip(), [])
    assert csv.field_size_limit() == limit


def test_unknown_way_of_handling_bad_rows_is_an_error(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD)
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        text.load_csv(csv_config(on_bad_rows="ignore"), str(tmp_path))


def test_texts_in_both_files_are_reported(tmp_path):
    (tmp_path / "train.csv").write_text(GOOD)
    (tmp_path / "test.csv").write_text(GOOD)
    corpus = text.load_csv(csv_config(test_file="test.csv"), str(tmp_path))
    assert corpus.validation  # Which selects: its texts count, too.
    assert corpus.notes == ("4 text(s) are in both the train and the test file",)


def test_split_is_independent_of_order_and_keeps_equal_texts_together():
    examples = [text.Example(f"text {n // 2}", n % 3) for n in range(100)]
    examples.append(text.Example("TEXT  7", 0))
    train, held_out = text.split(examples, 0.2, seed=1)
    assert text.split(examples[::-1], 0.2, seed=1) == (train, held_out)
    assert text.split(examples, 0.2, seed=2) != (train, held_out)
    keys = [{text.text_key(e.text) for e in part} for part in (train, held_out)]
    assert not keys[0] & keys[1]
    assert len(keys[1]) == 10
    assert sorted(train + held_out) == sorted(examples)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_split_share_must_leave_both_sides(fraction):
    examples = [text.Example(str(n), 0) for n in range(5)]
    with pytest.raises(ValueError, match=re.escape(str(fraction))):
        text.split(examples, fraction, seed=0)


def test_one_distinct_text_cannot_be_split():
    with pytest.raises(errors.DataError, match="1 distinct text"):
        text.split([text.Example("a", 0)] * 3, 0.5, seed=0)


def test_limit_takes_the_first_of_each_split():
    examples = [text.Example(str(n), 0) for n in range(5)]
    corpus = text.Corpus(examples, examples, examples[:1], ("a",), ())
    assert text.limit(corpus, 0) is corpus
    limited = text.limit(corpus, 2)
    assert [len(part) for part in parts_of(limited)] == [2, 2, 1]
    assert limited.train == examples[:2]


def test_docstrings_are_the_same_in_another_order_of_files(corpus, monkeypatch):
    walk = os.walk

    def reversed_walk(top):
        for folder, folders, names in walk(top):
            folders.reverse()
            yield folder, folders, names[::-1]

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert docstrings.load(docstrings_config()) == corpus


def test_docstrings_hold_no_library_name(corpus):
    names = re.compile(
        r"tensorflow|keras|numpy|scikit|sklearn|matplotlib|pyplot|scipy"
        r"|\b(tf|np|plt|mpl)\b",
        re.IGNORECASE,
    )
    texts = [e.text for part in parts_of(corpus) for e in part]
    assert [item for item in texts if names.search(item)] == []
    assert [item for item in texts if len(item.split()) < 8] == []


def test_docstring_splits_share_no_text_and_hardly_a_phrase(corpus):
    train, validation, test = (
        [docstrings._shingles(e.text) for e in part] for part in parts_of(corpus)
    )
    texts = [text.text_key(e.text) for part in parts_of(corpus) for e in part]
    assert len(set(texts)) == len(texts)
    for shingles in validation + test:
        for other in train:
            shorter = min(len(shingles), len(other))
            assert len(shingles & other) <= 0.5 * shorter


def test_docstring_classes_are_balanced_in_each_split(corpus):
    assert corpus.classes == ("keras", "matplotlib", "sklearn")
    for part in parts_of(corpus):
        counts = [sum(e.label == label for e in part) for label in range(3)]
        assert min(counts) == max(counts) > 5
    assert "sklearn 1." in corpus.notes[0]


@pytest.mark.parametrize("limit_examples", [12, 0])
def test_docstrings_without_a_validation_share_have_two_splits(limit_examples):
    pytest.importorskip("sklearn")
    config = docstrings_config(limit_examples)
    config.validation_fraction = 0
    config.data.libraries = ("keras", "sklearn")
    config.data.texts_per_library = 250
    corpus = docstrings.load(config)
    train, validation, test = map(len, parts_of(corpus))
    assert validation == 0 and train > 3 * test > 0


def test_docstring_files_are_each_in_one_split():
    items = [docstrings._Text(f"f{n // 7}", str(n)) for n in range(700)]
    parts = docstrings._deal(items, docstrings_config())
    files = {
        split: {int(item) // 7 for item in texts} for split, texts in parts.items()
    }
    assert sum(map(len, files.values())) == len(set.union(*files.values())) == 100
    assert [len(parts[name]) for name in ("train", "validation", "test")] == (
        pytest.approx([448, 112, 140], abs=7)
    )


def test_fewer_examples_read_fewer_texts_but_enough():
    wanted = [docstrings._wanted(docstrings_config(n)) for n in (3, 120, 600, 0)]
    assert wanted == [200, 500, 1000, 1000]  # The second: 2 * (120 / 3) / 0.16.


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Sums `tf.Tensor`s.\n\nArgs:\n  x: A.", "Sums .Tensor s."),
        ("Use sklearn.svm or np.ndarray.\n\nParameters\n----------\nx", ""),
        ("A KerasTensor, a TFRecord, tfidf, TensorFlow 2.", ""),
        ("Plots.\n\n>>> plt.plot()", "Plots."),
        ("See :class:`~a.B`.\n\n.. versionadded:: 1", "See ~a.B ."),
        ("Mean.\n\nRead more in the :ref:`User Guide <x>`.", "Mean."),
    ],
    ids=["google", "numpydoc", "inside names", "example", "role", "boilerplate"],
)
def test_clean_keeps_prose_and_masks_names(docstring, expected):
    mask = docstrings.name_pattern(("keras", "sklearn"))
    cleaned = docstrings.clean(docstring, mask)
    assert not mask.search(cleaned)
    if expected:
        assert cleaned == expected


def test_clean_masks_names_but_not_what_only_looks_like_one():
    mask = docstrings.name_pattern(("mylib",))
    cleaned = docstrings.clean("mylib.x, tfidf, input, MyLibTensor, tf2", mask)
    assert cleaned == ".x, tfidf, input, Tensor, 2"


def test_library_that_is_not_installed_is_an_error():
    config = docstrings_config()
    config.data.libraries = ("keras", "no_such_library")
    with pytest.raises(errors.DataError, match=r"'no_such_library'.*tfamp\[all\]"):
        docstrings.load(config)


def test_library_without_docstrings_is_an_error():
    config = docstrings_config(limit_examples=20)
    config.data.libraries = ("keras", "certifi")
    pytest.importorskip("certifi")
    with pytest.raises(errors.DataError, match="Too few docstrings .*certifi 0"):
        docstrings.load(config)
