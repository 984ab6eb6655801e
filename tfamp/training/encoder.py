"""The BERT encoder that every text task shares: pretrained, or new of a given size."""

import pathlib

import keras
from ml_collections import config_dict

from tfamp.training import pretrained


def find(config: config_dict.ConfigDict) -> pretrained.Preset | None:
    """Finds the pretrained encoder and checks the length of the examples.

    Loads no weights yet: this comes before a corpus is read.

    Args:
      config: `config.model` has preset ("" for a new encoder, else see
        `pretrained.find`) and max_sequence_length, the positions of a new encoder;
        `config.data.sequence_length` is the tokens of an example.

    Returns:
      A `Preset`; None for a new encoder.

    Raises:
      DataError: If the preset is not there or not a BERT encoder.
      ImportError: If an optional dependency is missing.
      ValueError: If examples are longer than the encoder's positions.
    """
    preset = pretrained.find(config.model.preset) if config.model.preset else None
    positions = preset.max_sequence_length if preset else None
    if preset is None:
        positions = config.model.max_sequence_length
    length = config.data.sequence_length
    if positions is not None and length > positions:
        raise ValueError(
            "`config.data.sequence_length` must be at most the encoder's positions. "
            f"Received: {length}, positions: {positions}."
        )
    pretrained.require("keras_hub")  # Now, not after the corpus was read.
    return preset


def build(
    config: config_dict.ConfigDict, preset: pretrained.Preset | None
) -> keras.Model:
    """Builds the encoder under the dtype policy in force.

    Args:
      config: `config.model` has dropout, and the sizes of a new encoder: num_layers,
        num_heads, hidden_dim, intermediate_dim, max_sequence_length, vocabulary_size.
      preset: From `find`.

    Returns:
      A functional model from {token_ids, segment_ids, padding_mask} to
      {sequence_output [batch, length, hidden_dim], pooled_output [batch, hidden_dim]}.

    Raises:
      DataError: If the weights of a preset cannot be loaded.
    """
    if preset:
        return pretrained.build_backbone(preset, config.model.dropout)
    return pretrained.require("keras_hub").models.BertBackbone(
        vocabulary_size=config.model.vocabulary_size,
        num_layers=config.model.num_layers,
        num_heads=config.model.num_heads,
        hidden_dim=config.model.hidden_dim,
        intermediate_dim=config.model.intermediate_dim,
        dropout=config.model.dropout,
        max_sequence_length=config.model.max_sequence_length,
    )


def describe(config: config_dict.ConfigDict) -> str:
    """Returns the encoder's part of a report's line on data and model."""
    if not config.model.preset:
        model = config.model
        return f"encoder: new, {model.num_layers} layers of {model.hidden_dim}"
    # Of a folder only the last parts: the rest belongs to this host.
    return "encoder: " + "/".join(pathlib.PurePath(config.model.preset).parts[-2:])
