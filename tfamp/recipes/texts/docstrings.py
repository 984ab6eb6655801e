"""Docstrings of installed packages as texts: data that every host has."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp import errors, extras

if TYPE_CHECKING:
    import pandas

# TensorFlow carries an old copy of Keras, and wrappers generated from op descriptions.
_SKIPPED = re.compile(
    r"^tensorflow/python/keras/|/gen_[^/]*$|/test_[^/]*$|_test\.py$"
    r"|/(tests?|testing|externals|vendored|_vendor)/"
)
_TEXTS_PER_FILE = 30  # No file dominates its class, or a split.
_SECTION = re.compile(
    r"^\s*(?:Arg(?:ument)?s|Parameters|Returns?|Raises|Yields?|Examples?|Usage|Notes?"
    r"|References?|Attributes|See Also|Methods|Warnings?|Call arguments|Input shape"
    r"|Output shapes?|Keyword Args|Other Parameters)\s*(?::.*)?$"
    r"|^[^\n]*\n\s*[-=~]{3,}\s*$|^\s*(?:>>>|```|\.\. )",
    re.MULTILINE | re.IGNORECASE,
)
_MARKUP = re.compile(r":[\w:]+:(?=`)|https?://\S+|%\(\w+\)s|[`*|]|<[^<>\s]*>")
# Long names are masked wherever they occur ("KerasTensor"), short ones only as words
# or at the start of a name ("TFRecord").
_LONG = (
    "tensorflow|keras|scikit[-_]?learn|scikit|sklearn|matplotlib|pyplot|pylab|numpy"
    "|scipy|tflite"
)
_SHORT = r"(?<![A-Za-z])(?i:tf|mpl|plt|np|tfds|sp)(?![a-z])"


def collect(
    libraries: Sequence[str] = ("matplotlib", "scipy", "sklearn", "tensorflow"),
    texts_per_library: int = 100_000,
    min_words: int = 8,
) -> "pandas.DataFrame":
    """Reads the docstrings of installed packages: text that every host has.

    Source files are parsed, not imported. A text is the prose of a docstring up to its
    first section or example. Files come in the order of a hash of their paths, the same
    on every file system; another version of a package has other texts.

    Args:
      libraries: Import names.
      texts_per_library: Reading a library stops at so many.
      min_words: Shortest text.

    Returns:
      A table with the columns text, label (the library) and file, sorted by library,
      without repeated texts.

    Raises:
      DataError: If a library is not installed or has no docstrings.
    """
    pandas = extras.require("pandas")
    rows = []
    for library in sorted(libraries):
        spec = importlib.util.find_spec(library)
        if spec is None or not spec.submodule_search_locations:
            raise errors.DataError(
                f"The package {library!r} is not installed; its docstrings are text of "
                'this task. `pip install "tfamp[all]"`, or set config.data.libraries.'
            )
        texts: dict[str, str] = {}  # Text -> file.
        for file, text in _prose(pathlib.Path(spec.submodule_search_locations[0])):
            if len(texts) >= texts_per_library:
                break
            if len(text.split()) >= min_words:
                texts.setdefault(text, file)
        if not texts:
            raise errors.DataError(f"The package {library!r} has no docstrings.")
        rows += [(text, library, file) for text, file in texts.items()]
    return pandas.DataFrame(rows, columns=["text", "label", "file"])


def _prose(root) -> Iterator[tuple[str, str]]:
    """Yields (file, text) of a package's classes and functions."""
    files = [path.relative_to(root.parent).as_posix() for path in root.rglob("*.py")]
    files = [file for file in files if not _SKIPPED.search(file)]
    for file in sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Invalid escapes.
                tree = ast.parse((root.parent / file).read_bytes())
        except SyntaxError:  # For another Python, or a template.
            continue
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = (ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds))
        for doc in [doc for doc in docs if doc][:_TEXTS_PER_FILE]:
            section = _SECTION.search(doc)
            prose = doc[: section.start()] if section else doc
            yield file, " ".join(_MARKUP.sub(" ", prose).split())


def versions(libraries: Sequence[str]) -> str:
    """Returns the names of packages, and the versions of those that are installed."""
    packages = importlib.metadata.packages_distributions()
    return ", ".join(
        " ".join([name, *map(importlib.metadata.version, packages.get(name, [])[:1])])
        for name in sorted(libraries)
    )


def read(data: config_dict.ConfigDict) -> "pandas.DataFrame":
    """Returns docstrings without the names that tell the class, as many of each.

    Args:
      data: libraries, texts_per_library and min_words, as of `collect`.
    """
    table = collect(data.libraries, data.texts_per_library, data.min_words)
    names = "|".join([_LONG, *map(re.escape, data.libraries)])
    text = table.text.str.replace(f"(?i:{names})|{_SHORT}", " ", regex=True)
    table = table.assign(text=text.str.split().str.join(" "), place=table.file)
    table = table[table.text.str.split().str.len() >= data.min_words]
    return table.groupby("label").head(table.label.value_counts().min())
