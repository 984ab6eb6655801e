"""What the scripts share, without a process: jobs, folders and what is not shown."""

import points
import pytest

import tfamp
from tfamp.commands import jobs
from tfamp.runs import run_files


def test_train_job_records_the_interval_and_ends_in_a_table_and_a_timeline(
    tmp_path, monkeypatch, capsys
):
    create, chance = points.create, 0.9  # At which a few examples tell nothing.
    monkeypatch.setattr(points, "create", lambda x: create(x)._replace(chance=chance))
    scaling = {
        **{"schedule__name": "geometric", "schedule__min_interval": 1},
        **{"schedule__initial": 4, "initial_scale": 2.0**8},  # Nothing overflows soon.
    }
    scaling = {f"precision__loss_scale__{name}": x for name, x in scaling.items()}
    config = points.make_config(precision__mode="mixed_float16", epochs=1, **scaling)
    text = jobs.JOBS["train"].run(config, tmp_path, None)
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    assert rows["mode"].strip().startswith("mixed_float16: ")
    assert rows["data"].strip() == "points"
    assert 0 <= float(rows["test accuracy"]) <= 1
    assert rows["skipped steps"].strip() == "0"
    nothing = "0.9000, and the score is no better: the model has learned nothing"
    assert rows["chance level"].strip().startswith(nothing)
    evaluated = jobs.ON_RUNS["evaluate"].run(config, tmp_path, None)
    assert nothing in evaluated
    assert "errors" not in text and "[" not in rows["test accuracy"]
    rows = run_files.read_metrics(tmp_path, "step")
    # Growth after 4, 3, 2, 1, 1, ... steps.
    intervals = [row["growth_interval"] for row in rows[:10]]
    assert intervals == [4, 4, 4, 3, 3, 3, 2, 2, 1, 1]
    assert rows[9]["skipped_steps"] == 0 and rows[9]["loss_scale"] == 2.0**12
    assert (tmp_path / "timeline.png").exists()
    # The heading stands where Keras prints the epochs.
    assert capsys.readouterr().out.startswith("mixed_float16, seed 0:\n10/10 - ")


def test_train_and_compare_have_folders_of_their_own():
    config = points.make_config()
    folders = {job: run_files.default_workdir(config, job).name for job in jobs.JOBS}
    assert folders["compare"].startswith("points-")
    assert folders["train"].startswith("points-train-")
    other = points.make_config(epochs=5)
    assert run_files.default_workdir(other, "train").name != folders["train"]


def test_check_before_a_deletion_makes_the_model_and_knows_the_columns():
    config = points.make_config(precision__mode="mixed_bfloat16")
    jobs.JOBS["compare"].check(config, 1)
    config.precision.overrides = (("no_such_layer", "float32"),)
    with pytest.raises(tfamp.OverrideError, match="no_such_layer"):
        jobs.JOBS["train"].check(config, None)
    config.compare_unscaled = True
    with pytest.raises(ValueError, match="compare_unscaled"):
        jobs.JOBS["compare"].check(config, 1)
