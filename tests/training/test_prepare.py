import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfamp import errors
from tfamp.training import cnn, cnn_config, data, prepare, squad, tfds_folder

tfds = pytest.importorskip("tensorflow_datasets")

TSV = 'sentence\tlabel\na "fine" film \t1\nbad, bad\t0\ncafé\t1\n'
MSR = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
CSV = "id,text,other,label\n1,one,uno,x\n2,two,dos,y\n3,three,tres,x\n4,four,c,y\n"
ARTICLE = {
    "context": "Paris is in France.",
    "qas": [
        {
            "id": "q1",
            "question": "Where is Paris?",
            "answers": [{"text": "France", "answer_start": 12}],
        }
    ],
}


def settings(folder, fmt="glue", name="glue/sst2", **changes):
    return prepare.Settings(
        fmt, name, str(folder / "source"), str(folder / "data"), **changes
    )


@pytest.fixture
def files(tmp_path):
    """Returns a function that writes files into the source folder."""

    def fill(contents):
        for name, content in contents.items():
            path = tmp_path / "source" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            is_text = isinstance(content, str)
            path.write_bytes(content.encode() if is_text else content)
        return tmp_path

    return fill


def png(size=(4, 4), channels=3, value=9):
    return tf.io.encode_png(np.full((*size, channels), value, "uint8")).numpy()


def squad_json(*articles):
    entries = [{"title": f"t{n}", "paragraphs": [a]} for n, a in enumerate(articles)]
    return json.dumps({"version": "1.1", "data": entries})


def rows_of(folder, name, split):
    """Returns a split as plain `tfds.load` reads it."""
    loaded = tfds.load(name, split=split, data_dir=str(folder / "data"), download=False)
    return list(loaded.as_numpy_iterator())


def names_in(folder):
    return sorted(path.name for path in (folder / "data").iterdir())


# ---- What is written is what TFDS reads ----


def test_glue_files_are_read_by_their_tfds_name(files):
    folder = files(
        {"train.tsv": TSV, "dev.tsv": TSV, "test.tsv": "index\tsentence\n0\tx"}
    )
    prepared = prepare.prepare(settings(folder))
    assert prepared.splits == (("train", 3), ("validation", 3), ("test", 1))
    rows = sorted(rows_of(folder, "glue/sst2", "train"), key=lambda row: row["idx"])
    assert [row["idx"] for row in rows] == [0, 1, 2]
    assert [(r["sentence"].decode(), int(r["label"])) for r in rows] == [
        ('a "fine" film', 1),
        ("bad, bad", 0),
        ("café", 1),
    ]
    (hidden,) = rows_of(folder, "glue/sst2", "test")
    assert (hidden["sentence"], hidden["label"]) == (b"x", -1)
    assert names_in(folder) == ["glue"]
    assert prepared.to_text().splitlines() == [
        "split       examples  classes",
        "train              3        2",
        "validation         3        2",
        "test               1        2",
        "classes: negative, positive",
        f"glue/sst2: {folder / 'data' / 'glue' / 'sst2' / '2.0.0'}",
    ]


def test_mrpc_in_the_layout_of_glue(files):
    rows = '1\t10\t11\tone "a\tb\n0\t12\t13\tc\td\n'
    folder = files({"train.tsv": MSR + rows, "dev.tsv": MSR + rows[:16] + "\n"})
    prepare.prepare(settings(folder, name="glue/mrpc"))
    (row,) = rows_of(folder, "glue/mrpc", "validation")
    assert (row["sentence1"], row["sentence2"], row["label"]) == (b'one "a', b"b", 1)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ("12\t13\n14\t15\n", {"train": [b"a"], "validation": [b"c"], "test": [b"e"]}),
        (None, {"train": [b"a", b"c"], "validation": [b"e"]}),
    ],
    ids=["with GLUE's ids", "without"],
)
def test_mrpc_in_its_first_layout(files, ids, expected):
    contents = {
        "msr_paraphrase_train.txt": MSR + "1\t10\t11\ta\tb\r\n0\t12\t13\tc\td\r\n",
        "msr_paraphrase_test.txt": MSR + "1\t20\t21\te\tf\r\n",
    }
    folder = files(contents | ({"mrpc_dev_ids.tsv": ids} if ids else {}))
    prepared = prepare.prepare(settings(folder, name="glue/mrpc"))
    assert [name for name, _ in prepared.splits] == list(expected)
    for split, firsts in expected.items():
        rows = rows_of(folder, "glue/mrpc", split)
        assert sorted(row["sentence1"] for row in rows) == firsts
    assert rows[0]["label"] == (-1 if ids else 1)


@pytest.mark.parametrize(
    ("name", "header", "row", "expected"),
    [
        ("glue/cola", "", "g\t0\t*\tthe book", (b"the book", 0)),
        (
            "glue/rte",
            "index\tsentence1\tsentence2\tlabel\n",
            "0\ta\tb\tnot_entailment",
            (b"a", b"b", 1),
        ),
        (
            "glue/qnli",
            "index\tquestion\tsentence\tlabel\n",
            "0\ta\tb\tentailment",
            (b"a", b"b", 0),
        ),
    ],
)
def test_labels_of_glue_are_names_or_numbers(files, name, header, row, expected):
    folder = files({"train.tsv": f"{header}{row}\n", "dev.tsv": f"{header}{row}\n"})
    prepare.prepare(settings(folder, name=name))
    (example,) = rows_of(folder, name, "validation")
    assert set(expected) == {v for k, v in example.items() if k != "idx"}


@pytest.mark.parametrize("second", ["", "other"])
def test_csv_files_get_a_name_of_their_own(files, second):
    folder = files({"a.csv": CSV})
    prepared = prepare.prepare(
        settings(
            folder,
            "csv",
            "my_texts",
            train_file="a.csv",
            validation_fraction=0.25,
            second_text_column=second,
        )
    )
    assert prepared.splits == (("train", 3), ("test", 1))
    assert prepared.classes == ("x", "y")
    rows = rows_of(folder, "my_texts", "train") + rows_of(folder, "my_texts", "test")
    found = {row["text"]: (row.get("second_text"), row["label"]) for row in rows}
    assert found[b"one"] == (b"uno" if second else None, 0)
    assert found[b"two"] == (b"dos" if second else None, 1)
    assert len(found) == 4


@pytest.mark.parametrize("name", ["squad", "my_questions"])
def test_squad_files_are_split_by_article(files, name):
    other = json.loads(json.dumps(ARTICLE).replace("q1", "q2"))
    folder = files({"a.json": squad_json(ARTICLE, other)})
    prepare.prepare(
        settings(folder, "squad", name, train_file="a.json", validation_fraction=0.5)
    )
    rows = [*rows_of(folder, name, "train"), *rows_of(folder, name, "validation")]
    assert {row["id"] for row in rows} == {b"q1", b"q2"}
    assert rows[0]["answers"]["text"].tolist() == [b"France"]
    assert rows[0]["answers"]["answer_start"].tolist() == [12]


def test_real_questions_come_through_whole(shared_data, tmp_path):
    source = shared_data("xquad_en")
    wanted = prepare.Settings(
        "squad",
        "squad",
        str(source),
        str(tmp_path / "data"),
        train_file="xquad.en.json",
        validation_file="xquad.en.json",
    )
    prepare.prepare(wanted)
    rows = {row["id"].decode(): row for row in rows_of(tmp_path, "squad", "train")}
    questions = squad.read_json(source / "xquad.en.json")
    assert len(rows) == len(questions) == 1190
    for question in questions:
        row = rows[question.id]
        assert row["context"].decode() == question.context
        assert row["answers"]["answer_start"].tolist() == [
            answer.start for answer in question.answers
        ]


@pytest.mark.parametrize(
    ("channels", "expected"), [((1, 1), 1), ((3, 1), 3), ((4, 3), 3)]
)
def test_folders_of_images_train_the_cnn(files, channels, expected):
    contents = {
        f"{split}/{label}/{n}.png": png(channels=channels[number], value=10 * n)
        for split in ("train", "test")
        for number, label in enumerate(("cat", "dog"))
        for n in range(3)
    }
    folder = files(contents | {"train/notes.txt": "x", "train/cat/list.txt": "x"})
    prepared = prepare.prepare(settings(folder, "images", "pets"))
    assert prepared.splits == (("train", 6), ("test", 6))
    config = cnn_config.get_cnn_config()
    config.data.name = "pets"
    config.validation_fraction = 0.2
    task = cnn.create(config, str(folder / "data"))
    image, label = next(iter(task.train))
    assert image.shape == (4, 4, expected) and int(label) in (0, 1)
    assert "2 classes" in task.description
    values = {(int(image[0, 0, 0]), int(label)) for image, label in task.train.take(5)}
    assert values <= {(10 * n, label) for n in range(3) for label in range(2)}


def test_held_out_images_are_a_share_of_each_class(files):
    contents = {f"{c}/{n}.png": png() for c in "ab" for n in range(10)}
    folder = files(contents)
    wanted = settings(folder, "images", "pets", validation_fraction=0.3)
    assert prepare.prepare(wanted).splits == (("train", 14), ("test", 6))
    labels = [row["label"] for row in rows_of(folder, "pets", "test")]
    assert sorted(labels) == [0] * 3 + [1] * 3


def test_what_is_no_image_is_left_out_and_told(files):
    others = ["train/a/2.webp", "train/a/sub/3.png", "train/notes.txt"]
    hidden = ["train/.cache/1.png", "train/a/._1.png", "test/b/.x"]
    folder = files(PETS | dict.fromkeys([*others, *hidden], b""))
    prepared = prepare.prepare(settings(folder, "images", "pets"))
    assert (prepared.classes, prepared.splits[0]) == (("a", "b"), ("train", 2))
    (note,) = prepared.notes
    assert note.startswith("3 other file(s) left out: ")
    assert "2.webp" in note and "sub" in note and "._1" not in note


def test_color_that_is_lost_is_told(files):
    names = map(str, range(10))
    splits = ("train", "test")
    contents = {f"{s}/{n}/1.png": png((28, 28)) for n in names for s in splits}
    prepared = prepare.prepare(settings(files(contents), "images", "mnist"))
    assert prepared.notes == ("color images turned gray, as those of 'mnist' are",)


def test_images_of_a_set_of_tfds_have_its_features(files):
    names = ["airplane", "automobile", "bird", "cat", "deer"]
    names += ["dog", "frog", "horse", "ship", "truck"]
    contents = {
        f"{split}/{name}/a.png": png((32, 32), value=number)
        for split in ("train", "test")
        for number, name in enumerate(names)
    }
    folder = files(contents)
    assert prepare.prepare(settings(folder, "images", "cifar10")).classes == tuple(
        names
    )
    train, _, classes = data.load_tfds("cifar10", str(folder / "data"), None)
    assert classes == 10
    pairs = {(int(image[0, 0, 0]), int(label)) for image, label in train}
    assert pairs == {(n, n) for n in range(10)}


def test_tab_may_be_written_as_an_escape(files):
    folder = files({"a.tsv": CSV.replace(",", "\t")})
    changes = {"train_file": "a.tsv", "validation_fraction": 0.25, "delimiter": r"\t"}
    prepared = prepare.prepare(settings(folder, "csv", "mine", **changes))
    assert prepared.classes == ("x", "y")


# ---- Bad input: one line, before anything is written ----

GLUE = {"train.tsv": TSV, "dev.tsv": TSV}
PETS = {"train/a/1.png": png(), "train/b/1.png": png()}
PETS |= {name.replace("train", "test"): content for name, content in PETS.items()}
SPLIT = {"train_file": "a", "validation_fraction": 0.5}
BAD = {
    "missing file": (
        ("glue", "glue/sst2"),
        {"dev.tsv": TSV},
        {},
        "No file train.tsv .*--source_dir=.*/source. Pass the folder that holds it.$",
    ),
    "missing column": (
        ("glue", "glue/sst2"),
        GLUE | {"dev.tsv": "text\tlabel\nx\t1\n"},
        {},
        "dev.tsv, row 1: no column 'sentence'.* Correct the file.$",
    ),
    "unknown label": (
        ("glue", "glue/sst2"),
        GLUE | {"dev.tsv": TSV + "x\tgood\ny\t2\n"},
        {},
        r"2 bad row\(s\). .*dev.tsv, row 5: label 'good' is not one of negative",
    ),
    "fields": (
        ("glue", "glue/sst2"),
        GLUE | {"train.tsv": TSV + "x\t1\t2\n"},
        {},
        r"train.tsv, row 5: 3 field\(s\), expected 2.*--on_bad_rows=skip",
    ),
    "empty file": (("glue", "glue/sst2"), GLUE | {"dev.tsv": ""}, {}, "dev.tsv"),
    "no GLUE task": (("glue", "squad"), GLUE, {}, "knows no files of 'squad"),
    "unknown config": (("glue", "glue/sst3"), GLUE, {}, "Unknown data set"),
    "no name": (("csv", "My Texts"), {"a": CSV}, SPLIT, "Not a name"),
    "name of TFDS": (("csv", "imdb_reviews"), {"a": CSV}, SPLIT, "Choose a new name"),
    "CSV column": (
        ("csv", "mine"),
        {"a": CSV.replace("label", "class")},
        SPLIT,
        "row 1: no column 'label'",
    ),
    "CSV row": (
        ("csv", "mine"),
        {"a": CSV + "5,five\n"},
        SPLIT,
        "row 6: 2 field.*--on_bad_rows",
    ),
    "nothing to score": (
        ("glue", "glue/sst2"),
        GLUE | {"dev.tsv": "sentence\tlabel\nx\t7\n"},
        {"on_bad_rows": "skip"},
        "No example of the split 'validation' of glue/sst2.*dev.tsv, row 2: label '7'",
    ),
    "no id of MRPC": (
        ("glue", "glue/mrpc"),
        {
            "msr_paraphrase_train.txt": f"{MSR}1\t10\t11\ta\tb\n",
            "msr_paraphrase_test.txt": f"{MSR}1\t20\t21\te\tf\n",
            "mrpc_dev_ids.tsv": "8\t9\n",
        },
        {},
        "split 'validation' .* 1 of 1 pairs of mrpc_dev_ids.tsv are not in msr_para",
    ),
    "name of a folder": (("csv", "mine/.."), {"a": CSV}, SPLIT, "Not a name"),
    "line end in a class": (
        ("csv", "mine"),
        {"a": CSV.replace(",x", ',"x\nz"')},
        SPLIT,
        r"1 name\(s\) of classes .*'x\\nz'",
    ),
    "words of training in a path": (
        ("csv", "mine"),
        {"config.data.csv": "text,other\n"},
        SPLIT | {"train_file": "config.data.csv"},
        "/config.data.csv, row 1: .*set --label_column, --second_text_column, --text_c",
    ),
    "no JSON": (("squad", "squad"), {"a": "{"}, SPLIT, "/a"),
    "answer elsewhere": (
        ("squad", "squad"),
        {"a": squad_json(ARTICLE, ARTICLE).replace("12", "3")},
        SPLIT,
        "France.*answer_start",
    ),
    "bad question before the split": (
        ("squad", "squad"),
        {"a": squad_json(ARTICLE, ARTICLE).replace('"q1"', "5", 1)},
        SPLIT,
        r"1 bad row\(s\). .*article 1.*'id' is missing or not of type str",
    ),
    "surrogate": (
        ("squad", "squad"),
        {"a": squad_json(ARTICLE).replace("Where", "\\ud800")},
        SPLIT,
        "question 'q1': its question has half of a surrogate pair",
    ),
    "SQuAD as another": (("squad", "mnist"), {"a": ""}, SPLIT, "'squad' or a new name"),
    "no image": (
        ("images", "pets"),
        PETS | {"test/b/2.png": "text"},
        {},
        r"1 bad row\(s\). .*2.png: not an image",
    ),
    "sizes": (
        ("images", "pets"),
        PETS | {"test/b/2.png": png((5, 4))},
        {},
        r"2 sizes: .*4x4; .*2.png: 5x4",
    ),
    "image torn": (
        ("images", "pets"),
        PETS | {"test/b/2.png": "text"},
        {},
        "2.png: not an image: [^{}]*$",
    ),
    "all images bad": (
        ("images", "pets"),
        PETS | {f"test/{label}/1.png": "text" for label in "ab"},
        {"on_bad_rows": "skip"},
        "No example of the split 'test' of pets is usable. 2 bad row",
    ),
    "class without an image": (
        ("images", "pets"),
        PETS | {"train/c/1.webp": b""},
        {},
        r"train has 2 image\(s\) .* none in: c",
    ),
    "class to score only": (
        ("images", "pets"),
        PETS | {"test/c/1.png": png()},
        {},
        r"'test' has the class\(es\) c, of which 'train' has no image",
    ),
    "line end in a folder": (
        ("images", "pets"),
        {k.replace("/b/", "/b\nc/"): v for k, v in PETS.items()},
        {},
        "line end",
    ),
    "validation for test": (
        ("images", "pets"),
        {k.replace("test/", "validation/"): v for k, v in PETS.items()},
        {},
        "split folder.s. train, validation. Expected train and test",
    ),
    "one class": (("images", "pets"), {"train/a/1.png": png()}, {}, "Expected"),
    "no test": (
        ("images", "pets"),
        {k: v for k, v in PETS.items() if k.startswith("train")},
        {},
        "Expected train and test",
    ),
    "size in TFDS": (("images", "cifar10"), PETS, {}, r"images of \(32, 32, 3\)"),
    "classes in TFDS": (
        ("images", "cifar10"),
        {k: png((32, 32)) for k in PETS},
        {},
        "has the 10 classes .* Received folders: a, b",
    ),
    "features in TFDS": (("images", "coco"), PETS, {}, "features .* choose a new name"),
}


@pytest.mark.parametrize(
    ("target", "contents", "changes", "expected"), BAD.values(), ids=BAD
)
def test_bad_files_are_one_line_and_write_nothing(
    files, target, contents, changes, expected
):
    folder = files(contents)
    with pytest.raises(errors.DataError, match=expected) as caught:
        prepare.prepare(settings(folder, *target, **changes))
    assert "\n" not in str(caught.value)
    assert not (folder / "data").exists()


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        (("parquet", "x"), {}, "Unknown format. Received: 'parquet'"),
        (("glue", "glue/sst2"), {"on_bad_rows": "drop"}, "'drop'"),
        (("csv", "x"), {"validation_fraction": 1.0}, r"in \[0, 1\). Received: 1.0"),
        (("csv", "x"), {}, "--train_file"),
        (("csv", "x"), {"train_file": "a"}, "either --validation_file or"),
        (("csv", "x"), SPLIT | {"validation_file": "b"}, "either --validation_file or"),
        (("images", "x"), {}, "Pass --validation_fraction"),
        (("glue", "glue/sst2"), SPLIT, "glue does not read --train_file=a, --valid.*5"),
        (("squad", "squad"), SPLIT | {"header": False}, "not read --header=False"),
        (("images", "x"), {"train_file": "a"}, "not read --train_file=a"),
        (("csv", "x"), SPLIT | {"delimiter": ";;"}, "Received: delimiter=';;'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(files, target, changes, expected):
    folder = files({"a/1.png": png(), "b/1.png": png()})
    with pytest.raises(ValueError, match=expected):
        prepare.prepare(settings(folder, *target, **changes))


@pytest.mark.parametrize("fmt", ["glue", "csv", "squad", "images"])
def test_bad_entries_are_left_out_and_counted_on_request(files, fmt):
    bad = json.loads(json.dumps(ARTICLE).replace("12", "3").replace("q1", "q3"))
    other = json.loads(json.dumps(ARTICLE).replace("q1", "q2"))
    contents = {
        "glue": GLUE | {"train.tsv": TSV + "x\tgood\n"},
        "csv": {"a": CSV + "5,five\n"},
        "squad": {"a": squad_json(ARTICLE, other, bad)},
        "images": PETS | {"test/b/2.png": "text"},
    }
    names = {"glue": "glue/sst2", "squad": "squad"}
    folder = files(contents[fmt])
    changes = SPLIT if fmt in ("csv", "squad") else {}
    wanted = settings(
        folder, fmt, names.get(fmt, "mine"), on_bad_rows="skip", **changes
    )
    prepared = prepare.prepare(wanted)
    assert "1 bad row(s) skipped" in prepared.to_text()
    good = {"glue": 6, "csv": 4, "squad": 2, "images": 4}[fmt]
    assert sum(count for _, count in prepared.splits) == good


# ---- Writing: whole or not at all ----


def test_prepared_set_is_replaced_on_request_only(files):
    folder = files(GLUE)
    prepare.prepare(settings(folder))
    files({"train.tsv": "sentence\tlabel\nonly one\t0\n"})
    with pytest.raises(errors.DataError, match="prepared already in .*--overwrite"):
        prepare.prepare(settings(folder))
    assert len(rows_of(folder, "glue/sst2", "train")) == 3
    prepare.prepare(settings(folder, overwrite=True))
    (row,) = rows_of(folder, "glue/sst2", "train")
    assert row["sentence"] == b"only one"
    assert names_in(folder) == ["glue"]


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
def test_failure_leaves_what_was_there(files, before):
    folder = files(GLUE)
    if before:
        prepare.prepare(settings(folder))
    target = tfds_folder.find_target("glue/sst2")

    def examples():
        yield {"sentence": "x", "label": 0, "idx": 0}
        raise KeyboardInterrupt

    source = tfds_folder.Source({"train": examples()}, target.registered.info.features)
    final = tfds_folder.check_target(target, str(folder / "data"), overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        tfds_folder.write(target, source, final)
    assert names_in(folder) == (["glue"] if before else [])
    if before:
        assert len(rows_of(folder, "glue/sst2", "train")) == 3


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_failure_of_the_last_move_leaves_what_was_there(
    files, monkeypatch, before, failure
):
    folder = files(GLUE)
    if before:
        prepare.prepare(settings(folder))
    final = folder / "data/glue/sst2/2.0.0"
    replace = os.replace

    def fail(source, target):
        if target == final and "replaced" not in str(source):
            raise failure
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((errors.DataError, KeyboardInterrupt)):
        prepare.prepare(settings(folder, overwrite=True))
    assert final.exists() == before
    if before:
        assert len(rows_of(folder, "glue/sst2", "train")) == 3
    assert names_in(folder) == ["glue"]


@pytest.mark.parametrize("shown", [True, False])
def test_bars_of_tfds_are_as_they_were(files, shown):
    tfds.display_progress_bar(shown)
    try:
        prepare.prepare(settings(files(GLUE)))
        off = tfds.core.utils.tqdm_utils.EmptyTqdm
        bar = tfds.core.utils.tqdm_utils.tqdm(total=1, leave=False)
        assert isinstance(bar, off) != shown
        bar.close()
    finally:
        tfds.display_progress_bar(True)


def test_folder_that_cannot_be_written_is_one_line(files):
    folder = files(GLUE)
    (folder / "data").write_text("a file")
    with pytest.raises(errors.DataError, match="Cannot write .*--data_dir") as caught:
        prepare.prepare(settings(folder))
    assert "\n" not in str(caught.value)


def test_missing_source_folder_is_one_line(tmp_path):
    with pytest.raises(errors.DataError, match="`source_dir` must be a folder"):
        settings(tmp_path)


def test_long_work_reports(files, monkeypatch):
    monkeypatch.setattr(tfds_folder, "_REPORTED", 2)
    lines = []
    prepare.prepare(settings(files(GLUE)), lines.append)
    assert lines == ["train: 2 examples", "validation: 2 examples"]


def test_new_folder_may_be_deep(files):
    folder = files(GLUE)
    wanted = prepare.Settings(
        "glue", "glue/sst2", str(folder / "source"), str(folder / "a" / "b")
    )
    assert prepare.prepare(wanted).folder == pathlib.Path(
        folder, "a", "b", "glue", "sst2", "2.0.0"
    )
