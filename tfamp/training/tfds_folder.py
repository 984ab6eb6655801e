"""Folders that `tfds.load` reads, written whole or not at all."""

import contextlib
import io
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from tfamp import errors
from tfamp.training import tables

_VERSION = "1.0.0"  # Of sets that TFDS does not know.
_REPORTED = 10_000  # Examples between two lines on progress.


class Target(NamedTuple):
    """A data set that is to be written.

    Attributes:
      name: As `tfds.load` takes it, without a version.
      version: Such as "1.0.0".
      registered: TFDS' builder of that name, which reads the set; None for a new name.
    """

    name: str
    version: str
    registered: Any

    @property
    def folder(self) -> pathlib.PurePath:
        """Where it lies in the data folder."""
        return pathlib.PurePath(self.name, self.version)


class Source(NamedTuple):
    """What was read of local files.

    Attributes:
      splits: Feature dictionaries of each split's examples, by its name; an iterable
        of known length.
      features: A `tfds.features.FeaturesDict`.
      supervised_keys: (input, label), where the set can be read as such pairs.
      notes: What was left out and why.
    """

    splits: Mapping[str, Any]
    features: Any
    supervised_keys: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()


class Prepared(NamedTuple):
    """A data set that was written.

    Attributes:
      name: As `tfds.load` takes it.
      folder: Where it lies.
      splits: (name, examples) of each split.
      classes: Names of the classes; empty where there are none.
      notes: What was left out and why.
    """

    name: str
    folder: pathlib.Path
    splits: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Returns a table of the splits, and where they are."""
        classes = str(len(self.classes)) if self.classes else "-"
        rows = [("split", "examples", "classes")]
        rows += [(split, str(count), classes) for split, count in self.splits]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{split:<{widths[0]}}  {count:>{widths[1]}}  {number:>{widths[2]}}"
            for split, count, number in rows
        ]
        if self.classes:
            lines.append(f"classes: {tables.list_names(self.classes)}")
        return "\n".join([*lines, *self.notes, f"{self.name}: {self.folder}"])


def find_target(name: str) -> Target:
    """Returns what a name stands for; the same for one config of a set as in TFDS.

    Args:
      name: Name in TFDS, or a new one of small letters, digits and "_".

    Raises:
      DataError: If it is not a name, or TFDS knows the set but not this config.
    """
    tfds = import_tfds()
    if not re.fullmatch(r"[a-z][a-z0-9_]*(/\w[\w.-]*)?", name):
        raise errors.DataError(
            f"Not a name of a data set. Received: {name!r}. Expected small letters, "
            "digits and '_', as 'my_reviews'; or a name in TFDS, as 'glue/sst2'."
        )
    with tempfile.TemporaryDirectory() as nowhere:
        try:
            builder = tfds.builder(name, data_dir=nowhere)
        except tfds.core.registered.DatasetNotFoundError:
            return Target(name, _VERSION, None)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise errors.DataError(f"Unknown data set {name!r}: {reason}") from error
        folder = pathlib.Path(builder.data_dir).relative_to(nowhere)
    return Target(folder.parent.as_posix(), folder.name, builder)


def check_target(target: Target, data_dir: str, overwrite: bool) -> pathlib.Path:
    """Returns where a set is to lie.

    Raises:
      DataError: If there is one already, and it is not to be replaced.
    """
    final = pathlib.Path(data_dir, target.folder).absolute()
    if final.exists() and not overwrite:
        raise errors.DataError(
            f"{target.name} is prepared already in {final}. Pass --overwrite to "
            "replace it, or another --data_dir."
        )
    return final


def write(
    target: Target,
    source: Source,
    final: pathlib.Path,
    report: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Writes a data set; its folder appears whole or, after a failure, not at all.

    What was there before stays there after a failure. A kill may leave parts of both in
    a folder `.prepare-...` of the data folder, which is yours to look at and delete.

    Args:
      target: The name.
      source: The examples.
      final: From `check_target`. What lies there is replaced.
      report: Takes lines on the progress.

    Returns:
      A `Prepared`.

    Raises:
      DataError: If the folder cannot be written, an example does not fit, or TFDS
        would read a class by another name.
    """
    label = source.features["label"] if "label" in source.features else None
    classes = tuple(getattr(label, "names", None) or ())
    _check_classes(classes)
    root = final.parents[len(target.folder.parts) - 1]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".prepare-") as folder:
            builder = _store(target, source, folder, report)
            _publish(pathlib.Path(folder, target.folder), final, folder)
    except OSError as error:
        raise errors.DataError(
            f"Cannot write {final}: {error.strerror or error}. Pass another --data_dir."
        ) from error
    splits = {name: info.num_examples for name, info in builder.info.splits.items()}
    return Prepared(
        target.name,
        final,
        tuple((name, splits[name]) for name in source.splits),
        classes,
        tuple(source.notes),
    )


def settle(problems: list[str], on_bad_rows: str) -> tuple[str, ...]:
    """Raises for bad entries unless they are to be skipped.

    Args:
      problems: A line for each, with its file and what is wrong.
      on_bad_rows: "raise" or "skip".

    Returns:
      Notes: how many were left out, and the first of them.

    Raises:
      DataError: If there are any, for "raise".
    """
    if not problems:
        return ()
    shown = tables.list_lines(problems)
    if on_bad_rows == "raise":
        raise errors.DataError(
            f"{len(problems)} bad row(s). {shown}. Correct the files, or leave "
            "such rows out with --on_bad_rows=skip."
        )
    return (f"{len(problems)} bad row(s) skipped: {shown}",)


def import_tfds() -> ModuleType:
    """Imports TFDS.

    Raises:
      ImportError: If it is missing, naming the extra that brings it.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as e:
        raise ImportError('Install TFDS: pip install "tfamp[data]".') from e
    return tfds


def _store(target, source, folder, report):
    """Writes the set below a temporary folder; returns its builder."""
    tfds = import_tfds()

    name, _, config = target.name.partition("/")
    configs = [tfds.core.BuilderConfig(name=config)] if config else []

    class Builder(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
        """Stores the keys that `as_supervised` needs, too."""

        BUILDER_CONFIGS = configs  # Else TFDS warns of a "custom configuration".

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                description=f"{target.name}, from local files.",
                features=source.features,
                supervised_keys=source.supervised_keys,
            )

    builder = Builder(
        name=name,
        config=configs[0] if configs else None,
        version=target.version,
        features=source.features,
        split_datasets={
            split: _counted(split, examples, report)
            for split, examples in source.splits.items()
        },
        data_dir=folder,
    )
    # It prints where the set is: in the temporary folder.
    with _no_bars(tfds), contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _no_bars(tfds):
    """Turns TFDS' bars, one for every part of a split, off, and back to what was."""
    # TFDS 4.9 tells nobody whether bars are on; guarded by training/test_prepare.py.
    before = tfds.core.utils.tqdm_utils._active
    tfds.display_progress_bar(False)
    try:
        yield
    finally:
        tfds.display_progress_bar(before)


def _check_classes(names):
    """Raises for names of classes that TFDS, which stores one a line, cannot keep."""
    wrong = [n for n in names if n != n.strip() or not n or "\n" in n or "\r" in n]
    if wrong:
        raise errors.DataError(
            f"{len(wrong)} name(s) of classes are empty, or have a line end, or spaces "
            f"around them: {tables.list_names(map(repr, wrong))}. Correct the files."
        )


def _counted(split, examples, report) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields (key, example) as TFDS wants them, and reports now and then."""
    for number, example in enumerate(examples):
        if number and number % _REPORTED == 0:
            report(f"{split}: {number} examples")
        yield number, example


def _publish(written, final, temporary):
    """Moves a written set to its place, and what was there out of the way."""
    final.parent.mkdir(parents=True, exist_ok=True)
    before = pathlib.Path(temporary, "replaced")
    try:
        if final.exists():
            os.replace(final, before)
        os.replace(written, final)
    except BaseException:
        if before.exists() and not final.exists():
            os.replace(before, final)  # Else it is deleted with the temporary folder.
        raise
