"""Several replicas: one decision for all, in `fit`, in custom loops, on two workers.

All run in fresh processes, since logical devices must be set before TensorFlow
starts, and have a time limit, so that a deadlock fails.
"""

import functools

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

NAN = float("nan")


@functools.cache  # Two strategies in one process collide in their collectives.
def _mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _step_with_a_nan_on(bad_replica, strategy, inner=None, jit=False):
    """Applies [2, 2] on each replica, NaN on one; returns weights, scale and counts."""
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = inner(keras.optimizers) if inner else keras.optimizers.SGD(1.0)
        made = tfamp.LossScaleOptimizer(optimizer, initial_scale=2.0)
        made.build([weight])

    @tf.function(jit_compile=jit)
    def step(bad):
        def on_replica():
            context = tf.distribute.get_replica_context()
            is_bad = tf.equal(context.replica_id_in_sync_group, bad)
            made.apply([tf.constant([2.0, 2.0]) * tf.where(is_bad, NAN, 1.0)], [weight])

        strategy.run(on_replica)

    step(bad_replica)
    return made, weight, step


def _report(strategy, made, weight):
    replicas = strategy.experimental_local_results(weight.value)
    return {
        "weights": [value.numpy().tolist() for value in replicas],
        "scales": [
            float(value.numpy())
            for value in strategy.experimental_local_results(made.loss_scale.value)
        ],
        "skipped": int(made.skipped_steps.numpy()),
        "iterations": int(made.iterations.numpy()),
    }


def _skip_then_apply(bad_replica, strategy, inner=None):
    made, weight, step = _step_with_a_nan_on(bad_replica, strategy, inner)
    skipped = _report(strategy, made, weight)
    step(-1)
    return [skipped, _report(strategy, made, weight)]


def nan_on_each_replica():
    """Also with replicas that run on their own, and an optimizer of several."""
    merged = [_skip_then_apply(bad, _mirrored()) for bad in (0, 1)]
    with helpers.unmerged_replicas():
        return merged, [
            _skip_then_apply(bad, _mirrored(), inner)
            for inner in (None, [*INNER.values()][-1])
            for bad in (0, 1)
        ]


@pytest.mark.issue("keras#18666")
def test_nan_on_one_replica_skips_the_step_on_all(two_replicas):
    """Stock Keras writes NaN into both when replica 1 is the bad one."""
    merged, unmerged = two_replicas["nan_on_each_replica"]
    assert (len(merged), len(unmerged)) == (2, 4)
    for skipped, applied in merged + unmerged:
        assert skipped["weights"] == [[1.0, 2.0]] * 2
        assert set(skipped["scales"]) == {1.0}
        assert (skipped["skipped"], skipped["iterations"]) == (1, 0)
        assert applied["weights"][0] == applied["weights"][1] != [1.0, 2.0]
        assert (applied["skipped"], applied["iterations"]) == (1, 1)
    for _, applied in merged + unmerged[:2]:
        # Scale 1, gradients [2, 2] summed over two replicas, learning rate 1.
        assert applied["weights"] == [[-3.0, -2.0]] * 2


def nan_on_one_worker():
    return _skip_then_apply(1, tf.distribute.MultiWorkerMirroredStrategy())


def test_nan_on_one_worker_skips_the_step_on_all():
    results = workers.run(nan_on_one_worker, workers=2, timeout=180)
    assert len(results) == 2
    for skipped, applied in results:
        assert skipped["weights"] == [[1.0, 2.0]]
        assert skipped["scales"] == [1.0] and skipped["skipped"] == 1
        assert applied["weights"] == [[-3.0, -2.0]] and applied["iterations"] == 1


def train_on_another_device_and_on_one_replica():
    x = np.ones((32, 4), "float32")

    def model(jit_compile):
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam())
        made.compile(optimizer, "mse", jit_compile=jit_compile)
        return made

    with tf.device("CPU:1"):
        elsewhere = model(False)
    elsewhere.fit(x, x[:, :1], verbose=0)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        single = model(True)
    single.fit(x, x[:, :1], verbose=0)
    return [int(m.optimizer.iterations.numpy()) for m in (elsewhere, single)]


def test_other_devices_and_single_replicas_under_xla_train(two_replicas):
    """The compiled update runs where the variables are; one replica needs no sum."""
    assert two_replicas["train_on_another_device_and_on_one_replica"] == [1, 1]


def every_refusal():
    strategy = _mirrored()
    errors = {}

    def note(name, function):
        try:
            function()
            errors[name] = ""
        except Exception as e:
            errors[name] = f"{type(e).__name__}: {e}"

    def overwriting(optimizers):
        return optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)

    note("averages", lambda: _step_with_a_nan_on(-1, strategy, overwriting))
    note("xla", lambda: _step_with_a_nan_on(-1, strategy, jit=True))
    outside = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
    weight = keras.Variable([1.0])
    outside.build([weight])
    grads = [tf.constant([1.0])]
    note("scope", lambda: strategy.run(lambda: outside.apply(grads, [weight])))
    with strategy.scope():
        inside = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
        note("cross-replica", lambda: inside.apply(grads, [weight]))
    central = tf.distribute.experimental.CentralStorageStrategy()
    with central.scope():
        other = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
        mine = tf.Variable([1.0])
    note("central", lambda: central.run(lambda: other.apply(grads, [mine])))
    return errors


@pytest.mark.issue("keras#21366")
def test_what_cannot_work_says_so(two_replicas):
    errors = two_replicas["every_refusal"]
    assert "XLA over several replicas needs GPUs" in errors["xla"]
    assert "ema_overwrite_frequency=2 of SGD" in errors["averages"]
    assert "created under no strategy" in errors["scope"]
    assert "strategy.run" in errors["cross-replica"]
    assert "Received: CentralStorageStrategy" in errors["central"]
    assert all(e.startswith("RuntimeError") for e in errors.values())


INNER = {
    "adamw": lambda o: o.AdamW(0.1, weight_decay=0.1),
    "ema": lambda o: o.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "nadam": lambda o: o.Nadam(0.1),
    "lamb": lambda o: o.Lamb(0.1),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # Of Keras 3.15.
    INNER["multi"] = lambda o: o.MultiOptimizer(
        o.OptimizerMap(o.SGD(0.1), {".*_1": o.Adam(0.1)})
    )


def _train(strategy, inner, bad_step):
    """Returns the weights after four steps, an overflow before one of them."""
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        made, scale = inner(keras.optimizers), 1.0
        if bad_step is not None:
            scale = 4.0
            made = tfamp.LossScaleOptimizer(made, scale, dynamic=False)
        made.build([weight])

    @tf.function
    def step(factor):
        def on_replica():
            context = tf.distribute.get_replica_context()
            mine = tf.cast(context.replica_id_in_sync_group, tf.float32)
            made.apply([factor * ([2.0, 1.0] + mine)], [weight])

        strategy.run(on_replica)

    for index in range(4):
        if index == bad_step:
            step(tf.constant(NAN))
        step(tf.constant(scale))
    return weight.numpy().tolist()


def trajectories_over_two_replicas():
    strategy = _mirrored()
    return {
        name: [_train(strategy, inner, bad_step) for bad_step in (None, 2)]
        for name, inner in INNER.items()
    }


def test_every_kind_of_optimizer_takes_the_steps_it_takes_alone(two_replicas):
    weights = two_replicas["trajectories_over_two_replicas"]
    assert list(weights) == list(INNER)
    for alone, scaled in weights.values():
        assert scaled == pytest.approx(alone, rel=1e-6)
        assert scaled != [1.0, 2.0]


def train_with_the_recipe():
    strategy = _mirrored()
    return [_recipe(strategy, in_float16, 1) for in_float16 in (False, True)]


def _recipe(strategy, reduce_in_float16, bad_replica):
    """As in docs/custom_loops.md: scale, accumulate, reduce, unscale, clip, apply."""
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        made = tfamp.LossScaleOptimizer(inner, 1024.0)
        made.build([weight])

    def replica_step(factor):
        context = tf.distribute.get_replica_context()
        mine = context.replica_id_in_sync_group
        total = tf.zeros_like(weight)
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * [0.75, 1.0]) / (2 * 2)
                scaled = made.scale_loss(loss)
            total += tape.gradient(scaled, weight.value)
        total *= tf.where(tf.equal(mine, bad_replica), factor, 1.0)
        if reduce_in_float16:
            total = context.all_reduce("SUM", tf.cast(total, tf.float16))
        made.apply([total], [weight], skip_gradients_aggregation=reduce_in_float16)

    step = tf.function(lambda factor: strategy.run(replica_step, (factor,)))
    step(tf.constant(float("inf")))
    skipped = _report(strategy, made, weight)
    step(tf.constant(1.0))
    return [skipped, _report(strategy, made, weight)]


@pytest.mark.issue("tensorflow#37602", "keras#19308")
def test_recipe_for_custom_loops(two_replicas):
    reports = two_replicas["train_with_the_recipe"]
    assert len(reports) == 2
    for skipped, applied in reports:
        assert skipped["weights"] == [[1.0, 2.0]] * 2
        assert set(skipped["scales"]) == {512.0}
        # The sum over replicas and micro-batches is [0.75, 1.0], of norm 1.25: clipped.
        for weights in applied["weights"]:
            assert weights == pytest.approx([1.0 - 0.6, 2.0 - 0.8], rel=1e-6)


def embeddings_of_one_replica_and_of_two():
    """Adam's velocity of a float32 embedding after one batch under `enable`."""
    ids = np.array([[1, 1, 1, 2], [1, 2, 2, 3], [0, 1, 2, 2], [3, 1, 0, 0]])
    start = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")

    def velocity(strategy, clip):
        with strategy.scope():
            layers = [keras.layers.Embedding(4, 3, dtype="float32")]
            layers.append(keras.layers.Flatten(dtype="float32"))
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.layers[0].set_weights([start])
            model.compile(keras.optimizers.Adam(0.1, global_clipnorm=clip), "mse")
        model.fit(ids, np.ones((4, 12)), batch_size=4, verbose=0)
        return keras.ops.convert_to_numpy(model.optimizer._velocities[0]).tolist()

    asked = {"fused_kernels": False, "sum_embedding_gradients": True}
    with helpers.enabled("mixed_bfloat16", **asked):
        return [
            [velocity(strategy, clip) for clip in (None, 1e6)]
            for strategy in (tf.distribute.get_strategy(), _mirrored())
        ]


def test_rows_of_an_index_are_summed_over_replicas_before_they_are_squared(
    two_replicas,
):
    one, two = two_replicas["embeddings_of_one_replica_and_of_two"]
    assert max(one[0][1]) > 1e-5
    for expected, found in zip(one[0] + one[1], two[0] + two[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)


def everything_on_two_replicas():
    """One process for all: a start of TensorFlow costs more than the tests."""
    functions = (
        nan_on_each_replica,
        train_on_another_device_and_on_one_replica,
        every_refusal,
        trajectories_over_two_replicas,
        train_with_the_recipe,
        embeddings_of_one_replica_and_of_two,
    )
    return {function.__name__: function() for function in functions}


@pytest.fixture(scope="module")
def two_replicas():
    """Results of each function above in one process of two logical CPUs."""
    (results,) = workers.run(everything_on_two_replicas, workers=1, cpus=2, timeout=300)
    return results
