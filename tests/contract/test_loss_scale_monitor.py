"""The monitor: what it logs, names and raises, and what it leaves behind."""

import logging as standard_logging

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf

import tfamp

INF, NAN = float("inf"), float("nan")


def data(bad=None, where=13, examples=32):
    """Returns inputs of which one is not finite: in batch `where // 4`."""
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype("float32")
    if bad is not None:
        x[where, 1] = bad
    return x, np.ones((examples, 1), "float32")


def model_with(**keywords):
    keras.utils.set_random_seed(0)
    inner = keras.optimizers.Adam(0.01)
    layers = [
        keras.layers.Dense(4, name="first"),
        keras.layers.Dense(1, name="second"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    model.compile(tfamp.LossScaleOptimizer(inner, **keywords), "mse")
    return model


def fit(model, x, y, *callbacks, **keywords):
    keywords = {"batch_size": 4, "verbose": 0, "shuffle": False, **keywords}
    return model.fit(x, y, callbacks=list(callbacks), **keywords)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_scale_skips_and_names_are_shown_and_in_the_history(jit_compile, capsys):
    model = model_with()
    model.jit_compile = jit_compile
    monitor = tfamp.LossScaleMonitor()
    history = fit(model, *data(INF), monitor, epochs=2, verbose=2).history
    shown = "loss_scale: 16384.0000 - skipped_steps: 1.0000"
    assert shown in capsys.readouterr().out
    assert history["loss_scale"] == [2.0**14, 2.0**13]
    assert history["skipped_steps"] == [1, 2]
    # The infinite input makes the kernel's gradient NaN or infinite, and all later.
    named = {name for name in history if "/" in name}
    assert {name.split("/", 1)[1] for name in named} >= {"net/first/kernel"}
    assert all(count > 0 for name in named for count in history[name])


def test_clean_epochs_name_no_variable_and_warn_of_nothing(caplog):
    history = fit(model_with(), *data(), tfamp.LossScaleMonitor(every=1)).history
    assert set(history) == {"loss", "loss_scale", "skipped_steps"}
    assert "skipped" not in caplog.text


def test_every_list_of_the_history_has_a_value_for_each_epoch():
    """So that a data frame can be made of it."""
    model = model_with()
    x, y = data()
    values = iter([y, y * NAN, y])

    def epochs():
        for _ in range(3):
            yield from tf.data.Dataset.from_tensor_slices((x, next(values))).batch(4)

    history = model.fit(
        tf.data.Dataset.from_generator(
            epochs,
            output_signature=(tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])),
        ),
        epochs=3,
        steps_per_epoch=8,
        shuffle=False,
        verbose=0,
        callbacks=[tfamp.LossScaleMonitor()],
    ).history
    assert {len(values) for values in history.values()} == {3}
    # The second epoch's losses are NaN, and so is every gradient.
    assert history["nan/net/first/kernel"] == [0, 12, 0]
    assert history["nan/net/first/bias"] == [0, 4, 0]
    assert history["nan/net/second/kernel"] == [0, 4, 0]
    assert "nan/net/second/bias" not in history  # The first three only.


def test_batches_between_readings_show_the_last_one(caplog):
    seen = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["skipped_steps"])

    with caplog.at_level(standard_logging.INFO, logger="absl"):
        fit(model_with(), *data(INF), tfamp.LossScaleMonitor(every=4), Spy())
    assert seen == [0, 0, 0, 1, 1, 1, 1, 1]
    assert "1 step(s) skipped" in caplog.text and "first/kernel" in caplog.text


@pytest.mark.parametrize("keywords", [{"min_scale": 1.0}, {"dynamic": False}])
def test_run_that_cannot_go_on_is_stopped_with_what_to_try(keywords):
    model = model_with(initial_scale=2.0, **keywords)
    x, y = data()
    before = model.get_weights()
    with pytest.raises(tfamp.LossScaleExhaustedError, match="first/kernel") as error:
        fit(model, x, y * NAN, tfamp.LossScaleMonitor(patience=5, every=1))
    assert "look for bad values in the data" in str(error.value)
    assert int(model.optimizer.skipped_steps) == 5
    helpers.assert_equal(model.get_weights(), before)
    # Goes on from where it was, without the monitor's counts.
    fit(model, x, y)
    assert int(model.optimizer.consecutive_skipped_steps) == 0


def test_exhaustion_can_warn_once_or_be_ignored_and_a_scale_that_can_fall_is_none():
    x, y = data()
    model = model_with()
    fit(model, x, y * NAN, tfamp.LossScaleMonitor(patience=1, every=1))
    assert int(model.optimizer.skipped_steps) == 8
    keywords = {"initial_scale": 1.0, "dynamic": False}
    with pytest.warns(UserWarning, match="static at 1") as caught:
        monitor = tfamp.LossScaleMonitor("warn", patience=2, every=1)
        fit(model_with(**keywords), x, y * NAN, monitor, epochs=2)
    assert len(helpers.warned(caught)) == 1
    monitor = tfamp.LossScaleMonitor("ignore", patience=2, every=1)
    fit(model_with(**keywords), x, y * NAN, monitor)


def test_counts_are_in_no_checkpoint_and_end_with_the_training(tmp_path):
    model = model_with()
    fit(model, *data())
    plain = len(model.optimizer.variables)
    tf.train.Checkpoint(o=model.optimizer).write(str(tmp_path / "without"))

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            tf.train.Checkpoint(o=self.model.optimizer).write(str(tmp_path / "with"))
            self.model.save(tmp_path / "with.keras")
            assert len(self.model.optimizer.variables) == plain

    history = fit(model, *data(INF), tfamp.LossScaleMonitor(), Save()).history
    assert "net/first/kernel" in str(list(history))
    names = [
        {name for name, _ in tf.train.list_variables(str(tmp_path / kind))}
        for kind in ("without", "with")
    ]
    assert names[0] == names[1]
    loaded = keras.models.load_model(tmp_path / "with.keras")
    assert int(loaded.optimizer.skipped_steps) == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_second_fit_with_a_monitor_traces_nothing_again(fresh):
    model, monitor = model_with(), tfamp.LossScaleMonitor()
    fit(model, *data(), monitor)
    function = model.train_function
    monitor = tfamp.LossScaleMonitor() if fresh else monitor
    history = fit(model, *data(INF), monitor).history
    assert model.train_function is function
    assert "net/first/kernel" in str(list(history))


def test_model_built_by_its_first_step_is_counted_from_then_on():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1, name="late")])
    model.compile(tfamp.wrap_optimizer("adam"), "mse")
    history = fit(model, *data(INF), tfamp.LossScaleMonitor()).history
    assert history["skipped_steps"] == [1]
    assert "late/kernel" in str(list(history))


def test_monitor_hides_no_training_step_that_forgets_to_scale_the_loss(caplog):
    model = models.OwnStep([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfamp.wrap_optimizer("sgd"), "mse")
    fit(model, *data(), tfamp.LossScaleMonitor())
    assert "`scale_loss` was not called" in caplog.text


def test_model_without_loss_scaling_trains_with_a_note(caplog):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(model, *data(), tfamp.LossScaleMonitor()).history
    assert set(history) == {"loss"}
    assert "nothing to record: the optimizer is SGD" in caplog.text


@pytest.mark.parametrize(
    "keywords",
    [{"on_exhausted": "stop"}, {"patience": 0}, {"every": 0}, {"variables": -1}],
)
def test_nonsense_is_refused(keywords):
    with pytest.raises(ValueError, match=next(iter(keywords))):
        tfamp.LossScaleMonitor(**keywords)
