"""The network of a table: entity embeddings, normalization and dense layers."""

import keras
from ml_collections import config_dict

from tfamp.training import tabular_columns, tabular_encoders


def build_model(
    model: config_dict.ConfigDict, encoder: tabular_encoders.Encoder
) -> keras.Model:
    """Builds the network under the dtype policy in force.

    Every categorical column has an embedding; they and the normalized continuous
    columns go through dense layers with ReLU. Normalization and the output are in
    float32 in every mode: a distance in meters overflows float16, and the steps of a
    year do not survive bfloat16's 8 bits of precision.

    Args:
      model: Config with `dense_layers` (units), `dropout` after each of them,
        `embedding_dropout`, and `embedding_sizes`, pairs of a column and its size; see
        `embedding_size` for the others.
      encoder: Categories and scales.

    Returns:
      A functional model from `tabular_encoders.encode`'s inputs to float32 [batch, 1]:
      log(1 + target).

    References:
      Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016,
      https://arxiv.org/abs/1604.06737.
    """
    given = dict(model.embedding_sizes)
    inputs, parts = {}, []
    for column, count in encoder.sizes.items():
        name = tabular_columns.feature_name(column)
        inputs[name] = keras.Input((), dtype="int32", name=name)
        size = given.get(column) or embedding_size(count)
        parts.append(_embed(inputs[name], count, size, model.embedding_dropout, name))
    if encoder.mean:
        name = tabular_columns.CONTINUOUS
        inputs[name] = keras.Input((len(encoder.mean),), dtype="float32", name=name)
        normalize = keras.layers.Normalization(
            mean=encoder.mean,
            variance=encoder.variance,
            dtype="float32",
            name="normalization",
        )
        parts.append(normalize(inputs[name]))
    x = keras.layers.Concatenate(name="features")(parts) if parts[1:] else parts[0]
    for number, units in enumerate(model.dense_layers, 1):
        x = keras.layers.Dense(units, activation="relu", name=f"dense{number}")(x)
        if model.dropout:
            x = keras.layers.Dropout(model.dropout, name=f"dropout{number}")(x)
    x = keras.layers.Dense(1, dtype="float32", name="standardized")(x)
    rescale = keras.layers.Rescaling(
        encoder.target_scale, encoder.target_mean, dtype="float32", name="log_target"
    )
    return keras.Model(inputs, rescale(x), name="entity_embeddings")


def embedding_size(categories: int) -> int:
    """Returns the default size of an embedding: min(600, round(1.6 n^0.56)).

    Args:
      categories: Number of categories, the unseen one included.

    References:
      fast.ai, `emb_sz_rule`, https://docs.fast.ai/tabular.model.html.
    """
    return min(600, round(1.6 * categories**0.56))


def _embed(x, categories, size, rate, name):
    layer = keras.layers.Embedding(categories, size, name=f"embedding_{name}")
    x = layer(x)
    if not rate:
        return x
    return keras.layers.Dropout(rate, name=f"embedding_dropout_{name}")(x)
