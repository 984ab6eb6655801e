"""`tfamp.audit`: the launches of a step on a GPU that need not be there."""

import json

import helpers
import keras
import models
import numpy as np
import pytest
from keras import layers as L

import tfamp

BF16, FP16, FP32 = "mixed_bfloat16", "mixed_float16", "float32"
GPU = {"device": "h100", "jit_compile": False}
SPARSE = "sparse_categorical_crossentropy"


def mlp(mode=FP32, loss="mse", width=64, **compiled):
    """Eight variables."""
    with tfamp.policy_scope(mode):
        hidden = [L.Dense(width, "relu") for _ in range(3)]
        last = L.Dense(8, dtype="float32")
        model = keras.Sequential([keras.Input((width,)), *hidden, last], name="net")
    if loss:
        model.compile("adam", loss, jit_compile=False, **compiled)
    return model


def rules_of(report):
    return [finding.rule for finding in report.findings]


# ---- What is counted ----


def test_parts_of_a_step():
    counted = tfamp.audit(mlp(), **GPU).launches
    assert counted.total == sum(counted.parts.values())
    # A product and a bias for each of four layers, three ReLUs, loss and its mean.
    assert 11 <= counted.parts["forward"] <= 20
    # Seven products, four sums of biases, three ReLUs.
    assert 14 <= counted.parts["backward"] <= 20
    assert 20 * 8 <= counted.parts["update"] <= 27 * 8
    assert counted.casts < 15 and counted.graphs == counted.copies == 0


def test_mixed_precision_adds_launches_and_casts():
    stock, mixed = (tfamp.audit(mlp(m), **GPU).launches for m in (FP32, BF16))
    added = mixed.casts - stock.casts
    assert 8 <= added <= 16  # Weights, their gradients, and what goes in and out.
    assert mixed.total - stock.total == added
    assert mixed.parts["update"] == stock.parts["update"]


def test_what_enable_compiles_is_counted_as_it_would_be_on_the_gpu():
    with helpers.enabled(BF16):
        counted = tfamp.audit(mlp(BF16), **GPU).launches
    assert counted.parts["update"] == 1 and counted.graphs >= 1
    assert counted.total <= 60


def test_loss_scaling_is_part_of_the_update():
    plain, scaled = (tfamp.audit(mlp(m), **GPU).launches for m in (BF16, FP16))
    assert scaled.parts["update"] > plain.parts["update"]


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations_have_no_more_launches_than_relu(activation):
    """TensorFlow's own SiLU has one more each; 766 for 614 in EfficientNetV2-B0."""

    def total(activation):
        with helpers.as_if_on_a_gpu(BF16):
            body = [keras.Input((16, 16, 16))]
            for _ in range(4):
                activate = L.Activation(activation)
                body += [L.Conv2D(16, 3), L.BatchNormalization(), activate]
            model = keras.Sequential([*body, L.Flatten(), L.Dense(4)])
            model.compile("adam", "mse", jit_compile=False)
            return tfamp.audit(model, **GPU).launches.total

    assert total(activation) == total("relu")


def test_each_dropout_copies_its_seed_to_the_host():
    def copies(number):
        hidden = [L.Dropout(0.5, seed=n) for n in range(number)]
        model = keras.Sequential([keras.Input((64,)), *hidden, L.Dense(4)])
        model.compile("adam", "mse")
        return tfamp.audit(model, **GPU).launches.copies

    assert [copies(number) for number in (0, 1, 3)] == [0, 1, 3]


def test_a_recurrent_layer_is_cudnns_or_a_loop():
    def audited(**keywords):
        lstm = L.LSTM(16, **keywords)
        model = keras.Sequential([keras.Input((50, 8)), lstm, L.Dense(4)])
        model.compile("adam", "mse")
        return tfamp.audit(model, device="h100", batch_size=4)

    cudnn = audited()
    assert not cudnn.jit_compile and cudnn.launches.total < 400
    assert "Keras turns XLA off for " in " ".join(cudnn.notes)
    assert audited(use_cudnn=False).jit_compile  # As Keras has it on a GPU.
    loop = audited(recurrent_dropout=0.1).launches.parts  # Of 50 steps.
    assert loop["forward"] > 50 * 20 and loop["backward"] > 50 * 20


@pytest.mark.parametrize(
    ("loss", "metrics"),
    [(SPARSE, ["accuracy"]), ("categorical_crossentropy", ["accuracy", "auc"])],
)
def test_losses_and_metrics_are_those_of_the_model(loss, metrics):
    without = tfamp.audit(mlp(loss=loss), **GPU).launches.parts
    both = tfamp.audit(mlp(loss=loss, metrics=metrics), **GPU).launches.parts
    assert both["forward"] > without["forward"]
    assert both["backward"] == without["backward"]


def test_several_outputs_with_losses_by_name():
    x = keras.Input((16,))
    outputs = {"a": L.Dense(4, name="a")(x), "b": L.Dense(5, name="b")(x)}
    model = keras.Model(x, outputs)
    model.compile("adam", {"a": "mse", "b": SPARSE})
    assert tfamp.audit(model, **GPU).launches.total > 4 * 20


def test_a_model_that_is_not_compiled_gets_adam():
    report = tfamp.audit(mlp(loss=None), **GPU)
    assert "with Adam and a mean square" in report.notes[-1]
    assert report.launches == tfamp.audit(mlp(), **GPU).launches


def test_stored_slots_are_counted():
    with helpers.enabled(BF16, optimizer_state="8bit"):
        model = mlp(BF16, width=128)
        counted = tfamp.audit(model, **GPU).launches
    with helpers.enabled(BF16):
        plain = tfamp.audit(mlp(BF16, width=128), **GPU).launches
    assert counted.parts["update"] >= plain.parts["update"] == 1


# ---- What is found ----


def test_launch_bound_until_there_is_work_enough():
    small = tfamp.audit(mlp(), batch_size=64, **GPU)
    (finding,) = [x for x in small.findings if x.rule == "launch_bound"]
    assert finding.share == 1.0 and "tfamp.enable()" in finding.advice
    assert small.cost.launches == pytest.approx(25e-3 * small.launches.total)
    assert small.cost.launches > small.cost.arithmetic + small.cost.memory
    large = tfamp.audit(mlp(width=2048), batch_size=2**16, **GPU)
    assert large.launches.parts["update"] == small.launches.parts["update"]
    assert "launch_bound" not in rules_of(large)


def test_under_enable_it_is_not_advised():
    with helpers.enabled(BF16):
        report = tfamp.audit(mlp(BF16), **GPU)
    (finding,) = [x for x in report.findings if x.rule == "launch_bound"]
    assert "tfamp.enable()" not in finding.advice


def test_status_names_launches_that_bound_a_step_on_this_host():
    with helpers.as_if_on_a_gpu(BF16, fused_kernels=False) as status:
        tfamp.audit(mlp(BF16), device="a100", jit_compile=False)
        assert tfamp.status().reason == status.reason  # It is not this host's.
        for _ in range(2):
            report = tfamp.audit(mlp(BF16))
        (finding,) = [x for x in report.findings if x.rule == "launch_bound"]
        assert "bfloat16 saves memory, and no launch" in finding.evidence
        said = f"{status.reason}; but a step of 'net': {finding.what} (tfamp.audit)"
        assert tfamp.status().reason == said


def test_a_small_u_net_is_told_why_16_bits_gain_nothing():
    def block(x, filters):
        for _ in range(2):
            x = L.Conv2D(filters, 3, padding="same")(x)
            x = L.Activation("relu")(L.BatchNormalization()(x))
        return x

    with tfamp.policy_scope(BF16):
        inputs = keras.Input((32, 32, 3))
        skip = block(inputs, 8)
        x = L.Conv2DTranspose(8, 2, 2)(block(L.MaxPooling2D()(skip), 16))
        x = block(L.Concatenate()([x, skip]), 8)
        model = keras.Model(inputs, L.Conv2D(1, 1, dtype="float32")(x))
    assert "launch_bound" in rules_of(tfamp.audit(model, **GPU))
    assert "batch_norm" in rules_of(tfamp.audit(model, device="cpu-amx"))


@pytest.mark.parametrize("device", ["cpu-amx", "tpu"])
def test_launches_are_those_of_gpus(device):
    report = tfamp.audit(mlp(), device=device)
    assert report.launches is None and report.cost is None


def test_a_gpu_without_known_peaks_has_counts_alone():
    report = tfamp.audit(mlp(), device="gb10", jit_compile=False)
    assert report.launches.total == tfamp.audit(mlp(), **GPU).launches.total
    assert report.cost.arithmetic is None and "launch_bound" not in rules_of(report)


# ---- XLA ----


def test_under_xla_a_step_is_one_graph():
    report = tfamp.audit(mlp(), device="h100", jit_compile=True)
    assert report.launches.parts == {"step": 1}
    assert report.cost.memory is None and "launch_bound" not in rules_of(report)
    (note,) = report.notes
    assert "drop_remainder=True" in note and "bucket" not in note


def test_lengths_that_a_model_leaves_open_are_padded_to_few():
    model = keras.Sequential([keras.Input((None, 8)), L.Dense(8)])
    inputs = np.zeros((2, 5, 8), "float32")
    report = tfamp.audit(model, inputs=inputs, device="h100", jit_compile=True)
    assert any("bucket_by_sequence_length" in note for note in report.notes)


def test_what_xla_does_not_compile_is_named():
    model = keras.Sequential([keras.Input((8,)), models.OnHost(), L.Dense(8)])
    model.compile("adam", "mse", jit_compile=True)
    report = tfamp.audit(model, device="h100")
    (finding,) = [x for x in report.findings if x.rule == "xla"]
    assert finding.what == "XLA does not compile PyFunc"
    report = tfamp.audit(model, **GPU)
    (finding,) = [x for x in report.findings if x.rule == "launch_bound"]
    assert "jit_compile" not in finding.advice


# ---- What is not counted, and what is not changed ----


class OwnStep(keras.Model):
    """A model that trains by itself."""

    def train_step(self, data):
        return {}


class Raises(keras.losses.Loss):
    """A loss that no targets fit."""

    def call(self, y_true, y_pred):
        raise ValueError("targets must be boxes")


def own_step(*args):
    model = OwnStep(*args)
    model.compile("adam", "mse")
    return model


def frozen(*args):
    model = keras.Model(*args)
    model.trainable = False
    return model


def raising(*args):
    model = keras.Model(*args)
    model.compile("adam", Raises())
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (own_step, "OwnStep has its own `train_step`"),
        (frozen, "nothing of it trains"),
        (raising, "targets must be boxes"),
    ],
)
def test_steps_that_are_not_counted_are_told(make, reason):
    x = keras.Input((8,))
    report = tfamp.audit(make(x, L.Dense(8)(x)), **GPU)
    assert report.launches is None
    (note,) = [x for x in report.notes if x.startswith("Launches are not counted: ")]
    assert reason in note


def test_nothing_is_changed():
    with tfamp.policy_scope(FP16):
        x = keras.Input((6, 8))
        lstm = L.LSTM(64, name="lstm")
        model = keras.Model(x, L.Dropout(0.5, seed=1)(L.BatchNormalization()(lstm(x))))
    model.compile("adam", "mse", metrics=["mae", keras.metrics.MeanAbsoluteError("x")])
    inputs = np.ones((4, 6, 8), "float32")
    model(inputs)
    of_optimizer = dict(vars(model.optimizer))
    with models.unchanged(model):
        assert tfamp.audit(model, **GPU).launches.total > 100
    assert not model.optimizer.built
    now = vars(model.optimizer)
    assert [x for x in now if now[x] is not of_optimizer.get(x)] == []
    assert lstm.supports_jit
    model.fit(inputs, np.ones((4, 64)), verbose=0)
    counts = tfamp.audit(model, **GPU).launches  # Of a built optimizer, too.
    assert int(model.optimizer.iterations) == 1 and counts.total > 100


def test_report():
    report = tfamp.audit(mlp(), **GPU)
    content = json.loads(json.dumps(report.to_dict()))
    assert content["launches"]["parts"] == report.launches.parts
    assert content["cost"]["launches"] == report.cost.launches
    text = str(report)
    assert f"| step                | {report.launches.total}" in text
    assert "us each, as measured with one H200" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 88
