"""The flags of each command.

Nothing here imports TensorFlow: help, and the error of a mistyped flag, are quick.
"""

import pathlib
from typing import Any

from absl import flags

from tfamp import functions
from tfamp.commands import app
from tfamp.facts import devices
from tfamp.measuring import device
from tfamp.runs import run_files

# What goes with --find_batch_size.
OF_SEARCH = "memory_limit_mb", "max_batch_size", "effective_batch"
_JOBS = "compare", "train", "evaluate", "predict", "export"  # Of `jobs`.
# Value of --job -> job of a benchmark.
TIMED = {"train_benchmark": "train", "inference_benchmark": "inference"}
_TINY = {"steps": 2, "warmup": 1, "repeats": 1}
_PREFIX = "benchmark_"
# What a job measures: cells are all combinations. Empty: as the text says.
_LISTS = {
    "batch_sizes": "Batch sizes; default: the configuration's, with float32's if set.",
    "sequence_lengths": "Sequence lengths; default: the configuration's.",
    "modes": "Modes; default: float32, TF32 if supported, the configuration's.",
    "jit": "XLA: auto, on, off; default: as the configuration says.",
}
_COUNTS = {
    "steps": (20, "Timed steps per process; whole windows if gradients accumulate."),
    "warmup": (5, "Untimed steps before the timed ones, including the first."),
    "repeats": (3, "Processes per cell, interleaved."),
}
_OF_TIMED = tuple(_PREFIX + name for name in (*_LISTS, *_COUNTS))


def train(default_config: str | None) -> None:
    """Defines the flags of a training script.

    Args:
      default_config: Path of the default configuration; must work offline. None: the
        command line must name one.
    """
    flags.DEFINE_string(
        "workdir", None, "Folder of the run; default: runs/NAME-HASH of the settings."
    )
    flags.DEFINE_string("data_dir", "", "Folder of prepared (TFDS) or local data.")
    flags.DEFINE_string("manual_dir", "", "Folder of a TFDS data set's original files.")
    flags.DEFINE_enum(
        "job",
        "compare",
        [*_JOBS, *TIMED],
        "compare: train in float32 and the mixed mode; train: in one mode; evaluate, "
        "predict and export: use the model that a run in --workdir has trained; "
        "train_benchmark and inference_benchmark: time steps on synthetic data.",
    )
    flags.DEFINE_string(
        "input", "", "Rows for --job=predict: a .csv, .tsv or .jsonl file."
    )
    flags.DEFINE_string(
        "output", "", "Result of --job=predict and export; default: in --workdir."
    )
    flags.DEFINE_string(
        "precision", "float32", "Compute dtype of the SavedModel of --job=export."
    )
    flags.DEFINE_integer("seeds", 1, "Number of seeds to compare over.", lower_bound=1)
    flags.DEFINE_bool("tiny", False, "Run for a few seconds, as a check.")
    flags.DEFINE_bool("overwrite", False, "Delete the run in --workdir first.")
    flags.DEFINE_integer(
        "numerics",
        None,
        "Steps between measurements by tfamp.NumericsMonitor of underflow and "
        "overflow in 16 bits; written to the folder `numerics` of each run.",
        lower_bound=1,
    )
    for name, text in _LISTS.items():
        flags.DEFINE_list(_PREFIX + name, [], text)
    for name, (default, text) in _COUNTS.items():
        flags.DEFINE_integer(_PREFIX + name, default, text, lower_bound=1)
    _define_search()
    app.define_config(default_config, _check_training)


def _check_training(has_config):
    """Raises ValueError where flags do not belong to the job, or one is missing."""
    values = flags.FLAGS
    name = "" if values.find_batch_size else values.job
    on_runs = "evaluate", "predict", "export"
    for wanted, owner, others in (
        (not name, "--find_batch_size", OF_SEARCH),
        (name, "a command without --find_batch_size", ("job",)),
        (name in TIMED, f"--job={' and --job='.join(TIMED)}", _OF_TIMED),
        (name == "compare", "--job=compare", ("seeds",)),
        (name == "predict", "--job=predict", ("input",)),
        (name in ("predict", "export"), "--job=predict and --job=export", ("output",)),
        (name == "export", "--job=export", ("precision",)),
        (name not in on_runs, "a job that trains or measures", ("overwrite",)),
    ):
        names = [f"--{other}" for other in others if values[other].present]
        if names and not wanted:
            names = ", ".join(names)
            raise ValueError(
                f"{names} belongs to {owner}. Received: {names}."
                + " A training has --config.precision.mode." * ("precision" in others)
            )
    if name == "predict" and not values.input:
        raise ValueError("--job=predict needs --input, a .csv, .tsv or .jsonl file.")
    if not has_config and not (name in on_runs and values.workdir):
        expected = "--config=FILE, or a name as in `tfamp train cnn/digits`"
        if name in on_runs:
            expected += ", or --workdir=FOLDER of a run"
        raise ValueError(
            f"No configuration. Received: no --config. Expected: {expected}."
        )
    if name in on_runs and values.workdir:
        run_files.read_config(pathlib.Path(values.workdir))  # There is a run.


def _define_search():
    """Defines --find_batch_size, and what goes with it."""
    flags.DEFINE_bool(
        "find_batch_size",
        False,
        "Find the largest batch size that fits into memory, in float32 and in the "
        "mixed mode, instead of running a job. Each trial is a separate process.",
    )
    flags.DEFINE_integer(
        "memory_limit_mb",
        None,
        "Memory limit in MiB: of the first GPU, or of the process without a GPU. "
        "Default: all GPU memory, or most of the available host memory.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "max_batch_size",
        None,
        "Largest batch size to try; default: that of tfamp.find_batch_size.",
    )
    flags.DEFINE_integer(
        "effective_batch",
        None,
        "Examples per weight update: find the largest micro-batch that fits, and how "
        "many of them to accumulate.",
        lower_bound=1,
    )


def benchmark_settings(job: str, tiny: bool = False) -> dict[str, Any]:
    """Returns what the flags ask for, with the job: as of `benchmark_jobs`.

    Args:
      job: Value of --job.
      tiny: Whether a run of seconds is wanted; numbers that were given still count.

    Raises:
      ValueError: If a flag makes no sense.
    """
    job_flags = {name.removeprefix(_PREFIX): flags.FLAGS[name] for name in _OF_TIMED}
    values: dict[str, Any] = {name: flag.value for name, flag in job_flags.items()}
    if tiny:
        values |= {k: v for k, v in _TINY.items() if not job_flags[k].present}
    for name in ("modes", "jit"):
        values[name] = tuple(values[name])
    for name in ("batch_sizes", "sequence_lengths"):
        try:
            values[name] = tuple(map(int, values[name]))
        except ValueError as error:
            raise ValueError(
                f"--{_PREFIX}{name} must be integers separated by commas. Received: "
                f"{','.join(values[name])!r}."
            ) from error
    return {"job": TIMED[job], **values}


def benchmark(default_config: str) -> None:
    """Defines the flags of the benchmark.

    Args:
      default_config: Path of the default configuration.
    """
    flags.DEFINE_string(
        "workdir",
        None,
        "Folder of the results; default: runs/NAME-HASH of the settings.",
    )
    flags.DEFINE_string(
        "workload",
        "",
        "Function to measure instead of the configuration's tasks, 'module:function' "
        "or 'file.py:function'. It returns a compiled Keras model and a "
        "tf.data.Dataset of batches.",
    )
    flags.DEFINE_list(
        "modes", [], "Precision modes; default: those that this device has units for."
    )
    flags.DEFINE_list("tasks", [], "Names of tasks to time; default: all.")
    flags.DEFINE_bool("tiny", False, "Run for a few seconds, as a check.")
    flags.DEFINE_bool("overwrite", False, "Delete the contents of the folder first.")
    app.define_config(default_config, _check_workload)


def _check_workload(_):
    if workload := flags.FLAGS.workload:
        functions.name_of(workload)


def doctor() -> None:
    """Defines the flags of the doctor."""
    flags.DEFINE_string("simulate", None, "Report on another device, such as a100.")
    flags.register_validator(
        "simulate", lambda name: name is None or devices.named(name)
    )
    flags.DEFINE_string("output", "", "File for the report: .json, else Markdown.")
    app.define_config(None)


def gpu_report() -> None:
    """Defines the flags of `tfamp gpu-report`."""
    flags.DEFINE_string(
        "output",
        "runs/gpu_report",
        "Folder of the results; a device has its own in it.",
    )
    flags.DEFINE_float(
        "minutes", 12, "Time limit of all parts together.", lower_bound=0
    )
    flags.DEFINE_list(
        "parts", [], "What to measure, such as time,numerics; default: all."
    )
    flags.register_validator("parts", lambda names: not device.check_parts(names))
    flags.DEFINE_bool("tiny", False, "Run small models, on any device, as a check.")
    flags.DEFINE_string(
        "torch_python", "", "Command of a Python with PyTorch; default: this Python."
    )
