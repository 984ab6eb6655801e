"""A Keras model's weights under the names and in the layouts that PyTorch has."""

import re

import keras
import numpy as np

# Layers of KerasHub's encoder, and those of a `TransformerEncoder` in it, in
# transformers; other layers have the same name on both sides.
_ENCODER = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "embeddings_layer_norm": "embeddings.LayerNorm",
    "pooled_dense": "pooler.dense",
}
_BLOCK = {
    "self_attention_layer/query": "attention.self.query",
    "self_attention_layer/key": "attention.self.key",
    "self_attention_layer/value": "attention.self.value",
    "self_attention_layer/attention_output": "attention.output.dense",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "feedforward_intermediate_dense": "intermediate.dense",
    "feedforward_output_dense": "output.dense",
    "feedforward_layer_norm": "output.LayerNorm",
}
_VARIABLES = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def to_torch(variable: keras.Variable) -> tuple[str, np.ndarray]:
    """Returns a variable's name and its value as PyTorch has them.

    Args:
      variable: Of a convolution, a dense layer, an attention, an embedding or a
        normalization.
    """
    layer, _, kind = variable.path.rpartition("/")
    value = keras.ops.convert_to_numpy(variable)
    name = f"{_torch_layer(layer)}.{_VARIABLES[kind]}"
    if kind == "bias":
        return name, value.reshape(-1)  # Of an attention: [heads, size of a head].
    return name, _kernel(layer, value) if kind == "kernel" else value


def _torch_layer(layer):
    block = re.fullmatch(r"transformer_layer_(\d+)/(.+)", layer)
    if block:
        return f"encoder.encoder.layer.{block[1]}.{_BLOCK[block[2]]}"
    return f"encoder.{_ENCODER[layer]}" if layer in _ENCODER else layer


def _kernel(layer, value):
    """Outputs first, as PyTorch has kernels, and the heads of an attention as one."""
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    inputs = -1 if layer.endswith("attention_output") else len(value)
    outputs = value.shape[-1] if inputs == -1 else -1
    return value.reshape(inputs, outputs).T
