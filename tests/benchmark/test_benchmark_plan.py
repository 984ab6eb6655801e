"""The cells of a benchmark, and its settings."""

import pathlib

import pytest

from tfamp import hardware
from tfamp.benchmark import plan, records, suite_config
from tfamp.training import bert_config
from tfamp.training.tasks import images

CPU = hardware.DeviceDescription(
    kind="CPU", name="AMD EPYC", cpu_flags=("avx512_bf16",), onednn=True
)
GPU = hardware.DeviceDescription(
    kind="GPU", name="NVIDIA H200", compute_capability=(9, 0)
)
FLOAT32, BFLOAT16 = MODES = ("float32", "mixed_bfloat16")


def make_config(**fields):
    training = images.get_config()
    training.name, training.data.name = "tiny", "digits"
    config = suite_config.get_config()
    config.name = "suite"
    config.tasks.images = suite_config.get_task(training)
    config.tasks.images.update({"modes": MODES, "batch_sizes": (8,), **fields})
    return config


def columns(cells):
    return [(cell.framework, cell.mode, cell.batch_size, cell.xla) for cell in cells]


def test_cells_are_all_combinations_float32_first():
    cells = plan.make(make_config(batch_sizes=(8, 16), xla=(BFLOAT16,)))
    assert columns(cells)[:8] == [
        ("tfamp", FLOAT32, 8, False),
        ("tfamp", BFLOAT16, 8, False),
        ("tfamp", BFLOAT16, 8, True),
        ("keras", FLOAT32, 8, False),
        ("keras", BFLOAT16, 8, False),
        ("keras", BFLOAT16, 8, True),
        ("torch", FLOAT32, 8, False),
        ("torch", BFLOAT16, 8, False),
    ]
    assert len(cells) == 16 and len({cell.key for cell in cells}) == 16


def test_batch_size_is_the_configurations_if_none_is_asked_for():
    config = make_config(batch_sizes=(), frameworks=("tfamp",))
    config.tasks.images.config.batch_size = 24
    assert {cell.batch_size for cell in plan.make(config)} == {24}


def test_rewrites_are_tfamps_alone():
    config = make_config(modes=(FLOAT32, "rewrite_bfloat16"))
    cells = plan.make(config)
    assert [c.framework for c in cells if c.mode == "rewrite_bfloat16"] == ["tfamp"]


def test_task_without_a_twin_has_no_cell_in_pytorch():
    config = make_config()
    config.tasks.images.config.label_smoothing = 0.1
    assert {cell.framework for cell in plan.make(config)} == {"tfamp", "keras"}


@pytest.mark.parametrize(
    ("device", "modes"),
    [
        (CPU, ["float32", "mixed_bfloat16", "mixed_float16", "rewrite_bfloat16"]),
        (
            GPU,
            ["float32", "tf32", "mixed_bfloat16", "mixed_float16", "rewrite_float16"],
        ),
    ],
    ids=["CPU", "GPU"],
)
def test_modes_by_default_are_what_the_device_computes(device, modes, monkeypatch):
    monkeypatch.setattr(hardware, "read_devices", lambda: [device])
    assert plan.default_modes() == modes
    slow = {"mixed_float16"} if device is CPU else set()
    assert plan.default_modes(slow=False) == [m for m in modes if m not in slow]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("repeats", 0, "config.repeats must be at least 1"),
        ("steps", 0, "config.steps"),
        ("memory_limit_mb", 0, "config.memory_limit_mb"),
        ("tasks.images.modes", ("fp16",), "config.tasks.images.modes must be some of"),
        ("tasks.images.xla", ("fp16",), "config.tasks.images.xla"),
        ("tasks.images.frameworks", ("jax",), "config.tasks.images.frameworks"),
        ("tasks.images.frameworks", (), "config.tasks.images.frameworks must be one"),
        ("name", "../mine", "config.name must be a name of letters"),
        ("tasks.images.batch_sizes", (0,), "integers of at least 1"),
        ("tasks.images.config.batch_size", 0, "config.batch_size"),
        ("tasks.images.config.strategy", "mirrored", "one device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_make_no_sense_are_refused(path, value, message):
    config = make_config()
    config.update_from_flattened_dict({path: value})
    with pytest.raises(ValueError, match=message):
        plan.make(config)


def test_all_wrong_settings_are_told_at_once():
    config = make_config(modes=("fp16",))
    config.repeats = 0
    with pytest.raises(ValueError, match="repeats.*modes"):
        plan.make(config)


def test_benchmark_without_a_task_is_refused():
    with pytest.raises(ValueError, match="nothing to measure"):
        plan.make(suite_config.get_config())


def test_training_configuration_that_is_no_task_is_refused():
    config = make_config()
    config.tasks.images = config.tasks.images.config
    with pytest.raises(ValueError, match="images must be made by `suite_config.get_t"):
        plan.make(config)


def test_cell_that_is_asked_for_twice_is_one():
    modes = ("float32", "float32")
    assert len(plan.make(make_config(modes=modes, batch_sizes=(8, 8)))) == len(
        plan.make(make_config(modes=modes[:1], batch_sizes=(8,)))
    )


def test_name_of_a_task_that_is_no_file_name_is_refused():
    config = make_config()
    config.tasks["a/b"] = config.tasks.images
    with pytest.raises(ValueError, match="'a/b'"):
        plan.make(config)


def test_preset_that_is_not_there_is_told_before_any_work(tmp_path):
    config = make_config()
    training = bert_config.get_bert_config()
    training.model.preset = str(tmp_path / "none")
    config.tasks.texts = suite_config.get_task(training)
    config.tasks.texts.synthetic = True
    with pytest.raises(Exception, match="There is no folder") as found:
        plan.make(config)
    assert type(found.value).__name__ == "DataError"


def test_configuration_of_a_cell_is_the_runs_with_the_cells_own():
    task = make_config().tasks.images
    task.config.precision.overrides = (("head", "float32"),)
    cell = records.Cell("images", "tfamp", "rewrite_bfloat16", 16, True)
    one = plan.config_of(task, cell, seed=3)
    assert (one.batch_size, one.seed, one.jit_compile) == (16, 3, True)
    assert (one.precision.mode, one.precision.graph_rewrite) == (BFLOAT16, True)
    assert not one.precision.overrides  # A rewrite knows no layers.
    mixed = plan.config_of(task, cell._replace(mode=BFLOAT16), seed=3)
    assert mixed.precision.overrides and mixed.precision.graph_rewrite is False
    assert task.config.precision.mode == "auto"  # Not changed.


def test_folder_is_the_same_with_more_cells_and_another_with_other_models():
    config, more = make_config(), make_config(batch_sizes=(8, 16), modes=())
    more.repeats, more.memory_limit_mb, more.torch_python = 7, 100, "python"
    assert suite_config.identity(config) == suite_config.identity(more)
    more.tasks.images.config.model.dense += 1
    assert suite_config.identity(config) != suite_config.identity(more)
    assert "repeats" in config  # A copy was changed.


def test_file_is_loaded_from_beside_another(tmp_path):
    (tmp_path / "other.py").write_text("def get_config():\n    return 7\n")
    assert suite_config.load("other.py", tmp_path / "this.py") == 7
    assert suite_config.load(pathlib.Path(tmp_path, "other.py")) == 7
