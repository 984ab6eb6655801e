"""Gradient accumulation over replicas: as on one device, and summed once a window.

With loss scaling and without. In fresh processes, as in test_optimizer_replicas.py.
"""

import functools
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

NAN = float("nan")
WINDOW = 3
INNER = {
    "momentum": lambda o, k: o.SGD(0.1, momentum=0.9, gradient_accumulation_steps=k),
    "Adam": lambda o, k: o.Adam(0.1, gradient_accumulation_steps=k),
    "clipped AdamW": lambda o, k: o.AdamW(
        0.1, weight_decay=0.1, global_clipnorm=0.5, gradient_accumulation_steps=k
    ),
    "averages": lambda o, k: o.SGD(
        0.1, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=k
    ),
}
SCALED = {**INNER}
if hasattr(keras.optimizers, "MultiOptimizer"):
    # Where nothing is accumulated, Keras clips before the sum; loss scaling after it.
    SCALED["several"] = lambda o, k: o.MultiOptimizer(
        o.OptimizerMap(
            o.SGD(0.1, clipnorm=0.5),
            {".*second": o.Adam(0.1, gradient_accumulation_steps=k)},
        )
    )


@functools.cache  # Two strategies in one process collide in their collectives.
def _strategy(replicas):
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _start(strategy, inner, scaled):
    """Returns an optimizer, its variables, and a step of one micro-batch.

    The gradients of all replicas together are those of one device. The step takes the
    number of the micro-batch, and the replica that gets NaN.
    """
    with strategy.scope():
        values = {"first": [1.0, 2.0], "second": [[3.0], [4.0]]}
        weights = [keras.Variable(value, name=name) for name, value in values.items()]
        made = inner(keras.optimizers, WINDOW)
        if scaled:
            made = tfamp.LossScaleOptimizer(made, 8.0)
        made.build(weights)
    alone = strategy.num_replicas_in_sync == 1

    def gradients(number, mine, bad):
        ids = [0.0, 1.0] if alone else [mine]
        first = sum(number + [1.0, 2.0] * tf.stack([i, 1.0 - i]) for i in ids)
        is_bad = tf.logical_and(bad >= 0, tf.logical_or(alone, tf.equal(mine, bad)))
        rows = tf.IndexedSlices(
            tf.stack([[number]] * len(ids)),
            tf.zeros(len(ids), tf.int32),
            tf.constant([2, 1]),
        )
        return [tf.where(is_bad, NAN, first), rows]

    @tf.function
    def step(number, bad):
        def on_replica():
            context = tf.distribute.get_replica_context()
            mine = tf.cast(context.replica_id_in_sync_group, tf.float32)
            grads = gradients(number, mine, bad)
            if scaled:
                rows = grads[1]
                values = made.scale_loss(rows.values)
                rows = tf.IndexedSlices(values, rows.indices, rows.dense_shape)
                grads = [made.scale_loss(grads[0]), rows]
            made.apply(grads, weights)

        strategy.run(on_replica)

    return made, weights, step


def _report(strategy, made, weights):
    found = [strategy.experimental_local_results(w.value) for w in weights]
    report = {"weights": [[x.numpy().tolist() for x in v] for v in found]}
    if hasattr(made, "skipped_steps"):
        names = "skipped_steps", "loss_scale", "iterations"
        report |= {name: float(getattr(made, name).numpy()) for name in names}
    inner = getattr(made, "inner_optimizer", made)
    averages = getattr(inner, "_model_variables_moving_average", ())
    return report | {"averages": [x.numpy().tolist() for x in averages]}


def _train(strategy, inner, scaled, bad=None):
    """Two windows and a part of one; with a bad micro-batch between them or without."""
    made, weights, step = _start(strategy, inner, scaled)
    for number in range(2 * WINDOW + 2):
        if number == 1 and bad is not None:
            step(tf.constant(7.0), tf.constant(float(bad)))
        step(tf.constant(float(number)), tf.constant(-1.0))
    return _report(strategy, made, weights)


def every_optimizer():
    def on_one_and_on_two(*given):
        return [_train(_strategy(count), *given) for count in (1, 2)]

    with helpers.enabled("float32"):
        plain = {x: on_one_and_on_two(INNER[x], False) for x in INNER}
    scaled = {x: on_one_and_on_two(SCALED[x], True, 1) for x in SCALED}
    return {
        **{f"{name}, scaled: False": runs for name, runs in plain.items()},
        **{f"{name}, scaled: True": runs for name, runs in scaled.items()},
    }


@pytest.mark.issue("keras#19308")
def test_windows_of_two_replicas_are_those_of_one_device(two_replicas):
    found = two_replicas["every_optimizer"]
    assert len(found) >= 8
    for name, (one, two) in found.items():
        for [alone], replicas in zip(one["weights"], two["weights"], strict=True):
            assert replicas[0] == replicas[1], name
            assert replicas[0] == [pytest.approx(x, rel=1e-5) for x in alone], name
        for alone, mean in zip(one["averages"], two["averages"], strict=True):
            assert mean == [pytest.approx(x, rel=1e-5) for x in alone], name
        if "True" in name:  # The bad micro-batch cost itself alone.
            names = "skipped_steps", "loss_scale"
            assert [two[each] for each in names] == [1.0, 4.0], name
            assert two["iterations"] == one["iterations"], name


def without_merging():
    with helpers.unmerged_replicas():
        return _train(_strategy(2), INNER["Adam"], True, 1)


def test_replicas_that_run_on_their_own_accumulate_alike(two_replicas):
    merged = two_replicas["every_optimizer"]["Adam, scaled: True"][1]
    assert two_replicas["without_merging"] == merged


def summed_before():
    """`skip_gradients_aggregation`: what is added was summed by the caller."""
    with _strategy(2).scope():
        weight = keras.Variable([1.0])
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        made = tfamp.LossScaleOptimizer(inner, 1.0, dynamic=False)
        made.build([weight])

    def on_replica():
        gradient = tf.constant([3.0])
        made.apply([gradient], [weight], skip_gradients_aggregation=True)

    step = tf.function(lambda: _strategy(2).run(on_replica))
    step()
    step()
    return weight.numpy().tolist()


def test_sums_of_the_caller_are_not_summed_again(two_replicas):
    assert two_replicas["summed_before"] == [1.0 - 3.0]


def collectives():
    """Sizes of what is summed: at the top of a step, and in branches."""

    def sizes(scaled):
        _, _, step = _start(_strategy(2), INNER["Adam"], scaled)
        spec = tf.TensorSpec([], tf.float32)
        graph = step.get_concrete_function(spec, spec).graph
        inside = [
            [node.op for node in function.node_def].count("CollectiveReduceV2")
            for function in graph.as_graph_def().library.function
        ]
        top = [x for x in graph.get_operations() if x.type == "CollectiveReduceV2"]
        return [x.inputs[0].shape.num_elements() for x in top], sorted(
            filter(None, inside)
        )

    with helpers.enabled("float32"):
        return [sizes(scaled) for scaled in (False, True)]


@pytest.mark.issue("keras#19308", "keras#17429")
def test_gradients_are_summed_in_the_branch_of_a_windows_last_micro_batch(two_replicas):
    """One sum of all, packed, on each of two replicas; and one number a micro-batch."""
    plain, scaled = two_replicas["collectives"]
    assert plain == [[], [2]]
    assert scaled == [[1, 1], [2]]


MODES = ("float32", "mixed_bfloat16", "mixed_float16")


def _model(mode, replicas):
    tfamp.enable(mode, on_unsupported="warn")
    with _strategy(replicas).scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        for index, weight in enumerate(model.weights):
            shape = [*weight.shape, index + 1]
            weight.assign(tf.random.stateless_normal(weight.shape, seed=shape[-2:]) / 2)
        optimizer = INNER["clipped AdamW"](keras.optimizers, WINDOW)
        optimizer.learning_rate = 0.01
        model.compile(optimizer, "mse")
    return model


def _fit(model, epochs):
    x = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
    y = 2 * x[:, :1] - x[:, 1:2]
    # Five micro-batches: an epoch ends within a window.
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return [w.tolist() for w in model.get_weights()]


def fits(folder):
    """Of each mode: weights at first, of one device, of two replicas, saved between."""
    warnings.simplefilter("ignore")  # bfloat16 is slow here.
    found = {}
    for mode in MODES:
        first = [w.tolist() for w in _model(mode, 1).get_weights()]
        alone = _fit(_model(mode, 1), 2)
        model = _model(mode, 2)
        _fit(model, 1)
        path = f"{folder}/{mode}.keras"
        model.save(path)
        model.save_weights(f"{folder}/{mode}.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint = checkpoint.save(f"{folder}/{mode}")
        rest = {"kept": _fit(model, 1)}
        with _strategy(2).scope():
            rest["file"] = _fit(tfamp.load_model(path), 1)
        other = _model(mode, 2)
        with _strategy(2).scope():
            other.optimizer.build(other.trainable_variables)
            other.load_weights(f"{folder}/{mode}.weights.h5")
        rest["weights"] = _fit(other, 1)
        single = _model(mode, 1)
        single.optimizer.build(single.trainable_variables)
        restored = tf.train.Checkpoint(model=single, optimizer=single.optimizer)
        restored.restore(checkpoint).assert_existing_objects_matched()
        rest["checkpoint, one device"] = _fit(single, 1)
        tfamp.disable()
        if mode != "mixed_float16":
            rest["Keras alone"] = _fit(keras.models.load_model(path), 1)
        found[mode] = [first, alone, rest]
    return found


def _flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


@pytest.mark.issue("keras#19308")
@pytest.mark.parametrize("mode", MODES)
def test_fit_accumulates_alike_and_its_state_is_saved_within_a_window(
    mode, two_replicas
):
    first, alone, rest = two_replicas["fits"][mode]
    moved = np.linalg.norm(_flat(alone) - _flat(first))
    assert moved > 0.05
    compute = mode.removeprefix("mixed_")
    tolerance = {"float32": 64, "float16": 8, "bfloat16": 8}[compute]
    tolerance *= tfamp.float_format(compute).epsilon
    for name, weights in rest.items():
        error = np.linalg.norm(_flat(weights) - _flat(alone))
        assert error < tolerance * moved, (name, error / moved)


def on_two_workers():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with helpers.enabled("float32"):
        plain = _train(strategy, INNER["clipped AdamW"], False)
    return [plain, _train(strategy, INNER["clipped AdamW"], True, 1)]


@pytest.mark.issue("keras#19308")
def test_windows_of_two_workers_are_those_of_one_device(two_replicas):
    results = workers.run(on_two_workers, workers=2, timeout=180)
    assert results[0] == results[1]
    for scaled, found in zip((False, True), results[0], strict=True):
        name = f"clipped AdamW, scaled: {scaled}"
        expected = two_replicas["every_optimizer"][name][1]
        assert found.keys() == expected.keys()
        for [mine], theirs in zip(found["weights"], expected["weights"], strict=True):
            assert [mine] * 2 == [
                [pytest.approx(x, rel=1e-5) for x in b] for b in theirs
            ]
        for key in found.keys() - {"weights", "averages"}:
            assert found[key] == expected[key]


def everything_on_two_replicas(folder):
    """One process for all: a start of TensorFlow costs more than the tests."""
    functions = every_optimizer, without_merging, summed_before, collectives
    found = {function.__name__: function() for function in functions}
    return found | {"fits": fits(folder)}


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    """Results of each function above in one process of two logical CPUs."""
    folder = tmp_path_factory.mktemp("saved")
    (results,) = workers.run(
        everything_on_two_replicas, (folder,), workers=1, cpus=2, timeout=500
    )
    return results
