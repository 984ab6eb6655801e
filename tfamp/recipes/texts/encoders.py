"""BERT encoders and their tokenizers, pretrained or new, for every task of texts."""

import collections
import contextlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data
from tfamp.runs import tasks

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHUNK = 10_000  # Texts at a time.
_HF_FILES = ("config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors")
# KerasHub's presets of Google's checkpoints begin so; Google computes the tanh form of
# GELU. The others are sentence encoders (MiniLM, BGE, E5), which have the exact one.
_GOOGLE = "bert_"
# `hidden_act` of Hugging Face -> Keras activation; None: the tanh form, KerasHub's own.
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
)
# What KerasHub's converter reads over in silence: a config.json must have these.
_FIXED = {"position_embedding_type": "absolute", "layer_norm_eps": 1e-12}


class Encoder(NamedTuple):
    """An encoder that can be built, and what texts must be to go into it.

    Attributes:
      build: Function of no argument; returns under the dtype policy in force a
        functional model from {token_ids, segment_ids, padding_mask}, int32 [batch,
        length], to {sequence_output [batch, length, hidden], pooled_output [batch,
        hidden]}. Raises DataError if the weights cannot be loaded.
      tokenizer: A `tokenizers` tokenizer; None for a new encoder, whose tokenizer is to
        be trained: `train_tokenizer`.
      positions: Most tokens of an example.
      vocabulary_size: Number of token ids.
      description: For the report.
    """

    build: Callable[[], keras.Model]
    tokenizer: Any
    positions: int
    vocabulary_size: int
    description: str


def load(config: config_dict.ConfigDict) -> Encoder:
    """Finds the encoder of a configuration; loads no weights yet.

    Args:
      config: `config.model` has preset: a KerasHub name such as "bert_tiny_en_uncased",
        "kaggle://...", "hf://org/name", or a folder of Hugging Face's kind or of
        KerasHub's; "": a new encoder of num_layers, num_heads, hidden_dim,
        intermediate_dim, max_sequence_length and vocabulary_size. dropout is of both.
        `config.data.sequence_length` is the most tokens of an example.

    Raises:
      DataError: If a preset does not exist, cannot be downloaded or is no BERT encoder.
      ImportError: If an optional dependency is missing.
      ValueError: If examples are longer than the encoder's positions.
    """
    models, model = extras.require("keras_hub").models, config.model
    extras.require("tokenizers")
    if model.preset:
        encoder = _load_preset(models, model.preset, model.dropout)
    else:
        names = (
            *("num_layers", "num_heads", "hidden_dim", "intermediate_dim", "dropout"),
            *("max_sequence_length", "vocabulary_size"),
        )
        sizes = {name: model[name] for name in names}
        encoder = Encoder(
            lambda: models.BertBackbone(**sizes),
            tokenizer=None,
            positions=model.max_sequence_length,
            vocabulary_size=model.vocabulary_size,
            description=f"encoder: new, {model.num_layers} layers of "
            f"{model.hidden_dim}",
        )
    if config.data.sequence_length > encoder.positions:
        raise ValueError(
            "`config.data.sequence_length` must be at most the encoder's positions. "
            f"Received: {config.data.sequence_length}, positions: {encoder.positions}."
        )
    return encoder


def random_tokens(
    config: config_dict.ConfigDict,
) -> tuple[Encoder, dict[str, np.ndarray], Callable[..., np.ndarray]]:
    """Makes batches of random tokens of full length for an encoder, to time steps.

    No corpus is read and no tokenizer trained. A new encoder has as many positions as
    the tokens need. The content depends on `config.seed` alone.

    Args:
      config: As in `load`; `config.batch_size` is that of the batches.

    Returns:
      (the encoder; {token_ids, segment_ids, padding_mask}, int32 [8, batch, length];
      what draws integers for labels).

    Raises:
      DataError, ImportError, ValueError: As `load` does.
    """
    config = config.copy_and_resolve_references()
    length, positions = config.data.sequence_length, config.model.max_sequence_length
    if not config.model.preset:
        config.model.max_sequence_length = max(length, positions)
    encoder = load(config)
    draw = np.random.default_rng(config.seed).integers
    shape = (tasks.BATCHES, config.batch_size, length)
    features = {
        "token_ids": draw(encoder.vocabulary_size, size=shape, dtype="int32"),
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": np.ones(shape, "int32"),
    }
    return encoder, features, draw


def with_activation(model: keras.Model, activation: str) -> keras.Model:
    """Returns a copy of an encoder with another feed-forward activation.

    `BertBackbone` has the tanh form of GELU built in (KerasHub 0.32), Hugging Face's
    BERT the exact one; the hidden states differ by 4e-3. The activation is part of the
    copied layers' configurations, so it also survives saving.

    Args:
      model: Functional model with `keras_hub.layers.TransformerEncoder` layers.
      activation: Keras name, "gelu" for the exact form.

    Returns:
      A functional model with the same weights.
    """
    encoder = extras.require("keras_hub").layers.TransformerEncoder

    def clone(layer):
        config = layer.get_config()
        if isinstance(layer, encoder):
            config["activation"] = activation
        return layer.__class__.from_config(config)

    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """Trains an uncased WordPiece tokenizer; the same texts give the same tokens.

    Args:
      texts: Texts of the training split only.
      vocabulary_size: Largest number of tokens, the five special ones included.

    Returns:
      A `tokenizers` tokenizer.
    """
    tokenizers, texts = extras.require("tokenizers"), list(texts)
    learner = tokenizers.BertWordPieceTokenizer(lowercase=True)
    normalize = learner.normalizer.normalize_str
    counts = collections.Counter(c for item in texts for c in normalize(item))
    counts.pop(" ", None)
    most = (vocabulary_size - len(SPECIAL)) // 4  # Each letter has a "##" form too.
    letters = sorted(sorted(counts, key=lambda c: (-counts[c], c))[:most])
    # Ties between merges go by token id, and the ids of letters by the order of a hash
    # map, another one in each run (tokenizers 0.23). As special tokens they are fixed;
    # the tokenizer that is returned has the five special ones only.
    learner.train_from_iterator(
        texts,
        vocab_size=vocabulary_size,
        min_frequency=2,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        special_tokens=[*SPECIAL, *letters, *(f"##{letter}" for letter in letters)],
        show_progress=False,
    )
    return tokenizers.BertWordPieceTokenizer(learner.get_vocab(), lowercase=True)


def encodings(tokenizer: Any, texts: Sequence[Any]) -> Iterator[Any]:
    """Yields the encoding by a `tokenizers` tokenizer of each text, or pair of texts.

    In parts: its objects are 100 times the ids.
    """
    for start in range(0, len(texts), _CHUNK):
        yield from tokenizer.encode_batch(texts[start : start + _CHUNK])


def _load_preset(models, name, dropout) -> Encoder:
    """Returns a pretrained encoder; its sizes and its tokenizer are read now."""
    with _load_errors(name):
        source = _download(name) if name.startswith("hf://") else _expanded(name)
        # Its sizes, and whether it is a BERT at all: no weights are read.
        sizes = models.BertBackbone.from_preset(source, load_weights=False).get_config()
        config_file = pathlib.Path(source, "config.json")
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        if "model_type" in config:
            tokenizer, activation = _read_hugging_face(config_file.parent, config)
        else:
            saved = models.BertTokenizer.from_preset(source)
            tokenizer = _tokenizer(
                saved.get_vocabulary(),
                saved.lowercase,
                saved.strip_accents or None,  # Not said is also saved as False.
                saved.split_on_cjk,
            )
            builtin = name in models.BertBackbone.presets
            activation = "gelu" if builtin and not name.startswith(_GOOGLE) else None
        if tokenizer.get_vocab_size() > sizes["vocabulary_size"]:
            raise ValueError(
                f"its vocabulary has {tokenizer.get_vocab_size()} tokens, its encoder "
                f"{sizes['vocabulary_size']}."
            )

    def build():
        with _load_errors(name):
            backbone = models.BertBackbone.from_preset(source, dropout=dropout)
        return with_activation(backbone, activation) if activation else backbone

    # Of a folder only the last parts: the rest belongs to this host.
    short = "/".join(pathlib.PurePath(name).parts[-2:])
    return Encoder(
        build,
        tokenizer,
        sizes["max_sequence_length"],
        sizes["vocabulary_size"],
        f"encoder: {short}",
    )


@contextlib.contextmanager
def _load_errors(name):
    """Tells what goes wrong with a preset as a DataError of one line."""
    # KerasHub lets the first one through, a bare Exception.
    broken = extras.require("safetensors").SafetensorError
    try:
        yield
    except (broken, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise errors.DataError(
            f"The preset {name!r} cannot be loaded: {type(error).__name__}: {reason} "
            "Expected a KerasHub name such as 'bert_tiny_en_uncased', 'hf://org/name' "
            f"or, without a network, the path of a folder with {', '.join(_HF_FILES)}, "
            "or of one saved by KerasHub."
        ) from error


def _expanded(name):
    """Returns the path of a folder, or a name as it is."""
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((os.sep, ".", "~")):
        raise ValueError(f"The folder {name} does not exist.")
    return name


def _download(name):
    """Returns the folder of an hf:// name: downloaded, or as cached before."""
    return extras.require("huggingface_hub").snapshot_download(
        name.removeprefix("hf://"),
        allow_patterns=list(_HF_FILES),
        # Else the hub retries for 20 s.
        local_files_only=not data.resolves("huggingface.co"),
    )


def _read_hugging_face(folder, config):
    """Returns tokenizer and activation; refuses what KerasHub would get wrong."""
    for field, expected in _FIXED.items():
        if config.get(field, expected) != expected:
            raise ValueError(
                f"{folder}/config.json has {field}={config[field]!r}; KerasHub's BERT "
                f"has {expected!r}."
            )
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{folder}/config.json has hidden_act={activation!r}; expected one of "
            f"{', '.join(_ACTIVATIONS)}."
        )
    _check_weights(folder / "model.safetensors", config["num_hidden_layers"])
    options = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = _tokenizer(
        (folder / "vocab.txt").read_text("utf-8").rstrip("\n").split("\n"),
        options.get("do_lower_case", True),
        options.get("strip_accents"),
        options.get("tokenize_chinese_chars", True),
    )
    return tokenizer, _ACTIVATIONS[activation]


def _check_weights(path, layers):
    """Raises for weights that KerasHub would leave out, or take for numbers."""
    with extras.require("safetensors").safe_open(path, framework="np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    dtypes = {name: d for name, d in dtypes.items() if "encoder.layer." in name}
    numbers = {int(re.search(r"encoder\.layer\.(\d+)", name)[1]) for name in dtypes}
    if len(numbers) != layers:
        raise ValueError(
            f"{path} has {len(numbers)} layers; its config.json says {layers}."
        )
    if odd := sorted(set(dtypes.values()) - {"BF16", "F16", "F32", "F64"}):
        raise ValueError(f"{path} has weights of {', '.join(odd)}; expected floats.")


def _tokenizer(vocabulary, lowercase, strip_accents, chinese):
    """Returns a WordPiece tokenizer; uncased ones strip accents by default.

    As Google's and Hugging Face's do. KerasHub's own leaves the accents on.
    """
    return extras.require("tokenizers").BertWordPieceTokenizer(
        {token: index for index, token in enumerate(vocabulary)},
        lowercase=lowercase,
        strip_accents=strip_accents,
        handle_chinese_chars=chinese,
    )
