"""Shows the limits of number formats, and how each format rounds a number.

python scripts/formats.py
python scripts/formats.py --value=1e-7 --value=70000,-0.1,nan
"""

import quiet_start  # noqa: F401  Before all that imports TensorFlow.
from absl import flags

from tfamp import tables
from tfamp.commands import app
from tfamp.facts import formats


def main():
    """Prints one of the two tables."""
    texts = [text for value in flags.FLAGS.value for text in value.split(",")]
    rows = rounded(texts) if texts else limits()
    print(tables.of_dicts(rows, markdown=False))


def limits():
    """Returns a row for each format."""
    return [
        {
            "format": found.name,
            "bits": f"{found.bits}",
            "bytes": f"{found.bytes}",
            "max": f"{found.max:.9g}",
            "smallest normal": f"{found.smallest_normal:.9g}",
            "smallest subnormal": f"{found.smallest_subnormal:.9g}",
            "epsilon": f"{found.epsilon:.9g}",
            "computed by": found.supported,
        }
        for found in map(formats.float_format, formats.FORMAT_NAMES)
    ]


def rounded(texts):
    """Returns a row for each number in each format."""
    return [
        {
            "value": text,
            "format": found.format,
            "stored": f"{found.stored:.9g}",
            "relative error": f"{found.relative_error:.2g}",
            "outcome": found.outcome,
        }
        for text in texts
        for found in (formats.represent(float(text), n) for n in formats.FORMAT_NAMES)
    ]


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "value", [], "Number, or several separated by commas; may be repeated."
    )
    app.run(main)
