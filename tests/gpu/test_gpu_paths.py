"""TensorFlow's paths of a GPU, run on one that computes nothing.

Each test is a process of its own, in which TensorFlow finds the stand-in. What it runs
is real, values are not: this tests what a GPU is asked for, and that nothing refuses.
"""

import pathlib

import pytest
import stand_in

pytestmark = pytest.mark.stand_in
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    "names",
    [
        "fits",
        "fits_xla keras_choice",
        "attention savings",
        "rewrite serves diagnostics",
    ],
)
def test_what_users_do_runs_on_a_gpu(names):
    stand_in.run(str(HERE / "paths.py"), *names.split(), flags=stand_in.FAST_XLA)
