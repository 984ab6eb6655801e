"""Writes the result of a `nox -s next` into the table of docs/maintainers/versions.md.

    python .ci/versions.py RESULTS.xml

The file is pytest's `--junitxml`. Ends with 1 if a test failed.
"""

import datetime
import pathlib
import re
import sys
import xml.etree.ElementTree

from tfamp.facts import versions
from tfamp.keras_patches import patches

PAGE = pathlib.Path(__file__).parents[1] / "docs/maintainers/versions.md"
PACKAGES = ("tensorflow", "keras", "keras-hub", "tensorflow-text")


def main(results):
    """Replaces the row of these releases, or adds it."""
    suite = xml.etree.ElementTree.parse(results).getroot().find("testsuite")
    counts = {k: int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    off = "; ".join(patches.missing()) or "nothing"
    found = [versions.installed(name) or "does not load" for name in PACKAGES]
    passed = counts["tests"] - failed - counts["skipped"]
    date = datetime.date.today().isoformat()
    row = [*found, passed, failed, counts["skipped"], off, date]
    line = f"| {' | '.join(map(str, row))} |"
    text = PAGE.read_text()
    table = re.search(r"(\| TensorFlow \| Keras \| KerasHub .*?\n)\n", text, re.S)[1]
    kept = [x for x in table.splitlines() if not x.startswith(f"| {found[0]} | ")]
    PAGE.write_text(text.replace(table, "\n".join([*kept, line]) + "\n"))
    print(line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
