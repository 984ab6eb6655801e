"""A Keras variable that reads as float32 and is stored in fewer bits.

How a variable is stored is a property of the variable: `store` gives it to one that is
made, and whatever holds the variable goes on with it. Files have what it reads as.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.memory import codes


class StoredVariable(keras.Variable):
    """What `store` makes of a variable: the same object, of this class.

    Attributes:
      code: The `codes.Code` that it is stored in.
      natives: The TensorFlow variables that hold it.
    """

    code: codes.Code
    natives: tuple[tf.Variable, ...]
    _salt = 0
    _counter: keras.Variable | None = None
    _opened: tf.Tensor | None = None  # Its value, while it is open.

    def _maybe_autocast(self, value):  # Keras 3.10 to 3.15: what `value` returns.
        if value is not self._value:
            return super()._maybe_autocast(value)
        if self._opened is not None:
            return self._opened
        if value.dtype == tf.bfloat16:  # In a layer of bfloat16, as it is.
            found = super()._maybe_autocast(value)
            same = keras.backend.standardize_dtype(found.dtype) == self.dtype
            return found if same else tf.cast(found, self.dtype)
        read = compiled(lambda *parts: self.code.read(*parts, self.shape), self.natives)
        return super()._maybe_autocast(read(*self.natives))

    def _direct_assign(self, value):
        if self._opened is not None:
            self._opened = tf.cast(value, tf.float32)
            return
        # The same on all replicas, at the next attempt, and after a restart.
        step = 0 if self._counter is None else self._counter.value
        key = codes.mix(codes.mix(tf.constant(self._salt, tf.uint32)) + _uint32(step))
        pack = compiled(self.code.pack, self.natives)
        packed = pack(tf.cast(value, tf.float32), key)
        for native, part in zip(self.natives, packed, strict=True):
            native.assign(part)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Reads it once and stores it once, however often it is assigned meanwhile."""
        self._opened = self.value
        try:
            yield
            value = self._opened
        finally:
            self._opened = None
        self._direct_assign(value)

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
                "A SavedModel would hold weights of bfloat16 under float32's name. "
                f"Received: {self.path!r}, stored in bfloat16. Use `tfamp.export`, or "
                "save a .keras file and export what it loads."
            )
        # In the graph that is saved; its values are those of `_serialize_to_tensors`.
        object_map[self] = tf.Variable(tf.zeros(self.shape))
        return []

    def _write_object_proto(self, proto, options):
        self.natives[0]._write_object_proto(proto, options)
        proto.variable.dtype = tf.float32.as_datatype_enum
        proto.variable.shape.CopyFrom(self.shape.as_proto())


def compiled(function: Callable, variables: Sequence[tf.Variable]) -> Callable:
    """Returns a function compiled by XLA, if it is called in a plain graph.

    There codes, as single operations, take ten times as long.

    Args:
      function: A function of tensors of known shapes.
      variables: TensorFlow's, on the device that it runs on.
    """
    in_graph = tf.inside_function() and not graph_context.in_xla()
    devices = {v.device for v in variables}
    possible = graph_context.xla_supports(devices, ("CPU", "GPU"))
    if not in_graph or not possible or graph_context.watched():
        return function
    return tf.function(function, jit_compile=True, autograph=False)


def _uint32(step):
    return tf.cast(step, tf.uint32)


def store(
    variable: keras.Variable,
    code: codes.Code,
    salt: int = 0,
    counter: keras.Variable | None = None,
) -> None:
    """Has a float32 variable stored in another way from now on, rounded once.

    Args:
      variable: A variable that is made; it becomes a `StoredVariable`.
      code: How it is stored.
      salt: Another number for each variable: their random bits differ by it.
      counter: An integer variable []. Random bits are others at each of its values.
    """
    with tf.init_scope():
        value = tf.convert_to_tensor(variable.value)
        parts = code.pack(value, tf.constant(salt, tf.uint32))
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
    found = [(v, v.natives) for v in variables if isinstance(v, StoredVariable)]
    try:
        for each, _ in found:
            restore(each)
        yield
    finally:
        for each, natives in found:
            each.__class__, each.natives = StoredVariable, natives
            each._value = natives[0]
