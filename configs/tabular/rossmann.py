"""Daily sales of 1115 Rossmann stores; the files of Kaggle's "Rossmann Store Sales".

    python scripts/train_tabular.py --config=configs/tabular/rossmann.py \\
        --data_dir=FOLDER --job=compare

FOLDER holds `train.csv` and `store.csv` of
https://www.kaggle.com/c/rossmann-store-sales/data. Days on which a store is closed or
sells nothing are left out, as the competition does not score them; so is the column
`Customers`, which is not known beforehand. The last 3 % of the rows are the test.

Network, loss, batch size and epochs are those of Guo and Berkhahn's code,
https://github.com/entron/entity-embedding-rossmann; its README tells of an RMSPE of
0.098 on the last 3 % by one such network, and of third place by the mean of ten, with
the stores' states, the weather and search trends besides, which are not in these two
files. Nothing is recorded here yet. On a GPU raise `--config.batch_size`: rows are
small, and at 128 a step is too short for its mode to matter.
"""

from tfamp.recipes import tabular


def get_config():
    """Returns the configuration."""
    config = tabular.get_config()
    config.name = "rossmann"
    config.validation_fraction = 0.03
    config.data.table_file = "train.csv"
    config.data.join_file = "store.csv"
    config.data.join_key = "Store"
    stores = (
        *("StoreType", "Assortment"),
        *("CompetitionOpenSinceMonth", "CompetitionOpenSinceYear"),
        *("Promo2", "Promo2SinceWeek", "Promo2SinceYear", "PromoInterval"),
    )
    config.data.join_columns = (*stores, "CompetitionDistance")
    config.data.target_column = "Sales"
    config.data.categorical_columns = (
        *("Store", "DayOfWeek", "Promo", "StateHoliday", "SchoolHoliday"),
        *stores,
    )
    config.data.continuous_columns = ("CompetitionDistance",)  # Meters.
    config.data.fill_missing = "median"  # The distance of three stores is not known.
    config.data.date_column = "Date"
    config.data.date_parts = ("year", "month", "week", "day")
    config.data.time_columns = ("Date",)
    config.data.leave_out = (("Open", "0"), ("Sales", "0"))
    config.data.test_fraction = 0.03
    config.data.baseline_columns = ("Store", "DayOfWeek", "Promo")
    config.data.categories = (
        *(("Store", 1116), ("DayOfWeek", 8), ("Date_year", 4), ("Date_month", 13)),
        *(("Date_week", 53), ("Date_day", 32)),
    )
    config.model.loss = "mean_absolute_error"
    return config
