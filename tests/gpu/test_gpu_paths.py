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
        pytest.param("fits_xla keras_choice", marks=pytest.mark.slow),
        pytest.param("attention savings", marks=pytest.mark.slow),
        pytest.param("rewrite serves diagnostics", marks=pytest.mark.slow),
    ],
)
def test_what_users_do_runs_on_a_gpu(names):
    stand_in.run(str(HERE / "paths.py"), *names.split(), flags=stand_in.FAST_XLA)


@pytest.mark.slow
def test_what_holds_on_any_device_runs_as_far_as_no_value_counts():
    """A test of `-m device` that compares values is skipped from there on."""
    quiet = "-q", "-n", "0", "-p", "no:cacheprovider"
    warned = "-W", "ignore::UserWarning"  # Of what is not finite.
    given = "-m", "pytest", "-m", "device", *quiet, *warned, str(HERE.parent)
    stand_in.run(*given, flags=stand_in.FAST_XLA)
