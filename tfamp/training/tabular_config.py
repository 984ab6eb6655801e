"""The configuration that the files in `configs/tabular/` start from."""

from ml_collections import config_dict

from tfamp.training import base_config


def get_tabular_config() -> config_dict.ConfigDict:
    """Returns the defaults of regression on a table; see `tabular.create`.

    The network and its optimizer are those of Guo and Berkhahn, "Entity Embeddings of
    Categorical Variables", 2016 (https://arxiv.org/abs/1604.06737): embeddings, dense
    layers of 1000 and 500 with ReLU, Adam; see
    https://github.com/entron/entity-embedding-rossmann.
    """
    config = base_config.get_config()
    config.task = "tabular_regression"
    config.epochs = 10
    config.batch_size = 128
    config.eval_batch_size = 4096
    config.data.name = "table"  # Local files; or "diabetes", which scikit-learn has.
    config.data.cache = False  # The table is in memory as it is.
    _add_files(config.data)
    _add_columns(config.data)
    config.data.split_seed = 0  # Of the order of the training rows.
    config.data.test_fraction = 0.2
    # Categories, the unseen one included, for `--job=train_benchmark`, which reads no
    # data: pairs (column, number). 100 of other columns.
    config.data.categories = ()
    config.model.name = "entity_embeddings"
    config.model.dense_layers = (1000, 500)
    config.model.dropout = 0.0  # After each dense layer.
    config.model.embedding_dropout = 0.0
    # Pairs (column, size); see `tabular.embedding_size` for other columns.
    config.model.embedding_sizes = ()
    config.model.loss = "mean_squared_error"  # Or "mean_absolute_error"; of log1p.
    config.tiny.model = {"dense_layers": (16, 8)}
    return config


def _add_files(data):
    """Adds what says how local files are read; see `tabular_files.read`."""
    data.table_file = ""  # File or pattern in `data_dir`; Parquet by its ending.
    data.delimiter = ","
    data.header = True
    data.quoted = True
    # A second file with one row for each value of a column, as of stores for sales.
    data.join_file = ""
    data.join_key = ""
    data.join_columns = ()  # What is taken from it.
    data.on_bad_rows = "raise"  # Or "skip": left out and counted.


def _add_columns(data):
    """Adds the columns and what is done with them; see `tabular_data.load`."""
    data.target_column = ""
    data.categorical_columns = ()
    data.continuous_columns = ()
    data.date_column = ""
    data.date_format = "%Y-%m-%d"
    data.date_parts = ()  # Categorical columns made of the date; `DATE_PARTS`.
    # Order of the rows, for the split; the date or numbers. None: shuffled.
    data.time_columns = ()
    # Pairs (column, value as written): rows that have it are left out and counted.
    data.leave_out = ()
    data.missing_values = ("NA", "NaN", "nan", "null")  # Beside the empty field.
    # Of continuous columns: a missing value is a bad row, or "median": that of the
    # training rows, and a column NAME_missing of 0 and 1.
    data.fill_missing = "raise"
    # The score of the mean log target of these categorical columns' combinations is
    # reported beside the model's.
    data.baseline_columns = ()
