"""A corpus that is already there: which library does this docstring come from?

The source files of installed packages are parsed, not imported. A text is the prose
of a docstring up to its first section or example, so that neither the libraries'
section styles nor their names tell the class.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ml_collections import config_dict

from tfamp import errors
from tfamp.training import text

# Names that would tell the library. Long ones are masked wherever they occur
# ("KerasTensor"), short ones only as words or at the start of a name ("TFRecord").
_LONG_NAMES = (
    *("tensorflow", "keras", "scikit-learn", "scikit_learn", "scikit", "sklearn"),
    *("matplotlib", "pyplot", "pylab", "numpy", "scipy", "tflite"),
)
_SHORT_NAMES = ("tf", "mpl", "plt", "np", "tfds", "sp")
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # Where it is not the import name.

_SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "tests", "test", "testing", "externals", "vendored", "_vendor")
)
# TensorFlow carries an old copy of Keras, and wrappers generated from op descriptions.
_SKIPPED_PATHS = re.compile(
    r"^tensorflow/python/keras/|/gen_[^/]*$|/test_[^/]*$|_test\.py$"
)
_TEXTS_PER_FILE = 30  # No file dominates its class, or a split.
_FEWEST = 200  # Texts of a library below which a split may get no file.
_SHINGLE = 4  # Words in a row that tell near-duplicates.

_SECTION = re.compile(
    r"^\s*(?:Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Usage|Notes?"
    r"|References?|Attributes|See Also|Methods|Warnings?|Call arguments|Input shape"
    r"|Output shapes?|Reference|Keyword Args|Other Parameters)\s*(?::.*)?$"
    r"|^[^\n]*\n\s*[-=~]{3,}\s*$|^\s*(?:>>>|```|\.\. )",
    re.MULTILINE | re.IGNORECASE,
)
_NOTHING = re.compile(r"(?!)")  # Masks no name.
_MARKUP = re.compile(r":[\w:]+:(?=`)|https?://\S+|%\(\w+\)s|[`*|]|<[^<>\s]*>")
# scikit-learn's: a sentence that ends most of its docstrings, and a link's target.
_BOILERPLATE = re.compile(r"(?i:read more in the\s+user guide\s*\.?)|sphx_glr_\w+")


class _Text(NamedTuple):
    """A docstring's prose; `path` from the folder of the package."""

    path: str
    text: str


def load(config: config_dict.ConfigDict) -> text.Corpus:
    """Builds the corpus from installed packages; a few seconds.

    The order of files is that of a hash of their paths, so it is the same on every
    file system; another version of a package changes the corpus (the notes name the
    versions). A file's texts are all in one split, for siblings share phrases; a text
    is dropped where more than half of its four-word sequences are in longer texts, of
    any class.

    Args:
      config: `config.data` has
        libraries: Import names; the classes.
        texts_per_library: Reading a library stops at so many; fewer for
          `config.limit_examples`.
        min_words: Shortest text.
        test_fraction, split_seed: Share and seed of the test split.

    Returns:
      A `Corpus` with equally many texts of each library in each split.

    Raises:
      DataError: If a library is not installed or has too few docstrings.
    """
    libraries = tuple(sorted(config.data.libraries))
    kept = _read(libraries, config, name_pattern(libraries))
    dealt = [_deal(kept[library], config) for library in libraries]
    splits: dict[str, list[text.Example]] = {"validation": []}
    for name in ("train", "validation", "test"):
        if name != "validation" or config.validation_fraction:
            examples = _balance(dealt, name, libraries)
            splits[name] = text.shuffle(examples, config.data.split_seed)
    notes = (describe(libraries),)
    return text.Corpus(**splits, classes=libraries, notes=notes)


def load_documents(config: config_dict.ConfigDict) -> dict[str, list[str]]:
    """Reads the same docstrings as text to model: names stay, nothing is balanced.

    Args:
      config: As for `load`.

    Returns:
      The texts of "train", "validation" and "test", file after file; a file's are all
      in one split. Near-duplicates are left out, or a model would know test texts.

    Raises:
      DataError: If a library is not installed, or a split has no text.
    """
    libraries = tuple(sorted(config.data.libraries))
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for items in _read(libraries, config, _NOTHING).values():
        for name, texts in _deal(items, config).items():
            splits[name] += texts
    if not all(splits[name] for name in ("train", "test")):
        raise errors.DataError(
            f"Too few docstrings in {', '.join(libraries)}: "
            + ", ".join(f"{len(texts)} {name}" for name, texts in splits.items())
            + ". Choose larger packages in config.data.libraries."
        )
    return splits


def describe(libraries: Sequence[str]) -> str:
    """Returns which versions of which libraries the texts are of."""
    versions = ", ".join(f"{name} {_version(name)}" for name in sorted(libraries))
    return f"docstrings of {versions}"


def name_pattern(libraries: Sequence[str]) -> re.Pattern[str]:
    """Returns the pattern of all library names and aliases to mask."""
    long_names = "|".join(map(re.escape, sorted({*_LONG_NAMES, *libraries})))
    short_names = "|".join(map(re.escape, _SHORT_NAMES))
    return re.compile(
        rf"(?i:{long_names})|(?<![A-Za-z])(?i:{short_names})(?![a-z])",
    )


def clean(docstring: str, mask: re.Pattern[str]) -> str:
    """Returns a docstring's prose before its first section, with names masked."""
    section = _SECTION.search(docstring)
    prose = docstring[: section.start()] if section else docstring
    prose = _BOILERPLATE.sub(" ", _MARKUP.sub(" ", prose))
    prose = mask.sub(" ", prose)
    return " ".join(prose.split())


def _read(libraries, config, mask) -> dict[str, list[_Text]]:
    """Returns the texts of each library, without near-duplicates."""
    roots = {library: _find_package(library) for library in libraries}
    found = {
        library: list(_read_library(root, config, mask))
        for library, root in roots.items()
    }
    return _drop_near_duplicates(found, config.data.split_seed)


def _read_library(root, config, mask) -> Iterator[_Text]:
    """Yields a library's texts, file after file, until there are enough."""
    wanted = _wanted(config)
    count = 0
    base = os.path.dirname(root)
    for path in _source_files(root, config.data.split_seed):
        if count >= wanted:
            return
        with open(os.path.join(base, path), "rb") as file:
            texts = _file_texts(file.read(), mask, config.data.min_words)
        count += len(texts)
        yield from (_Text(path, item) for item in texts)


def _wanted(config):
    """Texts of a library: its maximum, or enough for the smallest split's limit."""
    if not config.limit_examples:
        return config.data.texts_per_library
    test = config.data.test_fraction
    validation = (1.0 - test) * config.validation_fraction
    share = min(test, validation or test)
    per_class = config.limit_examples / len(config.data.libraries)
    # Twice, since near-duplicates go and files come whole.
    enough = max(math.ceil(2.0 * per_class / share), _FEWEST)
    return min(config.data.texts_per_library, enough)


def _find_package(library):
    """Returns a package's folder, without importing it."""
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise errors.DataError(
            f"The package {library!r} is not installed; its docstrings are a class of "
            'this task. `pip install "tfamp[all]"`, or set config.data.libraries.'
        )
    return os.path.abspath(next(iter(spec.submodule_search_locations)))


def _source_files(root, seed):
    """Returns the paths of a package's files from its parent, in hash order."""
    base = os.path.dirname(root)
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        relative = os.path.relpath(folder, base).replace(os.sep, "/")
        paths += [f"{relative}/{name}" for name in names if name.endswith(".py")]
    paths = [path for path in paths if not _SKIPPED_PATHS.search(path)]
    return sorted(paths, key=lambda path: _hash(seed, path))


def _file_texts(source, mask, min_words):
    """Returns the cleaned docstrings of a file's classes and functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes; as an error: no texts.
            tree = ast.parse(source)
    except SyntaxError:  # For another Python, or a template.
        return []
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]
    texts = (clean(doc, mask) for doc in docs if doc)
    return [item for item in texts if len(item.split()) >= min_words][:_TEXTS_PER_FILE]


def _drop_near_duplicates(found, seed):
    """Returns the texts per library without those that mostly repeat earlier ones."""
    order = [
        (_shingles(item.text), _hash(seed, item.path), item.text, library, item)
        for library, items in found.items()
        for item in items
    ]
    # Long ones first, so that none is kept that is most of a shorter one.
    order.sort(key=lambda entry: (-len(entry[0]), *entry[1:]))
    kept: dict[str, list[_Text]] = {library: [] for library in found}
    seen: set[tuple[str, ...]] = set()
    for shingles, _, _, library, item in order:
        if shingles and 2 * len(shingles & seen) <= len(shingles):
            seen |= shingles
            kept[library].append(item)
    for items in kept.values():
        items.sort(key=lambda item: (_hash(seed, item.path), item.text))
    return kept


def _shingles(item):
    """Returns the set of four words in a row, without case, digits and marks."""
    words = re.findall(r"[a-z]+", item.lower())
    return set(zip(*(words[start:] for start in range(_SHINGLE)), strict=False))


def _deal(items, config):
    """Deals whole files to the splits, each to the one that lacks most of its share."""
    test = config.data.test_fraction
    validation = (1.0 - test) * config.validation_fraction
    shares = {
        "train": 1.0 - test - validation,
        "validation": validation,
        "test": test,
    }
    splits: dict[str, list[str]] = {name: [] for name in shares}
    files: dict[str, list[str]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item.text)
    total = 0
    for texts in files.values():
        total += len(texts)
        lacks = {name: shares[name] * total - len(splits[name]) for name in shares}
        splits[max(lacks, key=lacks.__getitem__)] += texts
    return splits


def _balance(dealt, split, libraries):
    """Returns equally many examples of each library in a split."""
    texts = [part[split] for part in dealt]
    count = min(map(len, texts))
    if not count:
        sizes = ", ".join(
            f"{name} {len(items)}" for name, items in zip(libraries, texts, strict=True)
        )
        raise errors.DataError(
            f"Too few docstrings for the {split} split: {sizes}. Expected at least 1 "
            "of each. Choose larger packages in config.data.libraries."
        )
    return [
        text.Example(item, label)
        for label, items in enumerate(texts)
        for item in items[:count]
    ]


def _hash(seed, path):
    """Returns a key that orders paths the same on every machine."""
    return hashlib.sha256(f"{seed}:{path}".encode()).digest()


def _version(library: str) -> str:
    """Returns the installed version of a library, or "?"."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(library, library))
    except importlib.metadata.PackageNotFoundError:
        return "?"
