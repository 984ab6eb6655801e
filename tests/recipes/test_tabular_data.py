"""Tables read, checked, joined, split by time and encoded."""

import datetime

import helpers
import made_tables
import numpy as np
import pandas as pd
import pytest

from tfamp import errors
from tfamp.measuring import workloads
from tfamp.recipes import tabular, tabular_data, tabular_encoding

HEADER = "day,hour,shop,heat,sold"
ROWS = [
    f"2020-01-{day:02},{hour},{shop},{day / 2 + hour},{10 * day + hour}"
    for day in range(1, 11)
    for hour in range(3)
    for shop in "ab"
]


def load_file(name, data_dir=""):
    config = workloads.load(helpers.ROOT / f"configs/{name}.py")
    return helpers.with_fields(config, data_dir=str(data_dir))


FIELDS = {
    **{"validation_fraction": 0.2, "data__table_file": "sold.csv"},
    **{"data__target_column": "sold", "data__categorical_columns": ("shop", "hour")},
    **{"data__continuous_columns": ("heat",), "data__date_column": "day"},
    **{"data__time_columns": ("day", "hour")},
}


@pytest.fixture
def load(tmp_path):
    """Returns a function: reads the rows above, or what has replaced them.

    It takes fields of the configuration, without "data" those of the data.
    """
    write(tmp_path, ROWS)
    rest = "validation_fraction", "limit_examples"

    def read(**fields):
        data = {k if k in rest else f"data__{k}": v for k, v in fields.items()}
        given = {**FIELDS, **data, "data_dir": str(tmp_path)}
        return tabular_data.load(helpers.configured(tabular, **given))

    return read


def write(folder, rows, header=HEADER, name="sold.csv"):
    (folder / name).write_text("\n".join([header, *rows]) + "\n")


def sold(splits):
    """Returns the targets of each split."""
    return [part["sold"].to_list() for part in splits[:3]]


# ---- Splits ----


def test_split_is_by_time_with_no_time_on_two_sides_and_always_the_same(load, tmp_path):
    write(tmp_path, np.random.default_rng(0).permutation(ROWS).tolist())
    splits = load()
    train, validation, test = sold(splits)
    assert [*map(len, splits[:3])] == [38, 10, 12]
    # The target grows with the time.
    assert max(train) < min(validation) and max(validation) < min(test)
    assert splits.starts == ("2020-01-07", "2020-01-09")
    assert test == sorted(test) and train != sorted(train)
    for one, other in zip(splits[:3], load()[:3], strict=True):
        pd.testing.assert_frame_equal(one, other)
    other = sold(load(split_seed=1))
    assert other[0] != train and sorted(other[0]) == sorted(train)
    assert other[2] == test
    splits = load(split_seed=1, validation_fraction=0.0, limit_examples=7)
    assert [*map(len, splits[:3])] == [7, 0, 7]
    assert sold(splits)[2] == [90.0, 90, 91, 91, 92, 92, 100]
    assert splits.starts == ("2020-01-09",)


def test_without_a_time_the_split_is_drawn(load):
    splits = load(time_columns=())
    assert splits.starts == () and [*map(len, splits[:3])] == [38, 10, 12]
    expected = [float(row.split(",")[4]) for row in ROWS]
    assert sold(splits)[2] != expected[-12:]
    assert sorted(sum(sold(splits), [])) == sorted(expected)


# ---- What cannot be used ----


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2020-01-04,1,a,x,3", "column 'heat' is not a finite float32 number: x"),
        ("2020-01-04,1,a,1e39,3", "'heat' is not a finite float32 number: 1e39"),
        ("2020-01-04,1,a,,3", "column 'heat' is empty"),
        ("2020-01-04,1,a,NaN,3", "column 'heat' is empty"),
        ("2020-01-04,1,a,1,few", "'sold' is not a finite float32 number: few"),
        ("2020-01-04,1,a,1,-1", "column 'sold' is below 0: -1"),
        ("04.01.2020,1,a,1,3", "'day' is not a date of the format '%Y-%m-%d': 04.01."),
        (",1,a,1,3", "'day' is not a date of the format"),
        ("2020-01-04,noon,a,1,3", "'hour' is not a finite float32 number: noon"),
        ("2020-01-04,1,a,1", "column 'sold' is empty"),
    ],
)
def test_bad_row_is_told_and_can_be_skipped(load, tmp_path, row, reason):
    write(tmp_path, [*ROWS[:9], row, "", *ROWS[9:]])
    with pytest.raises(errors.DataError) as caught:
        load()
    message = str(caught.value)
    assert f"1 bad row(s). {tmp_path}/sold.csv, row 11: " in message
    assert reason in message and "on_bad_rows='skip'" in message
    splits = load(on_bad_rows="skip")
    assert sum(map(len, splits[:3])) == len(ROWS)
    assert splits.notes == ("1 bad row(s) skipped",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sold.csv cannot be read: No columns"),
        (f"{HEADER}\n", "0 usable rows"),
        ("\n".join([HEADER, *ROWS[:2]]), "2 usable rows of 1 different time"),
        ("day,hour,shop,heat\n2020-01-01,1,a,2\n", "no column 'sold'. Found: 'day'"),
        (f"{HEADER}\n2020-01-01,1,a,2,3\n1,2,3,4,5,6\n", "in line 3, saw 6"),
        (f"{HEADER}\n2020-01-01,1,a,2,3,4\n", "more fields than its header"),
        (HEADER.encode() + b"\n2020-01-01,1,\xff,1,1\n", "can't decode byte"),
        (None, "No file sold.csv in .*--data_dir=FOLDER"),
    ],
    ids="empty,no row,one time,no column,long row,long rows,no UTF-8,none".split(","),
)
def test_unusable_file_is_an_error(load, tmp_path, text, message):
    path = tmp_path / "sold.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text or b"")
    if text is None:
        path.unlink()
    with pytest.raises(errors.DataError, match=message):
        load()


@pytest.mark.parametrize(
    ("column", "name"),
    [("shop of", "shop_of"), ("class", "column_class"), ("_x", "column__x")],
)
def test_inputs_have_names_that_layers_and_signatures_can_have(column, name):
    assert tabular_encoding.feature_name(column) == name


# ---- Parquet, join, rows left out ----


def test_parquet_is_read_as_csv_is(load, tmp_path):
    write(tmp_path, [*ROWS, "2020-01-11,1,,,7"])
    fields = {"fill_missing": "median", "date_parts": ("day_of_week",)}
    from_csv = load(**fields)
    frame = pd.read_csv(tmp_path / "sold.csv")
    frame["hour"] = frame["hour"].astype("float64")  # As pandas has gaps.
    dates = pd.to_datetime(frame["day"])
    for number, day in enumerate((frame["day"], dates, dates.dt.date)):
        name = f"sold{number}.parquet"
        frame.assign(day=day).to_parquet(tmp_path / name)
        found = load(table_file=name, **fields)
        for one, other in zip(found[:3], from_csv[:3], strict=True):
            pd.testing.assert_frame_equal(one, other)
    frame.assign(sold=-1).to_parquet(tmp_path / "sold4.parquet")
    with pytest.raises(errors.DataError, match=r"sold4.parquet, row 1: .* below 0"):
        load(table_file="sold4.parquet", **fields)


@pytest.fixture
def load_parquet(load, tmp_path):
    """Returns a function as `load`, of a Parquet file with other columns."""

    def read(columns, **fields):
        frame = pd.read_csv(tmp_path / "sold.csv")
        frame.assign(**columns).to_parquet(tmp_path / "sold.parquet")
        return load(table_file="sold.parquet", **fields)

    return read


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_parquet_timestamps_keep_their_hours(load_parquet, zone):
    times = pd.date_range("2020-01-01", periods=len(ROWS), freq="7h", tz=zone)
    order = np.random.default_rng(0).permutation(len(ROWS))
    columns = {"day": times[order], "sold": order}
    splits = load_parquet(columns, date_parts=("hour",), time_columns=("day",))
    assert sold(splits)[2] == list(range(48, 60)) and len(splits.train) == 38
    hours = [str(7 * row % 24) for row in range(48, 60)]
    assert splits.test["day_hour"].to_list() == hours


DAYS = [row[:10] for row in ROWS]


@pytest.mark.parametrize(
    ("days", "date_format", "notes"),
    [
        (
            [None, *(int(day.replace("-", "")) for day in DAYS[1:])],
            "%Y%m%d",
            ("1 bad row(s) skipped",),
        ),
        ([datetime.date.fromisoformat(day) for day in DAYS], "%d.%m.%Y", ()),
    ],
    ids=["integers", "dates"],
)
def test_parquet_dates_are_integers_or_dates_whatever_the_format(
    load_parquet, days, date_format, notes
):
    fields = {"date_format": date_format, "date_parts": ("day",)}
    splits = load_parquet({"day": pd.Series(days)}, on_bad_rows="skip", **fields)
    assert splits.notes == notes
    assert splits.test["day_day"].to_list() == ["9"] * 6 + ["10"] * 6


def test_join_adds_the_columns_of_each_key_which_must_be_there_once(load, tmp_path):
    asked = {
        **{"join_file": "shops.csv", "join_key": "shop", "fill_missing": "median"},
        **{"join_columns": ("region", "area"), "continuous_columns": ("heat", "area")},
        **{"categorical_columns": ("shop", "region")},
    }

    def joined(*rows):
        write(tmp_path, rows, "shop,region,area", "shops.csv")
        return load(**asked).test

    rows = joined("a,north,3.5", "b,,")
    north = rows["shop"] == "a"
    assert north.sum() == 6 and set(rows["region"][north]) == {"north"}
    assert set(rows["region"][~north]) == {""}
    assert set(rows["area"][north]) == {3.5} and rows["area"][~north].isna().all()
    with pytest.raises(errors.DataError, match=r"shops.csv has several rows of shop a"):
        joined("a,n,1", "b,s,2", "a,n,3")
    message = r"30 bad .*row 3: .* no row of shops.csv for it"
    with pytest.raises(errors.DataError, match=message):
        joined("a,n,1", "NA,s,2")


def test_rows_are_left_out_and_counted_and_date_parts_are_categories(load):
    parts = ("year", "month", "week", "day", "day_of_week", "day_of_year", "hour")
    splits = load(date_parts=parts, leave_out=(("shop", "a"), ("hour", "2")))
    assert splits.notes == (
        "30 rows with shop a left out",
        "10 rows with hour 2 left out",
    )
    assert sum(map(len, splits[:3])) == 20
    expected = ["2020", "1", "2", "10", "4", "10", "0"]
    assert [splits.test.iloc[-1][f"day_{part}"] for part in parts] == expected


def test_rossmann_files_become_its_features(tmp_path):
    config = load_file("tabular/rossmann", made_tables.write_rossmann(tmp_path))
    splits = tabular_data.load(config)
    assert splits.notes[0] == "24 rows with Open 0 left out"
    # Two days of three stores.
    assert sum(map(len, splits[:3])) == 60 * 3 - 24 and len(splits.test) == 6
    assert splits.starts == ("2015-07-28", "2015-07-30")
    encoder = tabular_encoding.fit(config.data, splits.train)
    features = {*encoder.categories, *encoder.mean}
    assert not features & {"Customers", "Sales", "Open", "Date"}
    assert {"Store", "Promo2SinceYear", "Date_week", "CompetitionDistance"} < features
    assert encoder.sizes["Store"] == 4
    assert list(encoder.mean)[1:] == ["missingindicator_CompetitionDistance"]
    inputs = tabular_encoding.encode(encoder, splits.test)
    unknown = inputs["Store"] == 3
    np.testing.assert_array_equal(inputs["continuous"][:, 1], unknown)
    median = encoder.medians["CompetitionDistance"]
    assert median in (1270, 75860, (1270 + 75860) / 2)
    np.testing.assert_array_equal(inputs["continuous"][unknown, 0], median)


def test_bike_sharing_knows_nothing_of_the_target(shared_data):
    config = load_file("tabular/bike_sharing", shared_data("bike_sharing"))
    splits = tabular_data.load(config)
    assert [*map(len, splits[:3])] == [12513, 1390, 3476] and splits.notes == ()
    assert splits.starts == ("2012-06-10", "2012-08-07")
    assert not {"casual", "registered", "instant", "dteday"} & {*splits.train.columns}


# ---- Encoding ----


def make_rows(shop=("b", "a", "", "b"), heat=(1.0, 3.0, np.nan, 8.0)):
    return pd.DataFrame({"shop": shop, "heat": heat, "sold": np.arange(4.0)})


@pytest.fixture
def settings():
    fields = {**FIELDS, "data__categorical_columns": ("shop",)}
    return helpers.configured(tabular, **fields).data


def test_encoder_knows_the_training_rows_only(settings):
    encoder = tabular_encoding.fit(settings, make_rows())
    assert encoder.categories == {"shop": ["", "a", "b"]}
    assert encoder.medians == {"heat": 3.0}
    logs = np.log1p(np.arange(4.0))
    assert encoder.target_mean == pytest.approx(logs.mean())
    assert encoder.target_scale == pytest.approx(logs.std())
    filled = np.array([1.0, 3, 3, 8])
    assert list(encoder.mean.values()) == pytest.approx([filled.mean(), 0.25])
    assert encoder.variance["heat"] == pytest.approx(filled.var())
    others = make_rows(("a", "c", "b", ""), (np.nan, 1e6, 0.1, 2.0))
    inputs = tabular_encoding.encode(encoder, others)
    assert inputs["shop"].dtype == np.int32
    assert inputs["shop"].tolist() == [2, 0, 3, 1]  # 0: never seen.
    expected = np.array([[3, 1], [1e6, 0], [0.1, 0], [2, 0]], "float32")
    np.testing.assert_array_equal(inputs["continuous"], expected)
    assert inputs["continuous"].dtype == np.float32


def test_what_training_rows_lack_is_unseen_and_constants_keep_their_scale(settings):
    rows = make_rows(shop=("b", "a", "a", "b"), heat=(0.1,) * 4)
    encoder = tabular_encoding.fit(settings, rows)
    assert encoder.categories == {"shop": ["a", "b"]}
    assert tabular_encoding.encode(encoder, make_rows())["shop"].tolist() == [
        2,
        1,
        0,
        2,
    ]
    assert encoder.mean == {"heat": pytest.approx(0.1)}
    assert encoder.variance == {"heat": 1.0}
    with pytest.raises(errors.DataError, match="No training row has a value of 'heat'"):
        tabular_encoding.fit(settings, make_rows(heat=(np.nan,) * 4))


def test_baseline_is_the_mean_of_its_group_or_of_all(settings):
    train = make_rows(shop=("b", "a", "a", "b"))
    test = make_rows(shop=("a", "b", "c", "a"))
    logs = np.log1p(np.arange(4.0))
    a, b, whole = logs[1:3].mean(), logs[[0, 3]].mean(), logs.mean()
    found = tabular_data.baseline(settings, train, test, ("shop",))
    np.testing.assert_allclose(np.log1p(found), [a, b, whole, a])
    found = tabular_data.baseline(settings, train, test, ())
    np.testing.assert_allclose(np.log1p(found), [whole] * 4)


def test_diabetes_is_bundled_in_its_units():
    splits = tabular_data.load(load_file("tabular/diabetes"))
    assert [*map(len, splits[:3])] == [319, 35, 88]
    ages = np.concatenate([part["age"] for part in splits[:3]])
    assert (ages.min(), ages.max()) == (19, 79)
    assert set(splits.train["sex"]) == {"1", "2"}
