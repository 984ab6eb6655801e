"""How float32 numbers are stored in 8 bits or in bfloat16, and read again.

A code of 8 bits is the upper bits of float32 with another bias: three of mantissa, and
as many of exponent as are left. Blocks of 256 elements share the bias, which is stored
as the exponent of a power of two.

| code | exponents below the block's largest | for | smaller numbers |
| --- | --- | --- | --- |
| signed | 15 | averages of gradients | 0 |
| unsigned | 31 | averages of their squares | the smallest code: Adam divides by it |

Rounding is stochastic: random bits are added below the last bit that is kept, and what
is below it is cut off. So what is stored is right in the mean, and an average moves
even by less than half a step. What was stored before is stored exactly. NaN and
infinity have codes of their own.

References:
  Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021,
  https://arxiv.org/abs/2110.02861
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

BLOCK = 256  # Elements that share a scale, as in the reference.
_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # float32's.
_LARGEST = 0x7F7  # The upper 12 bits of the largest finite number.

_and, _or = tf.bitwise.bitwise_and, tf.bitwise.bitwise_or
_left, _right = tf.bitwise.left_shift, tf.bitwise.right_shift


class Code(NamedTuple):
    """A format of storage.

    Attributes:
      pack: Function of a float32 tensor and a uint32 key [] that returns the tensors to
        store.
      read: Function of these tensors and a shape that returns float32 of that shape.
    """

    pack: Callable
    read: Callable


def mix(x: tf.Tensor) -> tf.Tensor:
    """Hashes uint32 (the permutation `lowbias32` of Chris Wellons).

    XLA fuses it into the operation that uses it, unlike `tf.random.stateless_uniform`.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = tf.bitwise.bitwise_xor(x, _right(x, tf.constant(shift, tf.uint32)))
        x *= tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(x, _right(x, tf.constant(16, tf.uint32)))


def _noise(x, key, bits):
    """Returns random integers of so many bits: int32, in the shape of x."""
    *outer, last = x.shape
    # XLA writes a range out into the program: two short ones, not one for all elements.
    places = tf.range(math.prod(outer))[:, None] * last + tf.range(last)
    drawn = mix(tf.cast(tf.reshape(places, x.shape), tf.uint32) + key)
    return tf.cast(_right(drawn, tf.constant(32 - bits, tf.uint32)), tf.int32)


def _split(x):
    """Returns a float32 tensor's bits without the sign, and the sign's: int32."""
    bits = tf.bitcast(x, tf.int32)
    return _and(bits, 0x7FFFFFFF), _right(bits, 31)


# ---- 8 bits ----


def _eight(signed: bool) -> Code:
    top = 125 if signed else 253  # Of finite numbers; then infinity, then NaN.

    def bias(exponent):
        return tf.maximum(_left(tf.cast(exponent, tf.int32), 3) - top, 0)

    def pack(x, key):
        flat = tf.reshape(x, [-1])
        flat = tf.pad(flat, [[0, -x.shape.num_elements() % BLOCK]])
        size, sign = _split(tf.reshape(flat, [-1, BLOCK]))
        finite = size < _INFINITY
        # In two parts, as numbers of another kind, or XLA merges them: on a CPU it
        # vectorizes no reduction over the last axis. Floats are ordered as their bits.
        lanes = tf.reshape(tf.where(finite, size, 0), [-1, 8, BLOCK // 8])
        lanes = tf.bitcast(tf.reduce_max(lanes, 1), tf.float32)
        largest = tf.bitcast(tf.reduce_max(lanes, -1, keepdims=True), tf.int32)
        # Of the smallest power of two that is no less.
        exponent = _right(largest + 0x7FFFFF, 23)
        rounded = tf.minimum(_right(size + _noise(size, key, 20), 20), _LARGEST)
        lowest = 0 if signed else tf.cast(size > 0, tf.int32)
        code = tf.clip_by_value(rounded - bias(exponent), lowest, top)
        special = top + 1 + tf.cast(size > _INFINITY, tf.int32)
        code = tf.where(finite, code, special)
        code = _or(code, _and(sign, 0x80)) if signed else code
        return tf.cast(code, tf.uint8), tf.cast(exponent, tf.uint8)

    def read(codes, exponent, shape):
        codes = tf.cast(codes, tf.int32)
        code = _and(codes, 0x7F) if signed else codes
        bits = tf.where(code > 0, _left(code + bias(exponent), 20), 0)
        special = tf.where(code == top + 1, _INFINITY, _NAN)
        bits = tf.where(code > top, special, bits)
        bits = _or(bits, _left(_and(codes, 0x80), 24)) if signed else bits
        flat = tf.reshape(tf.bitcast(bits, tf.float32), [-1])
        return tf.reshape(flat[: shape.num_elements()], shape)

    return Code(pack, read)


# ---- bfloat16 ----


def _pack_bfloat16(x, key):
    size, sign = _split(x)
    rounded = tf.minimum(_right(size + _noise(size, key, 16), 16), 0x7F7F)
    special = tf.where(size > _INFINITY, _NAN >> 16, _INFINITY >> 16)
    bits = tf.where(size < _INFINITY, rounded, special)
    bits = _or(bits, _and(sign, 0x8000))
    return (tf.bitcast(tf.cast(bits, tf.uint16), tf.bfloat16),)


SIGNED, UNSIGNED = _eight(True), _eight(False)
BFLOAT16 = Code(_pack_bfloat16, lambda x, shape: tf.cast(x, tf.float32))
# In which a variable that is not stored takes part in an update.
FLOAT32 = Code(lambda x, key: (x,), lambda x, shape: x)
