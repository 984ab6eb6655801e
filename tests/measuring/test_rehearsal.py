"""What a mode would do on another device, tried on this one."""

import json
import sys

import keras
import matplotlib
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import hardware

matplotlib.use("agg")
SCRIPT = """
import keras, numpy as np, tensorflow as tf

def build(batch_size, broken=False):
    x = keras.Input((32,))
    y = keras.layers.Dense(256, "relu", name="wide")(x)
    y = keras.layers.Dense(256, "relu", name="product")(y)
    model = keras.Model(x, keras.layers.Dense(4, name="head")(y), name="own")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    features = np.random.default_rng(0).normal(size=(256, 32)).astype("float32")
    data = features, features[:, :4].argmax(-1)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    return model, batches.repeat()

def fails(batch_size):
    model, batches = build(batch_size)
    if keras.config.dtype_policy().name == "mixed_float16":
        raise TypeError("this code knows no float16")
    return model, batches

def without_loss(batch_size):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(4)])
    model.compile("adam")
    return model, build(batch_size)[1]
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield "own_script.py"
    sys.modules.pop("own_script", None)


def test_modes_are_tried_for_a_device_that_is_not_here(script, capsys):
    found = tfamp.rehearse(
        *(f"{script}:build", 32),
        **{"device": "v100", "steps": 4, "seconds": 20.0},
        modes=("mixed_float16", "float8"),
    )
    said = capsys.readouterr().err.splitlines()
    assert [x.split(" (")[0] for x in said if " of " in x] == [
        *("1 of 3: float32", "2 of 3: mixed_float16", "3 of 3: float8")
    ]
    assert sum(" after 4 steps" in line for line in said) == 3
    wide, half, float8 = found.modes
    assert [x["mode"] for x in found.modes] == ["float32", "mixed_float16", "float8"]
    # On this host, whose CPU multiplies in neither.
    assert [x["how"] for x in found.modes] == ["measured", "emulated", "emulated"]
    assert all(len(x["losses"]) == 4 for x in found.modes)
    assert wide["losses"][0] == pytest.approx(half["losses"][0], rel=1e-2)
    assert half["skipped_steps"] == 0 and wide["skipped_steps"] is None
    assert 0 < half["output_error"] < 1e-2 < float8["output_error"] < 0.2
    assert half["overrides"] == {} and "product" in float8["worst"]
    # Of the device: float16 tensor cores, and none for the others.
    assert half["fast"] and not wide["fast"] and not float8["fast"]
    assert wide["formats"] == {"float32": 1.0} and wide["fast_share"] == 0
    assert half["fast_share"] > 0.9 and float8["fast_share"] == 0
    assert float8["formats"]["float8"] > 0.8
    assert sum(half["memory"].values()) < sum(wide["memory"].values())
    json.dumps(found.to_dict())
    page = str(found)
    assert "own_script.py:build" in page or "# build rehearsed for Tesla V100" in page
    assert page.count("(computed)") == 6 and "`tfamp.enable('mixed_float16')`" in page
    assert len(found.figure().axes) == 4
    assert keras.config.dtype_policy().name == "float32"


def test_a_mode_that_fails_is_told_beside_those_that_work(script, tmp_path, capsys):
    given = {"steps": 2, "seconds": 5.0, "modes": ("mixed_float16",)}
    given |= {"workdir": tmp_path / "kept"}
    found, again = (tfamp.rehearse(f"{script}:fails", 16, **given) for _ in range(2))
    assert again.modes[0] == found.modes[0]
    told = [x for x in capsys.readouterr().err.splitlines() if " of 2: " in x]
    # A process that failed is tried again.
    before = ["(measured before)" in line for line in told]
    assert before == [False, False, True, False]
    wide, half = found.modes
    assert not wide["failures"] and "knows no float16" in half["failures"]["training"]
    assert "knows no float16" in str(found)
    found.figure()


def test_what_fails_in_float32_too_is_told(script):
    asked = {"batch_size": 16, "steps": 2, "seconds": 1.0, "modes": "float8"}
    page = str(tfamp.rehearse(f"{script}:without_loss", **asked))
    assert "- float32: training failed: ValueError: No loss to compute" in page
    assert "- float8: no layer computes in float8." in page
    with pytest.raises(ValueError, match="script.py:missing'"):
        tfamp.rehearse(f"{script}:missing", **asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "h10"}, "Did you mean 'h100'"),
        ({"modes": ("float16",)}, "Did you mean 'mixed_float16'"),
        ({"modes": "float16"}, "Did you mean 'mixed_float16'"),
        ({"steps": 0}, "steps"),
        ({"seconds": "1"}, "seconds"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_process_is_started(given, message):
    given = {"batch_size": 16, **given}
    with pytest.raises((ValueError, TypeError), match=message):
        tfamp.rehearse("own_script.py:build", **given)


def test_another_device_decides_in_a_scope():
    with hardware.simulated(hardware.DEVICES["t4"]):
        assert tfamp.detect_support()["Tesla T4 (compute capability 7.5)"]
        with tfamp.policy_scope("mixed_float16"):
            assert hardware.choose_mode(hardware.read_devices()).mode == "mixed_float16"
    assert len(hardware.read_devices()) == len(tf.config.get_visible_devices())
