"""Classification of the texts of a CSV file, with a pretrained or a new encoder.

    python scripts/train_bert.py --config=configs/bert/csv.py --data_dir=FOLDER \\
        --config.data.train_file=reviews.csv --config.data.text_column=review \\
        --config.data.label_column=stars --preset=PRESET

FOLDER (default: the current one) holds the file, whose first row names the columns; a
fifth of its rows is scored, unless --config.data.test_file names another file. Labels
are any words or numbers. PRESET is a KerasHub name such as `bert_base_en_uncased`,
`hf://org/name`, or a Hugging Face or KerasHub folder, and takes the steps of
`config.fine_tuning`. Without it a small encoder is trained from nothing, which wants
larger steps, and more of them: with the 2,162 sentences of `sentences.py` test accuracy
is 0.80 in float32 (one seed, 598 sentences, chance 0.51); with the steps of fine-tuning
it stays at the chance level.

Also: --config.data.second_text_column for pairs of texts, --config.data.delimiter="\\t"
for TSV, --config.data.on_bad_rows=skip for rows without a text or a label,
--config.data.sequence_length for longer texts (the report says how many were cut), and
--config.model.pooling=mean for sentence encoders; `text_classification.get_config` says
when to use it.
"""

from tfamp.recipes import text_classification


def get_config():
    """Returns the configuration of a CSV file."""
    config = text_classification.get_config("csv")
    config.name = "bert-csv"
    config.data.sequence_length = config.model.max_sequence_length = 128
    config.epochs = 10
    config.fine_tuning = {"epochs": 3, "optimizer": {"learning_rate": 5e-5}}
    return config
