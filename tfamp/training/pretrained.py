"""Pretrained BERT encoders: KerasHub and Hugging Face names, and folders of both."""

import importlib
import os
import pathlib
from types import ModuleType

import keras

from tfamp import errors
from tfamp.training import data, preset_folder

_HF_PREFIX = "hf://"
_KAGGLE_PREFIX = "kaggle://"
_LOCAL_OPTION = (
    "Without a network, give the path of a Hugging Face folder on disk with "
    f"{', '.join(preset_folder.FILES)}, or of one saved by KerasHub."
)

# KerasHub's presets of Google's checkpoints begin so; Google computes the tanh form.
# The others are sentence encoders (MiniLM, BGE, E5), which say "gelu": the exact one.
_GOOGLE = "bert_"

Preset = preset_folder.Preset


def require(module: str) -> ModuleType:
    """Imports an optional dependency of the text tasks.

    Raises:
      ImportError: If it is missing, naming the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This task needs {module}, which cannot be imported: {error}. "
            'Install it with `pip install "tfamp[bert]"`.'
        ) from error


def find(preset: str) -> Preset:
    """Finds a preset's files, downloads what is missing, and checks that they fit.

    Reads the tokenizer and the headers of the weights; loads no weights yet.

    Args:
      preset: A KerasHub name such as "bert_tiny_en_uncased", "kaggle://...",
        "hf://org/name", or the path of a folder, of Hugging Face's or KerasHub's.

    Returns:
      A `Preset`.

    Raises:
      DataError: If it is not there, lacks files, cannot be downloaded, is no BERT
        encoder, or the weights are not those of its config.json.
    """
    for module in ("tokenizers", "safetensors"):
        require(module)
    if preset.startswith(_HF_PREFIX):
        return preset_folder.read(preset, _download_hf(preset))
    if preset.startswith(_KAGGLE_PREFIX):
        return preset_folder.read(preset, _download_kaggle(preset, preset))
    if "://" in preset:
        raise errors.DataError(
            f"The preset {preset!r} is of an unknown kind. Expected a KerasHub name, "
            f"{_KAGGLE_PREFIX}..., {_HF_PREFIX}org/name, or the path of a folder."
        )
    path = pathlib.Path(preset).expanduser()
    if path.is_dir():
        return preset_folder.read(preset, path)
    if os.sep in preset or preset.startswith(("~", ".")):
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


def _download_hf(preset):
    """Returns the folder of an hf:// name: downloaded, or as cached before."""
    hub = require("huggingface_hub")
    offline = not data.resolves("huggingface.co")  # Else the hub retries for 20 s.

    def download(files):
        try:
            folder = hub.snapshot_download(
                preset.removeprefix(_HF_PREFIX),
                allow_patterns=list(files),
                local_files_only=offline,
            )
        except (OSError, ValueError) as error:
            raise _unusable(preset, error) from error
        return pathlib.Path(folder)

    folder = download(preset_folder.FILES[:1])
    # Not the weights of a model that cannot be used.
    return download(preset_folder.files_of(preset, folder))


def _find_keras_hub(preset):
    """Returns a preset by its name in KerasHub."""
    models = require("keras_hub").models
    known = models.BertBackbone.presets
    if preset not in known:
        other = preset in models.Backbone.presets
        kind = "of another architecture" if other else "unknown"
        raise errors.DataError(
            f"The preset {preset!r} is {kind}. Expected one of {', '.join(known)}. "
            f"{_LOCAL_OPTION}"
        )
    handle = known[preset]["kaggle_handle"]
    found = preset_folder.read(preset, _download_kaggle(preset, handle))
    activation = None if preset.startswith(_GOOGLE) else "gelu"
    return found._replace(activation=activation)


def _download_kaggle(preset, handle):
    """Returns the folder of a kaggle:// name: downloaded, or as cached before."""
    hub = require("kagglehub")

    def download(file):
        try:
            path = hub.model_download(handle.removeprefix(_KAGGLE_PREFIX), file)
        except (OSError, ValueError, KeyError) as error:
            raise _unusable(preset, error) from error
        return pathlib.Path(path)

    folder = download(preset_folder.KERAS_FILES[0]).parent
    for file in preset_folder.files_of(preset, folder)[1:]:
        download(file)
    return folder


def _unusable(preset, error):
    """Returns the error for a preset that did not load, in one line."""
    reason = " ".join(str(error).split())[:200]
    return errors.DataError(
        f"The preset {preset!r} cannot be loaded: {type(error).__name__}: {reason}. "
        f"{_LOCAL_OPTION}"
    )
