"""Operations inside the functions, loops and conditions of a traced graph."""

from collections.abc import Iterator

import tensorflow as tf

# Operation -> its attributes that name what it runs. Not a loop's condition.
_BODIES = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "MapDefun": ("f",),
    "While": ("body",),
    "StatelessWhile": ("body",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}
# How often these run is not written in the graph.
REPEATING = frozenset(("While", "StatelessWhile", "MapDefun"))
CALLS = frozenset(_BODIES)


def bodies(op: tf.Operation) -> Iterator[tf.Graph]:
    """Yields the graphs of what an operation runs; none for most.

    The same objects in which the operations were traced, where that was in this
    process. Of a condition all branches.
    """
    for attribute in _BODIES.get(op.type, ()):
        value = op.get_attr(attribute)
        for each in value if isinstance(value, list) else [value]:
            # No public name in TensorFlow 2.21; guarded by
            # tests/benchmark/test_step_flops.py.
            yield op.graph._get_function(each.name).graph
