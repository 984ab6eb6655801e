"""Writes local files as a TFDS data set, for the training scripts to read by name.

    python scripts/prepare_data.py --format=glue --name=glue/sst2 \\
        --source_dir=SST-2 --data_dir=DATA
    python scripts/prepare_data.py --format=squad --name=squad --source_dir=FOLDER \\
        --train_file=train-v1.1.json --validation_file=dev-v1.1.json --data_dir=DATA
    python scripts/prepare_data.py --format=csv --name=my_reviews --source_dir=FOLDER \\
        --train_file=reviews.csv --validation_fraction=0.2 --data_dir=DATA
    python scripts/prepare_data.py --format=images --name=my_photos \\
        --source_dir=FOLDER --data_dir=DATA

Then `--data_dir=DATA --config.data.name=NAME` of a training script, or
`tfds.load(NAME, data_dir=DATA)`. The share or file of `--validation_...` is the split
that is scored.
"""

import dataclasses
import sys

import quiet_start  # noqa: F401  Before all that imports TensorFlow.
from absl import flags

from tfamp.training import app, prepare


def main(argv):
    """Writes the set that the flags describe, and prints a table of it."""
    del argv  # Unused: `app` refuses arguments that are no flags.
    names = [field.name for field in dataclasses.fields(prepare.Settings)]
    settings = prepare.Settings(**{name: flags.FLAGS[name].value for name in names})
    print(
        prepare.prepare(settings, lambda line: sys.stderr.write(f"{line}\n")).to_text()
    )


if __name__ == "__main__":
    flags.DEFINE_enum("format", None, prepare.FORMATS, "What the files are.")
    flags.DEFINE_string(
        "name", None, "Name in TFDS, or a new one (csv, images, squad)."
    )
    flags.DEFINE_string("source_dir", None, "Folder of the local files.")
    flags.DEFINE_string("data_dir", None, "Folder to write.")
    flags.DEFINE_string("train_file", "", "csv, squad: file in --source_dir.")
    flags.DEFINE_string("validation_file", "", "The same, of the scored split.")
    flags.DEFINE_float("validation_fraction", 0.0, "Or the share of the scored split.")
    flags.DEFINE_integer("split_seed", 0, "Seed of that split.")
    flags.DEFINE_string("text_column", "text", "csv: name, or position if --noheader.")
    flags.DEFINE_string("second_text_column", "", "csv: the same, of pairs of texts.")
    flags.DEFINE_string("label_column", "label", "csv: the same, of the class.")
    flags.DEFINE_string("delimiter", ",", "csv: between the fields; \\t for a tab.")
    flags.DEFINE_bool("header", True, "csv: whether the first row names the columns.")
    flags.DEFINE_bool("quoted", True, 'csv: whether " quotes fields.')
    flags.DEFINE_enum("on_bad_rows", "raise", ("raise", "skip"), "Or leave them out.")
    flags.DEFINE_bool("overwrite", False, "Replace a prepared set of that name.")
    flags.mark_flags_as_required(["format", "name", "source_dir", "data_dir"])
    app.run(main)
