"""Which cells a benchmark has, and what settings are refused before any work."""

import helpers
import pytest

from tfamp import functions
from tfamp.commands import benchmark_jobs
from tfamp.facts import hardware
from tfamp.measuring import workloads
from tfamp.measuring.benchmark import accuracy, cell_modes, cells

FILES = sorted((helpers.ROOT / "configs/benchmark").glob("*.py"))
FILES = [path for path in FILES if path.stem != "models"]


def make(**fields):
    """The digits' network in two modes."""
    config = helpers.configured(cells, name="some")
    task = cells.get_task(workloads.load(helpers.ROOT / "configs/cnn/digits.py"))
    task.update({"modes": ("float32", "mixed_bfloat16"), **fields})
    config.tasks.digits = task
    return config


def columns(config):
    return [cell.column for cell in cells.plan(config)]


def test_cells_are_every_mode_of_every_framework_float32_first():
    modes = ("float32", "mixed_bfloat16", "rewrite_bfloat16")
    config = make(modes=modes, xla=("mixed_bfloat16",))
    assert columns(config) == [
        "float32",
        "mixed_bfloat16",
        "rewrite_bfloat16",
        "mixed_bfloat16, XLA",
        "keras float32",
        "keras mixed_bfloat16",
        "torch float32",
        "torch mixed_bfloat16",
    ]
    config.tasks.digits.config.optimizer.accumulation_steps = 2  # No twin has it.
    assert not any(name.startswith("torch") for name in columns(config))


def test_shapes_are_all_combinations_and_float32_has_its_own_batch_size():
    config = make(batch_sizes=(8, 16), frameworks=("tfamp",))
    found = [(c.batch_size, c.mode) for c in cells.plan(config)]
    assert found == [(n, m) for n in (8, 16) for m in ("float32", "mixed_bfloat16")]
    config = make(frameworks=("tfamp",))
    config.tasks.digits.config.float32.batch_size = 24
    assert [c.batch_size for c in cells.plan(config)] == [24, 32]


@pytest.fixture
def host_of(monkeypatch):
    """Returns a function: gives this host another device, by its name."""

    def simulate(device):
        found = [hardware.find_device(device)]
        monkeypatch.setattr(hardware, "read_devices", lambda: found)

    return simulate


@pytest.mark.parametrize(
    ("device", "slow", "expected"),
    [
        ("a100", False, ["float32", "tf32", "mixed_bfloat16", "mixed_float16"]),
        ("v100", False, ["float32", "mixed_float16"]),
        ("cpu-avx2", False, ["float32", "mixed_bfloat16"]),
        ("cpu-avx2", True, ["float32", "mixed_bfloat16", "mixed_float16"]),
    ],
)
def test_modes_by_default_are_the_fast_ones_and_one_of_16_bits(
    device, slow, expected, host_of
):
    host_of(device)
    assert cell_modes.default_modes(slow) == expected


@pytest.mark.parametrize(("device", "base"), [("h100", "tf32"), ("v100", "float32")])
def test_the_base_is_tf32_where_the_device_has_it(device, base, host_of):
    host_of(device)
    config = make(modes=(), frameworks=("tfamp",))
    planned = cells.plan(config)
    assert {cells.base(planned, cell, config).mode for cell in planned} == {base}
    config.time_to_accuracy.digits = cells.get_accuracy(config.tasks.digits.config)
    modes = [mode for _, mode, seed in accuracy.plan(config) if seed == 0]
    assert set(modes) >= {"float32", base}
    planned = cells.plan(benchmark_jobs._benchmark(config.tasks.digits.config, "train"))
    assert {cell.mode for cell in planned} >= {"float32", base}


def test_the_base_is_tfamps_float32_of_the_same_shape():
    config = make(xla=("float32",), batch_sizes=(8, 16))
    planned = cells.plan(config)
    for cell in planned:
        base = cells.base(planned, cell, config)
        expected = ("tfamp", "float32", cell.batch_size, "off")
        assert (base.framework, base.mode, base.batch_size, base.jit) == expected
    config.tasks.digits.jit = ("off", "on")
    compiled = next(c for c in cells.plan(config) if c.jit == "on")
    assert cells.base(cells.plan(config), compiled, config).jit == "on"
    config.tasks.other = make(beside="digits").tasks.digits
    other = compiled._replace(task="other", batch_size=8)
    assert cells.base(planned, other, config).task == "digits"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("repeats", 0, "config.repeats must be at least 1"),
        ("job", "serve", "one of train, inference"),
        ("tasks.digits.modes", ("fp16",), "some of 'float32', 'tf32'"),
        ("tasks.digits.batch_sizes", (0,), "integers of at least 1"),
        ("tasks.digits.beside", "absent", "must name a task"),
        ("tasks.digits.config.strategy", "mirrored", "one device"),
        ("tasks.digits.config.optimizer.name", "lamb", "'lamb'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(path, value, message):
    config = make()
    config.update_from_flattened_dict({path: value})
    with pytest.raises(ValueError, match=message):
        cells.plan(config)


def test_folder_is_the_same_with_more_cells_and_another_with_other_models():
    config, more = make(), make(modes=("float32",), batch_sizes=(8,))
    more.repeats = 9
    assert cells.identity(config) == cells.identity(more)
    more.tasks.digits.config.model.dense = 7
    assert cells.identity(config) != cells.identity(more)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_plans_its_cells_and_shows_its_command(path):
    config = workloads.load(path)
    tiny = cells.apply_tiny(config)
    planned = cells.plan(config)
    assert {cell.framework for cell in planned} >= {"tfamp"}
    assert 1 <= len(cells.plan(tiny)) <= len(planned) and tiny.repeats == 1
    for cell in planned:
        base = cells.base(planned, cell, config)
        # Attention and memory may be measured in one mode.
        tasks = cell.task, config.tasks[cell.task].beside
        modes = {x.mode for x in planned if x.task in tasks}
        modes -= {"mixed_bfloat16", "mixed_float16"}
        assert base.mode in modes if base else not modes
    command = f"python scripts/benchmark.py --config={path.relative_to(helpers.ROOT)}"
    default = "python scripts/benchmark.py\n"
    assert (default if path.stem == "quick" else command) in path.read_text()


# ---- A user's function ----


def test_models_for_a_gpu_are_measured_in_pytorch(host_of):
    host_of("h100")
    planned = cells.plan(workloads.load(helpers.ROOT / "configs/benchmark/gpu.py"))
    peers = {(x.task, x.mode) for x in planned if x.framework == "torch"}
    modes = "float32", "tf32", "mixed_bfloat16", "mixed_float16"
    twins = "bert_base", "mnist_wide"
    assert peers == {(task, mode) for task in twins for mode in modes}


def test_a_function_is_named_by_its_file(tmp_path, monkeypatch):
    # No other test's file has this name: modules stay imported.
    (tmp_path / "seven.py").write_text("def build():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("seven:build", "seven.py:build", str(tmp_path / "seven.py:build")):
        assert functions.find(functions.name_of(name))() == 7
    import seven  # pyright: ignore[reportMissingImports]

    assert functions.name_of(seven.build) == "seven:build"


@pytest.mark.parametrize(
    "function", ["own", "absent:build", "absent.py:build", lambda: 0, ":build"]
)
def test_a_function_that_no_process_could_import_is_refused(function, tmp_path):
    with pytest.raises(ValueError, match="module:function"):
        functions.name_of(function)


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        ("return keras.Sequential([keras.layers.Dense(1)])", {}, "Sequential, compile"),
        ("return keras.Sequential([]), DATA", {}, "compiled: False"),
        ("return None", {}, "NoneType"),
        ("return None", {"batch_size": 2}, "no argument batch_size"),
    ],
)
def test_what_a_function_returns_is_checked(code, arguments, message, tmp_path):
    data = "DATA = tf.data.Dataset.range(3).batch(1)"
    text = f"import keras, tensorflow as tf\n{data}\ndef build():\n    {code}\n"
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(TypeError, match=message):
        workloads.from_function(f"{tmp_path / 'own.py'}:build", arguments, "auto")
