import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfamp import formats

NUMPY_FORMATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("name", NUMPY_FORMATS)
def test_agrees_with_numpy_finfo(name):
    info = np.finfo(name)
    assert formats.float_format(name) == formats.FloatFormat(
        name=name,
        bits=info.bits,
        exponent_bits=info.iexp,
        mantissa_bits=info.nmant,
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        epsilon=float(info.eps),
    )


@pytest.mark.parametrize("name", [n for n in formats.FORMAT_NAMES if n != "tf32"])
def test_agrees_with_ml_dtypes_finfo(name):
    info, found = ml_dtypes.finfo(name), formats.float_format(name)
    assert (found.name, found.bits) == (name, info.bits)
    assert (found.exponent_bits, found.mantissa_bits) == (info.nexp, info.nmant)
    assert found.max == float(info.max)
    assert found.smallest_normal == float(info.smallest_normal)
    assert found.smallest_subnormal == float(info.smallest_subnormal)
    assert found.epsilon == float(info.eps)


@pytest.mark.parametrize("name", formats.FORMAT_NAMES)
def test_every_limit_is_a_python_number(name):
    kinds = [type(field) for field in formats.float_format(name)]
    assert kinds == [str, int, int, int, float, float, float, float]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_limits_follow_from_all_65536_bit_patterns(name):
    found = formats.float_format(name)
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # NaN patterns are among them.
        values = patterns.view(np.dtype(name)).astype(np.float64)
    positive = np.sort(values[np.isfinite(values) & (values > 0)])
    exponent_field = (patterns >> found.mantissa_bits) & (2**found.exponent_bits - 1)
    normal = values[(exponent_field > 0) & np.isfinite(values) & (values > 0)]
    assert found.bits == 16 == 1 + found.exponent_bits + found.mantissa_bits
    assert found.max == positive[-1]
    assert found.smallest_subnormal == positive[0]
    assert found.smallest_normal == normal.min()
    assert found.epsilon == positive[positive > 1.0][0] - 1.0
    # Half of the bit patterns are positive; of those, the last exponent is not finite.
    assert len(positive) == 2**15 - 2**found.mantissa_bits - 1


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_values_round_to_zero_and_to_infinity_where_the_limits_say(name):
    found = formats.float_format(name)
    dtype = np.dtype(name)
    step = found.max * found.epsilon / (2 - found.epsilon)  # Between the largest two.
    assert float(np.float64(found.smallest_subnormal / 2).astype(dtype)) == 0.0
    assert float(np.float64(found.smallest_subnormal * 0.75).astype(dtype)) > 0.0
    assert float(np.float64(found.max + step * 0.25).astype(dtype)) == found.max
    with np.errstate(over="ignore"):
        assert np.isinf(float(np.float64(found.max + step * 0.75).astype(dtype)))


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16():
    tf32, wide, narrow = map(formats.float_format, ("tf32", "float32", "float16"))
    assert tf32.name == "tf32"
    assert tf32.bits == 19
    assert tf32.exponent_bits == wide.exponent_bits
    assert tf32.smallest_normal == wide.smallest_normal
    assert tf32.mantissa_bits == narrow.mantissa_bits
    assert tf32.epsilon == narrow.epsilon == 2.0**-tf32.mantissa_bits


def test_tf32_limits_are_the_float32_limits_with_13_fraction_bits_cleared():
    tf32, wide = formats.float_format("tf32"), formats.float_format("float32")
    cleared = wide.mantissa_bits - tf32.mantissa_bits
    mask = np.uint32(2**32 - 2**cleared)

    def truncate(value):
        return float((np.float32(value).view(np.uint32) & mask).view(np.float32))

    assert cleared == 13
    assert tf32.max == truncate(wide.max)
    # The lowest bit that is left, alone, is the smallest subnormal.
    assert tf32.smallest_subnormal == float(np.uint32(2**cleared).view(np.float32))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("bfloat16", id="name"),
        pytest.param(tf.bfloat16, id="tensorflow"),
        pytest.param(np.dtype("bfloat16"), id="numpy_dtype"),
        pytest.param(ml_dtypes.bfloat16, id="scalar_type"),
    ],
)
def test_accepts_anything_that_names_a_dtype(dtype):
    assert formats.float_format(dtype).name == "bfloat16"


@pytest.mark.parametrize("name", NUMPY_FORMATS + ("bfloat16",))
def test_accepts_tensorflow_and_numpy_dtypes(name):
    expected = formats.float_format(name)
    assert formats.float_format(tf.dtypes.as_dtype(name)) is expected
    assert formats.float_format(np.dtype(name)) is expected


@pytest.mark.parametrize(
    "dtype",
    ["float17", "fp16", "", "int32", tf.int32, np.int8, "float16_ref", None, 3, "e"],
    ids=repr,
)
def test_unknown_format_is_an_error_that_says_what_was_received(dtype):
    with pytest.raises(ValueError, match=re.escape(f"dtype={dtype!r}")) as caught:
        formats.float_format(dtype)
    for name in formats.FORMAT_NAMES:
        assert name in str(caught.value)
