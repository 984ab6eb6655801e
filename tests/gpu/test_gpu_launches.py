"""Launches of a training step on a GPU, counted on one that computes nothing."""

import pathlib

import pytest
import stand_in

pytestmark = pytest.mark.stand_in
HERE = pathlib.Path(__file__).parent

# Launches and copies to the host of a step, in figures of `measure.py`: at most.
# BERT has 2 layers; without XLA.
BOUNDS = {
    "mixed_bfloat16": {"mlp": (45, 3), "cnn": (44, 4), "bert": (150, 4)},
    "mixed_float16": {"mlp": (45, 4), "cnn": (44, 5), "bert": (160, 5)},
    "tf32": {"mlp": (45, 3), "cnn": (40, 4), "bert": (140, 4)},
}


@pytest.mark.parametrize("mode", BOUNDS)
def test_launches_and_copies_of_a_step_have_bounds(mode):
    given = f"--model={','.join(BOUNDS[mode])}", f"--mode={mode}", "--layers=2"
    found = stand_in.run(str(HERE / "measure.py"), *given, "--tfamp")
    for model, (launches, copies) in BOUNDS[mode].items():
        of_model = found[model]
        assert of_model["launches"] <= launches, (model, of_model)
        assert of_model["copies_to_host"] <= copies, (model, of_model)


def test_a_step_under_xla_is_one_graph():
    given = "--model=mlp", "--xla", "--tfamp"
    found = stand_in.run(str(HERE / "measure.py"), *given, flags=stand_in.FAST_XLA)
    assert 1 <= found["mlp"]["launches"] <= 2, found
    assert len(found["compiled"]) == 1


@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
def test_the_rests_of_an_epoch_compile_no_more_steps(mode):
    given = "--model=mlp,cnn", f"--mode={mode}", "--fit", "--tfamp"
    found = stand_in.run(str(HERE / "measure.py"), *given, "--xla")
    assert len(found["compiled"]) == 4, found  # Two training steps, two of evaluation.
    stand_in.run(str(HERE / "measure.py"), *given)  # Of any size, without XLA.
