"""What a format makes of gradients: counted as NumPy's and ml_dtypes' casts round."""

import json
import math

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tfamp import formats
from tfamp.numerics import statistics
from tfamp.precision import policy

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TINY = formats.float_format("float16").smallest_subnormal


def count_by_casting(values, dtype, loss_scale=1.0):
    """The same counts from what the cast makes of each value."""
    limits = formats.float_format(dtype)
    scaled = values * np.float32(loss_scale)
    finite = scaled[np.isfinite(scaled)]
    with np.errstate(over="ignore"):
        cast = np.abs(finite.astype(DTYPES[dtype]).astype("float64"))
    return statistics.Counts(
        values=values.size,
        zeros=int((finite == 0).sum()),
        underflow=int(((cast == 0) & (finite != 0)).sum()),
        subnormal=int(((cast > 0) & (cast < limits.smallest_normal)).sum()),
        overflow=int(np.isinf(cast).sum()),
        not_finite=int(values.size - finite.size),
    )


# Every float32; and powers of two, halves between them, and their neighbors, where the
# decisions fall.
edges = st.builds(
    lambda power, bits, sign: sign * math.ldexp(1 + bits / 2**11, power),
    st.integers(-40, 20),
    st.integers(0, 2**11),
    st.sampled_from((-1.0, 1.0)),
).map(np.float32)
any_float = st.floats(width=32).map(np.float32)


@given(arrays.arrays("float32", st.integers(0, 20), elements=edges | any_float))
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_those_of_a_cast(dtype, values):
    assert statistics.count_out_of_range(values, dtype) == count_by_casting(
        values, dtype
    )


@given(
    arrays.arrays("float32", st.integers(0, 20), elements=edges),
    st.integers(-10, 24).map(lambda power: 2.0**power),
)
def test_counts_of_scaled_values_are_those_of_a_cast(values, loss_scale):
    found = statistics.count_out_of_range(values, "float16", loss_scale)
    assert found == count_by_casting(values, "float16", loss_scale)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.0, 1.0, 1e-9, 1e-9, 1e-9], 0.25),
        ([1.0, -2.0], 1.0),
        ([], math.nan),
        ([0.0], math.nan),
        ([1.0, math.nan], math.nan),
    ],
)
def test_kept_is_of_the_nonzero_values(values, kept):
    found = statistics.count_out_of_range(values, "float16").kept
    np.testing.assert_equal(found, kept)


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match="int8"):
        statistics.count_out_of_range([1.0], "int8")


# ---- Gradients of a model ----

ROWS, CLASSES = 32, 40


@pytest.fixture(scope="module")
def measured():
    """A linear classifier, its batch, and the gradients as calculus has them."""
    keras.utils.set_random_seed(1)
    with policy.policy_scope("mixed_float16"):
        inputs = keras.Input((3,))
        x = keras.layers.Dropout(0.5, name="dropout")(inputs)
        logits = keras.layers.Dense(CLASSES, name="logits")(x)
        cast = keras.layers.Activation("linear", dtype="float32", name="cast")
        model = keras.Model(inputs, cast(logits))
    kernel = np.linspace(-9, 9, 3 * CLASSES).reshape(3, CLASSES).astype("float32")
    model.layers[2].set_weights([kernel, np.zeros(CLASSES, "float32")])
    generator = np.random.default_rng(0)
    features = generator.normal(size=(ROWS, 3)).astype("float32")
    labels = generator.integers(CLASSES, size=ROWS)
    exact = features.astype("float64") @ kernel
    exact = np.exp(exact - exact.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    exact[np.arange(ROWS), labels] -= 1
    gradients = {"logits": exact / ROWS, "logits/kernel": features.T @ exact / ROWS}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    report = statistics.gradient_underflow(
        model, loss, features, labels, loss_scale=2.0**15
    )
    return model, (loss, features, labels), gradients, report


def test_gradients_of_logits_and_weights_are_counted(measured):
    model, _, gradients, report = measured
    assert [(row.name, row.kind) for row in report.rows][-3:] == [
        ("cast", "activation"),
        ("logits/kernel", "weight"),
        ("logits/bias", "weight"),
    ]
    for name, exact in gradients.items():
        row, magnitudes = report.row(name), np.abs(exact)
        assert row.largest == pytest.approx(magnitudes.max(), rel=1e-4)
        for counts, scale in ((row.unscaled, 1), (row.scaled, 2**15)):
            expected = (magnitudes * scale <= TINY / 2).sum()
            assert counts.underflow == pytest.approx(expected, abs=0.01 * exact.size)
    logits = report.row("logits")
    assert logits.unscaled.kept < 0.95 < 0.99 < logits.scaled.kept
    assert [layer.dtype_policy.name for layer in model.layers][2] == "mixed_float16"


def test_scale_that_is_too_large_overflows_and_bfloat16_loses_nothing(measured):
    model, batch, gradients, _ = measured
    report = statistics.gradient_underflow(model, *batch, loss_scale=2.0**24)
    beyond = (np.abs(gradients["logits"]) * 2.0**24 >= 65520).sum()
    assert report.row("logits").scaled.overflow == pytest.approx(beyond, abs=2)
    assert beyond > 0 == report.row("logits").unscaled.overflow
    report = statistics.gradient_underflow(model, *batch, dtype="bfloat16")
    assert report.row("logits").unscaled.kept == 1.0


def test_report_is_plain_data_and_a_table(measured):
    *_, report = measured
    stored = json.loads(json.dumps(report.to_dict()))
    assert (stored["schema_version"], stored["format"]) == (2, "float16")
    (row,) = [row for row in stored["rows"] if row["name"] == "logits"]
    assert row["unscaled"]["values"] == ROWS * CLASSES
    title, _, *table = report.to_markdown().splitlines()
    assert title.startswith("# Gradients in float16")
    assert "become 0, times 32768" in table[0]
    (line,) = [line for line in table if line.startswith("| logits (activation)")]
    counts = report.row("logits").unscaled
    assert f"{counts.underflow / (counts.values - counts.zeros):.2%}" in line
    assert len({each.count("|") for each in table}) == 1


def nested():
    inputs = keras.Input((3,))
    inner = keras.Model(inputs, keras.layers.Dense(4, name="a")(inputs), name="inner")
    shared, x = keras.layers.Dense(4, name="shared"), keras.Input((3,))
    return keras.Model(x, shared(shared(inner(x))))


def sequential():
    model = keras.Sequential([keras.layers.Dense(4, name="a")])
    model.build((None, 3))
    return model


@pytest.mark.parametrize(
    ("build", "names"), [(nested, ["inner", "shared"]), (sequential, ["a"])]
)
def test_nested_shared_and_sequential_layers_are_measured(build, names):
    def mean(labels, outputs):
        return keras.ops.mean(outputs)

    features = np.ones((2, 3), "float32")
    report = statistics.gradient_underflow(build(), mean, features, None)
    assert [row.name for row in report.rows if row.kind == "activation"] == names
    assert report.row("a/bias" if build is nested else "a").largest > 0
