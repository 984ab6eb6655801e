"""Whether XLA compiles a step: as asked, as compiled, or as Keras would decide."""

import importlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp import kernel_switches
from tfamp.diagnostics import audit, cudnn, devices, xla_choice
from tfamp.precision import policy

layers = keras.layers


def mlp():
    return keras.Sequential([keras.Input((8, 4)), layers.Dense(4)])


def lstm(**keywords):
    return keras.Sequential([keras.Input((8, 4)), layers.LSTM(4, **keywords)])


def augmented():
    images = keras.Input((8, 8, 3))
    return keras.Model(images, layers.RandomRotation(0.1, name="turn")(images))


def choose(model, asked=None, device="a100", rewrite=None):
    return xla_choice.choose(model, asked, devices.subject(device), rewrite)


CASES = {
    # model, device, arguments -> on, possible
    "GPU": (mlp, "a100", {}, True, True),
    "CPU": (mlp, "cpu-amx", {}, False, True),
    "TPU": (mlp, "tpu", {}, True, True),
    "cuDNN": (lstm, "a100", {}, False, False),
    "LSTM on a CPU": (lstm, "cpu-amx", {}, False, True),
    "LSTM on a TPU": (lstm, "tpu", {}, True, True),
    "LSTM that is not cuDNN's": (
        lambda: lstm(activation="relu"),
        "a100",
        {},
        True,
        True,
    ),
    "LSTM without cuDNN": (lambda: lstm(use_cudnn=False), "a100", {}, True, True),
    "a layer without XLA": (augmented, "a100", {}, False, False),
    "rewrite": (mlp, "a100", {"rewrite": "float16"}, False, True),
    "auto": (mlp, "cpu-amx", {"asked": "auto"}, False, True),
    "auto on a GPU": (mlp, "a100", {"asked": "auto"}, True, True),
    "asked for": (mlp, "cpu-amx", {"asked": True}, True, True),
    "asked for as NumPy's": (mlp, "cpu-amx", {"asked": np.True_}, True, True),
    "asked to be off": (mlp, "a100", {"asked": False}, False, True),
    "asked for in spite of cuDNN": (lstm, "a100", {"asked": True}, True, False),
}


@pytest.mark.parametrize(
    ("make", "device", "arguments", "on", "possible"), CASES.values(), ids=CASES
)
def test_choice(make, device, arguments, on, possible):
    choice = choose(make(), device=device, **arguments)
    assert (choice.jit_compile, choice.possible) == (on, possible)
    # Who wants it, and does not get it, is told; so is who asks for too much.
    wants = device != "cpu-amx" and arguments.get("asked") is not False
    assert bool(choice.notes) == (wants and not possible)


def test_note_names_the_layers():
    assert "turn" in choose(augmented()).notes[0]
    (note,) = choose(lstm(name="memory"), asked=True).notes
    assert "Keras turns it off" in note and "memory" in note


def test_eager_model_has_no_xla():
    model = mlp()
    model.compile("sgd", "mse", run_eagerly=True)
    assert choose(model) == xla_choice.Choice(False, True)
    choice = choose(model, asked=True)
    assert not choice.jit_compile and "run_eagerly=True" in choice.notes[0]
    report = audit.audit(model, device="a100")
    assert not report.jit_compile and report.findings[0].rule == "eager"


def test_compiled_model_keeps_its_choice_elsewhere_where_it_can():
    model = mlp()
    model.compile("sgd", "mse", jit_compile=True)
    assert choose(model, device="cpu-amx").jit_compile
    model = lstm()
    model.compile("sgd", "mse", jit_compile=True)
    choice = choose(model)
    assert not choice.jit_compile and "Keras turns it off" in choice.notes[0]


def test_determinism_and_strategies_turn_xla_off():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = mlp()
    choice = choose(model)
    assert not choice.jit_compile and choice.possible
    assert "strategy" in choice.notes[0]
    assert not model._resolve_auto_jit_compile()  # Private; Keras 3.15.
    model.compile("sgd", "mse", jit_compile=True)
    assert choose(model).jit_compile
    with kernel_switches.scope(deterministic=True):
        assert "deterministic" in choose(mlp()).notes[0]


@pytest.mark.parametrize("make", [mlp, augmented])
def test_rule_is_keras(make, monkeypatch):
    """The private `_resolve_auto_jit_compile` of Keras 3.15, shown a GPU."""
    gpu = types.SimpleNamespace(device_type="GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
    model = make()
    assert model._distribute_strategy is None
    assert bool(model._resolve_auto_jit_compile()) == choose(model).jit_compile


ACTIVATIONS = {
    "activation": ("tanh", "relu", tf.tanh, keras.ops.tanh),
    "recurrent_activation": ("sigmoid", "hard_sigmoid", tf.sigmoid),
    "use_bias": (True, False),
    "unroll": (True, False),
    "reset_after": (True, False),
}
VARIANTS = [(name, value) for name, values in ACTIVATIONS.items() for value in values]


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_cudnn_takes_what_keras_says(kind):
    """The private rules of Keras 3.15."""
    keras_rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    names = ["activation", "recurrent_activation", "unroll", "use_bias"]
    rule = keras_rnn._do_lstm_arguments_support_cudnn
    if kind is layers.GRU:
        names.append("reset_after")
        rule = keras_rnn._do_gru_arguments_support_cudnn
    for name, value in VARIANTS:
        if name not in names:
            continue
        layer = kind(4, **{name: value})
        wanted = rule(**{each: getattr(layer, each) for each in names})
        assert cudnn.refuses_xla(layer) == wanted, (name, value)
    assert not cudnn.refuses_xla(kind(4, use_cudnn=False))
    assert cudnn.runs_whole(kind(4, dropout=0.5))
    assert not cudnn.runs_whole(kind(4, recurrent_dropout=0.5))
    assert cudnn.refuses_xla(kind(4, recurrent_dropout=0.5))


def test_cudnn_runs_a_layer_in_one_kernel():
    with policy.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((64, 16)), layers.LSTM(16)])

    def kernels(**keywords):
        report = audit.audit(model, device="v100", **keywords)
        (text,) = [x.evidence for x in report.findings if x.rule == "batch"]
        return int(text.split("the ")[1].split(" kernels")[0])

    assert kernels() < 10
    assert kernels(jit_compile=True) > 64
