"""The gradient of a kernel that a whole batch is multiplied by, as one product.

Keras' EinsumDense, of which its attention is made, multiplies [batch, length, in] by
[in, out] as a batch of products. TensorFlow's gradient of the kernel is then
[batch, in, out], in 16 bits, and a sum over it. Dense has one product: a batch times
less memory, one launch for two, and one rounding.
"""

import tensorflow as tf


def of_product(original, op, received):
    """Returns the gradients of x [..., in] and kernel [in, out]; others are theirs."""
    x, kernel = op.inputs
    is_kernel = kernel.shape.rank == 2 and x.shape.rank not in (None, 2)
    turned = op.get_attr("adj_x") or op.get_attr("adj_y") or x.dtype.is_complex
    if not is_kernel or turned:
        return original(op, received)
    rows, of_rows = (tf.reshape(t, [-1, tf.shape(t)[-1]]) for t in (x, received))
    of_x = tf.reshape(tf.matmul(of_rows, kernel, transpose_b=True), tf.shape(x))
    of_x.set_shape(x.shape)
    return of_x, tf.matmul(rows, of_rows, transpose_a=True)
