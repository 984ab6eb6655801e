"""What `fit`, `evaluate` and `predict` do under XLA, which compiles each shape anew.

A batch with at most three quarters of the rows of an earlier one runs without XLA,
unless the batch before it had as few. So the rest at the end of an epoch costs no
compilation, and nothing is padded:

| batch | its step |
|---|---|
| more than three quarters of the most rows so far | compiled by XLA |
| fewer, the first in a row | the same step, as Keras makes it without XLA |
| fewer, the second in a row of that size | compiled by XLA, from then on |
| any, once XLA has refused a step, and Keras had chosen XLA | without XLA |

Where small operators become programs, on a GPU without XLA, steps are traced for the
sizes of the first kind of batch in the same way, and for any size for the rest.

Batches are drawn before a step and not within it, so a step can be taken again.
"""

import contextlib
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp import errors, progress, records
from tfamp.facts import graph_context, user_code
from tfamp.keras_patches import hooks

# By the function's name, the words for a step.
_KINDS = {
    "train_function": "training",
    "test_function": "evaluation",
    "predict_function": "prediction",
}
# Without XLA, a row takes up to 1.3 times the memory (BERT-Base, 384 tokens): a rest
# must not need more than what has run.
_REST = 0.75
# In errors that end a compilation, by TensorFlow or by XLA itself: nothing has run.
# The last is XLA's where cuDNN has no kernel for a convolution that it has fused.
_REFUSALS = re.compile(
    r"tf2xla conversion failed|xla/service/|Autotuner could not find any supported"
)
_OPERATORS = re.compile(
    r"(\w+) \(No registered|with op (\w+) must be a compile|op_type=\"(\w+)\""
)
_NODE = re.compile(r"{{node ([^}]+)}}")


def hooked(
    train: Callable[[Callable], Callable], clusters: Callable[[], bool]
) -> dict[str, Callable]:
    """Returns {name of a method: function of the original that makes its replacement}.

    Args:
      train: Such a function for `make_train_function`; what it gets is replaced.
      clusters: Whether small operators become programs now, where sizes are known.
    """
    makes = {f"make_{name}": _hook(name, clusters) for name in _KINDS}
    inner = makes["make_train_function"]
    return {**makes, "make_train_function": lambda original: train(inner(original))}


def _hook(name, clusters):
    @hooks.around
    def make_function(original, model, *args, **kwargs):
        before = getattr(model, name)
        original(model, *args, **kwargs)
        function = plain = getattr(model, name)
        if function is before or model.run_eagerly or not _is_alone(model):
            return function
        if model.jit_compile:
            model.jit_compile = False
            try:  # Both now, of the same `train_step`; neither is traced.
                original(model, force=True)
                plain = getattr(model, name)
            finally:
                model.jit_compile = True
        if model.jit_compile or clusters():
            setattr(
                model, name, Steps(model, _KINDS[name], function, plain, clusters())
            )
        return getattr(model, name)

    return make_function


def _is_alone(model):
    """Whether a model has no strategy, whose steps stay as they are."""
    with model.distribute_strategy.scope():
        return not tf.distribute.has_strategy()


class Steps:
    """A model's training, test or predict function under XLA; see the module.

    Args:
      model: The model.
      kind: What the steps are, such as "training".
      compiled: Keras' function that XLA compiles.
      plain: Keras' function of the same step without XLA; `compiled` itself, where
        only its small operators are compiled.
      clusters: Whether these become programs, where sizes are known.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        compiled: Callable,
        plain: Callable,
        clusters: bool,
    ):
        self._model, self._kind, self._clusters = model, kind, clusters
        self._compiled, self._plain, self._refused = compiled, plain, False
        self._rows: set[int] = set()  # Numbers of rows that XLA compiles.
        self._last: int | None = None
        self._seen: set[tuple] = set()  # Shapes that it has compiled.
        self._graphs: list[tuple] = []
        # The sizes that have programs: of others, Keras' function would be traced for
        # all sizes, too.
        self._first: Any = None

    def __call__(self, data):
        """Takes the next steps, as the function of Keras that this stands for."""
        with _weighed(self._model):
            return self._steps(data)

    def _steps(self, data):
        if self._refused:
            return self._plain(data)
        if isinstance(data, list):  # Batches of `predict`, which draws them itself.
            return self._step(data, lambda function: function(data))
        if not isinstance(data, tf.data.Iterator):  # One batch of `train_on_batch`.
            data = list(data)
            return self._attempt(data, lambda function: function(iter(data)))
        count, spec, outputs = self._model.steps_per_execution, data.element_spec, []
        if self._compiled is self._plain and _is_known(spec):
            return self._plain(data)
        loops = count > 1 and not self._clusters
        if loops and any(graph_spec == spec for _, graph_spec, _ in self._graphs):
            return self._compiled(data)  # Keras' loop: half the host's time.
        for batch in itertools.islice(data, count):
            outputs = [self.step(batch, spec)]
        if not outputs:
            raise StopIteration
        return outputs[0]

    def step(self, batch: Any, spec: Any, call: Callable | None = None) -> Any:
        """Takes a step on one batch that was drawn from a `tf.data.Dataset`.

        Args:
          batch: The batch, eager tensors in any structure.
          spec: The `element_spec` of the dataset, for which the step is traced.
          call: Function of (a `tf.function` of a batch, the batch) that calls it.

        Returns:
          What Keras' function returns.
        """

        def run(function):
            if graph_context.is_for_a_rest() and not self._clusters:
                return function(iter([batch]))  # Its size needs no copies to the host.
            exact = tf.nest.map_structure(tf.type_spec_from_value, batch)
            if self._clusters and self._first is None:
                self._first = exact
            graph = self._graph(function, exact if exact == self._first else spec)
            return call(graph, batch) if call else graph(batch)

        return self._step([batch], run)

    def _step(self, batches, run):
        rows, most = min(map(_rows, batches)), max(self._rows, default=0)
        is_rest = 0 < rows <= _REST * most and rows not in {*self._rows, self._last}
        self._last = rows
        if self._refused:
            return run(self._plain)
        if not is_rest:
            self._rows.add(rows)
            return self._attempt(batches, run)
        has_xla = self._compiled is not self._plain
        with graph_context.for_a_rest() if has_xla else contextlib.nullcontext():
            return run(self._plain)

    def _attempt(self, batches, run):
        """Takes a step under XLA; says if that compiles, and what it does not."""
        if self._compiled is self._plain:
            return run(self._plain)
        flat = tf.nest.flatten(batches, expand_composites=True)
        shapes = tuple(tuple(getattr(x, "shape", ())) for x in flat)
        if shapes in self._seen:
            return run(self._compiled)
        what = f"the {self._kind} step of model '{self._model.name}'"
        examples = errors.examples(list(dict.fromkeys(map(str, shapes))))
        logging.warning("XLA compiles %s for batches of shape %s.", what, examples)
        began = time.perf_counter()
        still = progress.Progress(what=f"compiling {what}", say=logging.warning)
        try:
            with still:
                outputs = run(self._compiled)
        except tf.errors.OpError as error:
            if not _REFUSALS.search(str(error)):
                raise
            self._refuse(error, what)
            return run(self._plain)
        seconds = time.perf_counter() - began
        logging.warning("XLA compiled %s, and it ran, in %.1f s.", what, seconds)
        self._seen.add(shapes)
        return outputs

    def _refuse(self, error, what):
        """Warns that XLA is given up, or raises where the user has asked for it."""
        cause = f"XLA does not compile {_operator(str(error))} in {what}"
        cure = "Use `compile(jit_compile=False)`"
        if records.of(self._model).wants_xla:
            error.add_note(f"{cause}. Received: jit_compile=True. {cure}.")
            raise error
        user_code.warn(
            f"{cause}, and Keras had chosen XLA by itself: the model goes on without "
            f"it, with the same batch. {cure} to say so from the start."
        )
        self._refused = True
        self._model.jit_compile = False  # Also of the functions that are still to come.

    def _graph(self, function, spec):
        """Keras' function on one batch, traced as Keras does: once for all sizes."""
        for of, graph_spec, graph in self._graphs:
            if of is function and graph_spec == spec:
                return graph

        @tf.function(input_signature=[spec], autograph=False)
        def graph(batch):
            return function(iter([batch]))

        self._graphs.append((function, spec, graph))
        return graph


def _weighed(model):
    """Scopes the losses of several outputs as means over rows.

    Keras weighs a batch's by the rows that its graph knows, and by 1 where it knows
    none; here an epoch has graphs of both kinds.
    """
    whole = getattr(model, "_compile_loss", None)
    if whole is None:
        return contextlib.nullcontext()
    original, original_build = whole.call, whole.build

    def call(y_true, y_pred, sample_weight=None):
        rows = tf.shape(keras.tree.flatten(y_pred)[0])[0]

        def weigh():
            weighed = [_of_rows(metric, rows) for metric in whole.metrics if metric]
            stack.enter_context(hooks.replaced(weighed))

        def build(*args):  # It makes the metrics.
            original_build(*args)
            weigh()

        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks.replaced([(whole, "build", build)]))
            weigh()  # None yet, where it is not built.
            return original(y_true, y_pred, sample_weight)

    return hooks.replaced([(whole, "call", call)])


def _of_rows(metric, rows):
    original = metric.update_state

    def update_state(value, sample_weight=None):
        return original(value, rows if sample_weight is None else sample_weight)

    return metric, "update_state", update_state


def _is_known(spec):
    flat = tf.nest.flatten(spec, expand_composites=True)
    return all(x.shape.is_fully_defined() for x in flat)


def _rows(batch):
    """Returns the length of what comes first in a batch that has one; else 0."""
    shapes = (getattr(each, "shape", ()) for each in keras.tree.flatten(batch))
    return next((shape[0] or 0 for shape in shapes if len(shape)), 0)


def _operator(message):
    """Returns the operators, and the node, that a refusal names; else its beginning."""
    operators = [next(filter(None, x)) for x in _OPERATORS.findall(message)]
    where = _NODE.search(message)
    names = errors.examples(list(dict.fromkeys(operators)))
    if not names and where is None:
        return f"an operator ({message.strip()[:200]})"
    return f"{names or 'an operator'} ({where[1]})" if where else names
