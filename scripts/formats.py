"""Shows the limits of number formats, and what each format makes of a number.

python scripts/formats.py
python scripts/formats.py --value=1e-7 --value=70000,-0.1,nan
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read when TensorFlow starts.

from absl import flags  # noqa: E402

from tfamp import formats  # noqa: E402
from tfamp.training import app  # noqa: E402


def main(argv):
    """Prints one of the two tables."""
    del argv
    values = formats.parse_numbers(flags.FLAGS.value)
    print(
        formats.to_text(
            formats.values_table(values) if values else formats.limits_table()
        )
    )


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "value", [], "Number, or several with commas between them; may be repeated."
    )
    app.run(main)
