"""A Keras variable that reads as float32 and is stored in fewer bits.

How a variable is stored is a property of the variable: `store` gives it to one that is
made, so references to the variable stay valid. Files hold what it reads as.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.storage import codes

_PIECE = 2**18  # Elements that are packed at once; what that takes is several times it.


class StoredVariable(keras.Variable):
    """A variable after `store`: the same object, of this class.

    Attributes:
      code: The `codes.Code` that it is stored in.
      natives: The TensorFlow variables that hold it.
    """

    code: codes.Code
    natives: tuple[tf.Variable, ...]
    _salt: int
    _counter: keras.Variable | None

    def _maybe_autocast(self, value):  # Keras 3.10 to 3.15: what `value` returns.
        if value.dtype == tf.bfloat16:  # In a layer of bfloat16, as it is.
            cast = super()._maybe_autocast(value)
            same = keras.backend.standardize_dtype(cast.dtype) == self.dtype
            return cast if same else tf.cast(cast, self.dtype)
        own = value is self._value
        return super()._maybe_autocast(read(self, self.natives) if own else value)

    def _direct_assign(self, value):
        assign_parts(self, pack(self, tf.cast(value, tf.float32), key_of(self)))

    @property
    def handle(self):
        """What a gradient tape knows a trained variable by."""
        return self.natives[0].handle

    # ---- Checkpoints of TensorFlow ----

    @property
    def _shared_name(self):
        return self.natives[0]._shared_name

    def _serialize_to_tensors(self):
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def _copy_trackable_to_cpu(self, object_map):
        object_map[self] = tf.Variable(self.value)

    def _export_to_saved_model_graph(self, object_map, tensor_map, options, **kwargs):
        if self.trainable:
            raise ValueError(
                "A SavedModel cannot hold weights that are stored in bfloat16 and "
                f"read as float32. Received: {self.path!r}, stored in bfloat16. Use "
                "`tfamp.export`, or save a .keras file and export what it loads."
            )
        # In the graph that is saved; its values are those of `_serialize_to_tensors`.
        object_map[self] = tf.Variable(tf.zeros(self.shape))
        return []

    def _write_object_proto(self, proto, options):
        self.natives[0]._write_object_proto(proto, options)
        proto.variable.dtype = tf.float32.as_datatype_enum
        proto.variable.shape.CopyFrom(self.shape.as_proto())


class _OpenedVariable(keras.Variable):
    """A variable that is a tensor meanwhile; see `updated`."""

    def _maybe_autocast(self, value):
        return super()._maybe_autocast(self._opened if value is self._value else value)

    def _direct_assign(self, value):
        self._opened = tf.cast(value, tf.float32)


def updated(
    function: Callable, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns what variables would have after a function that reads and assigns them.

    Args:
      function: It takes nothing.
      variables: Of any kind; they stay as they are.
      values: What they have before, in float32.
    """
    classes = [each.__class__ for each in variables]
    try:
        for each, value in zip(variables, values, strict=True):
            each.__class__, each._opened = _OpenedVariable, value
        function()
        return [each._opened for each in variables]
    finally:
        for each, kind in zip(variables, classes, strict=True):
            each.__class__ = kind
            vars(each).pop("_opened", None)


def is_special(variable: Any) -> bool:
    """Whether a variable is stored in fewer bits, or a tensor meanwhile."""
    return isinstance(variable, StoredVariable | _OpenedVariable)


def code_of(variable: keras.Variable) -> codes.Code:
    """Returns how a variable is stored."""
    return getattr(variable, "code", codes.FLOAT32)


def read(variable: keras.Variable, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the float32 tensor that these parts of a variable stand for."""
    code, natives = code_of(variable), parts_of(variable)
    return compiled(lambda *p: code.read(*p, variable.shape), natives)(*parts)


def pack(variable: keras.Variable, value: tf.Tensor, key: tf.Tensor) -> tuple:
    """Returns the parts of a float32 value, as a variable stores it."""
    # Only where it must: XLA takes `tf.ensure_shape` for a dynamic shape, and inlines
    # all calls of the whole step; drawing dropout's numbers takes 40 times as long.
    if not value.shape.is_fully_defined():
        value = tf.ensure_shape(value, variable.shape)
    return compiled(code_of(variable).pack, parts_of(variable))(value, key)


def parts_of(variable: keras.Variable) -> tuple:
    """Returns the TensorFlow variables that hold a variable."""
    return getattr(variable, "natives", (variable._value,))


def assign_parts(variable: keras.Variable, parts: Iterable[tf.Tensor]) -> None:
    """Assigns what a variable's code packed."""
    for native, part in zip(parts_of(variable), parts, strict=True):
        native.assign(part)


def key_of(variable: keras.Variable) -> tf.Tensor:
    """Returns the key of a variable's next random bits, uint32 [].

    The same on all replicas, at the next attempt, and after a restart.
    """
    counter = getattr(variable, "_counter", None)
    step = 0 if counter is None else counter.value
    salt = tf.constant(getattr(variable, "_salt", 0), tf.uint32)
    return codes.mix(codes.mix(salt) + tf.cast(step, tf.uint32))


def compiled(function: Callable, variables: Sequence[tf.Variable]) -> Callable:
    """Returns a function compiled by XLA, if it is called in a plain graph.

    There codes, as single operations, take ten times as long.

    Args:
      function: A function of tensors of known shapes.
      variables: TensorFlow's, on the device that it runs on.
    """
    in_graph = tf.inside_function() and not graph_context.in_xla()
    possible = graph_context.xla_supports({v.device for v in variables})
    if not in_graph or not possible or graph_context.watched():
        return function
    return tf.function(function, jit_compile=True, autograph=False)


def store(
    variable: keras.Variable,
    code: codes.Code,
    salt: int,
    counter: keras.Variable | None,
) -> None:
    """Has a float32 variable stored in another way from now on, rounded once.

    Args:
      variable: A variable that is made; it becomes a `StoredVariable`.
      code: How it is stored.
      salt: Another number for each variable: their random bits differ by it.
      counter: An integer variable []. Random bits are others at each of its values.
    """
    with tf.init_scope():
        value = tf.reshape(tf.convert_to_tensor(variable.value), [-1])
        pieces = [
            code.pack(value[i : i + _PIECE], tf.constant(salt + i, tf.uint32))
            for i in range(0, value.shape[0], _PIECE)
        ]
        parts = [tf.concat(each, 0) for each in zip(*pieces, strict=True)]
        if code is codes.BFLOAT16:
            parts = [tf.reshape(parts[0], variable.shape)]
        trained = variable.trainable
        # As Keras makes those of several replicas.
        how = {"aggregation": variable.value.aggregation} if trained else {}
        natives = tuple(
            tf.Variable(part, trainable=trained, name=variable.name, **how)
            for part in parts
        )
    variable.__class__ = StoredVariable
    variable.code, variable.natives = code, natives
    variable._salt, variable._counter = salt, counter
    variable._value = natives[0]


def restore(variable: StoredVariable) -> None:
    """Has a variable stored in float32 again.

    Args:
      variable: One that `store` was given.
    """
    with tf.init_scope():
        value = tf.Variable(
            tf.convert_to_tensor(variable.value),
            trainable=variable.trainable,
            name=variable.name,
        )
    variable.__class__, variable._value = keras.Variable, value
    del variable.natives


@contextlib.contextmanager
def in_float32(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Scopes variables that are stored in float32, and change nothing meanwhile.

    Args:
      variables: Of any kind; those that `store` was given are meant.
    """
    pairs = [(v, v.natives) for v in variables if isinstance(v, StoredVariable)]
    try:
        for each, _ in pairs:
            restore(each)
        yield
    finally:
        for each, natives in pairs:
            each.__class__, each.natives = StoredVariable, natives
            each._value = natives[0]
