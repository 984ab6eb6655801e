"""Any UTF-8 text: the files of a folder, in the order of their names.

    python scripts/train_lm.py --config=configs/lm/text_file.py --data_dir=FOLDER

`--config.data.text_files` is a name or a pattern, "*.txt" by default. The last
twentieth of the text is the test split, what is before it the validation split. For a
short text, or one in a language without spaces between words:
`--config.data.unit=character --config.data.sequence_length=128`. There is no result to
expect, as no text is bundled.
"""

from tfamp.recipes import language_model


def get_config():
    """Returns the configuration."""
    config = language_model.get_config("text_file")
    config.name = "text_file"
    config.epochs = 5
    config.optimizer.learning_rate = 5e-3
    return config
