"""Whether a BERT checkpoint holds the tensors that its config.json promises.

Only the headers of the files are read, so that a mistake shows before any work.
"""

import collections
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import h5py

from tfamp import errors

_SEGMENTS = 2  # `BertBackbone` has no other number.
_FLOATS = ("BF16", "F16", "F32", "F64")  # In a safetensors file.


class Sizes(NamedTuple):
    """The sizes of a BERT encoder.

    Attributes:
      vocabulary_size: Tokens.
      num_layers: Transformer layers.
      num_heads: Heads of each.
      hidden_dim: Width.
      intermediate_dim: Width of the feed-forward part.
      max_sequence_length: Positions.
    """

    vocabulary_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    intermediate_dim: int
    max_sequence_length: int


# Hugging Face's names of the same, in the same order.
_HF_NAMES = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
)


def read_sizes(
    config: Mapping, path: pathlib.Path, hugging_face: bool = False
) -> Sizes:
    """Returns the sizes in a configuration.

    Args:
      config: KerasHub's or Hugging Face's.
      path: Its file, for errors.
      hugging_face: Whether the fields are named as there.

    Raises:
      DataError: If a size is missing, or makes no sense.
    """
    names = _HF_NAMES if hugging_face else Sizes._fields
    values = [config.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            received = f"{name}={value!r}" if name in config else f"no {name}"
            raise errors.DataError(
                f"{path} has {received}. Expected an integer of at least 1."
            )
    sizes = Sizes(*values)
    if sizes.hidden_dim % sizes.num_heads:
        raise errors.DataError(
            f"{path} has {names[3]}={sizes.hidden_dim}, which {names[2]}="
            f"{sizes.num_heads} does not divide."
        )
    return sizes


def check_safetensors(path: pathlib.Path, sizes: Sizes) -> None:
    """Checks the tensors of a Hugging Face checkpoint, with or without a prefix.

    Args:
      path: A safetensors file.
      sizes: Of the encoder.

    Raises:
      DataError: If the file is damaged, or a tensor is missing, of another shape or
        not of floats.
    """
    found = _read_header(path)
    first = "embeddings.word_embeddings.weight"
    prefix = next((k.removesuffix(first) for k in found if k.endswith(first)), "")
    old_names = f"{prefix}embeddings.LayerNorm.gamma" in found
    beyond = f"{prefix}{_layer(sizes.num_layers)}."
    _check_layers(path, sizes, any(k.startswith(beyond) for k in found))
    for name, expected in _hf_shapes(sizes, old_names):
        shape, dtype = found.get(prefix + name, (None, None))
        if shape is None:
            raise errors.DataError(
                f"{path} has no tensor {prefix + name}. Expected one of shape "
                f"{list(expected)}, as config.json says."
            )
        _check_shape(path, prefix + name, shape, expected)
        if dtype not in _FLOATS:
            raise errors.DataError(
                f"{path}: the tensor {prefix + name} has dtype {dtype}. Expected one "
                f"of {', '.join(_FLOATS)}."
            )


def check_h5(path: pathlib.Path, sizes: Sizes) -> None:
    """Checks the tensors of a KerasHub checkpoint, by their shapes alone.

    Their paths in the file depend on how it was saved.

    Args:
      path: A `.weights.h5` file.
      sizes: Of the encoder.

    Raises:
      DataError: If the file is damaged, or lacks a tensor of a shape.
    """
    found = collections.Counter()

    def count(_, item):
        if isinstance(item, h5py.Dataset):
            found[tuple(item.shape)] += 1

    try:
        with h5py.File(path) as file:
            file.visititems(count)
    except OSError as error:
        raise _damaged(path, error) from error
    expected = list(_h5_shapes(sizes))
    left = found - collections.Counter(shape for _, shape in expected)
    for name, shape in expected:
        if not found[shape]:
            others = [list(each) for each in sorted(left) if len(each) == len(shape)]
            raise errors.DataError(
                f"{path} has no tensor of shape {list(shape)} for {name}, as "
                "config.json says. Received beside the others: "
                f"{', '.join(map(str, others)) or 'none'}."
            )
        found[shape] -= 1
    query = dict(expected)["the queries of layer 0"]
    _check_layers(path, sizes, bool(found[query]))


def _read_header(path):
    """Returns {tensor: (shape, dtype)} of a safetensors file."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {k: (v.get_shape(), v.get_dtype()) for k, v in slices.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path, error):
    reason = " ".join(str(error).split())[:200]
    return errors.DataError(f"{path} cannot be read: {reason}. Copy it again.")


def _check_layers(path, sizes, has_more):
    """Raises for layers that the encoder would leave out in silence."""
    if has_more:
        raise errors.DataError(
            f"{path} has more layers than the {sizes.num_layers} of config.json. "
            "Expected the files of one model."
        )


def _check_shape(path, name, shape, expected):
    if tuple(shape) != tuple(expected):
        raise errors.DataError(
            f"{path}: the tensor {name} has shape {list(shape)}. Expected "
            f"{list(expected)}, as config.json says."
        )


def _layer(index):
    return f"encoder.layer.{index}"


def _hf_shapes(sizes, old_names) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors of Hugging Face's BertModel.

    Args:
      sizes: Of the encoder.
      old_names: Whether normalization has gamma and beta, as in TensorFlow's.
    """
    hidden, inner = sizes.hidden_dim, sizes.intermediate_dim
    norm = ("gamma", "beta") if old_names else ("weight", "bias")

    def dense(name, rows, columns):
        return [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))]

    def normalization(name):
        return [(f"{name}.LayerNorm.{part}", (hidden,)) for part in norm]

    yield "embeddings.word_embeddings.weight", (sizes.vocabulary_size, hidden)
    positions = (sizes.max_sequence_length, hidden)
    yield "embeddings.position_embeddings.weight", positions
    yield "embeddings.token_type_embeddings.weight", (_SEGMENTS, hidden)
    yield from normalization("embeddings")
    for index in range(sizes.num_layers):
        layer = _layer(index)
        for part in ("query", "key", "value"):
            yield from dense(f"{layer}.attention.self.{part}", hidden, hidden)
        yield from dense(f"{layer}.attention.output.dense", hidden, hidden)
        yield from normalization(f"{layer}.attention.output")
        yield from dense(f"{layer}.intermediate.dense", inner, hidden)
        yield from dense(f"{layer}.output.dense", hidden, inner)
        yield from normalization(f"{layer}.output")
    yield from dense("pooler.dense", hidden, hidden)


def _h5_shapes(sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the variables of KerasHub's BertBackbone."""
    hidden, heads, inner = sizes.hidden_dim, sizes.num_heads, sizes.intermediate_dim
    one = hidden // heads
    yield "the token embedding", (sizes.vocabulary_size, hidden)
    yield "the position embedding", (sizes.max_sequence_length, hidden)
    yield "the segment embedding", (_SEGMENTS, hidden)
    layer = {
        "the queries": (hidden, heads, one),
        "the keys": (hidden, heads, one),
        "the values": (hidden, heads, one),
        "the attention's output": (heads, one, hidden),
        "the feed-forward's first kernel": (hidden, inner),
        "the feed-forward's second kernel": (inner, hidden),
    }
    for index in range(sizes.num_layers):
        for name, shape in layer.items():
            yield f"{name} of layer {index}", shape
    yield "the pooler", (hidden, hidden)
