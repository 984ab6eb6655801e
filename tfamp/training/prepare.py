"""Local files written as ordinary TFDS folders: training knows one way to read data."""

import dataclasses
import os
import re
from collections.abc import Callable

from tfamp import errors
from tfamp.training import prepare_images, prepare_texts, tfds_folder

# Format -> function of (settings, target) that reads the files.
_READERS = {
    "csv": prepare_texts.read_csv,
    "glue": prepare_texts.read_glue,
    "images": prepare_images.read,
    "squad": prepare_texts.read_squad,
}
FORMATS = tuple(_READERS)
# Setting -> formats that read it, of those that not all do.
_READ_BY = {
    **dict.fromkeys(("train_file", "validation_file"), ("csv", "squad")),
    **dict.fromkeys(("validation_fraction", "split_seed"), ("csv", "images", "squad")),
    **dict.fromkeys(("text_column", "second_text_column", "label_column"), ("csv",)),
    **dict.fromkeys(("delimiter", "header", "quoted"), ("csv",)),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is read, and what is written.

    Attributes:
      format: One of `FORMATS`.
      name: Name in TFDS ("glue/sst2", "squad", "cifar10"), whose features the set then
        has; or, of "csv" and "images", a new name.
      source_dir: Folder of the local files.
      data_dir: Folder that is written; `tfds.load(name, data_dir=data_dir)` reads it.
      train_file: File in `source_dir`; "csv" and "squad" only.
      validation_file: The same, of the split that is scored; "": a share of the other.
        That split is named "validation" as in GLUE and SQuAD, else "test".
      validation_fraction: That share, of texts, of SQuAD's articles, or of images where
        no folders tell the splits.
      split_seed: Seed of that choice.
      text_column, second_text_column, label_column, delimiter, header, quoted: Of
        "csv"; see `text.load_csv`.
      on_bad_rows: "raise", or "skip" to leave them out and say how many.
      overwrite: Whether a prepared set of that name is replaced.
    """

    format: str
    name: str
    source_dir: str
    data_dir: str
    train_file: str = ""
    validation_file: str = ""
    validation_fraction: float = 0.0
    split_seed: int = 0
    text_column: str = "text"
    second_text_column: str = ""
    label_column: str = "label"
    delimiter: str = ","
    header: bool = True
    quoted: bool = True
    on_bad_rows: str = "raise"
    overwrite: bool = False

    def __post_init__(self):
        """Checks what can be checked without the files."""
        if self.format not in FORMATS:
            raise ValueError(
                f"Unknown format. Received: {self.format!r}. Expected one of {FORMATS}."
            )
        if self.on_bad_rows not in ("raise", "skip"):
            raise ValueError(
                "`on_bad_rows` must be 'raise' or 'skip'. Received: "
                f"{self.on_bad_rows!r}."
            )
        if unread := self._unread():
            raise ValueError(
                f"--format={self.format} does not read {', '.join(unread)}. Leave that "
                "out, or choose another format."
            )
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ValueError(
                "`validation_fraction` must be in [0, 1). Received: "
                f"{self.validation_fraction}."
            )
        if not self.data_dir:
            raise ValueError("Pass the folder to write: --data_dir=FOLDER.")
        if not os.path.isdir(self.source_dir):
            raise errors.DataError(
                f"`source_dir` must be a folder. Received: {self.source_dir!r}."
            )

    def _unread(self):
        """Returns the flags that were set to what the format does not read."""
        return [
            f"--{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if self.format not in _READ_BY.get(field.name, FORMATS)
            and getattr(self, field.name) != field.default
        ]


def prepare(
    settings: Settings, report: Callable[[str], None] = lambda line: None
) -> tfds_folder.Prepared:
    """Reads and checks local files, then writes them as a TFDS data set.

    Args:
      settings: What is read, and what is written.
      report: Takes lines on the progress.

    Returns:
      What was written.

    Raises:
      DataError: If files are missing or malformed, naming file, row and reason; if
        nothing of a split is usable; or if the set is there already.
    """
    target = tfds_folder.find_target(settings.name)
    final = tfds_folder.check_target(target, settings.data_dir, settings.overwrite)
    try:
        source = _READERS[settings.format](settings, target)
    except errors.DataError as error:
        raise errors.DataError(_as_flags(str(error))) from error
    for split, examples in source.splits.items():
        if not len(examples):
            raise errors.DataError(
                f"No example of the split {split!r} of {target.name} is usable. "
                f"{'; '.join(source.notes)}".strip()
            )
    return tfds_folder.write(target, source, final, report)


def _as_flags(line):
    """Returns an error of the readers, which training shares, in words of this tool."""
    names = {field.name: field.name for field in dataclasses.fields(Settings)}
    names["test_file"] = "validation_file"
    for name, flag in names.items():  # Not every "config.data.": it may be in a path.
        line = re.sub(rf"\bconfig\.data\.{name}\b", f"--{flag}", line)
    return line.replace("--data_dir=", "--source_dir=")
