"""Where texts with labels come from: local files, GLUE's own, TFDS."""

import pathlib
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data as data_sets

_COLUMNS = "Set config.data.text_column, second_text_column and label_column."


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


def columns(data: config_dict.ConfigDict) -> list[str]:
    """Returns the names of the one or two columns of texts, as the data have them."""
    if task := GLUE.get(data.name.split(":")[0]):  # Without a version.
        return [*task.texts]
    return [name for name in (data.text_column, data.second_text_column) if name]


# ---- Local files ----


def read_csv_files(data: config_dict.ConfigDict, folder: str) -> list[Any]:
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


def read_glue_files(name: str, folder: str) -> tuple[Any, Any, tuple[str, ...]]:
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


def read_tfds(
    config: config_dict.ConfigDict,
) -> tuple[Any, Any, tuple[str, ...] | None]:
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
