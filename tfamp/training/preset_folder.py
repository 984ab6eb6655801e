"""Folders with a pretrained BERT encoder, of Hugging Face's kind or of KerasHub's."""

import json
import pathlib
from typing import Any, NamedTuple

from tfamp import errors
from tfamp.training import checkpoint_shapes

# What is read of a Hugging Face folder, and of a folder of KerasHub's
# `save_to_preset`; the weights last.
FILES = ("config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors")
KERAS_FILES = (
    "config.json",
    "assets/tokenizer/vocabulary.txt",
    "tokenizer.json",
    "model.weights.h5",
)

# `hidden_act` -> Keras activation; None: the tanh form of GELU that BertBackbone has.
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
)
_DEFAULT_ACTIVATION = "gelu"
# Fields of Hugging Face's config.json that BertBackbone has one value for.
_FIXED = {
    "position_embedding_type": "absolute",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}


class Preset(NamedTuple):
    """A pretrained encoder, its files found and its tokenizer read.

    Attributes:
      name: As the user wrote it.
      source: Its folder, which `BertBackbone.from_preset` takes.
      tokenizer: A `tokenizers` tokenizer with the preset's vocabulary.
      activation: Keras name of the feed-forward activation; None for KerasHub's own.
      max_sequence_length: Positions the encoder has.
    """

    name: str
    source: str
    tokenizer: Any
    activation: str | None
    max_sequence_length: int


def files_of(name: str, folder: pathlib.Path) -> tuple[str, ...]:
    """Returns the files that must stand beside a config.json.

    Args:
      name: The preset's, for errors.
      folder: It may have no other file yet.

    Raises:
      DataError: If config.json is missing or malformed, or not of a BERT encoder.
    """
    config = _read_config(name, folder)
    if "registered_name" in config:  # As Keras serializes its objects.
        _check_keras_config(config, folder / FILES[0])
        return KERAS_FILES
    _check_hf_config(config, folder / FILES[0])
    return FILES


def read(name: str, folder: pathlib.Path) -> Preset:
    """Returns the preset in a folder, with its tokenizer.

    Of the weights, only the header is read.

    Args:
      name: The preset's, for errors.
      folder: With `FILES` or `KERAS_FILES`.

    Raises:
      DataError: If a file is missing or malformed, if it is no BERT encoder, or if
        the weights are not those of its config.json.
    """
    files = files_of(name, folder)
    _check_files(name, folder, files)
    config = _read_config(name, folder)
    if files is KERAS_FILES:
        return _read_keras_folder(name, folder, config)
    return _read_hf_folder(name, folder, config)


def _read_config(name, folder):
    if not (folder / FILES[0]).is_file():
        _check_files(name, folder, FILES)
    return _read_json(folder / FILES[0])


def _read_hf_folder(name, folder, config):
    """Returns the preset of a Hugging Face folder."""
    path = folder / FILES[0]
    activation = _ACTIVATIONS[config.get("hidden_act", _DEFAULT_ACTIVATION)]
    sizes = checkpoint_shapes.read_sizes(config, path, hugging_face=True)
    vocabulary = _read_vocabulary(folder / FILES[1], sizes)
    tokenizer = _tokenizer_of(vocabulary, _read_json(folder / FILES[2]))
    checkpoint_shapes.check_safetensors(folder / FILES[3], sizes)
    return Preset(name, str(folder), tokenizer, activation, sizes.max_sequence_length)


def _read_keras_folder(name, folder, config):
    """Returns the preset of a folder that KerasHub's `save_to_preset` wrote."""
    path = folder / KERAS_FILES[0]
    sizes = checkpoint_shapes.read_sizes(config.get("config") or {}, path)
    vocabulary = _read_vocabulary(folder / KERAS_FILES[1], sizes)
    saved = _read_json(folder / KERAS_FILES[2]).get("config") or {}
    options = {
        "do_lower_case": saved.get("lowercase", False),
        # False is also what is saved if nothing was said.
        "strip_accents": saved.get("strip_accents") or None,
        "tokenize_chinese_chars": saved.get("split_on_cjk", True),
    }
    tokenizer = _tokenizer_of(vocabulary, options)
    checkpoint_shapes.check_h5(folder / KERAS_FILES[3], sizes)
    return Preset(name, str(folder), tokenizer, None, sizes.max_sequence_length)


def _check_files(name, folder, files):
    """Raises if a preset's folder lacks some of its files."""
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise errors.DataError(
            f"The preset {name} lacks {', '.join(missing)} (looked in {folder}). "
            f"Expected a Hugging Face folder with {', '.join(FILES)}, or one of "
            f"KerasHub with {', '.join(KERAS_FILES)}."
        )


def _check_hf_config(config, path):
    """Raises if it is not of a BERT that KerasHub's computes like Hugging Face's."""
    if config.get("model_type") != "bert":
        raise errors.DataError(
            f"{path} has model_type={config.get('model_type')!r}. Expected 'bert'."
        )
    activation = config.get("hidden_act", _DEFAULT_ACTIVATION)
    if activation not in _ACTIVATIONS:
        raise errors.DataError(
            f"{path} has hidden_act={activation!r}. Expected one of "
            f"{', '.join(_ACTIVATIONS)}."
        )
    for field, value in _FIXED.items():
        if config.get(field, value) != value:
            raise errors.DataError(
                f"{path} has {field}={config[field]!r}. Expected {value!r}, which is "
                "what KerasHub's BERT has."
            )


def _check_keras_config(config, path):
    """Raises if KerasHub's config.json is not that of a BERT encoder."""
    if config.get("class_name") != "BertBackbone":
        raise errors.DataError(
            f"{path} has class_name={config.get('class_name')!r}. Expected "
            "'BertBackbone'."
        )


def _tokenizer_of(vocabulary, options):
    """Returns a WordPiece tokenizer; uncased ones strip accents unless told not to."""
    import tokenizers

    return tokenizers.BertWordPieceTokenizer(
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


def _read_vocabulary(path, sizes):
    """Returns the tokens of a vocabulary, one a line."""
    tokens = path.read_text("utf-8").rstrip("\n").split("\n")
    missing = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"} - set(tokens)
    if missing:
        raise errors.DataError(
            f"{path} lacks the token(s) {', '.join(sorted(missing))}. Expected a BERT "
            "WordPiece vocabulary, one token a line."
        )
    if len(tokens) > sizes.vocabulary_size:
        raise errors.DataError(
            f"{path} has {len(tokens)} tokens, more than the vocab_size="
            f"{sizes.vocabulary_size} of config.json. Expected the files of one model."
        )
    return tokens
