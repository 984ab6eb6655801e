"""How float32 numbers are stored in 8 bits and in bfloat16."""

import numpy as np
import pytest
import tensorflow as tf

from tfamp.storage import codes

pytestmark = pytest.mark.device
CODES = {"signed": codes.SIGNED, "unsigned": codes.UNSIGNED, "16": codes.BFLOAT16}


@pytest.fixture(params=CODES)
def code(request):
    return CODES[request.param]


def stored_as(code, values, key=0):
    x = tf.constant(values, tf.float32)
    return code.read(*code.pack(x, tf.constant(key, tf.uint32)), x.shape).numpy()


def test_rounding_is_right_in_the_mean_and_keeps_what_was_stored(code):
    count = 4096
    sizes = 2.0 ** np.resize(np.arange(-9, 4), 256)
    values = np.random.default_rng(0).uniform(1, 2, 256) * sizes
    given = np.tile(values[:, None], count).astype("float32").T.reshape(-1)
    found = stored_as(code, given, key=7).reshape(count, 256)
    low, high = found.min(0), found.max(0)
    x = given[:256]
    assert (low <= x).all() and (x <= high).all()
    assert (found == low).sum(0).min() + (found == high).sum(0).min() > 0
    share = (x - low) / np.maximum(high - low, 1e-30)
    errors = (found - x).mean(0) / np.maximum(high - low, 1e-30)
    limit = 4.5 * np.sqrt(share * (1 - share) / count) + 1e-5
    assert (np.abs(errors) <= limit).all()
    np.testing.assert_array_equal(stored_as(code, found[0], key=1), found[0])


def test_what_is_no_number_stays_what_it_is(code):
    values = [np.inf, np.nan, 0.0, 1.0, 1e-30, 3e38]
    values += [-np.inf, -1.0, -3e38] if code is not codes.UNSIGNED else []
    found = stored_as(code, values)
    given = np.float32(values)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(given))
    np.testing.assert_array_equal(
        found[~np.isfinite(found)], given[~np.isfinite(given)]
    )
    assert found[2] == 0 and (found[4] > 0) == (code is not codes.SIGNED)
