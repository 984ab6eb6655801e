import decimal
import math
import re
from fractions import Fraction

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfamp.facts import formats, modes

every_format = pytest.mark.parametrize("name", formats.FORMAT_NAMES)


@every_format
def test_limits_are_python_numbers_and_those_of_ml_dtypes(name):
    found = formats.float_format(name)
    kinds = [str, int, int, int, float, float, float, float, int, str]
    assert [type(field) for field in found] == kinds
    if name == "tf32":
        # float32 with 13 bits of the fraction cleared: 13 are left of its 23.
        mask, largest = np.uint32(2**32 - 2**13), np.finfo("float32").max
        cut = np.float32(largest).view(np.uint32) & mask
        assert found[1:4] == (19, 8, 10) and found.bytes == 4
        assert found.max == float(cut.view(np.float32))
        assert found.smallest_subnormal == float(np.uint32(2**13).view(np.float32))
        return
    info = ml_dtypes.finfo(name)
    limits = info.max, info.smallest_normal, info.smallest_subnormal, info.eps
    sizes = info.bits, info.nexp, info.nmant
    assert found[:8] == (name, *sizes, *map(float, limits))
    assert 8 * found.bytes == found.bits


def test_anything_that_names_a_dtype_is_accepted_and_nothing_else():
    known = "bfloat16", tf.bfloat16, np.dtype("bfloat16"), ml_dtypes.bfloat16
    assert {formats.float_format(dtype).name for dtype in known} == {"bfloat16"}
    for dtype in ("fp16", "", tf.int32, np.int8, "float16_ref", None, 3, "e"):
        expected = f"dtype={dtype!r}. Expected one of {', '.join(formats.FORMAT_NAMES)}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            formats.float_format(dtype)


# ---- What a format makes of a number ----


@pytest.mark.parametrize("name", ["float32", "float16"])
@hypothesis.given(value=st.floats(allow_nan=False))
def test_agrees_with_numpy_where_numpy_rounds_once(name, value):
    with np.errstate(over="ignore", under="ignore"):
        expected = float(np.float64(value).astype(name))
    stored = formats.represent(value, name).stored
    assert stored == expected
    assert math.copysign(1, stored) == math.copysign(1, expected)


@hypothesis.given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_is_float32_rounded_at_the_13th_bit(value):
    """By integers: half of the last kept bit, less one, plus that bit; then cut."""
    word = int(np.float32(value).view(np.uint32))
    rounded = (word + 0xFFF + (word >> 13 & 1)) & 0xFFFFE000
    expected = float(np.uint32(rounded).view(np.float32))
    found = formats.represent(value, "tf32")
    assert found.stored == expected
    assert (found.outcome == "overflow") == math.isinf(expected)


@pytest.mark.parametrize("name", ["tf32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_number_is_not_rounded_to_float32_first(name):
    epsilon = Fraction(formats.float_format(name).epsilon)
    middle, beside = 1 + epsilon / 2, Fraction(1, 2**40)  # float32 cannot tell them.
    assert formats.represent(middle, name).stored == 1.0
    assert formats.represent(middle + beside, name).stored == float(1 + epsilon)
    odd = 1 + 3 * epsilon / 2
    assert formats.represent(odd, name).stored == float(1 + 2 * epsilon)
    assert formats.represent(odd - beside, name).stored == float(1 + epsilon)


@every_format
def test_limits_are_where_the_outcome_changes(name):
    found = formats.float_format(name)
    largest, normal = Fraction(found.max), Fraction(found.smallest_normal)
    tiny, epsilon = Fraction(found.smallest_subnormal), Fraction(found.epsilon)

    def outcome(value):
        return formats.represent(value, name).outcome

    assert outcome(largest) == "exact"
    assert outcome(largest * (1 + epsilon / 64)) == "rounded"
    assert outcome(largest * (1 + epsilon)) == "overflow"
    assert outcome(normal) == outcome(tiny) == outcome(normal - tiny) == "exact"
    assert outcome(normal * (1 + epsilon / 4)) == "rounded"
    assert outcome(normal - tiny * Fraction(5, 4)) == "subnormal"
    assert outcome(tiny * Fraction(3, 4)) == "subnormal"
    assert outcome(tiny / 2) == "underflow"  # A tie, to the even 0.
    assert outcome(tiny / 2 * (1 + epsilon / 4)) == "subnormal"


@every_format
def test_zero_and_what_is_not_finite(name):
    for zero in (0.0, -0.0):
        found = formats.represent(zero, name)
        assert math.copysign(1, found.stored) == math.copysign(1, zero)
        assert (found.relative_error, found.outcome) == (0.0, "exact")
    assert formats.represent(math.nan, name).outcome == "nan"
    assert math.isnan(formats.represent(math.nan, name).stored)
    tiny = formats.represent(Fraction(-1, 10**400), name)
    assert (tiny.outcome, math.copysign(1, tiny.stored)) == ("underflow", -1.0)
    assert tiny.relative_error == 1.0
    huge = formats.represent(-(10**400), name)
    infinite = formats.represent(-math.inf, name)
    assert huge.outcome == "overflow"
    if name == "float8_e4m3fn":  # It has no infinity.
        assert math.isnan(huge.stored) and math.isnan(infinite.stored)
        assert infinite.outcome == "overflow"
    else:
        assert huge.stored == infinite.stored == -math.inf
        assert infinite.outcome == "exact"


def test_any_real_number_is_rounded_once():
    kinds = int, np.int8, float, np.float16, ml_dtypes.bfloat16, Fraction
    assert {formats.represent(kind(3), "float16").stored for kind in kinds} == {3.0}
    # Just above the middle between 1 and its successor; float64 would lose the rest.
    with decimal.localcontext(decimal.Context(prec=60)):
        two = decimal.Decimal(2)
        value = 1 + two**-8 + two**-80
    assert formats.represent(value, "bfloat16").stored == 1.0078125


# ---- Modes ----


@pytest.mark.parametrize(
    "name", ["fp16", "half", "TF32", " tf32", "auto", "", None, 16, ["tf32"]], ids=repr
)
def test_no_alias_is_accepted(name):
    with pytest.raises(ValueError, match=re.escape(f"mode={name!r}")) as caught:
        modes.get_mode(name)
    assert all(repr(mode) in str(caught.value) for mode in modes.MODES)


@pytest.mark.issue("keras#11860", "tensorflow#58138")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_pure_16_bits_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="half an epsilon") as caught:
        modes.get_mode(name)
    assert f"Did you mean 'mixed_{name}'" in str(caught.value)
    # What the message says, in numbers: a weight of 1 does not move.
    step = formats.float_format(name).epsilon / 2.1
    assert tf.cast(1.0 + step, name) == 1.0
