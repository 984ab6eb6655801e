"""Where Keras' attention runs in linear memory: on every device, from a length on.

In a mode with 16-bit layers everywhere; in the others, which are stock Keras, where
`flash_attention=True` asks for it, which Keras refuses on TensorFlow. Where sizes are
not known when a graph is traced, or scores are returned, Keras' own runs.
"""

import keras
import tensorflow as tf

from tfamp.keras_patches import hooks
from tfamp.kernels import attention, install

FROM = 1024  # Queries and keys; of other numbers of each, their product counts.


def describe() -> str:
    """Says, for `status`, where it is used."""
    if not HOOKS.in_force():
        return "Keras'"
    condition = "" if LAYER_HOOKS.in_force() else " where flash_attention=True"
    return f"in linear memory{condition}, from {FROM} queries and keys"


@hooks.around
def _dot_product_attention(
    original,
    query,
    key,
    value,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    flash_attention=None,
    attn_logits_soft_cap=None,
):
    """Where this is not for it, Keras' own runs as if no flash attention were asked."""
    inputs = [keras.ops.convert_to_tensor(x) for x in (query, key, value)]
    of_scores = [_of_scores(x) for x in (bias, mask)]
    plain = scale is None or isinstance(scale, int | float)
    wanted = (flash_attention or LAYER_HOOKS.in_force()) and plain
    if not wanted or not _applies(*inputs, *of_scores):
        inputs = query, key, value, bias, mask, scale, is_causal
        return original(*inputs, False, attn_logits_soft_cap)
    query, key, value = inputs
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (tf.repeat(x, groups, axis=2) for x in (key, value))
    scale = key.shape[3] ** -0.5 if scale is None else scale
    return attention.attend(query, key, value, scale, *of_scores, is_causal)


def _compute_attention(
    layer,
    query,
    key,
    value,
    attention_mask=None,
    training=None,
    return_attention_scores=False,
    use_causal_mask=False,
):
    """Of layers with dropout; those without it call the function above."""
    from keras.src.random import seed_generator

    drop = layer._dropout_layer
    scores = getattr(layer, "_return_attention_scores", return_attention_scores)
    mask = None if attention_mask is None else tf.cast(attention_mask, tf.bool)
    mask = _of_scores(mask, -3)
    if not 0 < drop.rate < 1 or scores or not _applies(query, key, value, None, mask):
        return NotImplemented
    dropout = None
    if install.trains() if training is None else training:
        seed = tf.cast(seed_generator.draw_seed(drop.seed_generator), tf.int32)
        dropout = drop.rate, seed
    scale, options = query.shape[3] ** -0.5, (use_causal_mask, dropout, "zero")
    return attention.attend(query, key, value, scale, None, mask, *options), None


def _of_scores(x, axis=0):
    """Returns a bias or mask with the four dimensions of the scores."""
    if x is not None:
        x = tf.convert_to_tensor(x)
        while x.shape.rank is not None and x.shape.rank < 4:
            x = tf.expand_dims(x, axis)
    return x


def _applies(query, key, value, bias, mask) -> bool:
    """Whether these are many scores, of sizes that are known but for the batch's."""
    inputs, of_scores = (query, key, value), [x for x in (bias, mask) if x is not None]
    if any(x.shape.rank != 4 or None in x.shape[1:] for x in (*inputs, *of_scores)):
        return False
    _, queries, heads, _ = query.shape
    _, keys, groups, _ = key.shape
    return (
        queries * keys >= FROM**2
        and heads % groups == 0
        and query.dtype in (tf.float32, tf.bfloat16, tf.float16)
        and len({x.dtype for x in inputs}) == 1
        and (mask is None or mask.dtype == tf.bool)
        and all(x.shape[2] in (1, queries) for x in of_scores)
        and all(x.shape[3] in (1, keys) for x in of_scores)
    )


HOOKS = hooks.HookGroup(dot_product_attention=_dot_product_attention)
LAYER_HOOKS = hooks.HookGroup(
    _compute_attention=install.or_keras_own(_compute_attention),
    grouped_attention=install.or_keras_own(_compute_attention),
)
