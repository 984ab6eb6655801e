"""What scripts/doctor.py says: of this machine, of a simulated device, of a recipe."""

import importlib.util
import json
import pathlib
import re

import helpers
import pytest
import tensorflow as tf
from absl import logging

from tfamp import device_table, errors, hardware
from tfamp.diagnostics import machine, machine_text
from tfamp.precision import control
from tfamp.training import doctor

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = ROOT / "configs/cnn/digits.py"
SCRIPT = ROOT / "scripts/doctor.py"


def digits(**precision):
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.precision.update(precision)
    return config.lock()


# ---- The machine ----


def test_this_machine_is_what_hardware_says():
    report = machine.describe()
    decision = hardware.choose_mode(hardware.read_devices())
    assert not report.simulated
    assert (report.mode, report.mode_reason) == (decision.mode, decision.reason)
    facts = dict(report.facts)
    assert facts["tensorflow"] == tf.__version__
    assert {"oneDNN", "TF32 flag", "CPU has", "dtype policy"} <= facts.keys()
    assert any(switch["name"] == "TF32" for switch in report.switches)


@pytest.mark.parametrize("key", device_table.DEVICES)
def test_simulated_device_is_named_so_and_tells_nothing_of_this_host(key):
    report = machine.describe(key)
    assert report.simulated
    assert report.facts == report.variables == report.switches == ()
    assert device_table.get(key).name in report.device
    text = machine_text.to_text(report)
    assert text.startswith("Simulated device: ")
    assert report.mode in text


@pytest.mark.parametrize(
    ("key", "mode", "rewrite"),
    [
        ("a100", "mixed_bfloat16", "float16"),
        ("v100", "mixed_float16", "float16"),
        ("t4", "mixed_float16", "float16"),
        ("h100", "mixed_bfloat16", "float16"),
        ("gtx1660", "float32", "no"),
        ("p100", "float32", "no"),
        ("tpu", "mixed_bfloat16", "no"),
    ],
)
def test_decisions_for_devices(key, mode, rewrite):
    report = machine.describe(key)
    assert (report.mode, report.graph_rewrite) == (mode, rewrite)


def test_variables_that_matter_are_shown_and_no_others():
    environ = {
        "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL": "x",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "SECRET": "no",
    }
    report = machine.describe(environ=environ)
    assert dict(report.variables).keys() == environ.keys() - {"SECRET"}
    # TensorFlow would end the process over this pair; the doctor says so.
    assert report.graph_rewrite == "no"


@pytest.mark.parametrize("columns", [70, 88])
def test_text_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for key in (None, "gtx1660"):
        lines = machine_text.to_text(machine.describe(key)).splitlines()
        assert max(map(len, lines[1:])) <= columns


def test_markdown_has_every_switch():
    report = machine.describe()
    text = machine_text.to_markdown(report)
    for switch in report.switches:
        assert f"| {switch['name']} |" in text


# ---- A recipe ----


@pytest.fixture(scope="module")
def audits():
    """Reports on the digits recipe by (device, settings)."""
    return {
        name: doctor.report(digits(**settings), device)
        for name, (device, settings) in {
            "a100": ("a100", {}),
            "v100": ("v100", {}),
            "v100 bfloat16": ("v100", {"mode": "mixed_bfloat16"}),
            "a100 rewrite": ("a100", {"graph_rewrite": True}),
            "host float32": (None, {"mode": "float32"}),
            "host bfloat16": (None, {"mode": "mixed_bfloat16"}),
        }.items()
    }


@pytest.mark.parametrize(
    ("name", "mode", "formats"),
    [
        ("a100", "mixed_bfloat16", {"bfloat16", "tf32"}),
        ("v100", "mixed_float16", {"float16", "float32"}),
        ("v100 bfloat16", "mixed_bfloat16", {"bfloat16", "float32"}),
        ("a100 rewrite", "graph rewrite to float16", {"float16"}),
        ("host float32", "float32", {"float32"}),
        ("host bfloat16", "mixed_bfloat16", {"bfloat16", "float32"}),
    ],
)
def test_recipe_is_built_in_its_mode(audits, name, mode, formats):
    report = audits[name]
    assert report.mode == mode
    assert set(report.audit.formats) == formats
    assert report.audit.batch_size == digits().batch_size
    assert report.audit.simulated == (not name.startswith("host"))


def test_override_of_a_recipe_is_found_as_an_island():
    config = digits(overrides=((r"dense(_\d+)?", "float32"),))
    report = doctor.report(config, "a100")
    (finding,) = [x for x in report.audit.findings if x.rule == "float32_islands"]
    (row,) = finding.details
    assert row["layer"].startswith("dense")
    assert 0.01 < row["share_of_operations"] < row["share_of_time"]


@pytest.mark.parametrize("device", [None, "a100"])
def test_override_that_matches_nothing_is_an_error(device):
    config = digits(overrides=(("no_such_layer", "float32"),), mode="mixed_bfloat16")
    with pytest.raises(ValueError, match="no_such_layer"):
        doctor.report(config, device)


@pytest.fixture
def warned(monkeypatch):
    """What absl was told."""
    told = []
    monkeypatch.setattr(logging, "warning", lambda text, *a: told.append(text % a))
    return told


def test_override_of_another_device_asks_nothing_of_this_host(warned):
    overrides = (("conv.*", "float32"),)
    report = doctor.report(digits(overrides=overrides, mode="mixed_float16"), "v100")
    assert report.mode == "mixed_float16" and warned == []
    assert {"float16", "float32"} <= report.audit.formats.keys()
    float32 = [x for x in report.audit.findings if x.rule == "float32_islands"]
    assert "conv" in float32[0].evidence
    assert control.status().requested is None


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, True),
        ({"strategy": "mirrored"}, False),
        ({"strategy": "mirrored", "jit_compile": True}, True),
        ({"jit_compile": False}, False),
    ],
    ids=["as Keras", "strategy", "strategy, asked for", "off"],
)
def test_xla_of_a_recipe_is_that_of_its_training(changes, on):
    config = digits().copy_and_resolve_references().unlock()
    config.update(changes)
    assert doctor.report(config, "a100").audit.jit_compile == on


def test_times_are_those_of_a_recipe_on_this_host():
    with pytest.raises(ValueError, match="--time without --config"):
        doctor.report(time=True)
    with pytest.raises(ValueError, match="--time for NVIDIA A100"):
        doctor.report(digits(), "a100", time=True)


def test_report_that_cannot_be_written(audits, tmp_path):
    for path in (tmp_path / "absent" / "x.md", tmp_path):
        with pytest.raises(errors.RunError, match="--output=") as caught:
            doctor.write(audits["a100"], str(path))
        assert ".tmp" not in str(caught.value)


def test_recipe_in_the_wrong_format_is_told(audits):
    first = audits["v100 bfloat16"].audit.findings[0]
    assert first.rule == "fast_unit" and "'mixed_float16'" in first.advice


def test_accuracy_of_the_recipe_is_well(audits):
    for report in audits.values():
        assert [x for x in report.audit.findings if x.about == "accuracy"] == []


def test_report_as_text_and_files(audits, tmp_path):
    report = audits["a100"]
    assert str(report).startswith("Mode of the recipe: mixed_bfloat16")
    doctor.write(report, str(tmp_path / "report.json"))
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["machine"]["simulated"] and content["audit"]["model"] == "cnn"
    doctor.write(report, str(tmp_path / "report.md"))
    assert "Audit of 'cnn'" in (tmp_path / "report.md").read_text()


# ---- The script ----

COMMANDS = {
    "machine": [],
    "simulated": ["--simulate=t4"],
    "recipe": [f"--config={DIGITS}", "--simulate=a100", "--output=out.json"],
    "device": ["--simulate=a1000"],
    "mode": [f"--config={DIGITS}", "--config.precision.mode=x"],
    "stray": ["stray"],
    "output": ["--output=absent/x.md"],
    "data without a recipe": ["--data_dir=."],
    "data": [f"--config={ROOT}/configs/bert/tweets.py", "--data_dir=absent"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    cases = [(SCRIPT, arguments, folder) for arguments in COMMANDS.values()]
    results = helpers.run_scripts(cases)
    return folder, dict(zip(COMMANDS, results, strict=True))


def test_script_without_arguments_describes_this_machine(finished):
    code, stdout, stderr = finished[1]["machine"]
    assert code == 0, stderr
    decision = hardware.choose_mode(hardware.read_devices())
    assert re.search(rf"mode +{decision.mode}", stdout)
    assert "Kernel switches" in stdout and tf.__version__ in stdout


def test_script_simulates_a_device(finished):
    code, stdout, stderr = finished[1]["simulated"]
    assert code == 0, stderr
    assert stdout.startswith("Simulated device: Tesla T4")
    assert re.search(r"mode +mixed_float16", stdout)


def test_script_audits_a_recipe_and_trains_nothing(finished):
    folder, results = finished
    code, stdout, stderr = results["recipe"]
    assert code == 0, stderr
    assert "Audit of 'cnn' on NVIDIA A100-SXM4-40GB" in stdout
    assert [path.name for path in folder.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("device", "a100"),
        ("mode", "Unknown precision mode"),
        ("stray", "stray"),
        ("data", "absent"),
        ("output", "no such folder"),
        ("data without a recipe", "without --config"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(finished, name, phrase):
    code, stdout, stderr = finished[1][name]
    assert code == 1 and stdout == ""
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert phrase in line
