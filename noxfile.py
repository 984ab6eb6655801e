"""Sessions for nox: `nox -s contract`, `tests`, `lint`, `docs`, `next`.

`contract` runs over the tested pairs of TensorFlow and Keras, each with its file in
constraints/; `next` over releases that are not out yet. Environments are kept:
TensorFlow is a wheel of half a gigabyte.
"""

import configparser
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
    session.run("python", "-m", "pytest", "-m", "training", *CORE, *session.posargs)


@nox.session
def tests(session):
    """Every test, beside the newest tested pair."""
    install(session, NEWEST)
    session.run("python", "-m", "pytest", *session.posargs)
    session.run("python", "-m", "pytest", "-m", "training", *session.posargs)


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
@nox.parametrize("tensorflow", ["tensorflow", "tf-nightly"])
def next(session, tensorflow):
    """The contract beside TensorFlow's release candidate or nightly.

    With Keras' and KerasHub's nightlies; the result is a row of
    docs/maintainers/versions.md. What does not load beside that TensorFlow is removed,
    and tests that need it skip.
    """
    pip = ("python", "-m", "pip")
    nightlies = ["keras-nightly", "keras-hub-nightly", "tensorflow-text-nightly"]
    released = ["tensorflow", "tensorflow-text", "keras", "keras-hub"]
    session.install("-e", ".[all,test]")
    session.run(*pip, "uninstall", "-y", *released, "tf-nightly", *nightlies)
    session.install("--pre", tensorflow)
    # TensorFlow brings `keras`, which has the folder of `keras-nightly`: without the
    # one, the other is installed anew.
    session.run(*pip, "uninstall", "-y", "keras", "keras-nightly")
    session.install("--pre", "--no-deps", *nightlies)
    for module, package in (
        ("tensorflow_text", "tensorflow-text-nightly"),
        ("keras_hub", "keras-hub-nightly"),
    ):
        # In a process of its own, which it may end.
        check = f"python -c 'import {module}' || pip uninstall -y {package}"
        session.run("bash", "-c", check, external=True)
    results = pathlib.Path(session.create_tmp(), "next.xml")
    session.run(
        *("python", "-m", "pytest", f"--junitxml={results}", *CORE, *session.posargs),
        success_codes=[0, 1],
    )
    session.run("python", ".ci/versions.py", str(results))
