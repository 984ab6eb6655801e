"""Tables read, checked, joined, split by time and encoded."""

import datetime
import importlib.util
import pathlib
import sys

import made_tables
import numpy as np
import pytest

from tfamp import errors
from tfamp.training import (
    base_config,
    tabular_columns,
    tabular_config,
    tabular_data,
    tabular_encoders,
    tabular_files,
)

ROOT = pathlib.Path(__file__).parents[2]
HEADER = "day,hour,shop,heat,sold"
ROWS = [
    f"2020-01-{day:02},{hour},{shop},{day / 2 + hour},{10 * day + hour}"
    for day in range(1, 11)
    for hour in range(3)
    for shop in "ab"
]


def load_file(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"configs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.fixture
def config(tmp_path):
    """A configuration of the rows above, which are written to a file."""
    write(tmp_path, ROWS)
    config = tabular_config.get_tabular_config()
    config.data_dir = str(tmp_path)
    config.validation_fraction = 0.2
    config.data.table_file = "sold.csv"
    config.data.target_column = "sold"
    config.data.categorical_columns = ("shop", "hour")
    config.data.continuous_columns = ("heat",)
    config.data.date_column = "day"
    config.data.time_columns = ("day", "hour")
    return config


def write(folder, rows, header=HEADER, name="sold.csv"):
    (folder / name).write_text("\n".join([header, *rows]) + "\n")


def load(config):
    return tabular_data.load(config, config.data_dir)


def same(first, second):
    """Asserts that two sets of rows are equal."""
    for name in ("categories", "numbers"):
        left, right = getattr(first, name), getattr(second, name)
        assert list(left) == list(right)
        for column in left:
            np.testing.assert_array_equal(left[column], right[column])
    np.testing.assert_array_equal(first.target, second.target)
    np.testing.assert_array_equal(first.time, second.time)


# ---- Splits ----


def moments(rows):
    pairs = zip(rows.time, rows.categories["hour"], strict=True)
    return {(day, int(hour)) for day, hour in pairs}


def test_split_is_by_time_with_no_time_on_two_sides(config, tmp_path):
    shuffled = np.random.default_rng(0).permutation(ROWS).tolist()
    write(tmp_path, shuffled)
    splits = load(config)
    sizes = [len(rows.target) for rows in splits[:3]]
    assert sizes == [38, 10, 12] and splits.ordered
    train, validation, test = map(moments, splits[:3])
    assert max(train) < min(validation) and max(validation) < min(test)
    assert max(test) == ("2020-01-10", 2)
    assert list(splits.test.target) == sorted(splits.test.target)


def test_training_rows_are_shuffled_the_same_way_each_time(config):
    first, second = load(config), load(config)
    for one, other in zip(first[:3], second[:3], strict=True):
        same(one, other)
    assert list(first.train.target) != sorted(first.train.target)
    config.data.split_seed = 1
    third = load(config)
    assert list(third.train.target) != list(first.train.target)
    assert sorted(third.train.target) == sorted(first.train.target)
    same(third.test, first.test)


def test_without_a_time_the_split_is_drawn(config):
    config.data.time_columns = ()
    splits = load(config)
    assert not splits.ordered and set(splits.test.time) == {""}
    assert [len(rows.target) for rows in splits[:3]] == [38, 10, 12]
    assert list(splits.test.target) != [float(r.split(",")[4]) for r in ROWS[-12:]]
    everything = np.concatenate([rows.target for rows in splits[:3]])
    assert sorted(everything) == sorted(float(r.split(",")[4]) for r in ROWS)


def test_no_validation_and_a_limit(config):
    config.validation_fraction, config.limit_examples = 0.0, 7
    splits = load(config)
    assert [len(rows.target) for rows in splits[:3]] == [7, 0, 7]
    assert list(splits.test.target) == [90.0, 90, 91, 91, 92, 92, 100]


def test_one_time_cannot_be_split(config, tmp_path):
    write(tmp_path, ROWS[:2])
    with pytest.raises(errors.DataError, match=r"2 usable rows of 1 different time"):
        load(config)


# ---- What cannot be used ----


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2020-01-04,1,a,x,3", "column 'heat' is no finite float32 number: 'x'"),
        ("2020-01-04,1,a,inf,3", "'heat' is no finite float32 number: 'inf'"),
        ("2020-01-04,1,a,1e39,3", "'heat' is no finite float32 number: '1e39'"),
        ("2020-01-04,1,a,,3", "column 'heat' is empty"),
        ("2020-01-04,1,a,NaN,3", "column 'heat' is empty"),
        ("2020-01-04,1,a,1,few", "'sold' is no finite float32 number: 'few'"),
        ("2020-01-04,1,a,1,", "column 'sold' is empty"),
        ("2020-01-04,1,a,1,-1", "column 'sold' is below 0: '-1'"),
        ("04.01.2020,1,a,1,3", "'day' is no date of the format '%Y-%m-%d': '04.01."),
        (",1,a,1,3", "'day' is no date of the format"),
        ("2020-01-04,noon,a,1,3", "'hour' is no finite float32 number: 'noon'"),
        ("2020-01-04,1,a,1", "4 field(s), expected 5"),
        ("2020-01-04,1,a,1,3,4", "6 field(s), expected 5"),
    ],
)
def test_bad_row_is_told_and_can_be_skipped(config, tmp_path, row, reason):
    write(tmp_path, [*ROWS[:9], row, "", *ROWS[9:]])
    with pytest.raises(errors.DataError) as caught:
        load(config)
    message = str(caught.value)
    assert f"1 bad row(s). {tmp_path}/sold.csv, row 11: " in message
    assert reason in message and "on_bad_rows='skip'" in message
    config.data.on_bad_rows = "skip"
    splits = load(config)
    assert sum(len(rows.target) for rows in splits[:3]) == len(ROWS)
    assert splits.notes == ("1 bad row(s) skipped",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sold.csv in .* has no usable row"),
        (HEADER + "\n", "sold.csv in .* has no usable row"),
        ("day,hour,shop,heat\n2020-01-01,1,a,2\n", "no column 'sold'. Found: 'day'"),
        ("day,hour,shop,heat,sold,sold\n", "two columns 'sold'"),
        (b"day,hour,shop,heat,sold\n2020-01-01,1,\xff,1,1\n", "is not UTF-8"),
    ],
)
def test_unusable_file_is_an_error(config, tmp_path, text, message):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "sold.csv").write_bytes(content)
    with pytest.raises(errors.DataError, match=message):
        load(config)


def test_missing_file_and_column_name_the_settings(config, tmp_path):
    config.data.table_file = "bought.csv"
    with pytest.raises(errors.DataError, match="set .*config.data.table_file"):
        load(config)
    config.data.table_file, config.data.target_column = "sold.csv", "cnt"
    with pytest.raises(errors.DataError, match="config.data.categorical_columns"):
        load(config)
    with pytest.raises(errors.DataError, match="--data_dir=FOLDER"):
        tabular_data.load(config, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_column": "heat"}, "target_column must be named, and no feature"),
        ({"target_column": ""}, "target_column must be named"),
        ({"categorical_columns": (), "continuous_columns": ()}, "must name a column"),
        ({"continuous_columns": ("heat", "shop")}, "names must differ"),
        ({"categorical_columns": ("a b", "a-b")}, "names must differ"),
        ({"categorical_columns": ("continuous",)}, "names must differ"),
        (
            {"categorical_columns": ("hour", "features", "dense1", "self", "_x", "if")},
            r"other names than \['features', 'dense1', 'self', '_x', 'if'\]",
        ),
        (
            {"categorical_columns": ("shop", "embedding shop")},
            r"other names than \['embedding shop'\]",
        ),
        ({"date_parts": ("decade",)}, "date_parts must be of"),
        ({"date_column": "", "date_parts": ("year",)}, "date_parts need date_column"),
        ({"time_columns": ("sold",)}, "not known beforehand"),
        ({"join_file": "shops.csv"}, "belong together"),
        ({"join_file": "s", "join_key": "shop", "join_columns": ("x",)}, "among the"),
        ({"fill_missing": "mean"}, "fill_missing must be of"),
        ({"baseline_columns": ("heat",)}, "baseline_columns must be categorical"),
        ({"leave_out": ("shop", "a")}, "data.leave_out must be a tuple of pairs"),
        ({"name": "tables"}, "Unknown table. Received: config.data.name='tables'"),
        ({"on_bad_rows": "drop"}, "on_bad_rows` must be"),
    ],
)
def test_contradicting_settings_are_an_error(config, settings, message):
    config.data.update(settings)
    with pytest.raises(ValueError, match=message):
        load(config)


@pytest.mark.parametrize("package", ["pandas", "pyarrow", "sklearn"])
def test_missing_package_names_the_extra(config, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        config.data.table_file = "sold.parquet"
    with pytest.raises(ImportError, match=r'pip install "tfamp\[data\]"'):
        tabular_encoders.fit(load(config).train)


# ---- Parquet, join, rows left out ----


def test_parquet_is_read_as_csv_is(config, tmp_path):
    import pandas as pd

    write(tmp_path, [*ROWS, "2020-01-11,1,,,7"])
    config.data.fill_missing = "median"
    config.data.date_parts = ("day_of_week",)
    from_csv = load(config)
    frame = pd.read_csv(tmp_path / "sold.csv")
    dates = pd.to_datetime(frame["day"])
    for number, day in enumerate((frame["day"], dates, dates.dt.date)):
        frame["hour"] = frame["hour"].astype("float64")  # As pandas has gaps.
        name = f"sold{number}.parquet"
        frame.assign(day=day).to_parquet(tmp_path / name)
        config.data.table_file = name
        for one, other in zip(load(config)[:3], from_csv[:3], strict=True):
            same(one, other)
    frame.assign(sold=-1).to_parquet(tmp_path / "sold4.parquet")
    config.data.table_file = "sold4.parquet"
    with pytest.raises(errors.DataError, match=r"sold4.parquet, row 1: .* below 0"):
        load(config)
    frame.drop(columns="heat").to_parquet(tmp_path / "sold4.parquet")
    with pytest.raises(errors.DataError, match="no column 'heat'. Found: 'day'"):
        load(config)


def write_parquet(config, **columns):
    """Replaces columns of the rows in a Parquet file, which the configuration reads."""
    import pandas as pd

    frame = pd.read_csv(pathlib.Path(config.data_dir, "sold.csv"))
    name = "sold.parquet"
    frame.assign(**columns).to_parquet(pathlib.Path(config.data_dir, name))
    config.data.table_file = name


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_parquet_timestamps_keep_their_hours(config, zone):
    import pandas as pd

    times = pd.date_range("2020-01-01", periods=len(ROWS), freq="7h", tz=zone)
    order = np.random.default_rng(0).permutation(len(ROWS))
    write_parquet(config, day=times[order], sold=order)
    config.data.date_parts, config.data.time_columns = ("hour",), ("day",)
    splits = load(config)
    assert splits.test.target.tolist() == list(range(48, 60))
    hours = [str(7 * row % 24) for row in range(48, 60)]
    assert splits.test.categories["day_hour"].tolist() == hours
    assert len(splits.train.target) == 38


@pytest.mark.parametrize("gap", [False, True])
def test_parquet_integers_are_dates_in_their_format(config, gap):
    import pandas as pd

    days = [int(row[:10].replace("-", "")) for row in ROWS]
    write_parquet(config, day=pd.Series([None, *days[1:]] if gap else days))
    config.data.date_format, config.data.date_parts = "%Y%m%d", ("day",)
    config.data.on_bad_rows = "skip"
    splits = load(config)
    assert splits.notes == (("1 bad row(s) skipped",) if gap else ())
    assert splits.test.categories["day_day"].tolist() == ["9"] * 6 + ["10"] * 6


def test_parquet_dates_need_not_be_written_as_the_format_has_them(config):
    write_parquet(config, day=[datetime.date.fromisoformat(r[:10]) for r in ROWS])
    config.data.date_format = "%d.%m.%Y"
    assert set(load(config).test.time) == {"09.01.2020", "10.01.2020"}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_with_a_zone_in_their_format(config, tmp_path, ending):
    import pandas as pd

    config.data.date_format, config.data.date_parts = "%Y-%m-%d%z", ("day",)
    write(tmp_path, [row.replace(",", "+0100,", 1) for row in ROWS])
    if ending == "parquet":
        days = pd.to_datetime([row[:10] for row in ROWS]).tz_localize("Europe/Berlin")
        write_parquet(config, day=days)
    days = load(config).test.categories["day_day"]
    assert days.tolist() == ["9"] * 6 + ["10"] * 6


def test_parquet_floats_beyond_integers_are_read(config):
    heat = 2.0**60 * np.arange(len(ROWS))
    write_parquet(config, heat=heat)
    parts = load(config)[:3]
    found = np.concatenate([rows.numbers["heat"] for rows in parts])
    np.testing.assert_array_equal(np.sort(found), heat)


def test_file_that_is_no_parquet_is_an_error(config, tmp_path):
    (tmp_path / "sold.parquet").write_text("a,b\n")
    config.data.table_file = "sold.parquet"
    with pytest.raises(errors.DataError, match="cannot be read as Parquet"):
        load(config)


@pytest.fixture
def joined(config, tmp_path):
    """The configuration with a second file, of shops."""
    write(tmp_path, ["a,north,3.5", "b,,"], "shop,region,area", "shops.csv")
    config.data.join_file, config.data.join_key = "shops.csv", "shop"
    config.data.join_columns = ("region", "area")
    config.data.categorical_columns = ("shop", "region")
    config.data.continuous_columns = ("heat", "area")
    config.data.fill_missing = "median"
    return config


def test_join_adds_the_columns_of_each_key(joined):
    rows = load(joined).test
    north = rows.categories["shop"] == "a"
    assert north.sum() == 6
    np.testing.assert_array_equal(rows.categories["region"][north], "north")
    np.testing.assert_array_equal(rows.categories["region"][~north], "")
    np.testing.assert_array_equal(rows.numbers["area"][north], 3.5)
    assert np.isnan(rows.numbers["area"][~north]).all()


def test_key_must_be_in_the_second_file_just_once(joined, tmp_path):
    write(tmp_path, ["a,n,1", "b,s,2", "a,n,3"], "shop,region,area", "shops.csv")
    with pytest.raises(errors.DataError, match=r"shops.csv, row 4: shop 'a' is there"):
        load(joined)
    write(tmp_path, ["a,n,1"], "shop,region,area", "shops.csv")
    with pytest.raises(errors.DataError, match=r"30 bad .*row 3: no row of shops.csv"):
        load(joined)


def test_join_without_a_match_tells_why(joined, tmp_path):
    write(tmp_path, ["c,n,1"], "shop,region,area", "shops.csv")
    joined.data.on_bad_rows = "skip"
    with pytest.raises(errors.DataError) as caught:
        load(joined)
    message = str(caught.value)
    assert "No row is left of sold.csv with its rows of shops.csv" in message
    assert "60 bad row(s)" in message and "no row of shops.csv has shop 'a'" in message
    assert "leave_out" not in message


@pytest.mark.parametrize("key", ["", "NA"])
def test_empty_keys_of_a_join_are_bad_rows(joined, tmp_path, key):
    write(tmp_path, ["a,n,1", "b,s,2", f"{key},w,3"], "shop,region,area", "shops.csv")
    with pytest.raises(errors.DataError, match=r"shops.csv, row 4: .*join, is empty"):
        load(joined)
    write(tmp_path, [*ROWS, f"2020-01-11,1,{key},1,3"])
    joined.data.on_bad_rows = "skip"
    splits = load(joined)
    assert splits.notes == ("2 bad row(s) skipped",)
    assert sum(len(rows.target) for rows in splits[:3]) == len(ROWS)


def test_rows_are_left_out_and_counted(config):
    config.data.leave_out = (("shop", "a"), ("hour", "2"))
    splits = load(config)
    assert splits.notes == (
        "30 rows with shop a left out",
        "10 rows with hour 2 left out",
    )
    assert sum(len(rows.target) for rows in splits[:3]) == 20
    config.data.leave_out = (("shop", "a"), ("shop", "b"))
    with pytest.raises(errors.DataError, match="No row is left"):
        load(config)


def test_date_parts_are_categories(config):
    config.data.date_parts = tabular_columns.DATE_PARTS
    test = load(config).test
    day = datetime.date(2020, 1, 10)
    last = {n: v[-1] for n, v in test.categories.items() if n.startswith("day_")}
    assert last == {
        "day_year": "2020",
        "day_month": "1",
        "day_week": str(day.isocalendar().week),
        "day_day": "10",
        "day_day_of_week": str(day.weekday()),
        "day_day_of_year": "10",
        "day_hour": "0",
    }


def test_rossmann_files_become_its_features(tmp_path):
    config = load_file("tabular/rossmann")
    splits = tabular_data.load(config, made_tables.write_rossmann(tmp_path))
    assert splits.notes[0] == "24 rows with Open 0 left out"
    rows = [len(part.target) for part in splits[:3]]
    assert sum(rows) == 60 * 3 - 24 and rows[2] == 6  # Two days of three stores.
    assert set(splits.test.time) == {"2015-07-30", "2015-07-31"}
    features = {*splits.train.categories, *splits.train.numbers}
    assert not features & {"Customers", "Sales", "Open", "Date"}
    assert {"Store", "Promo2SinceYear", "Date_week", "CompetitionDistance"} < features
    encoder = tabular_encoders.fit(splits.train)
    assert encoder.sizes["Store"] == 4 and encoder.indicators == ["CompetitionDistance"]
    inputs = tabular_encoders.encode(encoder, splits.test)
    unknown = inputs["Store"] == 3
    np.testing.assert_array_equal(inputs["continuous"][:, 1], unknown)
    median = encoder.medians["CompetitionDistance"]
    assert median in (1270, 75860, (1270 + 75860) / 2)
    np.testing.assert_array_equal(inputs["continuous"][unknown, 0], median)


def test_bike_sharing_knows_nothing_of_the_target(shared_data):
    config = load_file("tabular/bike_sharing")
    splits = tabular_data.load(config, str(shared_data("bike_sharing")))
    sizes = [len(rows.target) for rows in splits[:3]]
    assert sum(sizes) == 17379 and splits.notes == ()
    assert sizes[2] / 17379 == pytest.approx(0.2, abs=0.001)
    features = {*splits.train.categories, *splits.train.numbers}
    assert not features & {"casual", "registered", "instant", "cnt", "dteday"}
    assert max(splits.train.time) <= min(splits.validation.time)
    assert max(splits.validation.time) <= min(splits.test.time)


# ---- Encoding ----


def make_rows(shop=("b", "a", "", "b"), heat=(1.0, 3.0, np.nan, 8.0), **more):
    numbers = {"heat": heat, **more}
    return tabular_data.Rows(
        {"shop": np.array(shop, object)},
        {name: np.array(v, "float64") for name, v in numbers.items()},
        np.arange(4.0),
        np.array(["", "", "", ""], object),
    )


def test_encoder_knows_the_training_rows_only():
    encoder = tabular_encoders.fit(make_rows())
    assert encoder.vocabularies == {"shop": ["", "a", "b"]}
    assert encoder.medians == {"heat": 3.0}
    logs = np.log1p(np.arange(4.0))
    assert encoder.target_mean == pytest.approx(logs.mean())
    assert encoder.target_scale == pytest.approx(logs.std())
    others = make_rows(("a", "c", "b", ""), (np.nan, 1e6, 0.1, 2.0))
    inputs = tabular_encoders.encode(encoder, others)
    assert inputs["shop"].dtype == np.int32
    assert inputs["shop"].tolist() == [2, 0, 3, 1]  # 0: never seen.
    assert inputs["continuous"].dtype == np.float32
    expected = np.array([[3, 1], [1e6, 0], [0.1, 0], [2, 0]], "float32")
    np.testing.assert_array_equal(inputs["continuous"], expected)
    assert tabular_encoders.count_unseen(encoder, others) == {"shop": 1}


def test_category_missing_in_no_training_row_is_unseen():
    encoder = tabular_encoders.fit(make_rows(shop=("b", "a", "a", "b")))
    assert encoder.vocabularies == {"shop": ["a", "b"]}
    inputs = tabular_encoders.encode(encoder, make_rows())
    assert inputs["shop"].tolist() == [2, 1, 0, 2]


def test_constant_column_keeps_its_scale():
    encoder = tabular_encoders.fit(make_rows(heat=(5.0,) * 4))
    assert (encoder.mean, encoder.variance) == ([5.0], [1.0])


@pytest.mark.parametrize(
    ("factor", "offset", "received"),
    [
        (1e20, 0, "mean 4e+20, standard deviation 2.54951e+20"),
        (1e-9, 0, "mean 4e-09, standard deviation 2.54951e-09"),
        (5, 1.7e9, "mean 1.7e+09, standard deviation 12.7475"),
    ],
)
def test_scale_without_room_in_float32_is_an_error(factor, offset, received):
    values = np.array([1.0, 3.0, 4.0, 8.0]) * factor + offset
    with pytest.raises(errors.DataError) as caught:
        tabular_encoders.fit(make_rows(cold=values))
    assert "Column 'cold' cannot be normalized" in str(caught.value)
    assert f"Received: {received} of" in str(caught.value)


@pytest.mark.parametrize(("factor", "offset"), [(1e18, 0), (1e-6, 0), (10, 1e6)])
def test_scale_with_room_in_float32_is_kept(factor, offset):
    values = np.array([1.0, 3.0, 4.0, 8.0]) * factor + offset
    encoder = tabular_encoders.fit(make_rows(heat=values))
    assert encoder.variance == pytest.approx([values.var()])
    constant = tabular_encoders.fit(make_rows(heat=(1.7e9,) * 4))
    assert (constant.mean, constant.variance) == ([1.7e9], [1.0])


def test_column_without_a_value_is_an_error():
    with pytest.raises(errors.DataError, match="'cold' is empty in all 4 training"):
        tabular_encoders.fit(make_rows(cold=(np.nan,) * 4))


def test_baseline_is_the_mean_of_its_group_or_of_all():
    train = make_rows(shop=("b", "a", "a", "b"))
    test = make_rows(shop=("a", "b", "c", "a"))
    logs = np.log1p(np.arange(4.0))
    a, b, whole = logs[1:3].mean(), logs[[0, 3]].mean(), logs.mean()
    found = tabular_encoders.baseline(train, test, ["shop"])
    np.testing.assert_allclose(np.log1p(found), [a, b, whole, a])
    found = tabular_encoders.baseline(train, test, [])
    np.testing.assert_allclose(np.log1p(found), [whole] * 4)


def test_diabetes_is_bundled_in_its_units():
    config = load_file("tabular/diabetes")
    splits = tabular_data.load(config, None)
    assert [len(rows.target) for rows in splits[:3]] == [319, 35, 88]
    ages = np.concatenate([rows.numbers["age"] for rows in splits[:3]])
    assert (ages.min(), ages.max()) == (19, 79)
    assert set(splits.train.categories["sex"]) == {"1", "2"}
    with pytest.raises(errors.DataError, match="have no column 'weight'"):
        tabular_files.read(config, None, ["weight"])


def test_settings_survive_the_command_lines_types():
    config = base_config.apply_tiny(load_file("tabular/bike_sharing"))
    config.update_from_flattened_dict({"data.categorical_columns": ("hr", "yr")})
    assert tabular_columns.categorical_columns(config.data) == ["hr", "yr"]
