"""TensorFlow's paths of a GPU, run on one that computes nothing.

Each test is a process of its own, in which TensorFlow finds the stand-in. What it runs
is real, values are not: this tests what a GPU is asked for, and that nothing refuses.
"""

import json
import pathlib

import pytest
import stand_in

WHY = stand_in.missing()
pytestmark = [
    pytest.mark.stand_in,
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]
HERE = pathlib.Path(__file__).parent
# XLA's default compiles each product some 40 times.
FAST_XLA = "--xla_gpu_enable_triton_gemm=false"


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
    stand_in.run(str(HERE / "paths.py"), *names.split(), flags=FAST_XLA)


# Launches and copies to the host of a step, in figures of `measure.py`: at most.
# BERT has 2 layers; without XLA.
BOUNDS = {
    "mixed_bfloat16": {"mlp": (45, 3), "cnn": (60, 4), "bert": (150, 4)},
    "mixed_float16": {"mlp": (55, 4), "cnn": (75, 5), "bert": (160, 5)},
    "tf32": {"mlp": (45, 3), "cnn": (60, 4), "bert": (140, 4)},
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
    found = stand_in.run(str(HERE / "measure.py"), *given, flags=FAST_XLA)
    assert 1 <= found["mlp"]["launches"] <= 2, found
    assert len(found["compiled"]) == 1


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
