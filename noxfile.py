"""Sessions for nox: `nox -s contract`, `tests`, `lint`, `docs`, `next`.

`contract` runs over the tested pairs of TensorFlow and Keras, each with its file in
constraints/; `next` with the Keras source in the folder $KERAS_SOURCE. Environments are
kept: TensorFlow is a wheel of half a gigabyte.
"""

import configparser
import os
import pathlib
import shutil

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True
NEWEST = "tensorflow-2.21"
PAIRS = sorted(path.stem for path in pathlib.Path("constraints").glob("*.txt"))
CORE = ("tests/contract", "tests/rules", "tests/upstream")


def install(session, pair):
    """Installs tfamp with the pinned releases of a pair."""
    session.install("-e", ".[all,test]", "-c", f"constraints/{pair}.txt")


@nox.session
@nox.parametrize("pair", PAIRS)
def contract(session, pair):
    """What users are promised, beside each tested pair of releases."""
    install(session, pair)
    session.run("python", "-m", "pytest", *CORE, *session.posargs)


@nox.session
def tests(session):
    """Every test, beside the newest tested pair."""
    install(session, NEWEST)
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session):
    """Style and form."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def docs(session):
    """The documentation as a site, in build/site; a broken link is an error."""
    setup = configparser.ConfigParser()
    setup.read("setup.cfg")
    # Without tfamp, whose source is only read, and TensorFlow.
    session.install(*setup["options.extras_require"]["docs"].split())
    source = pathlib.Path("build/docs")
    shutil.rmtree(source, ignore_errors=True)
    for folder in ("docs", "results"):
        shutil.copytree(folder, source / folder)
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(page, source)
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def next(session):
    """The contract beside a Keras from source, which may not be released yet."""
    source = os.environ.get("KERAS_SOURCE")
    if not source:
        session.error("Set KERAS_SOURCE to a folder with the source of Keras.")
    install(session, NEWEST)
    session.install("--no-deps", source)
    session.run("python", "-m", "pytest", *CORE, *session.posargs)
