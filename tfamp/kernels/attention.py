"""Attention whose memory grows with the length, and not with its square.

Keras on TensorFlow keeps every score of every head in float32 until the backward pass,
several times over. Here the queries go in blocks: the scores of one block are there at
a time, and the backward pass computes them again. All is float32 within, so that
results in 16 bits are rounded once.
"""

import functools
import math
from collections.abc import Iterator

import tensorflow as tf

from tfamp.facts import graph_context

_ROWS = 256  # Queries of a block: 64 and 128 took longer, 512 no less.
# Of causal attention: each runs on the keys up to its last query alone.
_SPANS = 4
_UNSEEN = -0.7 * 3.38953e38  # Keras' score of a key that is masked.


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    scale: float,
    bias: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    causal: bool = False,
    dropout: tuple[float, tf.Tensor] | None = None,
    unseen_rows: str = "mean",
) -> tf.Tensor:
    """Returns softmax(query @ key * scale + bias) @ value, as Keras does.

    All sizes must be known but for the batch's.

    Args:
      query: [batch, queries, heads, size] of a float format.
      key: [batch, keys, heads or 1, size] of the same.
      value: [batch, keys, heads or 1, any] of the same; so is what is returned.
      scale: Of the scores.
      bias: Float, broadcastable to [batch, heads, queries, keys].
      mask: bool, the same: True where a key is seen.
      causal: Whether the keys after a query's own place are masked, too.
      dropout: The share of the weights that is dropped, and the seed, int32 [2], that
        it is drawn by.
      unseen_rows: For a query whose keys are all masked: the "mean" of all values,
        as `dot_product_attention`, or "zero", as `MultiHeadAttention` with dropout.

    References:
      Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021,
      arxiv.org/abs/2112.05682
    """
    inputs = [x for x in (query, key, value, bias) if x is not None]
    zero, in_xla = unseen_rows == "zero", graph_context.in_xla()
    return _attend(inputs, scale, mask, causal, dropout, zero, in_xla)


# A graph of its own: eagerly, a tape would keep what each block computes; in a graph, a
# `ForwardAccumulator` takes no loops.
@functools.partial(tf.function, autograph=False)
def _attend(inputs, scale, mask, causal, dropout, zero, in_xla):
    length, keys = inputs[0].shape[1], inputs[1].shape[1]
    # A bias, or a mean of all values, takes every key.
    skips = causal and len(inputs) == 3 and (mask is None or zero)
    spans, rounds = list(_spans(length, keys, skips)), inputs[2].dtype == tf.bfloat16
    by_row = [True, False, False, *(x.shape[2] != 1 for x in inputs[3:])]

    def attended(first, query, key, value, bias=None):
        """Returns a block's output; all are float32 [batch, heads, rows, ...]."""
        scores = tf.matmul(query * scale, key, transpose_b=True)
        if bias is not None:
            scores += bias
        seen = _seen(mask, causal, first, query.shape[2], key.shape[2])
        if seen is not None:
            scores = tf.where(seen, scores, _UNSEEN)
        weights = tf.nn.softmax(scores)
        if seen is not None and zero:
            weights = tf.where(seen, weights, 0.0)
        if dropout is not None:
            weights = _dropped(weights, dropout, first)
        return _rounded_product(weights, value) if rounds else weights @ value

    def operands(first, rows, ends, query, key, value, *bias):
        query, *bias = (
            tf.cast(_rows(x, first, rows), tf.float32) for x in (query, *bias)
        )
        return [query, key[:, :, :ends], value[:, :, :ends], *bias]

    @tf.custom_gradient
    def attention(*inputs):
        def gradient(upstream):
            # Anew: what the forward pass made would be kept for it.
            wide, received = _wide(inputs), _by_heads([upstream])[0]

            def backward(*block):
                parts = operands(*block, *wide)
                output = attended(block[0], *parts)
                part = tf.cast(_rows(received, *block[:2]), tf.float32)
                # Where a `ForwardAccumulator` is active, a tape records nothing (2.21).
                return tf.gradients(output, parts, part)

            grads = _by_heads(_over(spans, backward, wide, by_row, in_xla))
            return [
                tf.cast(x, like.dtype) for x, like in zip(grads, inputs, strict=True)
            ]

        wide = _wide(inputs)

        def forward(*block):
            return [attended(block[0], *operands(*block, *wide))]

        output = _over(spans, forward, wide[:1], by_row[:1], in_xla)
        return tf.cast(_by_heads(output)[0], inputs[2].dtype), gradient

    return attention(*inputs)


def _seen(mask, causal, first, rows, ends):
    """Returns which keys a block's queries see, bool; None if it is all of them."""
    seen = None if mask is None else _rows(mask, first, rows)[..., :ends]
    if not causal:
        return seen
    past = first + tf.range(rows)[:, None] >= tf.range(ends)
    return past if seen is None else past & seen


def _dropped(weights, dropout, first):
    rate, seed = dropout
    # Integers that TensorFlow adds on the host, where a GPU's seed is read.
    block_seed = seed + tf.stack((first, 0))
    stays = tf.random.stateless_uniform(tf.shape(weights), block_seed) >= rate
    return tf.where(stays, weights / (1 - rate), 0.0)


@tf.custom_gradient
def _rounded_product(weights, value):
    """Returns weights @ value in bfloat16; all are float32, as are both gradients.

    bfloat16 is the faster one, and does for what Keras rounds to it, too; not for the
    gradient of the values, which adds up over the blocks, nor float16 for any gradient.
    """

    def gradient(upstream):
        of_weights = _rounded(upstream, value, transpose_b=True)
        return of_weights, tf.matmul(weights, upstream, transpose_a=True)

    return _rounded(weights, value), gradient


def _rounded(x, y, **keywords):
    low = (tf.cast(each, tf.bfloat16) for each in (x, y))
    return tf.cast(tf.matmul(*low, **keywords), tf.float32)


def _spans(queries, keys, skips) -> Iterator[tuple[int, int, int, int]]:
    """Yields each span's first query, blocks, queries of a block, and keys."""
    most, first = -(-queries // (_ROWS * (_SPANS if skips else 1))), 0
    while first < queries:
        blocks = min(most, (queries - first) // _ROWS)
        rows = _ROWS if blocks else queries - first
        blocks = max(blocks, 1)
        end = first + blocks * rows
        yield first, blocks, rows, min(end, keys) if skips else keys
        first = end


def _by_heads(tensors):
    """Swaps queries or keys and heads of the first three; a bias has them so."""
    turned = [tf.transpose(x, (0, 2, 1, 3)) for x in tensors[:3]]
    return [*turned, *tensors[3:]]


def _wide(inputs):
    """Returns all by heads: keys and values in float32."""
    query, key, value, *bias = _by_heads(inputs)
    return [query, tf.cast(key, tf.float32), tf.cast(value, tf.float32), *bias]


def _rows(x, first, rows):
    """Returns some rows of [batch, heads, all rows or 1, ...]."""
    if x.shape[2] == 1:
        return x
    return tf.slice(x, (0, 0, first, 0), (-1, -1, rows, -1))


def _over(spans, function, like, by_row, in_xla):
    """Runs a function over the blocks, one after another.

    It is given a block's first query, its queries, and its keys, and returns a tensor
    for each of `like`: the rows of the block, or a summand. Returns those put together.
    """
    parts, sums = [[] for _ in like], [tf.cast(x[:, :, :0], tf.float32) for x in like]
    for first, blocks, rows, ends in spans:

        def body(i, *state, first=first, rows=rows, ends=ends):
            results = zip(
                function(first + i * rows, rows, ends), state, by_row, strict=True
            )
            return i + 1, *(s.write(i, x) if row else s + x for x, s, row in results)

        # XLA takes no notice of it, and runs loops in turn by itself.
        with tf.control_dependencies([x for part in parts for x in part[-1:]]):
            state = [
                tf.TensorArray(tf.float32, blocks) if row else _padded(total, x, ends)
                for total, x, row in zip(sums, like, by_row, strict=True)
            ]
            _, *state = tf.while_loop(
                lambda i, *_, blocks=blocks: i < blocks,
                body,
                (0, *state),
                parallel_iterations=1,
                # XLA needs it for gradients of gradients. Without XLA a GPU would
                # compare with it itself, and the host wait for each block.
                maximum_iterations=blocks if in_xla else None,
            )
        for number, row in enumerate(by_row):
            if row:
                parts[number].append(_joined(state[number]))
        sums = state
    ends = math.inf
    return [
        tf.concat(part, 2) if row else _padded(total, x, ends)
        for part, total, x, row in zip(parts, sums, like, by_row, strict=True)
    ]


def _padded(total, like, ends):
    """Appends zeros for the keys that later queries see."""
    more = min(like.shape[2], ends) - total.shape[2]
    return tf.pad(total, ((0, 0), (0, 0), (0, more), (0, 0)))


def _joined(array):
    """Returns [batch, heads, rows, ...] of an array of blocks."""
    x = tf.transpose(array.stack(), (1, 2, 0, 3, 4))
    return tf.reshape(x, (-1, x.shape[1], x.shape[2] * x.shape[3], x.shape[4]))
