"""Shows the limits of number formats, and how each format rounds a number.

python scripts/formats.py
python scripts/formats.py --value=1e-7 --value=70000,-0.1,nan
"""

import quiet_start  # noqa: F401  Before all that imports TensorFlow.
from absl import flags

from tfamp.commands import app
from tfamp.facts import formats


def main():
    """Prints one of the two tables."""
    texts = [text for value in flags.FLAGS.value for text in value.split(",")]
    if texts:
        show_values({text: float(text) for text in texts})
    else:
        show_limits()


def show_limits():
    """Prints a line for each format."""
    print(
        f"{'format':<15}{'bits':<6}{'bytes':<7}{'max':<17}{'smallest normal':<17}"
        f"{'smallest subnormal':<20}{'epsilon':<17}computed by"
    )
    for found in map(formats.float_format, formats.FORMAT_NAMES):
        print(
            f"{found.name:<15}{found.bits:<6}{found.bytes:<7}{found.max:<17.9g}"
            f"{found.smallest_normal:<17.9g}{found.smallest_subnormal:<20.9g}"
            f"{found.epsilon:<17.9g}{found.supported}"
        )


def show_values(values):
    """Prints a line for each number in each format."""
    print(f"{'value':<12}{'format':<15}{'stored':<17}{'relative error':<16}outcome")
    for text, value in values.items():
        for name in formats.FORMAT_NAMES:
            found = formats.represent(value, name)
            print(
                f"{text:<12}{name:<15}{found.stored:<17.9g}"
                f"{found.relative_error:<16.2g}{found.outcome}"
            )


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "value", [], "Number, or several separated by commas; may be repeated."
    )
    app.run(main)
