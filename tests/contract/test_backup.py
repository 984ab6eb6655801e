"""`tfamp.BackupAndRestore`: `fit` goes on at the step, as if nothing had happened."""

import os
import random
import signal
from concurrent import futures

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

X = np.random.default_rng(0).normal(size=(90, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        rows = slice(index * 8, index * 8 + 8)
        return X[rows], Y[rows]


def tensors():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(90)


def noisy(x, y):
    return x + 0.1 * tf.random.normal((6,)), y


# Name -> function that returns arguments of `fit`.
DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "dataset": lambda: {"x": tensors().map(noisy).batch(8)},
    "unknown size": lambda: {"x": tensors().filter(lambda x, y: x[0] > -1).batch(8)},
    "endless": lambda: {"x": tensors().repeat().batch(8), "steps_per_epoch": 7},
    "PyDataset": lambda: {"x": Rows()},
    "PyDataset, threads": lambda: {"x": Rows(workers=2)},
}


class Stop(keras.callbacks.Callback):
    """Calls a function in some step of the process; notes how many there were."""

    def __init__(self, step=0, call=None):
        super().__init__()
        self.step, self.call, self.steps, self.losses = step, call, 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.losses.append((batch, logs["loss"]))
        if self.steps == self.step:
            self.call()


class Killed(BaseException):
    """As good as kill -9: nothing of `fit` runs after it."""


def kill():
    raise Killed


def build(**compiled):
    layers = keras.layers
    made = [layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((6,)), *made, layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    model.compile(adam, loss, metrics=["accuracy"], **compiled)
    return model


def train(data, *callbacks, make=build, **settings):
    """A whole script: seeds, model, `fit`; returns all that it leaves."""
    keras.utils.set_random_seed(0)
    given, model = DATA[data]() if isinstance(data, str) else data, make()
    settings = {"epochs": 3, "verbose": 0, "validation_data": (X, Y), **settings}
    settings["shuffle"] = "y" in given  # Keras warns of it with other data.
    history = model.fit(**given, callbacks=list(callbacks), **settings).history
    last = {name: values[-1] for name, values in history.items()}
    weights = [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]
    return last, weights


def killed(folder, step, *callbacks, data="arrays", save_freq=1, **settings):
    """The same, killed in a step, with a backup; returns what it noted until then."""
    stop = Stop(step, kill)
    with pytest.raises(Killed):
        backup = tfamp.BackupAndRestore(folder, save_freq=save_freq)
        train(data, *callbacks, backup, stop, **settings)
    return stop


def assert_same(found, expected):
    assert found[0] == expected[0]
    helpers.assert_equal(found[1], expected[1])


@pytest.mark.issue("keras#16252", "tensorflow#40342", "keras-hub#204", "keras#22010")
@pytest.mark.filterwarnings("ignore:.*(no speed-up|ran out of data|workers)")
@pytest.mark.parametrize(
    "data", helpers.names_of(DATA, slow=["unknown size", "endless", "PyDataset"])
)
def test_a_fit_that_was_killed_ends_as_one_that_was_not(data, tmp_path):
    with helpers.enabled("mixed_float16" if data == "arrays" else "float32"):
        whole = train(data, seen := Stop())
        # Within an epoch, and at its end.
        for stop in (19, 12) if data == "arrays" else (19,):
            folder, again = tmp_path / str(stop), Stop()
            stopped = killed(folder, stop, data=data)
            found = train(data, again, tfamp.BackupAndRestore(folder, save_freq=1))
            assert_same(found, whole)
            assert not list(folder.iterdir())
            assert stopped.losses + again.losses == seen.losses


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_state": "8bit"},
        {"optimizer_state": "bfloat16"},
        {"weights": "bfloat16"},
    ],
    ids=str,
)
def test_what_is_stored_in_fewer_bits_is_restored(settings, tmp_path):
    def make():
        dense = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((6,)), *dense])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        return model

    with helpers.enabled("mixed_bfloat16", on_unsupported="warn", **settings):
        whole = train("arrays", make=make)
        killed(tmp_path, 19, make=make)
        backup = tfamp.BackupAndRestore(tmp_path, save_freq=1)
        assert_same(train("arrays", backup, make=make), whole)


@pytest.mark.parametrize("size", [1, 2])
def test_saved_every_few_steps_and_with_several_in_one_call(size, tmp_path):
    make = lambda: build(steps_per_execution=size)  # noqa: E731
    whole = train("arrays", make=make)
    killed(tmp_path, 19 // size, save_freq=4, make=make)
    assert len(list(tmp_path.iterdir())) == 2
    again = Stop()
    backup = tfamp.BackupAndRestore(tmp_path, save_freq=4)
    assert_same(train("arrays", again, backup, make=make), whole)
    # Saved at step 16, the fourth of the second epoch; there are 36.
    assert again.steps * size == 36 - 16


def test_a_model_with_optimizers_and_a_step_of_its_own(tmp_path):
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
            self.noise = keras.layers.Dropout(0.5)

        def compile(self):
            super().compile()
            self.own = [keras.optimizers.Adam(0.01) for _ in range(2)]
            self.one, self.other = self.own
            self.mean = keras.metrics.Mean("loss")

        def call(self, x):
            return self.second(self.noise(self.first(x), training=True))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                error = tf.cast(y, "float32")[:, None] - self(x)
                loss = tf.reduce_mean(error**2)
            for layer, optimizer in ((self.first, self.one), (self.second, self.other)):
                weights = layer.trainable_variables
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, weights), weights, strict=True)
                )
            self.mean.update_state(loss)
            return {"loss": self.mean.result()}

    def run(*callbacks):
        keras.utils.set_random_seed(0)
        model = Two()
        model.compile()
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=list(callbacks))
        kept = [*model.variables, *model.one.variables, *model.other.variables]
        return [np.asarray(v) for v in kept]

    whole = run()
    with pytest.raises(Killed):
        run(tfamp.BackupAndRestore(tmp_path, save_freq=1), Stop(17, kill))
    helpers.assert_equal(run(tfamp.BackupAndRestore(tmp_path)), whole)


@pytest.mark.issue("keras#22010")
def test_a_scheduler_of_the_learning_rate_is_obeyed(tmp_path):
    def rate():
        return keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))

    whole = train("arrays", rate())
    for stop in (24, 30):  # Where an epoch begins, and within one.
        killed(tmp_path, stop + 1, rate(), save_freq=5)
        found = train("arrays", rate(), tfamp.BackupAndRestore(tmp_path))
        assert_same(found, whole)


def test_two_threads_go_on_each_with_its_own(tmp_path):
    """One after the other as far as the seeds, then both in `fit` at once."""
    data = {"x": X, "y": Y, "batch_size": 8}

    def fit(folder, callbacks):
        keras.utils.set_random_seed(0)
        made = build()
        backup = tfamp.BackupAndRestore(folder, save_freq=1)
        settings = {"epochs": 2, "verbose": 0, "shuffle": False}
        return lambda: made.fit(
            **data, callbacks=[*callbacks, backup], **settings
        ), made

    whole, expected = fit(tmp_path / "whole", [])
    whole()
    folders = tmp_path / "0", tmp_path / "1"
    for folder, stop in zip(folders, (5, 14), strict=True):
        with pytest.raises(Killed):
            fit(folder, [Stop(stop, kill)])[0]()
    runs = [fit(folder, []) for folder in folders]
    with futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each[0](), runs))
    for _, model in runs:
        helpers.assert_equal(model.variables, expected.variables)


def test_a_fit_that_fails_where_an_epoch_begins_leaves_the_next_alone(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Killed

    killed(tmp_path, 5)
    with pytest.raises(Killed):
        train("arrays", tfamp.BackupAndRestore(tmp_path), Fails())
    model, seen = build(), Stop()
    assert len(model.predict(X, verbose=0)) == 90
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[seen])
    assert seen.steps == 12


@pytest.mark.issue("keras#19179")
def test_keras_own_trains_on_a_part_of_the_epoch_twice(tmp_path):
    steps = {}
    for kind in (keras.callbacks.BackupAndRestore, tfamp.BackupAndRestore):
        folder, counts = tmp_path / kind.__module__, []
        for stop in (Stop(7, kill), Stop()):
            try:
                train("arrays", kind(folder, save_freq=1), stop, epochs=1)
            except Killed:
                pass
            counts.append(stop.steps)
        steps[kind.__module__.split(".")[0]] = sum(counts)
    assert steps["tfamp"] == 12
    assert steps["keras"] == 19


@pytest.mark.issue("keras#20712")
def test_a_model_that_is_not_built_goes_on(tmp_path):
    def make():
        model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    plain = {"validation_data": None}
    whole = train("arrays", make=make, **plain)
    killed(tmp_path, 15, make=make, **plain)
    found = train("arrays", tfamp.BackupAndRestore(tmp_path), make=make, **plain)
    assert_same(found, whole)


SCRIPT = """
import os, signal, sys
import keras, numpy as np
import tfamp

stop, name = int(sys.argv[1]), sys.argv[2]
tfamp.enable("mixed_float16")
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(90, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.5),
     keras.layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

class Stop(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_begin(self, batch, logs=None):
        Stop.steps += 1
        if Stop.steps == stop:
            os.kill(os.getpid(), getattr(signal, name))

backup = tfamp.BackupAndRestore("backup", save_freq=1)
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y),
                    callbacks=[Stop(), backup]).history
total = [float(np.abs(v.numpy()).sum()) for v in model.variables]
print(repr((history["loss"][-1], history["val_loss"][-1], total)))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Returns a function: runs of a step and a signal each -> how they ended."""
    file = tmp_path_factory.mktemp("script") / "script.py"
    file.write_text(SCRIPT)

    def run(cases):
        given = []
        for step, name, folder in cases:
            folder.mkdir(exist_ok=True)
            given.append((file, [str(step), name], folder))
        return helpers.run_scripts(given)

    return run


def check_kills(script, tmp_path, count):
    (whole,) = script([(0, "SIGKILL", tmp_path / "whole")])
    draw, names = random.Random(0), ("SIGKILL", "SIGTERM", "SIGUSR1")
    cases = [
        (draw.randint(1, 36), names[index % 3], tmp_path / str(index))
        for index in range(count)
    ]
    for (step, name, _), done in zip(cases, script(cases), strict=True):
        if name == "SIGKILL":
            assert done.returncode == -signal.SIGKILL, done
        else:
            assert done.returncode == 143, done
            said = f"{name}: saved after"
            assert done.stderr.count(said) == 1, (step, done.stderr)
    again = script([(0, name, folder) for _, name, folder in cases])
    assert [done.stdout for done in again] == [whole.stdout] * count


@pytest.mark.issue("keras#19389")
def test_kill_and_the_signals_of_schedulers_in_a_script(script, tmp_path):
    check_kills(script, tmp_path, 3)


@pytest.mark.slow
def test_kill_and_the_signals_of_schedulers_at_20_steps(script, tmp_path):
    check_kills(script, tmp_path, 20)


# ---- Bad input ----


def test_a_backup_of_another_model_is_refused_and_kept(tmp_path):
    killed(tmp_path, 5)

    def wider():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    before = sorted(tmp_path.iterdir())
    with pytest.raises(tfamp.RunError, match=r"another model.*, 16\].*, 2\]"):
        train("arrays", tfamp.BackupAndRestore(tmp_path), make=wider)
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_file_is_passed_over_and_a_foreign_one_refused(tmp_path, caplog):
    whole = train("arrays")
    killed(tmp_path, 9)
    _, last = sorted(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-200])
    assert_same(train("arrays", tfamp.BackupAndRestore(tmp_path)), whole)
    assert f"{last}' is damaged" in caplog.text
    for content in (b"", b"text", b"PK\3\4"):
        (tmp_path / "000001-000000000.npz").write_bytes(content)
        with pytest.raises(tfamp.RunError, match="000001.*damaged.*Delete"):
            train("arrays", tfamp.BackupAndRestore(tmp_path))


def test_backups_go_to_any_file_system_that_tensorflow_knows():
    folder = "ram://backups/run"  # As gs://, in this process' memory.
    whole = train("arrays")
    killed(folder, 9)
    assert len(tf.io.gfile.listdir(folder)) == 2
    assert_same(train("arrays", tfamp.BackupAndRestore(folder)), whole)
    assert not tf.io.gfile.listdir(folder)


def test_a_generator_is_told_of_before_training(tmp_path):
    def batches():
        while True:
            yield X[:8], Y[:8]

    given = {"x": batches(), "steps_per_epoch": 3}
    with pytest.warns(UserWarning, match="generator cannot be read again"):
        train(given, tfamp.BackupAndRestore(tmp_path), epochs=1)


@pytest.mark.parametrize("save_freq", [0, -1, 2.5, "step", True])
def test_save_freq_is_checked(save_freq, tmp_path):
    with pytest.raises(ValueError, match="save_freq"):
        tfamp.BackupAndRestore(tmp_path, save_freq=save_freq)


def test_a_signal_after_a_fit_that_failed_is_python_s_again(tmp_path):
    # Others that failed have left their own; and a shell's background jobs ignore one.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Killed):
        train("arrays", tfamp.BackupAndRestore(tmp_path), Stop(2, kill))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000_000):  # Python calls handlers between instructions.
            pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
