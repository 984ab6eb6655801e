"""Recipes, trained on a GPU that computes nothing."""

import json

import pytest
import stand_in

pytestmark = [pytest.mark.stand_in, pytest.mark.slow]


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
