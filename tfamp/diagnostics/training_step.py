"""A trace of a model's training step, as it would be on another device.

The step has the model's own layers, loss and metrics; its optimizer, and all that a
first step would make, are copies that are thrown away.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import hardware, names
from tfamp.inspect import structure, traces
from tfamp.keras_patches import compiling, hooks
from tfamp.precision import model_hooks
from tfamp.storage import low_bit

_UNINITIALIZED = "tensorflow.python.ops.resource_variable_ops:UninitializedVariable"
_SMALL = 4096  # Elements of a variable that may have its memory.


def trace(
    model: keras.Model,
    specs: Any,
    device: hardware.DeviceDescription,
    jit_compile: bool,
) -> tuple[tf.Graph, list[str]]:
    """Traces Keras' training step of a model; runs and changes nothing.

    Its parts are in the name scopes "forward", "backward" and "update".

    Args:
      model: A built model. One that is not compiled is given Adam and a mean square.
      specs: `tf.TensorSpec`s of known shapes, structured as the model's inputs.
      device: The device that it is traced for.
      jit_compile: Whether XLA compiles it.

    Returns:
      The graph, and what was assumed for it.

    Raises:
      ValueError: If the model does not train by Keras' own step.
      Exception: Whatever the model's own code raises.
    """
    _check(model)
    with (
        hardware.simulated(device),
        on_gpu(device),
        model_hooks.as_enabled(model, specs),
        traces.unchanged(structure.layers(model)),
        traces.looking(),
    ):
        step = _Step(model)
        traced = tf.function(
            step.one_step_on_data, jit_compile=jit_compile, autograph=False
        )
        return traced.get_concrete_function(specs).graph, step.notes


_CUDNN = hooks.HookGroup(_is_gpu_available=lambda original: lambda: True)


def on_gpu(device: hardware.DeviceDescription) -> contextlib.AbstractContextManager:
    """Scopes cuDNN's recurrent layers, if the device has them: Keras looks for one."""
    return _CUDNN.installed() if device.kind == "GPU" else contextlib.nullcontext()


def without_xla(model: keras.Model, device: hardware.DeviceDescription) -> list[str]:
    """Returns the layers for which Keras has no XLA: on a GPU those of cuDNN, too."""

    def supports(layer):
        if layer.supports_jit and getattr(layer, "use_cudnn", False):
            # Keras decides it when a layer is made, and does not save `use_cudnn`.
            layer = type(layer).from_config(layer.get_config())
        return layer.supports_jit

    with on_gpu(device):
        return [x.path for x in structure.walk(model) if not supports(x.layer)]


def _check(model):
    own = [
        name
        for name in ("train_step", "compute_loss")
        if not getattr(type(model), name).__module__.startswith(("keras.", "tfamp."))
    ]
    if own:
        raise ValueError(f"{type(model).__name__} has its own `{own[0]}`")
    if model.compiled and model.optimizer is None:
        raise ValueError("it was compiled without an optimizer")
    if not model.trainable_variables:
        raise ValueError("nothing of it trains")
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError("it has several replicas")


class _Step(keras.Model):
    """A compiled model around another one, with an optimizer of its own."""

    def __init__(self, model):
        super().__init__(name="step", dtype="float32")
        self.inner, self.built = model, True
        self.notes, self.targets = [], None
        if hasattr(model, "output_names"):  # By which losses are given.
            self.output_names = model.output_names
        arguments = self._as_compiled() if model.compiled else self._assumed()
        optimizer = arguments["optimizer"]
        with _without_memory(optimizer):
            optimizer.build(model.trainable_variables)
        vars(optimizer)["apply_gradients"] = _named_update(optimizer.apply_gradients)
        # Not that of `enable`, which would give the model its plan for good.
        keras_own = compiling.keras_own_compile()
        keras_own(self, **arguments, auto_scale_loss=False, jit_compile=False)

    def _as_compiled(self):
        model, config = self.inner, self.inner.get_compile_config()
        arguments = {"loss": model.loss, "optimizer": _copied(model.optimizer)}
        names = "loss_weights", "metrics", "weighted_metrics"
        try:
            read = keras.saving.deserialize_keras_object
            return arguments | {name: read(config[name]) for name in names}
        except Exception as error:  # Objects of the user's own, of any kind.
            self.notes.append(f"Launches are counted without the metrics: {error}")
            return arguments

    def _assumed(self):
        self.notes.append(
            "The model is not compiled: launches are counted with Adam and a mean "
            "square as its loss."
        )
        optimizer = model_hooks.scaled(self.inner, keras.optimizers.Adam())
        return {"loss": "mse", "optimizer": optimizer}

    def call(self, inputs, training=None):
        with tf.name_scope("forward"):
            return self.inner(inputs, training=training)

    # The kernels that `enable` installs look for this name.
    def one_step_on_data(self, x):
        return self.train_step((x,))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return super().compute_loss(x, self._targets(y_pred), y_pred, None, training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, self._targets(y_pred), y_pred, sample_weight)

    def _targets(self, predictions):
        """Returns placeholders that fit the predictions, or classes of them."""
        if self.targets is None:
            flat = keras.tree.flatten(predictions)
            losses = keras.tree.flatten(self.loss)
            losses *= len(flat) if len(losses) == 1 else 1
            placeholders = [*map(_target, flat, losses)]
            packed = keras.tree.pack_sequence_as(predictions, placeholders)
            vars(self)["targets"] = packed  # Keras would make other dicts of them.
        return self.targets


def _named_update(original):
    def apply_gradients(*args, **kwargs):
        with tf.name_scope("update"):
            return original(*args, **kwargs)

    return apply_gradients


def _target(prediction, loss):
    of_classes = "sparse" in str(getattr(loss, "name", loss)).lower()
    shape = prediction.shape[:-1] if of_classes else prediction.shape
    return tf.compat.v1.placeholder(tf.int32 if of_classes else tf.float32, shape)


def _copied(optimizer):
    """Returns an optimizer with the settings of another one, and no variables."""
    copy = optimizer.__class__.from_config(optimizer.get_config())
    for old, new in zip(
        low_bit.members_of(optimizer), low_bit.members_of(copy), strict=True
    ):
        if (state := vars(old).get("_state")) is not None:
            low_bit.low_bit(new, state)
    return copy


@contextlib.contextmanager
def _without_memory(optimizer) -> Iterator[None]:
    """Scopes variables that are there for a trace: large ones have no values."""
    uninitialized = names.resolve(_UNINITIALIZED)
    stores = any("_state" in vars(each) for each in low_bit.members_of(optimizer))
    if uninitialized is None or stores:  # Slots in fewer bits are made of their values.
        yield
        return

    def create(next_creator, **kwargs):
        value = kwargs["initial_value"]
        with tf.__internal__.FuncGraph("shapes").as_default():
            tensor = tf.convert_to_tensor(value() if callable(value) else value)
        if (tensor.shape.num_elements() or 0) < _SMALL:
            return next_creator(**kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k in ("name", "trainable")}
        return uninitialized(shape=tensor.shape, dtype=tensor.dtype, **kwargs)

    with tf.variable_creator_scope(create):
        yield
