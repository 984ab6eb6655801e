import re

import pytest
import tensorflow as tf

from tfamp.facts import formats, modes


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
