"""Local texts as TFDS examples: GLUE's files, SQuAD's JSON, CSV with named columns."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import errors
from tfamp.training import glue, squad, squad_splits, tables, text, tfds_folder

_FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}


class _Layout(NamedTuple):
    """Columns and files of a GLUE task; files that may lack have hidden labels."""

    columns: tuple[str, ...]  # Texts, in the order of `glue.GLUE`, and the label.
    header: bool = True
    files: Mapping[str, str] = _FILES


_PAIR = ("sentence1", "sentence2")
_LAYOUTS = {
    "glue/cola": _Layout(("3", "1"), False, {k: _FILES[k] for k in list(_FILES)[:2]}),
    "glue/mnli": _Layout(
        (*_PAIR, "gold_label"),
        files={
            "train": "train.tsv",
            "validation_matched": "dev_matched.tsv",
            "validation_mismatched": "dev_mismatched.tsv",
        },
    ),
    "glue/mrpc": _Layout(("#1 String", "#2 String", "Quality")),
    "glue/qnli": _Layout(("question", "sentence", "label")),
    "glue/qqp": _Layout(("question1", "question2", "is_duplicate")),
    "glue/rte": _Layout((*_PAIR, "label")),
    "glue/sst2": _Layout(("sentence", "label")),
    "glue/wnli": _Layout((*_PAIR, "label")),
}
# The distribution of Dolan and Brockett, 2005; its ids tell GLUE's validation split.
_MSR = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
_MSR_IDS = ("mrpc_dev_ids.tsv", "dev_ids.tsv")


def read_csv(settings, target: tfds_folder.Target) -> tfds_folder.Source:
    """Reads CSV or TSV files into the features text, [second_text,] label.

    Args:
      settings: `prepare.Settings`.
      target: A new name.

    Raises:
      DataError: If the files are missing or malformed, naming file, row, reason.
    """
    if target.registered:
        raise errors.DataError(
            f"{target.name!r} is a data set of TFDS with features of its own. Choose a "
            "new name for CSV files."
        )
    _check_split(settings)
    corpus = text.load_csv(_csv_config(settings), settings.source_dir)
    names = ["text", "label"]
    if settings.second_text_column:
        names.append("second_text")
    tfds = tfds_folder.import_tfds()
    features = dict.fromkeys(names, tfds.features.Text())
    features["label"] = tfds.features.ClassLabel(names=list(corpus.classes))
    splits = {
        split: [dict(zip(names, example, strict=False)) for example in examples]
        for split, examples in (("train", corpus.train), ("test", corpus.test))
    }
    keys = None if settings.second_text_column else ("text", "label")
    features = tfds.features.FeaturesDict(features)
    return tfds_folder.Source(splits, features, keys, corpus.notes)


def read_glue(settings, target: tfds_folder.Target) -> tfds_folder.Source:
    """Reads the files of a GLUE task: train.tsv, dev.tsv and, if there, test.tsv.

    MRPC may have the files of its first distribution instead, msr_paraphrase_train.txt
    and msr_paraphrase_test.txt: mrpc_dev_ids.tsv names the training pairs that are
    GLUE's validation split; without it the test pairs are the validation split.

    Args:
      settings: `prepare.Settings`.
      target: A name of `glue.GLUE`.

    Raises:
      DataError: If the files are missing or malformed, naming file, row, reason.
    """
    if target.name not in _LAYOUTS:
        raise errors.DataError(
            f"--format=glue knows no files of {target.name!r}. Expected one of "
            f"{', '.join(_LAYOUTS)}."
        )
    reader = _GlueReader(settings.source_dir, target)
    is_msr = target.name == "glue/mrpc" and not reader.has(_FILES["train"])
    splits = reader.read_msr() if is_msr else reader.read()
    notes = tfds_folder.settle(reader.problems, settings.on_bad_rows)
    notes += tuple(reader.notes)
    return tfds_folder.Source(splits, target.registered.info.features, None, notes)


def read_squad(settings, target: tfds_folder.Target) -> tfds_folder.Source:
    """Reads one or two files in SQuAD 1.1's format.

    Args:
      settings: `prepare.Settings`.
      target: "squad", or a new name, whose features are the same.

    Raises:
      DataError: If the files are missing or malformed, naming file, question, reason.
    """
    builder = tfds_folder.find_target("squad")
    if target.registered and target.name != builder.name:
        raise errors.DataError(
            f"--format=squad writes 'squad' or a new name. Received: {target.name!r}."
        )
    _check_split(settings)
    path = os.path.join(settings.source_dir, settings.train_file)
    train, problems = squad.parse_json(path)
    validation: list[squad.Question] = []
    if settings.validation_file:
        path = os.path.join(settings.source_dir, settings.validation_file)
        validation, more = squad.parse_json(path)
        problems = problems + more
    notes = tfds_folder.settle(problems, settings.on_bad_rows)
    if not settings.validation_file:
        train, validation = squad_splits.hold_out(
            train, settings.validation_fraction, settings.split_seed
        )
    splits = {"train": train, "validation": validation}
    return tfds_folder.Source(
        {split: list(map(squad.example, part)) for split, part in splits.items()},
        builder.registered.info.features,
        None,
        notes,
    )


def _check_split(settings):
    """Raises unless it is said what is read, and what is scored."""
    if not settings.train_file:
        raise ValueError(
            f"--format={settings.format} reads the file --train_file of --source_dir."
        )
    if bool(settings.validation_file) == bool(settings.validation_fraction):
        raise ValueError(
            "Pass either --validation_file or --validation_fraction. Received: "
            f"{settings.validation_file!r}, {settings.validation_fraction}."
        )


def _csv_config(settings):
    """Returns what `text.load_csv` reads of a configuration."""
    names = ("text_column", "second_text_column", "label_column", "delimiter")
    names += ("header", "quoted", "on_bad_rows", "split_seed", "train_file")
    data = {name: getattr(settings, name) for name in names}
    data["test_file"] = settings.validation_file
    data["test_fraction"] = settings.validation_fraction
    return config_dict.ConfigDict({"data": data, "validation_fraction": 0.0})


class _GlueReader:
    """Reads the files of one task; collects what is wrong in them."""

    def __init__(self, folder: str, target: tfds_folder.Target):
        self.folder = folder
        self.layout = _LAYOUTS[target.name]
        self.features = glue.GLUE[target.name].features
        self.labels = target.registered.info.features["label"].names
        self.problems: list[str] = []
        self.notes: list[str] = []

    def has(self, file: str) -> bool:
        """Returns whether a file is there."""
        return os.path.isfile(os.path.join(self.folder, file))

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """Reads the files of GLUE's own distribution."""
        return {
            split: self._examples(file, hidden=split == "test")
            for split, file in self.layout.files.items()
            if split != "test" or self.has(file)
        }

    def read_msr(self) -> dict[str, list[dict[str, Any]]]:
        """Reads the files of MRPC's first distribution."""
        ids = next((name for name in _MSR_IDS if self.has(name)), None)
        if ids is None:
            validation = self._examples(_MSR["test"])
            return {"train": self._examples(_MSR["train"]), "validation": validation}
        held_out = {row.values for row in self._rows(ids, ("0", "1"), header=False)}
        parts, found = {"train": [], "validation": []}, set()
        for row in self._rows(_MSR["train"], ("#1 ID", "#2 ID", *self.layout.columns)):
            key, values = row.values[:2], row.values[2:]
            part = parts["validation" if key in held_out else "train"]
            part.append(row._replace(values=values))
            found.add(key)
        if missing := held_out - found:
            self.notes.append(
                f"{len(missing)} of {len(held_out)} pairs of {ids} are not in "
                f"{_MSR['train']}"
            )
        splits = {name: self._parse(rows) for name, rows in parts.items()}
        return {**splits, "test": self._examples(_MSR["test"], hidden=True)}

    def _examples(self, file, hidden=False) -> list[dict[str, Any]]:
        """Returns the feature dictionaries of a file."""
        columns = self.layout.columns[:-1] if hidden else self.layout.columns
        return self._parse(self._rows(file, columns, self.layout.header), hidden)

    def _parse(self, rows, hidden=False) -> list[dict[str, Any]]:
        """Returns the feature dictionaries of rows of (text, [second text,] label)."""
        examples = []
        for row in rows:
            label = -1 if hidden else self._label(row)
            if label is not None:
                texts = zip(self.features[:-1], row.values, strict=False)
                number = row.number - 1 - self.layout.header  # As in TFDS: of the file.
                examples.append({**dict(texts), "label": label, "idx": number})
        return examples

    def _label(self, row) -> int | None:
        """Returns the class of a row, by name or by number; None if it is bad."""
        label = row.values[-1]
        if label in self.labels:
            return self.labels.index(label)
        if label.isdecimal() and int(label) < len(self.labels):
            return int(label)
        self.problems.append(
            f"{row.file}, row {row.number}: label {label!r} is not one of "
            f"{', '.join(self.labels)} (or 0 to {len(self.labels) - 1})"
        )
        return None

    def _rows(self, file, columns: Sequence[str], header=True) -> list[tables.Record]:
        """Returns the usable rows of a file."""
        data = {"delimiter": "\t", "header": header, "quoted": False}
        config = config_dict.ConfigDict({"data": data})
        rows, bad = tables.read_table(config, self.folder, file, columns)
        self.problems += [f"{b.file}, row {b.number}: {b.reason}" for b in bad]
        return rows
