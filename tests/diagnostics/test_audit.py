"""`tfamp.audit` on whole models, and how a report is shown."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp import device_table, hardware
from tfamp.diagnostics import audit, audit_report, timing
from tfamp.kernels import bias_gradient
from tfamp.precision import policy

layers = keras.layers


def build(mode, *parts, name="net"):
    """A sequential model of layers that are created in a mode."""
    with policy.policy_scope(mode):
        return keras.Sequential([part() for part in parts], name=name)


def mlp(mode, units=1024, **head):
    return build(
        mode,
        lambda: keras.Input((units,)),
        lambda: layers.Dense(units, activation="relu", name="body"),
        lambda: layers.Dense(16, name="head", **{"dtype": "float32", **head}),
    )


def rules(report):
    return [finding.rule for finding in report.findings]


HOST = hardware.DeviceDescription(
    "CPU", "A host", None, frozenset(("avx512_bf16",)), True
)


def test_well_set_model_on_a_cpu_and_on_a_gpu():
    model = mlp("mixed_bfloat16")
    for device in (HOST, "cpu-amx"):
        report = audit.audit(
            model, batch_size=256, device=device, bias_gradient_fixed=True
        )
        assert report.findings == ()
        assert str(report).endswith("Nothing found.")
    large = mlp("mixed_bfloat16", units=8192)
    report = audit.audit(large, batch_size=8192, device="a100", tensor_float_32=True)
    assert report.findings == ()


def test_one_model_on_different_devices():
    model = mlp("mixed_float16", units=8192)
    found = {
        key: rules(
            audit.audit(model, batch_size=8192, device=key, tensor_float_32=True)
        )
        for key in ("p100", "v100", "t4", "gtx1660", "a100", "h100", "tpu")
    }
    assert found["p100"] == found["gtx1660"] == found["tpu"] == ["fast_unit"]
    assert found["v100"] == found["a100"] == []
    slow = audit.audit(model, batch_size=8192, device="a100", tensor_float_32=False)
    assert rules(slow) == ["tf32"]


def test_report_says_where_it_is_from():
    report = audit.audit(mlp("float32"), batch_size=7, device="v100")
    assert report.simulated and report.batch_size == 7 and report.jit_compile
    assert "Tesla V100-SXM2-16GB (compute capability 7.0), simulated" in str(report)
    entry = device_table.get("v100")
    assert audit.audit(mlp("float32"), batch_size=7, device=entry) == report
    (cpu,) = [d for d in hardware.read_devices() if d.kind == "CPU"]
    assert not audit.audit(mlp("float32"), device=cpu).simulated


def test_bias_gradient_is_judged_as_it_stands():
    model = mlp("mixed_bfloat16")

    def found(**keywords):
        return rules(audit.audit(model, batch_size=256, device=HOST, **keywords))

    assert found() == ["bias_gradients"]
    try:
        bias_gradient.install()
        assert found() == []
        assert found(bias_gradient_fixed=False) == ["bias_gradients"]
    finally:
        bias_gradient.remove()


def test_xla_is_as_compiled_unless_told():
    model = mlp("mixed_bfloat16")
    model.compile("sgd", "mse", jit_compile=True)
    (cpu,) = [d for d in hardware.read_devices() if d.kind == "CPU"]
    assert audit.audit(model, device=cpu).jit_compile
    assert not audit.audit(model, device=cpu, jit_compile=False).jit_compile
    model.compile("sgd", "mse")
    assert audit.audit(model, device="a100").jit_compile
    assert "as Keras decides" in audit.audit(model, device="a100").notes[0]


def test_float16_without_loss_scaling():
    model = mlp("mixed_float16")
    assert "loss_scaling" not in rules(audit.audit(model, device="v100"))
    model.compile(keras.optimizers.SGD(), "mse", auto_scale_loss=False)
    report = audit.audit(model, device="v100")
    (finding,) = [x for x in report.findings if x.rule == "loss_scaling"]
    assert [row["layer"] for row in finding.details] == ["net/body"]


def test_pure_16_bit_policy():
    model = build(
        "float32",
        lambda: keras.Input((8192,), dtype="bfloat16"),
        lambda: layers.Dense(8192, dtype="bfloat16", name="pure"),
    )
    report = audit.audit(model, batch_size=8192, device="a100")
    assert rules(report) == ["narrow_variables", "outputs"]
    assert f"{8192 * 8193:,} trained weights" in report.findings[0].what


class Reader(keras.Model):
    """A subclassed model that reads integers, which Keras does not record."""

    def __init__(self):
        super().__init__(name="reader")
        self.embedding = layers.Embedding(30522, 256)
        self.head = layers.Dense(30522)

    def call(self, ids):
        return self.head(self.embedding(ids))


def test_subclassed_model_needs_inputs_and_its_vocabulary_is_padded():
    with policy.policy_scope("mixed_float16"):
        model = Reader()
    with pytest.raises(ValueError, match="is not built"):
        audit.audit(model)
    ids = np.zeros((512, 64), "int32")
    model(ids[:2])
    with pytest.raises(ValueError, match="Pass `inputs`"):
        audit.audit(model)
    report = audit.audit(model, inputs=ids, device="v100")
    assert report.batch_size == 512
    (finding,) = [x for x in report.findings if x.rule == "alignment"]
    assert "vocabulary 30522 -> 30528 in reader/dense" in finding.evidence


def test_open_sizes_are_told():
    model = build(
        "float32", lambda: keras.Input((None, 8), name="x"), lambda: layers.Dense(8)
    )
    assert "taken to be 128" in audit.audit(model).notes[0]
    assert audit.audit(model, inputs=np.zeros((2, 5, 8))).notes == ()


def test_input_that_is_slower_than_the_step():
    report = audit.audit(
        mlp("float32"), step_seconds=0.001, pipeline_seconds=0.01, device="p100"
    )
    assert rules(report) == ["pipeline"]
    assert report.findings[0].effect == pytest.approx(0.9)
    assert report.notes == ("a batch takes 10.00 ms to draw", "a step takes 1.00 ms")


def test_measured_times_change_nothing_in_the_model():
    model = build(
        "float32",
        lambda: keras.Input((8,)),
        lambda: layers.BatchNormalization(),
        lambda: layers.Dropout(0.5),
        lambda: layers.Dense(4),
    )
    before = [np.array(v) for v in model.variables]
    dataset = tf.data.Dataset.from_tensors((tf.ones((4, 8)), tf.ones(4))).repeat(9)
    report = audit.audit(model, batch_size=4, dataset=dataset)
    assert len(report.notes) == 2
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("trainable", [True, False])
def test_step_time_is_that_of_the_model(trainable):
    """Without weights to train there is no gradient; the model runs all the same."""
    ran, kept = [], tf.zeros(())

    class Slow(layers.Layer):
        def call(self, x):
            self.kept = tf.numpy_function(lambda y: ran.append(1) or y, [x], x.dtype)
            return tf.ensure_shape(self.kept, x.shape)

    slow = Slow()
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), slow])
    slow.kept = kept
    model.trainable = trainable
    assert timing.step_seconds(model, tf.ones((2, 3)), False) > 0
    assert len(ran) >= 7
    assert slow.kept is kept


def test_pipeline_time_is_that_of_a_batch():
    def slow():
        for index in range(8):
            tf.py_function(lambda: None, [], [])
            yield index

    assert timing.pipeline_seconds(slow()) > 0
    with pytest.raises(ValueError, match="more than 2 batches"):
        timing.pipeline_seconds([1, 2])


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device": "a1000"}, ValueError, "Did you mean 'a100'"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"device": 1}, TypeError, "device=1"),
        ({"device": "a100", "dataset": [1, 2, 3]}, ValueError, "cannot be timed"),
        (
            {"batch_size": 3, "inputs": np.zeros((2, 1024))},
            ValueError,
            "batch_size=3, inputs of 2",
        ),
    ],
    ids=["device", "batch size", "type", "simulated time", "two batch sizes"],
)
def test_bad_arguments(keywords, error, message):
    with pytest.raises(error, match=re.escape(message)):
        audit.audit(mlp("float32"), **keywords)


def test_model_that_is_no_model():
    with pytest.raises(TypeError, match="must be a Keras model"):
        audit.audit(layers.Dense(3))  # pyright: ignore[reportArgumentType]


# ---- The report ----


@pytest.fixture(scope="module")
def report():
    findings = (
        audit_report.Finding(
            "alignment",
            "speed",
            0.123,
            "sizes",
            "units 9 -> 16 | here " * 9,
            "pad them",
        ),
        audit_report.Finding(
            "outputs", "accuracy", None, "outputs", "head", "pin", ({"layer": "head"},)
        ),
    )
    return audit_report.AuditReport(
        *("net", "A device", True, 64, True, 4_300_000_000),
        *({"bfloat16": 0.9999, "float32": 0.0001}, findings, ("assumed",)),
    )


def test_report_is_plain_data(report):
    content = json.loads(json.dumps(report.to_dict()))
    assert content["schema_version"] == 1
    assert content["findings"][1]["details"] == [{"layer": "head"}]
    assert content["formats"] == report.formats
    assert set(content) - {"schema_version"} == set(report._fields)


@pytest.mark.parametrize("columns", [60, 88, 200])
def test_terminal_text_fits_the_terminal(report, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    assert "4.3 GFLOP" in lines[1] + lines[2]
    (first,) = [line for line in lines if "sizes" in line]
    assert first == "    12%  sizes"


def test_markdown_has_a_row_for_each_finding(report):
    text = report.to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4  # Two heads.
    unescaped = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert unescaped == [5] * 4
    assert "## Accuracy" in text and "- assumed" in text
