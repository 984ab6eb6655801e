"""Regression on a table with entity embeddings, as of Rossmann's sales."""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.runs import default_config

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of `configs/tabular/`; see `create`.

    The network and its optimizer are those of Guo and Berkhahn, "Entity Embeddings of
    Categorical Variables", 2016 (https://arxiv.org/abs/1604.06737): embeddings, dense
    layers of 1000 and 500 with ReLU, Adam; see
    https://github.com/entron/entity-embedding-rossmann.
    """
    config = default_config.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            "epochs": 10,
            "batch_size": 128,
            "eval_batch_size": 4096,
            "data": _data_config(),
            "model": {
                "name": "entity_embeddings",
                "dense_layers": (1000, 500),
                "dropout": 0.0,  # After each dense layer.
                "embedding_dropout": 0.0,
                # Pairs (column, size); see `embedding_size` for other columns.
                "embedding_sizes": (),
                # Or "mean_absolute_error"; of log1p.
                "loss": "mean_squared_error",
            },
            "tiny": {"model": {"dense_layers": (16, 8)}},
        }
    )
    return config


def _data_config():
    """Returns what says how a table is read; see `tabular_data.load`."""
    return {
        "name": "table",  # Local files; or "diabetes", which scikit-learn has.
        "cache": False,  # The table is in memory as it is.
        "table_file": "",  # File or pattern in `data_dir`; Parquet by its ending.
        "delimiter": ",",
        "header": True,
        "quoted": True,
        # A second file with one row for each value of a column, as of stores for sales.
        "join_file": "",
        "join_key": "",
        "join_columns": (),  # What is taken from it.
        "on_bad_rows": "raise",  # Or "skip": left out and counted.
        "target_column": "",
        "categorical_columns": (),
        "continuous_columns": (),
        "date_column": "",
        "date_format": "%Y-%m-%d",
        # Categorical columns made of the date: "year", "month", "week", "day",
        # "day_of_week", "day_of_year", "hour".
        "date_parts": (),
        # Order of the rows, for the split; the date or numbers. None: shuffled.
        "time_columns": (),
        # Pairs (column, value as written): rows that have it are left out and counted.
        "leave_out": (),
        "missing_values": ("NA", "NaN", "nan", "null"),  # Beside the empty field.
        # Of continuous columns: a missing value is a bad row, or "median": that of the
        # training rows, and a column missingindicator_NAME of 0 and 1.
        "fill_missing": "raise",
        # The score of the mean log target of these categorical columns' combinations is
        # reported beside the model's.
        "baseline_columns": (),
        "split_seed": 0,  # Of the order of the training rows.
        "test_fraction": 0.2,
        # Categories, the unseen one included, for `--job=train_benchmark`, which reads
        # no data: pairs (column, number). 100 of other columns.
        "categories": (),
    }


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Reads and encodes a table, and describes the network.

    The score is the root mean squared log error of the amounts (RMSLE), with the root
    mean squared percentage error (RMSPE); predictions below 0 count as 0. Scoring
    writes `predictions.png`; `columns.json` says how rows become the model's inputs.

    Args:
      config: `config.data` has what `tabular_data.load` reads, and
        baseline_columns: see `tabular_data.baseline`, whose score is reported.
        `config.model` has what `build_model` reads, and
        loss: one of `LOSSES`, of log(1 + target).

    Returns:
      A `Task`; features are those of `tabular_encoding.encode`, a label is
      log(1 + target), float32 [1].

    Raises:
      DataError: If the data are missing or malformed.
      ImportError: If an optional dependency is missing.
      ValueError: If a setting is invalid.
    """
    from tfamp.recipes.tasks import tabular

    return tabular.create(config)


def synthetic(config: config_dict.ConfigDict) -> "tasks.Synthetic":
    """Describes the model and makes batches of random rows for it.

    Args:
      config: As for `create`; `config.data.categories` has the numbers of categories,
        100 where a column is not there. `config.seed` alone decides on the content.

    Returns:
      A `tasks.Synthetic`.

    Raises:
      ValueError: If a setting is invalid.
    """
    from tfamp.recipes.tasks import tabular

    return tabular.synthetic(config)
