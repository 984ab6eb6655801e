"""TensorFlow's paths of a GPU, run on one that computes nothing.

Each test is a process of its own, in which TensorFlow finds the stand-in. What it runs
is real, values are not: this tests what a GPU is asked for, and that nothing refuses.
"""

import json
import pathlib

import pytest
import stand_in

pytestmark = pytest.mark.stand_in
HERE = pathlib.Path(__file__).parent
MIB = 2**20

# ---- Launches of a training step ----

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


# ---- `memory` beside what TensorFlow's allocator gives ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "size", "mode", "xla", "convolves"),
    [
        ("tabular/bike_sharing", 8192, "mixed_bfloat16", False, False),
        ("tabular/bike_sharing", 8192, "tf32", True, False),
        ("unet/digits_on_photographs", 64, "mixed_bfloat16", False, True),
        ("unet/digits_on_photographs", 64, "mixed_bfloat16", True, True),
        ("cnn/digits", 512, "mixed_bfloat16", False, True),
    ],
)
def test_memory_is_that_of_the_allocator(recipe, size, mode, xla, convolves):
    given = recipe, str(size), mode, *["xla"] * xla
    limit = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "64"}
    path, flags = str(HERE / "memory.py"), stand_in.FAST_XLA
    found = stand_in.run(path, *given, flags=flags, **limit)
    # XLA's own figure is exact, but for what the device holds anyway: 2 MiB.
    assert found["ratio"] == pytest.approx(1, abs=0.03 if xla else 0.1), found
    computed = found["computed"]
    # Twice: the limit, and a copy of the largest result, 8 MiB on both sides of each.
    least = 2 * (64 + 32) * MIB if convolves else 0
    assert least <= computed["workspaces"] <= 2 * least
    assert found["device_bytes"] <= computed["bound"] * 1.1


# ---- What users do ----


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


# ---- Recipes ----


@pytest.fixture
def questions(tmp_path):
    """A folder with questions in SQuAD's form."""
    rows = range(12)
    articles = [
        {
            "title": f"t{row}",
            "paragraphs": [
                {
                    "context": f"the tower {row} is high",
                    "qas": [
                        {
                            "id": f"q{row}",
                            "question": "which tower?",
                            "answers": [{"text": str(row), "answer_start": 10}],
                        }
                    ],
                }
            ],
        }
        for row in rows
    ]
    for name in ("train", "dev"):
        text = json.dumps({"data": articles, "version": "1.1"})
        (tmp_path / f"{name}-v1.1.json").write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ("cnn/digits", "mixed_float16"),
        ("unet/digits_on_photographs", "mixed_bfloat16"),
        ("tabular/diabetes", "mixed_float16"),
        ("lm/docstrings", "mixed_bfloat16"),
        ("bert/docstrings", "mixed_float16"),
        ("bert/squad:tiny", "tf32"),
    ],
)
def test_recipes_train_on_a_gpu(config, mode, tmp_path, questions):
    given = f"--config.precision.mode={mode}", "--config.jit_compile=False"
    if "squad" in config:
        given += (f"--manual_dir={questions}",)
    command = "-m", "tfamp", "train", config, "--tiny", "--job=train", *given
    folder = tmp_path / "run"
    stand_in.run(*command, f"--workdir={folder}")
    assert "test loss" in (folder / "result.json").read_text().replace("_", " ")
