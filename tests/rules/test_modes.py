import re

import keras
import pytest
import tensorflow as tf

from tfamp.facts import formats, modes

# name, compute format, dtype policy, TF32, needs loss scaling
TABLE = [
    ("float32", "float32", "float32", False, False),
    ("tf32", "tf32", "float32", True, False),
    ("mixed_bfloat16", "bfloat16", "mixed_bfloat16", True, False),
    ("mixed_float16", "float16", "mixed_float16", True, True),
]


def test_modes_mean():
    assert modes.MODES == {row[0]: modes.Mode(*row) for row in TABLE}
    narrowest = formats.float_format("float32").smallest_normal
    for mode in modes.MODES.values():
        policy = keras.dtype_policies.get(mode.policy)
        computes = "float32" if mode.name == "tf32" else mode.compute_format
        assert (policy.compute_dtype, policy.variable_dtype) == (computes, "float32")
        smallest = formats.float_format(mode.compute_format).smallest_normal
        assert mode.needs_loss_scale == (smallest > narrowest)


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
