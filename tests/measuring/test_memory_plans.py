"""The plan that fits: options in their order, predicted, and the first that fits."""

import helpers
import pytest
from ml_collections import config_dict

import tfamp
from tfamp.measuring import (
    memory_options,
    process_memory,
    processes,
    training_steps,
)

MIB = process_memory.MIB
MIXED = {"mode": "mixed_bfloat16"}
OWN = """
import keras
import tensorflow as tf

L = keras.layers


def build(batch_size):
    x = inputs = keras.Input((64,))
    for number in range(4):
        name = f"block_{number}"
        x = keras.Sequential([L.Dense(2048, "relu"), L.Dense(64)], name=name)(x)
    model = keras.Model(inputs, L.Dense(1, dtype="float32")(x))
    model.compile("adam", "mse")
    one = tf.zeros((64,)), tf.zeros((1,))
    return model, tf.data.Dataset.from_tensors(one).repeat().batch(batch_size)
"""
HEAD = """
import keras
import tensorflow as tf


def build(batch_size):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(8192)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(), loss)
    one = tf.zeros((8,)), tf.zeros((), tf.int32)
    return model, tf.data.Dataset.from_tensors(one).repeat().batch(batch_size)
"""
PROGRAMS, FLOAT32 = 500, 400  # MiB
ORDER = [
    *("float32", "mixed_bfloat16"),
    *("+ remat of 2 of 4 blocks", "+ remat of 4 of 4 blocks"),
    *("+ slots of bfloat16", "+ slots of 8 bits"),
    *("+ 2 parts of a batch", "+ 4 parts of a batch"),
    *("+ 8 parts of a batch", "+ 16 parts of a batch", "+ weights of bfloat16"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def stand_in(monkeypatch):
    """A step holds the programs and what was predicted, and what `held` has in MiB.

    Of the last option that it has, "first step" of all, and "of the mode" of the
    mixed mode alone, whatever the limit.
    """
    held = {}

    def call(function, asked, *_, memory=None):
        if function is memory_options.predict:
            return processes.Outcome(predicted())
        if function is memory_options.predict_parts:
            again = predicted()[1] | {"option": "mixed_bfloat16 again"}
            return processes.Outcome([again, in_parts()])
        assert function is training_steps.train
        options = [*predicted(), in_parts()]
        own = next(
            x["predicted_bytes"]
            for x in options
            if x["keywords"] == asked.keywords
            and x["accumulation_steps"] == asked.accumulation_steps
        )
        size = own + (PROGRAMS + held.get([*asked.keywords][-1], 0)) * MIB
        if size > memory.host:
            assert [*asked.keywords] != [
                "mode"
            ]  # Both modes are measured without the limit.
            return processes.Outcome(None, f"MemoryError: {size}")
        size += (asked.keywords == MIXED) * held.get("of the mode", 0) * MIB
        first = held.get("first step", 0) * MIB
        figures = {
            **{"host_bytes": size, "device_bytes": None, "peak_bytes": size + first},
            **{"workspaces_bytes": first, "seconds": len(asked.keywords)},
        }
        return processes.Outcome(figures)

    monkeypatch.setattr(processes, "call", call)
    return held


def option(name, keywords, mebibytes, parts=1):
    made = memory_options.make(name, keywords, 64, parts)
    return {**made, "predicted_bytes": mebibytes * MIB}


def predicted():
    again = {**MIXED, "remat": ["b"]}
    return [
        option("float32", {"mode": "float32"}, FLOAT32),
        option("mixed_bfloat16", MIXED, FLOAT32 - 100),
        option("+ remat", again, FLOAT32 - 200),
        option("+ slots", {**again, "optimizer_state": "8bit"}, FLOAT32 - 300),
    ]


def in_parts():
    return option("float32, 8 parts", {"mode": "float32"}, 50, 8)


@pytest.mark.parametrize(
    ("limit", "held", "chosen", "measured"),
    [
        (900, {}, "float32", 1),
        (880, {}, "mixed_bfloat16", 2),
        (780, {}, "+ remat", 3),
        (780, {"remat": 100}, "+ slots", 3),  # It was predicted to fit.
        (560, {}, "float32, 8 parts", 3),
        (520, {}, None, 2),
        (450, {}, None, 2),
    ],
)
def test_the_first_that_fits_is_chosen(file, stand_in, limit, held, chosen, measured):
    stand_in.update(held)
    found = tfamp.fit_memory(f"{file}:build", f"{limit}MiB", batch_size=64)
    known = [x for x in found.options if x["measured_bytes"] is not None]
    assert len(known) == measured
    assert str(found).count("over the limit") == bool(held)
    # What else float32 held is part of each prediction.
    sizes = [x["predicted_bytes"] // MIB for x in found.options]
    # Parts alone, where nothing fits, and not what was tried.
    parts = [PROGRAMS + 50] if PROGRAMS < limit < 600 else []
    expected = [PROGRAMS + FLOAT32 - 100 * n for n in range(4)] + parts
    assert sizes == expected
    if chosen is None:
        assert found.chosen is None
        says = f"is predicted to hold {min(expected)} MiB, {min(expected) - limit} MiB"
        assert says in str(found)
    else:
        assert found.chosen["option"] == chosen
        assert f'tfamp.enable("{found.chosen["keywords"]["mode"]}"' in str(found)
        assert found.chosen["time_ratio"] > 0
    text = "rows with +: in mixed_bfloat16, each together with those above it"
    assert text in str(found)


def test_trials_in_a_folder_are_not_made_again(
    file, tmp_path, monkeypatch, stand_in, capsys
):
    given = {"batch_size": 64, "workdir": tmp_path / "plan"}
    found = tfamp.fit_memory(f"{file}:build", "780MiB", **given)
    first = capsys.readouterr().err.splitlines()
    words = "  does not fit: 900 MiB resident, the limit is 780 MiB"
    assert first[:2] == ["a training step in float32", words]
    assert first[4] == "what the options hold, by tfamp.memory"
    assert first[5] == "4 of at most 5: + remat (at most 1 min left)"
    monkeypatch.setattr(processes, "call", None)  # Nothing is started.
    again = tfamp.fit_memory(f"{file}:build", "780MiB", **given)
    second = capsys.readouterr().err.splitlines()
    results = [line for line in first if line.startswith("  ")]
    assert again == found and len(second) == len(first)
    assert [line for line in second if line.startswith("  ")] == results
    assert sum("(measured before)" in line for line in second) == 4


def test_what_a_mode_brings_is_part_of_all_options_in_it(file, stand_in):
    stand_in["of the mode"] = 150
    found = tfamp.fit_memory(f"{file}:build", "780MiB", batch_size=64)
    assert found.chosen["option"] == "+ slots"
    sizes = [x["predicted_bytes"] // MIB for x in found.options]
    assert sizes == [900, 950, 850, 750]


def test_what_only_a_first_step_holds_is_told_and_not_predicted(file, stand_in):
    stand_in["first step"] = 150
    found = tfamp.fit_memory(f"{file}:build", "780MiB", batch_size=64)
    sizes = [x["predicted_bytes"] // MIB for x in found.options]
    assert sizes == [900, 800, 700, 600]
    assert found.options[0]["measured_bytes"] == 1050 * MIB
    assert "float32: 150 MiB of the measured only in the first step" in str(found)


def predict(file, batch_size):
    workload = config_dict.ConfigDict({"function": f"{file}:build"})
    return memory_options.predict(workload, batch_size, "mixed_bfloat16", None)


@pytest.mark.parametrize("optimizer", helpers.names_of(["ftrl", "adam"], slow=["ftrl"]))
def test_what_an_optimizer_refuses_is_left_out(tmp_path, optimizer):
    made = {"ftrl": "Ftrl()", "adam": "Adam(use_ema=True)"}[optimizer]
    (tmp_path / f"{optimizer}.py").write_text(
        OWN.replace('"adam"', f"keras.optimizers.{made}")
    )
    found = predict(tmp_path / f"{optimizer}.py", 8)
    names = [x["option"] for x in found]
    slots = {"+ slots of bfloat16", "+ slots of 8 bits"}
    assert slots & {*names} == (slots if optimizer == "adam" else set())
    assert names[-1].startswith("+ weights of bfloat16") == (optimizer == "ftrl")
    assert "+ 8 parts of a batch" in names
    assert tfamp.status().dtype_policy == "float32"


def test_options_of_a_model_are_predicted_in_their_order(file):
    found = predict(file, 1024)
    assert [each["option"] for each in found] == ORDER
    sizes = [each["predicted_bytes"] for each in found]
    assert sizes[1] < 0.75 * sizes[0] and sizes[3] < sizes[2] < sizes[1]
    assert sizes[5] < sizes[4] < sizes[3] and sizes[-1] < sizes[-2]
    assert found[3]["keywords"]["remat"] == [r"block_\d+"]
    # 16 parts free less than 1 % more than 8.
    assert (found[-1]["batch_size"], found[-1]["accumulation_steps"]) == (128, 8)


def test_what_frees_nothing_is_left_out_of_the_next_options(tmp_path):
    (tmp_path / "head.py").write_text(HEAD)
    found = predict(tmp_path / "head.py", 1024)
    sizes = {each["option"]: each["predicted_bytes"] for each in found}
    # Logits in bfloat16, and what they are cast to.
    assert sizes["mixed_bfloat16"] > sizes["float32"]
    assert sizes["+ 2 parts of a batch"] < 0.7 * sizes["float32"]
    assert [x["option"] for x in found if not x["kept"]][0] == "mixed_bfloat16"
    assert found[-1]["option"] == "+ weights of bfloat16, in mixed_bfloat16"
    assert found[-2]["keywords"] == {"mode": "float32"}  # SGD has no slots.
    assert found[-1]["keywords"]["weights"] == "bfloat16"  # Of the 16-bit mode alone.


def test_a_plan_is_measured_in_processes(file):
    found = tfamp.fit_memory(f"{file}:build", "3GiB", batch_size=64, steps=1)
    assert found.chosen["option"] == "float32"
    assert 0 < found.chosen["measured_bytes"] <= 3 * 1024 * MIB


@pytest.mark.slow  # Ten processes; measured bytes differ more where others run, too.
def test_a_limit_below_float32_needs_16_bits(file):
    found = tfamp.fit_memory(f"{file}:build", "3GiB", batch_size=4096, steps=1)
    limit = found.chosen["measured_bytes"] - 24 * MIB  # It differs by 11 MiB.
    found = tfamp.fit_memory(f"{file}:build", limit, batch_size=4096, steps=1)
    # A CPU without bfloat16 holds copies in float32, and needs parts of a batch, too.
    assert found.chosen["option"].startswith("mixed_bfloat16")
    assert found.chosen["measured_bytes"] <= limit


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"batch_size": 64, "limit": "2 gigs"}, ValueError, "an amount of memory"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({}, ValueError, "Received: '.*own.py:build', and no batch_size. Expected one"),
    ],
)
def test_bad_input(file, keywords, error, words):
    with pytest.raises(error, match=words):
        tfamp.fit_memory(f"{file}:build", **keywords)
