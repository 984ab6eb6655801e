"""What a cell in PyTorch is given: a Keras model's sizes, weights and batches.

One safetensors file: float32 weights under PyTorch's names and layouts
("weights/..."), batches ("batches/0/..."), and the rest as JSON in its metadata.
"""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from ml_collections import config_dict

from tfamp import extras
from tfamp.precision import policy
from tfamp.runs import base_config, optimizers, tasks

# Settings of the loss scale that `GradScaler` has, and its names of them.
_SCALER = {
    "initial_scale": "init_scale",
    "growth_interval": "growth_interval",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
}
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


def has_twin(config) -> bool:
    """Returns whether PyTorch has a twin of a configuration.

    Args:
      config: A configuration of any task; data are not read.
    """
    model, precision = config.model, config.precision
    default = base_config.get_config().precision.loss_scale.to_dict()
    scaling = precision.loss_scale.to_dict()
    ours = scaling.keys() - _SCALER.keys() - {"enabled"}
    network = config.task in _NETWORKS and (
        not model.preset if "preset" in model else model.name == "cnn"
    )
    return network and not (
        config.optimizer.accumulation_steps > 1
        or config.get("label_smoothing", 0)
        or precision.overrides
        or precision.finite_guard
        or any(scaling[name] != default[name] for name in ours)
    )


def write(file: str, plain: Mapping[str, Any], steps: int) -> None:
    """Writes what the twin needs; the weights are those that tfamp's cells start from.

    Args:
      file: The file.
      plain: The cell's training configuration as dicts.
      steps: How many batches, and learning rates.
    """
    safetensors = extras.require("safetensors.numpy")
    config = config_dict.ConfigDict(plain)
    source = tasks.synthetic(config)
    keras.utils.set_random_seed(config.seed)
    with policy.policy_scope("float32"):
        model = source.build_model()
    weights = dict(map(to_torch, model.weights))
    features, batches = _batches(source, steps)
    scaling = config.precision.loss_scale
    described = {
        "network": _NETWORKS[config.task](config, model, weights),
        "features": features,
        "optimizer": _optimizer(config.optimizer, steps),
        # Keywords of `GradScaler`; None without loss scaling.
        "loss_scale": {theirs: scaling[ours] for ours, theirs in _SCALER.items()}
        if scaling.enabled
        else None,
        "seed": config.seed,
    }
    arrays = {f"weights/{name}": value for name, value in weights.items()} | batches
    contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    safetensors.save_file(contiguous, file, {"request": json.dumps(described)})


def _batches(source, steps):
    """Returns the names of the features, and arrays by their names in the file."""
    names, arrays = [], {}
    batches = itertools.islice(source.batches.as_numpy_iterator(), steps)
    for number, (features, labels) in enumerate(batches):
        if isinstance(features, dict):  # Of integers, which PyTorch wants so.
            names = ["token_ids", "segment_ids", "padding_mask"]
            values = [features[name].astype("int64") for name in names]
        else:
            names, values = ["image"], [features]
        values.append(labels.astype("int64"))
        for name, value in zip((*names, "labels"), values, strict=True):
            arrays[f"batches/{number}/{name}"] = value
    return names, arrays


def _optimizer(config, steps):
    """Numbers of the optimizer; the schedule as the learning rate of each step."""
    optimizer = optimizers.create(config, steps)
    rates = []
    for step in range(steps):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    names = ("name", "epsilon", "momentum", "nesterov", "clip_global_norm")
    return {name: config[name] for name in names} | {
        "learning_rates": rates,
        # Adam has none, as `optimizers` has it.
        "weight_decay": 0.0 if config.name == "adam" else config.weight_decay,
    }


# ---- Names and layouts ----


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


# ---- The networks ----


def _describe_cnn(config, model, weights) -> dict[str, Any]:
    names = ("blocks", "batch_norm", "dense", "dropout")
    return {
        "kind": "cnn",
        "image_shape": model.input_shape[1:],
        "classes": model.output_shape[-1],
        **{name: config.model[name] for name in names},
    }


def _describe_bert(config, model, weights) -> dict[str, Any]:
    sizes = config.model
    rows = {
        "vocab_size": "word_embeddings",
        "max_position_embeddings": "position_embeddings",
        "type_vocab_size": "token_type_embeddings",
    }
    encoder = {
        **{
            name: len(weights[f"encoder.embeddings.{table}.weight"])
            for name, table in rows.items()
        },
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "hidden_size": sizes.hidden_dim,
        "intermediate_size": sizes.intermediate_dim,
        "hidden_dropout_prob": sizes.dropout,
        "attention_probs_dropout_prob": sizes.dropout,
        # KerasHub's, as functions of the same values.
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-12,
        # transformers gives the row of a padding token no gradient.
        "pad_token_id": None,
    }
    return {
        "kind": "bert",
        "encoder": encoder,
        "pooling": sizes.pooling,
        "dropout": sizes.dropout,
        "classes": model.output_shape[-1],
    }


# Task -> function of configuration, model and PyTorch's weights by name.
_NETWORKS = {
    "tfamp.recipes.images:create": _describe_cnn,
    "tfamp.recipes.text_classification:create": _describe_bert,
}
