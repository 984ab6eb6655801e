"""Pretrained BERT encoders: KerasHub names, hf:// names, Hugging Face folders."""

import importlib
import json
import os
import pathlib
from types import ModuleType
from typing import Any, NamedTuple

import keras

from tfamp import errors
from tfamp.training import data

# What KerasHub reads of a Hugging Face folder.
_FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json")
_HF_PREFIX = "hf://"
_LOCAL_OPTION = (
    "Without a network, give the path of a Hugging Face folder on disk with "
    f"{', '.join(_FILES)}."
)

# `hidden_act` -> Keras activation; None: the tanh form of GELU that BertBackbone has.
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
)


class Preset(NamedTuple):
    """A pretrained encoder, its files found and its tokenizer read.

    Attributes:
      name: As the user wrote it.
      source: What `BertBackbone.from_preset` takes: a folder or a KerasHub name.
      tokenizer: A `tokenizers` tokenizer with the preset's vocabulary.
      activation: Keras name of the feed-forward activation; None for KerasHub's own.
      max_sequence_length: Positions the encoder has; None if not known yet.
    """

    name: str
    source: str
    tokenizer: Any
    activation: str | None
    max_sequence_length: int | None


def require(module: str) -> ModuleType:
    """Imports an optional dependency of the text tasks.

    Raises:
      ImportError: If it is missing, naming the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"BERT tasks need {module}, which cannot be imported: {error}. "
            'Install it with `pip install "tfamp[bert]"`.'
        ) from error


def find(preset: str) -> Preset:
    """Finds a preset's files and reads its tokenizer; loads no weights yet.

    Args:
      preset: A KerasHub name such as "bert_tiny_en_uncased", "hf://org/name", or the
        path of a Hugging Face folder.

    Returns:
      A `Preset`.

    Raises:
      DataError: If it is not there, lacks files, or cannot be downloaded.
    """
    if preset.startswith(_HF_PREFIX):
        return _read_folder(preset, _download_hf(preset))
    path = pathlib.Path(preset).expanduser()
    if path.is_dir():
        return _read_folder(preset, path)
    if "://" not in preset and (os.sep in preset or preset.startswith(("~", "."))):
        raise errors.DataError(f"There is no folder {preset}. {_LOCAL_OPTION}")
    return _find_keras_hub(preset)


def build_backbone(preset: Preset, dropout: float) -> keras.Model:
    """Builds a pretrained encoder under the dtype policy in force.

    Args:
      preset: From `find`.
      dropout: Dropout rate of the encoder.

    Returns:
      A functional model from {token_ids, segment_ids, padding_mask} to
      {sequence_output, pooled_output}.

    Raises:
      DataError: If the weights cannot be loaded.
    """
    models = require("keras_hub").models
    # KerasHub lets this one through; it is a bare Exception.
    broken = require("safetensors").SafetensorError
    try:
        backbone = models.BertBackbone.from_preset(preset.source, dropout=dropout)
    except (OSError, ValueError, KeyError, broken) as error:
        raise _unusable(preset.name, error) from error
    if preset.activation is None:
        return backbone
    return with_activation(backbone, preset.activation)


def with_activation(model: keras.Model, activation: str) -> keras.Model:
    """Returns a copy of an encoder with another feed-forward activation.

    `BertBackbone` has the tanh form of GELU built in, Hugging Face's BERT the exact
    one; the hidden states differ by 4e-3. The activation is part of the copied layers'
    configurations, so it also survives `from_config`.

    Args:
      model: Functional model with `keras_hub.layers.TransformerEncoder` layers.
      activation: Keras name, "gelu" for the exact form.

    Returns:
      A functional model with the same weights.
    """
    encoder = require("keras_hub").layers.TransformerEncoder

    def clone(layer):
        config = layer.get_config()
        if isinstance(layer, encoder):
            config["activation"] = activation
        return layer.__class__.from_config(config)

    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy


def _read_folder(name, folder):
    """Returns the preset of a Hugging Face folder."""
    missing = [file for file in _FILES if not (folder / file).is_file()]
    if missing:
        raise errors.DataError(
            f"The preset {name} lacks {', '.join(missing)} (looked in {folder}). "
            f"Expected a Hugging Face folder with {', '.join(_FILES)}."
        )
    model, tokens = (_read_json(folder / _FILES[0]), _read_json(folder / _FILES[3]))
    if model.get("model_type") != "bert":
        raise errors.DataError(
            f"{folder / _FILES[0]} has model_type={model.get('model_type')!r}. "
            "Expected 'bert'."
        )
    activation = model.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise errors.DataError(
            f"{folder / _FILES[0]} has hidden_act={activation!r}. Expected one of "
            f"{', '.join(_ACTIVATIONS)}."
        )
    vocabulary = _read_vocabulary(folder / _FILES[2])
    if len(vocabulary) > model.get("vocab_size", len(vocabulary)):
        raise errors.DataError(
            f"{folder / _FILES[2]} has {len(vocabulary)} tokens, more than the "
            f"vocab_size={model['vocab_size']} of {_FILES[0]}. Expected the files of "
            "one model."
        )
    return Preset(
        name,
        str(folder),
        _tokenizer_of(vocabulary, tokens),
        _ACTIVATIONS[activation],
        model.get("max_position_embeddings"),
    )


def _tokenizer_of(vocabulary, options):
    """Returns a WordPiece tokenizer; uncased ones strip accents unless told not to."""
    return require("tokenizers").BertWordPieceTokenizer(
        {token: index for index, token in enumerate(vocabulary)},
        lowercase=options.get("do_lower_case", True),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )


def _read_json(path):
    """Reads a JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise errors.DataError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise errors.DataError(
            f"{path} must hold a JSON object. Received: {type(value).__name__}."
        )
    return value


def _read_vocabulary(path):
    """Returns the tokens of a vocab.txt, one a line."""
    tokens = path.read_text("utf-8").rstrip("\n").split("\n")
    missing = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"} - set(tokens)
    if missing:
        raise errors.DataError(
            f"{path} lacks the token(s) {', '.join(sorted(missing))}. Expected a BERT "
            "WordPiece vocabulary, one token a line."
        )
    return tokens


def _download_hf(preset):
    """Returns the folder of an hf:// name: downloaded, or as cached before."""
    hub = require("huggingface_hub")
    offline = not data.resolves("huggingface.co")  # Else the hub retries for 20 s.
    try:
        folder = hub.snapshot_download(
            preset.removeprefix(_HF_PREFIX),
            allow_patterns=list(_FILES),
            local_files_only=offline,
        )
    except (OSError, ValueError) as error:
        raise _unusable(preset, error) from error
    return pathlib.Path(folder)


def _find_keras_hub(preset):
    """Returns a preset by its KerasHub or Kaggle name."""
    models = require("keras_hub").models
    try:
        tokenizer = models.BertTokenizer.from_preset(preset)
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(preset, error) from error
    vocabulary = tokenizer.get_vocabulary()
    options = {"do_lower_case": tokenizer.lowercase}
    return Preset(preset, preset, _tokenizer_of(vocabulary, options), None, None)


def _unusable(preset, error):
    """Returns the error for a preset that did not load, in one line."""
    reason = " ".join(str(error).split())[:200]
    return errors.DataError(
        f"The preset {preset!r} cannot be loaded: {type(error).__name__}: {reason}. "
        f"{_LOCAL_OPTION}"
    )
