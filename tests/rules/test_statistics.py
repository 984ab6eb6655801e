"""What becomes of values in 16 bits: every bit pattern, and float64 beside."""

import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tfamp.facts import formats
from tfamp.numerics import statistics

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
both = pytest.mark.parametrize("dtype", DTYPES)
# Powers of two, halves between them, and their neighbors, where the decisions fall.
edges = st.builds(
    lambda power, bits, sign: sign * math.ldexp(1 + bits / 2**11, power),
    st.integers(-140, 120),
    st.integers(0, 2**11),
    st.sampled_from((-1.0, 1.0)),
).map(np.float32)
any_float = st.floats(width=32).map(np.float32)
many = arrays.arrays("float32", st.integers(0, 20), elements=edges | any_float)


def cast(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def lost(low, exact):
    found = statistics.count_lost([tf.constant(low)], [tf.constant(exact)])
    return statistics.Counts(*found.numpy().tolist())


def expected(low, exact):
    """The same counts in float64, which holds every value of the three formats."""
    limits = formats.float_format(low.dtype.name)
    known, found = np.abs(exact.astype("float64")), np.abs(low.astype("float64"))
    subnormal = (found > 0) & (found < limits.smallest_normal)
    return statistics.Counts(
        values=exact.size,
        zeros=int((known == 0).sum()),
        underflow=int(((found == 0) & (known != 0)).sum()),
        subnormal=int(subnormal.sum()),
        overflow=int((~np.isfinite(found) & np.isfinite(known)).sum()),
        not_finite=int((~np.isfinite(known)).sum()),
    )


@both
def test_every_bit_pattern_is_counted(dtype):
    patterns = np.arange(2**16, dtype="uint16").view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        ones = np.ones(2**16, "float32")
        assert lost(patterns, ones) == expected(patterns, ones)
        found = lost(patterns, patterns.astype("float32"))
    exponents, fractions = {"float16": (5, 10), "bfloat16": (8, 7)}[dtype]
    assert exponents + fractions == 15
    assert (found.values, found.zeros) == (2**16, 2)
    assert (found.underflow, found.overflow) == (0, 0)
    assert found.subnormal == 2 * (2**fractions - 1)
    assert found.not_finite == 2 * 2**fractions


@both
@given(many)
def test_counts_are_those_of_a_cast(dtype, values):
    low = cast(values, dtype)
    assert lost(low, values) == expected(low, values)


@both
@given(many)
def test_errors_are_those_of_float64(dtype, values):
    # TensorFlow's kernels take subnormals for 0, in some threads.
    usual = np.isfinite(values) & ~(abs(values) < np.finfo("float32").tiny)
    values = np.where(usual, values, np.float32(1.0))
    low = cast(values, dtype)
    found = float(statistics.relative_error([tf.constant(low)], [tf.constant(values)]))
    wide = values.astype("float64")
    if not np.isfinite(low).all():
        assert found == math.inf
    elif np.array_equal(low.astype("float64"), wide):
        assert found == 0.0
    else:
        error = np.linalg.norm(low.astype("float64") - wide) / np.linalg.norm(wide)
        assert found == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ((5, 1, 3, 0, 0, 0), 0.25),
        ((2, 0, 0, 0, 0, 0), 1.0),
        ((0, 0, 0, 0, 0, 0), math.nan),
        ((1, 1, 0, 0, 0, 0), math.nan),
        ((2, 0, 0, 0, 0, 1), math.nan),
    ],
)
def test_kept_is_of_the_nonzero_values(counts, kept):
    np.testing.assert_equal(statistics.Counts(*counts).kept, kept)


@pytest.mark.parametrize(
    ("largest", "scale"), [(1.0, 2.0**12), (8188.0, 1.0), (8189.0, 0.5), (0.0, None)]
)
def test_the_recommended_scale_leaves_three_bits(largest, scale):
    assert statistics.recommended_loss_scale(largest) == scale
