"""What a cell in PyTorch is given: a Keras model's sizes, its weights and its batches.

`torch_cell` reads two files: FILE.npz with float32 weights under PyTorch's names and
layouts and with the batches, and FILE.json with the rest.
"""

import itertools
import json
import os
import pathlib
import subprocess
from typing import Any

import keras
import numpy as np

from tfamp.benchmark import twin_weights
from tfamp.precision import policy
from tfamp.training import base_config, optimizers, run_files, tasks

_CELL = pathlib.Path(__file__).with_name("torch_cell.py")
_PROBE = """
import importlib.metadata, json, torch, transformers
names = ("torch", "transformers")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""
_PROBE_SECONDS = 300  # The first import from a cold disk takes a minute.


def command(python: str) -> tuple[str, ...]:
    """Returns the program that measures a cell in PyTorch.

    Args:
      python: An interpreter with PyTorch.
    """
    return (python, "-P", str(_CELL))


def torch_versions(python: str) -> tuple[dict[str, str], str]:
    """Finds out whether an interpreter has PyTorch and transformers.

    Args:
      python: The interpreter.

    Returns:
      Their versions by name, and why there are none, in a line; "" if there are.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"{python}: {error}"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {}, lines[-1] if lines else f"{python}: ended with {done.returncode}"


# ---- Which configurations have a twin ----

# Settings of the loss scale that `GradScaler` has, and its names of them.
_SCALER = {
    "initial_scale": "init_scale",
    "growth_interval": "growth_interval",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
}


def reason_without_twin(config) -> str:
    """Returns why PyTorch has no twin of a configuration, in a sentence; "" if it has.

    Args:
      config: A configuration of any task; data are not read.
    """
    return _other_network(config) or _other_training(config)


def _other_network(config):
    model = config.model
    if config.task == "image_classification":
        if model.name != "cnn":
            return f"Of images only the network 'cnn' has a twin, not {model.name!r}."
    elif config.task != "text_classification":
        return f"The task {config.task!r} has no twin."
    elif model.preset:
        return f"Only new encoders have a twin, not the preset {model.preset!r}."
    return ""


def _other_training(config):
    precision = config.precision
    without = {
        "gradient accumulation": config.optimizer.accumulation_steps > 1,
        "label smoothing": config.get("label_smoothing", 0) != 0,
        "modes of single layers": bool(precision.overrides),
        "the finite guard": precision.finite_guard,
    }
    found = [name for name, asked in without.items() if asked]
    found += [f"the loss scale's {name}" for name in _other_scaling(precision)]
    return f"The twin does not have {' and '.join(found)}." if found else ""


def _other_scaling(precision):
    """Names of settings that are not the default and that `GradScaler` has not."""
    default = base_config.get_config().precision.loss_scale.to_dict()
    asked = precision.loss_scale.to_dict()
    ours = asked.keys() - _SCALER.keys() - {"enabled"}
    return sorted(name for name in ours if asked[name] != default[name])


# ---- Writing ----


def write(path: str | os.PathLike, config, source: tasks.Synthetic, steps: int) -> None:
    """Writes what the twin needs; the weights are those that a cell of tfamp starts of.

    Args:
      path: The .npz file; the rest goes into the .json file beside it, written last.
      config: The configuration; `config.seed` seeds the weights.
      source: Has `build_model` and `batches`, of (features, labels).
      steps: How many batches, and learning rates.

    Raises:
      ValueError: If there is no twin, or too few batches.
    """
    if reason := reason_without_twin(config):
        raise ValueError(f"PyTorch has no twin of this configuration. {reason}")
    keras.utils.set_random_seed(config.seed)
    with policy.policy_scope("float32"):
        model = source.build_model()
    weights = dict(map(twin_weights.to_torch, model.weights))
    batches, features = _batches(source, steps)
    described = {
        "network": _NETWORKS[config.task](config, model, weights),
        "features": features,
        "optimizer": _optimizer(config.optimizer, steps),
        "loss_scale": _loss_scale(config.precision.loss_scale),
        "seed": config.seed,
    }
    file = pathlib.Path(path)
    arrays = {f"weights/{name}": value for name, value in weights.items()}
    _save(file, {**arrays, **batches})
    run_files.write_text(file.with_suffix(".json"), json.dumps(described, indent=2))


def _save(file, arrays):
    """As `run_files.write_text`: a kill leaves no half of a file."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    os.replace(temporary, file)


def _batches(source, steps):
    """Returns arrays by their names in the file, and the names of the features."""
    arrays, names = {}, []
    found = list(itertools.islice(source.batches.as_numpy_iterator(), steps))
    if len(found) < steps:
        raise ValueError(
            f"There are too few batches. Received: {len(found)}. Expected {steps}."
        )
    for number, (features, labels) in enumerate(found):
        if isinstance(features, dict):  # Of integers, which PyTorch wants so.
            names = ["token_ids", "segment_ids", "padding_mask"]
            values = [features[name].astype("int64") for name in names]
        else:
            names, values = ["image"], [features]
        values.append(labels.astype("int64"))
        for name, value in zip((*names, "labels"), values, strict=True):
            arrays[f"batches/{number}/{name}"] = value
    return arrays, names


def _optimizer(config, steps):
    """Numbers of the optimizer; the schedule as the learning rate of each step."""
    made = optimizers.create(config, steps)
    rates = []
    for step in range(steps):
        made.iterations.assign(step)
        rates.append(float(made.learning_rate))
    return {
        "name": config.name,
        "learning_rates": rates,
        "epsilon": config.epsilon,
        # Adam has none, as `optimizers` has it.
        "weight_decay": 0.0 if config.name == "adam" else config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "clip_global_norm": config.clip_global_norm,
    }


def _loss_scale(settings):
    """Keywords of `GradScaler`; None without loss scaling."""
    if not settings.enabled:
        return None
    return {torch_name: settings[name] for name, torch_name in _SCALER.items()}


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
        name: len(weights[f"encoder.embeddings.{table}.weight"])
        for name, table in rows.items()
    }
    encoder |= {
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
    "image_classification": _describe_cnn,
    "text_classification": _describe_bert,
}
