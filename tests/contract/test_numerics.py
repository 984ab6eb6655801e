"""Where precision is lost: planted faults are found, sound models are left alone."""

import json
import math
import re
import warnings

import faults
import helpers
import keras
import ml_dtypes
import models
import numpy as np
import pytest

import tfamp

L = keras.layers


def compared(fault, mode="mixed_float16", **given):
    """Compares a chain with a fault in the two formats, with a loss."""
    model = faults.functional(fault)
    inputs, targets = faults.batch(model)
    given = {"targets": targets, "loss": "mse", **given}
    return tfamp.compare_precision(model, inputs, mode, **given)


def case(kind, mode, fault):
    """Every fault in a chain; one in others, the rest if asked for."""
    one = faults.Variance
    others = kind in (faults.subclassed, faults.nested) and mode == "mixed_float16"
    usual = kind is faults.functional or (fault is one and others)
    quick = kind is faults.functional and fault in (faults.Mask, faults.Variance)
    mark = pytest.mark.training if usual else pytest.mark.slow
    return pytest.param(
        *(kind, mode, fault),
        id=f"{kind.__name__}-{fault.__name__}-{mode}",
        marks=() if quick else mark,
    )


@pytest.mark.issue(
    "keras#16552",
    "keras#17604",
    "tensorflow#47156",
    "transformers#6915",
    "tensorflow#115732",
    "tensorflow#115731",
    "tensorflow#37130",
    "transformers#18798",
    "tensorflow#56065",
)
@pytest.mark.parametrize(
    ("kind", "mode", "fault"),
    [case(kind, *each) for kind in faults.KINDS for each in faults.FAULTS],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # Of a constant.
def test_a_planted_fault_is_found_and_cured(kind, mode, fault):
    model = kind(fault)
    inputs, targets = faults.batch(model)
    found = tfamp.compare_precision(model, inputs, mode, targets=targets, loss="mse")
    error = "local_error"
    if fault is faults.GradientUnderflow:
        error = "local_gradient_error"
    worst = max(found.rows, key=lambda row: getattr(row, error))
    assert worst.path.endswith("fault")
    others = [row for row in found.rows if row.path != worst.path]
    assert max(getattr(row, error) for row in others) < 0.05
    batches = [faults.batch(model, seed=seed) for seed in range(4)]
    search = tfamp.search_precision(model, batches, mode, loss="mse")
    assert search.held_out.kept == (worst.path,)
    assert search.passed and search.complete
    layers = {x.path: x.error for x in search.layers}
    assert max(layers, key=layers.__getitem__) == worst.path
    # Each comparison takes a second or two: of the chains one is enough.
    if kind is not faults.functional or fault is faults.Overflow:
        tfamp.set_precision(model, mode, search.overrides)
        after = tfamp.compare_precision(model, inputs, targets=targets, loss="mse")
        assert max(row.accumulated_error for row in after.rows) < 0.05
        assert max(row.gradient_error for row in after.rows) < 0.05


LARGE = {"functional", "subclassed", "tokens"}
SOUND = [(name, mode) for mode in helpers.LOW for name in models.MODELS]
QUICK = [each for each in SOUND[: len(models.MODELS)] if each[0] not in LARGE]


@pytest.mark.parametrize("case", helpers.names_of(SOUND, quick=QUICK))
def test_any_sound_model_is_compared_and_left_as_it_was(case):
    name, mode = case
    model = models.MODELS[name]()
    inputs = models.batch(model)
    before = models.described(model)
    found = tfamp.compare_precision(model, inputs, mode)
    assert models.described(model) == before
    assert found.rows
    assert max(row.local_error for row in found.rows) < 0.1
    assert found.first_overflow is None and found.first_diverging is None
    known = {row.path for row in tfamp.describe_layers(model)}
    assert known & {row.path for row in found.rows}


def test_errors_are_those_of_numpy():
    """Three numbers that can be worked out, for the middle one of three layers."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    scale = [L.Lambda(lambda x, k=k: x * k, name=f"by{k}") for k in (3, 7, 5)]
    copy = L.Dense(4, use_bias=False, kernel_initializer="identity")
    model = keras.Sequential(
        [keras.Input((4,)), copy, *scale, L.Dense(2)], name="small"
    )
    row = tfamp.compare_precision(model, x, "mixed_bfloat16").rows[2]

    def bfloat16(values):
        return values.astype(ml_dtypes.bfloat16).astype("float32")

    def error(low, exact):
        exact = exact.astype("float64")
        return np.linalg.norm(low - exact) / np.linalg.norm(exact)

    by3 = bfloat16(bfloat16(x) * 3)
    by7 = bfloat16(by3 * 7)
    assert row.path == "small/by7"
    np.testing.assert_allclose(row.input_error, error(by3, x * 3), rtol=1e-5)
    np.testing.assert_allclose(row.accumulated_error, error(by7, x * 21), rtol=1e-5)
    local = error(bfloat16(bfloat16(x * 3) * 7), x * 21)
    np.testing.assert_allclose(row.local_error, local, rtol=1e-5)


def test_a_container_has_a_row_only_for_operations_of_its_own():
    def paths(model, inputs):
        found = tfamp.compare_precision(model, inputs, "mixed_bfloat16")
        return [row.name for row in found.rows]

    chain = faults.functional(faults.Cancellation)
    x, _ = faults.batch(chain)
    assert paths(chain, x) == ["first", "fault", "second", "head"]
    own = faults.subclassed(faults.Cancellation)  # It adds.
    names = ["first", "fault", "second", "head"]
    assert paths(own, x) == [*(f"subclassed/{name}" for name in names), "subclassed"]
    twice = faults.nested(faults.Cancellation)
    assert paths(twice, x)[:4] == [
        *("first", "fault"),
        *("first (call 2)", "fault (call 2)"),
    ]
    inputs = keras.Input((4, 8))
    y = L.MultiHeadAttention(2, 4, name="mha")(inputs, inputs)
    y = keras.ops.exp(keras.layers.LSTM(4, name="lstm")(y))
    rows = paths(keras.Model(inputs, y), np.ones((2, 4, 8), "float32"))
    assert rows[-3:] == ["mha", "lstm", "exp"]  # No row for the cell.
    assert {"mha/query", "mha/key", "mha/value"} < set(rows)


def test_counts_of_values_that_are_lost():
    small = L.Lambda(lambda x: x * 2.0**-13)
    copy = L.Dense(4, use_bias=False, kernel_initializer="identity")
    model = keras.Sequential([keras.Input((4,)), copy, small, L.Dense(2)])
    x = np.float32([[1.0, 2.0**-2, 2.0**-13, 0.0]])
    _, row, _ = tfamp.compare_precision(model, x, "mixed_float16").rows
    assert row.outputs == (4, 1, 1, 1, 0, 0)  # 2**-26 is gone.


@pytest.mark.parametrize(
    "mode", helpers.names_of(["mixed_bfloat16", "mixed_float16"], ["mixed_float16"])
)
def test_it_can_be_compiled_by_xla(mode):
    found = compared(faults.Variance, mode, jit_compile=True)
    assert "compiled by XLA" in str(found)
    assert max(found.rows, key=lambda row: row.local_error).path == "fault"


def test_the_loss_scale_is_the_optimizers():
    model = faults.functional(faults.Cancellation)
    inputs, targets = faults.batch(model)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
    model.compile(optimizer, "mse")
    found = tfamp.compare_precision(model, inputs, "mixed_float16", targets=targets)
    assert found.loss_scale == 64.0
    largest = found.recommended_loss_scale
    assert math.log2(largest).is_integer() and largest > 64.0
    given = {"targets": targets, "loss_scale": 2.0**30}
    far = tfamp.compare_precision(model, inputs, "mixed_float16", **given)
    assert any(row.gradients.overflow for row in far.rows)


def test_a_loss_that_goes_past_a_sigmoid():
    """Keras' losses use the logits of a layer, which are no outputs of it."""
    head = L.Dense(1, "sigmoid", dtype="float32", name="head")
    model = keras.Sequential([keras.Input((4,)), L.Dense(8, name="body"), head])
    x = models.batch(model)
    given = {"targets": np.ones((len(x), 1)), "loss": "binary_crossentropy"}
    found = tfamp.compare_precision(model, x, "mixed_bfloat16", **given)
    assert max(row.local_gradient_error for row in found.rows) < 0.05


def test_reports():
    found = compared(faults.Variance)
    verdict = "mixed_float16: diverges first in fault, which makes an error of "
    assert found.to_text().startswith(verdict) and "search_precision" in found.verdict
    assert found.first_diverging.path == "fault" and found.first_overflow is None
    assert found.to_markdown().count("\n| ") == 6
    stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["path"] for row in stored["rows"]] == [row.path for row in found.rows]
    assert len(found.figure().axes) == 1


@pytest.mark.parametrize(
    ("fault", "loss_scale", "verdict"),
    [
        (faults.Sum, 1.0, "overflows first in fault, which returns inf or NaN"),
        (faults.GradientUnderflow, 1.0, "no output diverges, but gradients do, first"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_comparison_begins_with_one_sentence(fault, loss_scale, verdict):
    found = compared(fault, loss_scale=loss_scale)
    assert str(found).splitlines()[0] == found.verdict
    assert found.verdict.startswith(f"mixed_float16: {verdict}")
    assert "fault" in found.verdict


def test_weights_may_be_regularized(disabled):
    dense = L.Dense(8, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), dense, L.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    compared = tfamp.compare_precision(model, x, "mixed_bfloat16", targets=x[:, :1])
    assert all(0 < row.gradient_error < 0.1 for row in compared.rows)
    batches = [(x[i : i + 16], x[i : i + 16, :1]) for i in range(0, 64, 16)]
    found = tfamp.search_precision(model, batches, "mixed_bfloat16", verbose=0)
    assert found.overrides == {}
    tfamp.enable("mixed_bfloat16")
    monitor = tfamp.NumericsMonitor(every=1, verbose=0)
    helpers.fit(keras.models.clone_model(model), x, x[:, :1], callbacks=[monitor])


@pytest.fixture
def chain():
    return faults.functional(faults.Cancellation)


def test_a_notebook_shows_a_summary_with_the_worst_calls():
    layers = [L.Dense(8, name=f"layer_{number}") for number in range(30)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="deep")
    inputs = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    found = tfamp.compare_precision(model, inputs, "mixed_bfloat16")
    short, shown = found._repr_markdown_(), repr(found)
    assert short.startswith("### deep: mixed_bfloat16 against float32\n")
    assert "the 8 of 30 calls with the largest local errors" in short
    worst = sorted(found.rows, key=lambda row: -row.local_error)[:8]
    for text in (short, shown):
        assert len(text.splitlines()) < 30
        assert "mixed_bfloat16: accurate everywhere, the largest error is " in text
        assert all(row.name in text for row in worst)
    assert len(str(found).splitlines()) > 30
    search = tfamp.search_precision(model, [inputs] * 4, "mixed_bfloat16")
    assert repr(search).splitlines()[0].startswith("deep: in mixed_bfloat16 ")
    assert search._repr_markdown_().startswith("### deep: layers that must stay")


def test_bad_input(chain):
    x, y = faults.batch(chain)
    batches = [(x, y)] * 4
    unbuilt = keras.Sequential([L.Dense(2)])
    for function, given in (
        (tfamp.compare_precision, x),
        (tfamp.search_precision, batches),
    ):
        with pytest.raises(ValueError, match="not built"):
            function(unbuilt, given, "mixed_float16")
        with pytest.raises(TypeError, match="keras.Model"):
            function(L.Dense(2), given, "mixed_float16")
        with pytest.raises(ValueError, match="mixed_float32"):
            function(chain, given, "mixed_float32")
        with pytest.raises(ValueError, match="float32"):
            function(chain, given, "float32")
    with pytest.raises(ValueError, match="32 bits"):
        tfamp.compare_precision(chain, x)
    with pytest.raises(ValueError, match="not compiled"):
        tfamp.compare_precision(chain, x, "mixed_float16", targets=y)
    with pytest.raises(ValueError, match="A loss needs targets.*'mse'"):
        tfamp.search_precision(chain, [x] * 4, "mixed_float16", loss="mse")
    with pytest.raises(ValueError, match=r"at least 4.*\n?.*Received: 3"):
        tfamp.search_precision(chain, batches[:3], "mixed_float16", loss="mse")
    x[3, 2] = np.nan
    with pytest.raises(ValueError, match="'first' have NaN in float32"):
        tfamp.compare_precision(chain, x, "mixed_float16")


def test_an_interrupt_leaves_the_model_as_it_was(chain, monkeypatch):
    before = models.described(chain)
    fault = chain.get_layer("fault")

    def interrupt(x):
        if fault.compute_dtype == "float16":
            raise KeyboardInterrupt
        return x

    object.__setattr__(fault, "call", interrupt)
    x, _ = faults.batch(chain)
    with pytest.raises(KeyboardInterrupt):
        tfamp.compare_precision(chain, x, "mixed_float16")
    assert fault.call is interrupt
    object.__delattr__(fault, "call")
    assert models.described(chain) == before


class Noise(L.Layer):
    """Noise of a seed of its own, in inference, too."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)

    def call(self, x):
        drawn = keras.random.normal(keras.ops.shape(x), 0.0, 1.0, "float32", self.seed)
        return x + keras.ops.cast(drawn, x.dtype)


def test_random_layers_draw_the_same_numbers_in_both_formats():
    model = keras.Sequential([keras.Input((4,)), Noise(), Noise(), L.Dense(2)])
    before = models.described(model)
    inputs = models.batch(model)
    found = tfamp.compare_precision(model, inputs, "mixed_bfloat16")
    assert max(row.accumulated_error for row in found.rows) < 0.05
    assert max(row.local_error for row in found.rows) < 0.05
    assert models.described(model) == before


def test_search_stops_in_time_with_what_is_safe(chain):
    batches = [faults.batch(chain, seed=seed) for seed in range(4)]
    found = tfamp.search_precision(
        chain, batches, "mixed_float16", loss="mse", seconds=0.0
    )
    assert not found.complete and found.passed
    assert found.held_out.kept == ("first", "fault", "second")
    assert "time limit" in str(found)


def test_search_of_a_sound_model_keeps_nothing():
    model = models.sequential()
    batches = [models.batch(model, rows=rows) for rows in (4, 5, 6, 7)]
    found = tfamp.search_precision(model, batches, "mixed_bfloat16")
    assert found.overrides == {} and found.passed and "no layer" in str(found)
    again = tfamp.search_precision(model, batches, "mixed_bfloat16")
    assert again.held_out.error == found.held_out.error
    json.dumps(found.to_dict(), allow_nan=False)
    assert len(found.figure().axes) == 1


def test_search_where_a_call_mixes_formats():
    """`x + y` of float32 and 16 bits is computed in float32, so one stays."""

    class Adds(faults.Subclassed):
        def call(self, x):
            x = self.first(x)
            return self.head(self.second(x + self.fault(x)))

    model = Adds(faults.Cancellation)
    x, y = faults.batch(model)
    model(x)
    found = tfamp.search_precision(model, [(x, y)] * 4, "mixed_float16", loss="mse")
    assert set(found.held_out.kept) == {"subclassed/fault"}
    tfamp.set_precision(model, "mixed_float16", found.overrides)
    with helpers.enabled("mixed_float16"):
        model(x)


@pytest.mark.parametrize("own", [None, "stack", "stack_1"])
def test_overrides_hold_for_the_same_model_made_again(own):
    """Keras counts models that are given no name: sequential, sequential_1."""

    def build():
        fault = faults.Cancellation(name="fault")
        stack = [L.Dense(8, "relu"), fault, L.Dense(2, name="head")]
        return keras.Sequential([keras.Input((8,)), *stack], name=own)

    model = build()
    batches = [np.random.default_rng(0).normal(size=(16, 8))] * 4
    found = tfamp.search_precision(model, batches, "mixed_float16")
    assert len(found.overrides) == 1
    with tfamp.policy_scope("mixed_float16"):
        again = build()
    tfamp.set_precision(again, "mixed_float16", found.overrides)
    assert again.get_layer("fault").compute_dtype == "float32"


# ---- While it trains ----


def trained(mode, callbacks=(), loss_scale=False, **compiled):
    """Trains on gradients of some 1e-7; returns the model and its history."""
    keras.utils.set_random_seed(0)
    low = {"small/logits": mode}  # It computes outputs.
    tfamp.enable(mode, loss_scale=loss_scale, overrides=low)
    stack = [L.Dense(16, "relu"), L.Dropout(0.2), L.BatchNormalization()]
    head = L.Dense(4, name="logits", dtype=None)
    model = keras.Sequential([keras.Input((8,)), *stack, head], name="small")

    def loss(y, outputs):
        found = keras.losses.sparse_categorical_crossentropy(y, outputs, True)
        return found * 1e-5

    model.compile(keras.optimizers.SGD(0.1), loss, **compiled)
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 8)).astype("float32")
    y = random.integers(0, 4, 64)
    keywords = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(x, y, callbacks=list(callbacks), **keywords)
    tfamp.disable()
    return model, history.history


def monitored(log_dir, **keywords):
    """Trains with a monitor and without; returns the monitor and what differs."""
    monitor = tfamp.NumericsMonitor(every=4, log_dir=log_dir)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one, history = trained("mixed_float16", [monitor], **keywords)
    other, expected = trained("mixed_float16", **keywords)
    same = zip(one.variables, other.variables, strict=True)
    differ = [v.path for v, w in same if not np.array_equal(v, w)]
    texts = [str(x.message) for x in said if "gradients of layer" in str(x.message)]
    return monitor, texts, differ + [k for k in history if history[k] != expected[k]]


@pytest.mark.issue("transformers#18798")
@pytest.mark.parametrize(
    "compiled", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str
)
def test_the_monitor_tells_what_is_lost_and_changes_nothing(compiled, tmp_path):
    monitor, texts, differ = monitored(tmp_path, **compiled)
    assert differ == []
    (text,) = texts
    assert "Step 0" in text and "'small/" in text and "float16" in text
    scale = monitor.recommended_loss_scale
    assert f"{scale:g}" in text and monitor.fits
    largest = max(row.largest_gradient for row in monitor.rows)
    assert 65504 / 16 < largest * scale <= 65504 / 8 or largest < 1e-5
    names = ["dense", "dropout", "batch_normalization", "logits"]
    lines = (tmp_path / "numerics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4]
    rows = [row["path"].split("/")[1] for row in json.loads(lines[0])["layers"]]
    assert [name.rstrip("_0123456789") for name in rows] == names
    assert [*(tmp_path / "numerics").iterdir()]  # Events for TensorBoard.
    lost = {row.path.split("/")[1]: row for row in monitor.rows}["logits"]
    assert lost.gradients.underflow and lost.gradients.zeros == 0
    assert 0.5 < lost.updates_lost <= 1.0  # Updates of 1e-8 on weights of 0.1.


def test_a_monitor_says_at_the_end_what_was_lost_and_by_what_scale_it_is_held(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monitor, texts, _ = monitored(None)
    assert texts
    said = capsys.readouterr().out.splitlines()
    (head,) = [line for line in said if line.startswith("NumericsMonitor, step 4: ")]
    assert "of 4 layers lose outputs, or more than 5% of their gradients:" in head
    text = "\n".join(said)
    assert re.search(r"small/logits +float16 +kept +\d+\.\d% to 0 +\d+%", text)
    assert "weights stored in that format would round away; harmless" in text
    assert f"{monitor.recommended_loss_scale:g} would keep the largest finite" in text
    row = {row.path.split("/")[1]: row for row in monitor.rows}["logits"]
    assert str(row).startswith("small/logits in float16: outputs kept, weights ")
    assert "% of its updates would be rounded away if weights were" in str(row)
    assert [*tmp_path.iterdir()] == []  # Nothing is written by default.
    scale = {"dynamic": False, "initial_scale": monitor.recommended_loss_scale}
    again = tfamp.NumericsMonitor(every=4, log_dir=None)
    trained("mixed_float16", [again], loss_scale=scale)
    assert max(row.gradients_lost for row in again.rows) < 0.01
    assert again.fits


def test_a_monitor_watches_the_layers_it_is_asked_for(tmp_path):
    monitor = tfamp.NumericsMonitor(4, ".*/logits", log_dir=None, max_lost=1.0)
    model, _ = trained("mixed_float16", [monitor])
    assert [row.path for row in monitor.rows] == ["small/logits"]
    assert "train_step" not in vars(model)
    none = tfamp.NumericsMonitor(log_dir=str(tmp_path / "logs"))
    trained("float32", [none])
    assert none.rows == () and not (tmp_path / "logs").exists()


@pytest.mark.training
def test_a_monitor_with_loss_scaling_has_nothing_to_warn_of(capsys):
    monitor = tfamp.NumericsMonitor(every=4, log_dir=None)
    trained("mixed_float16", [monitor], loss_scale={"initial_scale": 2.0**28})
    assert max(row.gradients_lost for row in monitor.rows) < 0.01
    words = "NumericsMonitor, step 4: no layer loses "
    assert words in capsys.readouterr().out
    # Nor where the scale is too high: the first step is taken again with a lower one.
    scale = {"initial_scale": 32.0 * monitor.recommended_loss_scale}
    monitor = tfamp.NumericsMonitor(every=100, max_lost=0.0, verbose=0)
    trained("mixed_float16", [monitor], loss_scale=scale)
    assert capsys.readouterr().out == ""
    assert {row.gradients_underflowed for row in monitor.rows} == {0.0}
    assert not any(row.gradients_lost for row in monitor.rows)


def test_a_monitor_beside_a_training_step_of_the_users_own():
    """And no weights before the first one."""
    monitor = tfamp.NumericsMonitor(every=2, log_dir=None)
    with tfamp.policy_scope("mixed_float16"):
        model = models.OwnStep([L.Dense(3, name="head")])
    given = {"batch_size": 8, "callbacks": [monitor], "auto_scale_loss": False}
    helpers.fit(model, np.ones((32, 4)), np.ones((32, 3)), **given)
    assert [row.path for row in monitor.rows] == [f"{model.name}/head"]
    assert "train_step" not in vars(model)


@pytest.mark.parametrize("keywords", [{"every": 0}, {"max_lost": 2}])
def test_bad_settings_of_the_monitor(keywords):
    (name,) = keywords
    with pytest.raises((TypeError, ValueError), match=name):
        tfamp.NumericsMonitor(**keywords)
