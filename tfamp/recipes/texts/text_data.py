"""Labeled texts in three splits: CSV and TSV files, GLUE, sets of TFDS, docstrings."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data as data_sets
from tfamp.recipes.texts import docstrings

if TYPE_CHECKING:
    import pandas

_COLUMNS = "Set config.data.text_column, second_text_column and label_column."
_MANY = 20  # Classes that may have one text each.
# How the user's own files are read, by default.
FILES = {
    "train_file": "train.csv",  # Or a pattern such as "*.txt".
    "test_file": "",  # "": a share of the training file is held out.
    "delimiter": ",",
    "header": True,
    "quoted": True,
}


class Corpus(NamedTuple):
    """Texts of three splits, each in a fixed, shuffled order.

    Attributes:
      train: Texts to train on: a table with columns text and, of pairs, second, and
        label, the index of the class in `classes`.
      validation: Texts split off the training data; they select the checkpoint.
      test: Texts scored once.
      classes: Class names, sorted, or in the order that the data set has.
      notes: What was left out and why, for the report; never silently.
    """

    train: "pandas.DataFrame"
    validation: "pandas.DataFrame"
    test: "pandas.DataFrame"
    classes: tuple[str, ...]
    notes: tuple[str, ...]


class Glue(NamedTuple):
    """A task of GLUE, in TFDS and in its own TSV files.

    Attributes:
      texts: Features of TFDS.
      columns: Columns of texts and label in the TSV files; positions where there is no
        header.
      classes: Class names; the TSV files have them, or their numbers.
      scored: Split of TFDS with published labels.
      dev: Its TSV file.
    """

    texts: tuple[str, ...]
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    scored: str = "validation"
    dev: str = "dev.tsv"


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
# https://gluebenchmark.com; stsb is a regression and not here.
GLUE = {
    "glue/cola": Glue(("sentence",), ("3", "1"), ("unacceptable", "acceptable")),
    "glue/mnli": Glue(
        ("premise", "hypothesis"),
        (*_PAIR, "gold_label"),
        ("entailment", "neutral", "contradiction"),
        "validation_matched",
        "dev_matched.tsv",
    ),
    "glue/mrpc": Glue(
        _PAIR, ("#1 String", "#2 String", "Quality"), ("not_equivalent", "equivalent")
    ),
    "glue/qnli": Glue(
        ("question", "sentence"), ("question", "sentence", "label"), _ENTAILMENT
    ),
    "glue/qqp": Glue(
        ("question1", "question2"),
        ("question1", "question2", "is_duplicate"),
        ("not_duplicate", "duplicate"),
    ),
    "glue/rte": Glue(_PAIR, (*_PAIR, "label"), _ENTAILMENT),
    "glue/sst2": Glue(("sentence",), ("sentence", "label"), ("negative", "positive")),
    "glue/wnli": Glue(_PAIR, (*_PAIR, "label"), _ENTAILMENT[::-1]),
}
# The distribution of Dolan and Brockett, 2005; its test pairs are scored.
_MSR = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")


def load(config: config_dict.ConfigDict) -> Corpus:
    """Reads a corpus, shuffles it, and splits off what is not split yet.

    Args:
      config: `config.data` has
        name: "csv", "docstrings", or a name in TFDS such as "glue/sst2", whose
          validation split is then the test data; of other sets it is the split "test",
          else "validation".
        text_column, second_text_column, label_column: Columns, or features of TFDS;
          without a header positions from "0"; no second one: single texts.
        on_bad_rows: "raise", or "skip" to leave out rows without a text or a known
          label, and say how many.
        test_fraction: Share of the training texts that is held out where there is no
          test data.
        split_seed: Seed of the splits, apart from the seed of a run.
        Of "csv" also train_file, test_file ("" for none), delimiter, header, quoted; of
        "docstrings" libraries, texts_per_library, min_words.
        `config.validation_fraction` is the share that selects; 0: none.
        `config.limit_examples` are the most of each split; 0: all.
        `config.data_dir` is the folder of local files, or of data prepared by TFDS;
        `config.manual_dir` that of GLUE's TSV files (train.tsv and dev.tsv, or MRPC's
        msr_paraphrase_*.txt), or of another data set's original files.

    Returns:
      A `Corpus`. Rows of the same text, but for case and spaces, are in the same split
      of one file, as are docstrings of the same source file.

    Raises:
      DataError: If data are missing, malformed, or teach nothing; bad rows are named.
      ImportError: If an optional dependency is missing.
    """
    data = config.data
    for module in ("pandas", "sklearn"):
        extras.require(module)
    classes, notes = None, []
    if data.name == "csv":
        train, test = _read_csv_files(data, config.data_dir or ".")
    elif data.name == "docstrings":
        train, test = docstrings.read(data), None
        notes.append(f"docstrings of {docstrings.versions(data.libraries)}")
    elif data.name in GLUE and config.manual_dir:
        train, test, classes = _read_glue_files(data.name, config.manual_dir)
    elif data.name:
        train, test, classes = _read_tfds(config)
    else:
        raise ValueError(
            "Unknown text data. Received: config.data.name=''. Expected "
            "'docstrings', 'csv' or a name in TFDS such as 'glue/sst2'."
        )
    classes = classes or tuple(sorted(set(train.label) - {""}))
    parts = [train] if test is None else [train, test]
    parts = _drop_bad_rows(parts, classes, data, notes)
    _check(parts, classes, data)
    return _split(parts, classes, config, notes)


def columns(data: config_dict.ConfigDict) -> list[str]:
    """Returns the names of the one or two columns of texts, as the data have them."""
    if task := GLUE.get(data.name.split(":")[0]):  # Without a version.
        return [*task.texts]
    return [name for name in (data.text_column, data.second_text_column) if name]


# ---- Local files ----


def _read_csv_files(data, folder):
    """Returns the training table and the test table, None if there is none."""
    wanted = [*columns(data), data.label_column]
    return [
        _named(data_sets.read_files(data, folder, file, wanted)) if file else None
        for file in (data.train_file, data.test_file)
    ]


def _named(table):
    """Names the columns: one or two of texts, label and place."""
    texts = ["text", "second"][: table.shape[1] - 2]
    return table.set_axis([*texts, "label", "place"], axis=1)


def _read_glue_files(name, folder):
    """Returns the tables of a GLUE task's own files, and its classes."""
    task = GLUE[name]
    layouts = [("train.tsv", task.dev)] + [_MSR] * (name == "glue/mrpc")
    there = [f for f in layouts if all(pathlib.Path(folder, x).is_file() for x in f)]
    if not there:
        looked = " or ".join(" and ".join(files) for files in layouts)
        raise errors.DataError(
            f"The folder --manual_dir={folder} lacks the files of {name!r}. Looked for "
            f"{looked}, unpacked."
        )
    written = {"delimiter": "\t", "header": not task.columns[0].isdigit()}
    written = config_dict.ConfigDict({**written, "quoted": False})
    numbers = {str(number): name for number, name in enumerate(task.classes)}
    tables = [
        _named(data_sets.read_files(written, folder, file, task.columns))
        for file in there[0]
    ]
    return *(table.replace({"label": numbers}) for table in tables), task.classes


# ---- TFDS ----


def _read_tfds(config):
    """Returns the tables of a TFDS set, and its classes, None if they have no names."""
    data, builder = config.data, data_sets.prepared_builder(config)
    splits, features = set(builder.info.splits), builder.info.features
    task = GLUE.get(data.name.split(":")[0])
    wanted = (*columns(data), "label" if task else data.label_column)
    test = next((s for s in ("test", "validation") if s in splits), None)
    test = task.scored if task else test
    missing = [f"feature {name!r}" for name in wanted if name not in features]
    missing += [f"split {s!r}" for s in {"train", test} - splits - {None}]
    if missing:
        raise errors.DataError(
            f"The data set {data.name!r} in {builder.data_dir} has no "
            f"{', '.join(missing)}. Found: {', '.join(features)}; "
            f"{', '.join(sorted(splits))}. {_COLUMNS}"
        )
    *texts, label = wanted
    odd = [
        name
        for name in texts
        if features[name].shape != () or features[name].tf_dtype != "string"
    ]
    odd += [label] if features[label].shape else []
    if odd:
        raise errors.DataError(
            f"The feature {odd[0]!r} of {data.name!r} is not "
            f"{'a class' if odd[0] == label else 'text'}. Received: "
            f"{' '.join(str(features[odd[0]]).split())[:100]}. {_COLUMNS}"
        )
    classes = getattr(features[label], "names", None)
    train = _read_split(builder, "train", wanted, classes)
    scored = _read_split(builder, test, wanted, classes) if test else None
    return train, scored, classes and tuple(classes)


def _read_split(builder, split, columns, classes):
    """Returns a split as a table, with the names of classes, if they have any."""
    pandas = extras.require("pandas")
    tfds = extras.require("tensorflow_datasets")
    rows = builder.as_dataset(
        split=split,
        shuffle_files=False,
        batch_size=-1,
        decoders=tfds.decode.PartialDecoding(dict.fromkeys(columns, True)),
    )
    place = f"{builder.info.full_name} {split}"
    values = {name: rows[name].numpy() for name in columns}
    try:
        for name, column in values.items():
            if column.dtype == object:
                values[name] = [text.decode("utf-8").strip() for text in column]
    except UnicodeDecodeError as error:
        raise errors.DataError(f"{place}: {error}.") from error
    table = pandas.DataFrame(values)
    places = [f"{place}, row {number}" for number in range(1, len(table) + 1)]
    table = _named(table.assign(place=places))
    names = dict(enumerate(classes or ()))  # A label that is hidden, -1, stays.
    return table.replace({"label": names}) if names else table


# ---- Rows, classes, splits ----


def _drop_bad_rows(parts, classes, data, notes):
    """Returns the tables without rows of no text or no known label."""
    names = [name for name in ("text", "second", "label") if name in parts[0]]
    good, bad, class_names = [], [], data_sets.list_names(classes)
    for part in parts:
        unknown = ~part.label.isin(classes)
        empty = (part[names] == "").any(axis=1)
        bad += [f"{place}: a field is empty" for place in part.place[empty]]
        bad += [
            f"{row.place}: label {row.label!r} is not one of {class_names}"
            for row in part[unknown & ~empty].itertuples()
        ]
        good.append(part[~unknown & ~empty])
    data_sets.report_bad_rows(bad, data.on_bad_rows, notes)
    return good


def _check(parts, classes, data):
    """Raises if nothing can be learned or scored."""
    used = [name for name in classes if name in set(parts[0].label)]
    name = data.get("train_file") or data.name
    if not used:
        raise errors.DataError(
            f"{name} has no usable row to train on: none has a text and a label in the "
            f"column {data.label_column!r}. Expected rows of at least 2 classes."
        )
    if len(used) < 2 or len(used) > max(len(parts[0]) // 2, _MANY):
        raise errors.DataError(
            f"{name} has {len(used)} class(es) in {len(parts[0])} usable training "
            f"row(s), column {data.label_column!r}: {data_sets.list_names(used)}. "
            "Expected at least 2, and several rows of each."
        )
    if not len(parts[-1]):
        raise errors.DataError(
            f"{data.get('test_file') or data.name} has no usable row to score: none "
            f"has a text and one of the labels {data_sets.list_names(classes)}."
        )


def _split(parts, classes, config, notes):
    """Returns the corpus: shuffled, split where it is not, and limited."""
    numbers = {name: i for i, name in enumerate(classes)}
    parts = [
        part.assign(label=part.label.map(numbers), key=_keys(part)) for part in parts
    ]
    names = [name for name in ("text", "second", "label") if name in parts[0]]
    splits = (part[names] for part in split(parts, config, notes))
    return Corpus(*splits, tuple(str(name) for name in classes), tuple(notes))


def split(
    parts: Sequence["pandas.DataFrame"],
    config: config_dict.ConfigDict,
    notes: list[str],
) -> list["pandas.DataFrame"]:
    """Shuffles rows, and splits off what is not split yet.

    Args:
      parts: The training table, and the test table if there is one. Rows that have the
        same in the column `key` stay on one side of each split that is made here.
      config: As in `load`.
      notes: Gets a line where keys are in both tables.

    Returns:
      Train, validation and test table.

    Raises:
      DataError: If there are too few keys.
    """
    seed = config.data.split_seed
    train, *rest = (part.sample(frac=1, random_state=seed) for part in parts)
    fraction = config.data.test_fraction
    train, test = (train, *rest) if rest else hold_out(train, fraction, seed)
    # Before a part of `train` selects the checkpoint, which must not know the test.
    if shared := len(set(train.key) & set(test.key)):
        notes.append(f"{shared} text(s) are in both the train and the test file")
    validation = train[:0]
    if config.validation_fraction:
        train, validation = hold_out(train, config.validation_fraction, seed + 1)
    return [
        part.head(config.limit_examples or len(part)).reset_index(drop=True)
        for part in (train, validation, test)
    ]


def _keys(table):
    """Returns what makes two rows the same: words without case, or a source file."""
    if "file" in table:
        return table.file
    texts = table.text + ("\n" + table.second if "second" in table else "")
    return texts.str.lower().str.split().str.join(" ")


def hold_out(
    table: "pandas.DataFrame", fraction: float, seed: int
) -> tuple["pandas.DataFrame", "pandas.DataFrame"]:
    """Returns the larger part and the held-out part, each in the table's order.

    Args:
      table: Rows that have the same in the column `key` stay on one side.
      fraction: Share of the keys that is held out.
      seed: Seed of the choice.

    Raises:
      DataError: If there are too few keys.
    """
    model_selection = extras.require("sklearn.model_selection")
    splitter = model_selection.GroupShuffleSplit(
        1, test_size=fraction, random_state=seed
    )
    try:
        ((larger, held_out),) = splitter.split(table, groups=table.key)
    except ValueError as error:
        raise errors.DataError(
            f"{table.key.nunique()} distinct text(s) cannot be split: {error}"
        ) from error
    return table.iloc[larger], table.iloc[held_out]
