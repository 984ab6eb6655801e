"""Small tables with the columns and the formats of data sets that are not at hand."""

import csv
import datetime

import numpy as np

# Of Kaggle's "Rossmann Store Sales".
SALES = "Store DayOfWeek Date Sales Customers Open Promo StateHoliday SchoolHoliday"
STORES = (
    "Store StoreType Assortment CompetitionDistance CompetitionOpenSinceMonth "
    "CompetitionOpenSinceYear Promo2 Promo2SinceWeek Promo2SinceYear PromoInterval"
)
# A competitor's distance beyond float16, and one that is not known.
STORE_ROWS = [
    [1, "c", "a", 1270, 9, 2008, 0, "", "", ""],
    [2, "a", "a", 75860, 11, 2007, 1, 13, 2010, "Jan,Apr,Jul,Oct"],
    [3, "d", "c", "", "", "", 1, 14, 2011, "Feb,May,Aug,Nov"],
]


def write_csv(path, header, rows):
    """Writes rows under a header."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)  # As in these files.
        writer.writerows([header, *rows])


def write_rossmann(folder, days=60):
    """Writes `train.csv`, the newest day first, and `store.csv`; returns the folder."""
    rng = np.random.default_rng(0)
    rows = []
    for day in range(days):
        date = datetime.date(2015, 7, 31) - datetime.timedelta(days=day)
        for store, *_ in STORE_ROWS:
            is_open = int(date.isoweekday() != 7)
            promo = int(date.isoweekday() < 6 and day % 14 < 7)
            sales = is_open * int(4000 * store * (1 + promo) * rng.uniform(0.8, 1.2))
            holiday = "a" if day == 30 else "0"
            fixed = [sales, sales // 9, is_open, promo, holiday, int(day < 20)]
            rows.append([store, date.isoweekday(), date, *fixed])
    write_csv(folder / "train.csv", SALES.split(), rows)
    write_csv(folder / "store.csv", STORES.split(), STORE_ROWS)
    return str(folder)
