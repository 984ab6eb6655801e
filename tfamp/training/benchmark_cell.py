"""Times one cell of a benchmark; as a program, in a process of its own.

    python -c "import tfamp.training.benchmark_cell as c; c.main()" < request.json

A request is {"config", "cell", "steps", "warmup", "output", "identity", "parent",
"memory"}: a plain configuration, the fields of a `Cell`, how many steps are timed and
how many come before them, the file that the figures are written to, what is written
beside them, the process that asks, and the arguments of `memory_limit.hold` or null. An
error is one line, the last of standard error.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from ml_collections import config_dict

from tfamp import control, kernel_switches
from tfamp.training import (
    base_config,
    benchmark_inputs,
    callbacks,
    compare,
    memory_limit,
    precision_config,
    run_files,
    trainer,
)

JOBS = ("train", "inference")
JIT = {"auto": None, "on": True, "off": False}  # As `config.jit_compile` has it.
# Outputs kept to tell the modes apart: enough for an error, small in a file.
_KEPT = 1024


class Cell(NamedTuple):
    """What one process measures.

    Attributes:
      job: "train" or "inference".
      mode: A precision mode.
      batch_size: Examples in a batch.
      sequence_length: Tokens of an example; None for images.
      jit: Whether XLA is asked for: "on", "off", or "auto" for Keras' choice.
    """

    job: str
    mode: str
    batch_size: int
    sequence_length: int | None
    jit: str

    @property
    def label(self) -> str:
        """The cell in a line."""
        length = f", length {self.sequence_length}" if self.sequence_length else ""
        return f"{self.mode}, batch {self.batch_size}{length}, XLA {self.jit}"

    @property
    def key(self) -> str:
        """The cell as a part of a file's name."""
        length = f"-length{self.sequence_length}" if self.sequence_length else ""
        return f"{self.job}-{self.mode}-batch{self.batch_size}{length}-xla_{self.jit}"


def measure(config, cell: Cell, steps: int, warmup: int) -> dict[str, Any]:
    """Times steps of a configuration's model on synthetic batches in this process.

    Training calls the function that `fit` calls, with the configuration's optimizer,
    loss and loss scaling; inference the one of `predict`. After each step its loss, or
    its output, is read: without that a GPU would still be at work when the clock stops.
    With `config.optimizer.accumulation_steps` a step is a whole window of so many
    batches: only then does each hold an update of the weights.

    Args:
      config: The configuration; its mode, sizes and `jit_compile` are the cell's.
      cell: What to measure.
      steps: Steps that are timed, each of them a whole window.
      warmup: Steps before them, the first one included; at least 1.

    Returns:
      Plain data:
        seconds: of each timed step;
        batches_per_step: of a step; 1 without accumulation, and for inference;
        first_step_seconds: of the first step, tracing and compilation included;
        loss: mean over the timed steps; inference: outputs, up to 1024 numbers of the
          first timed step;
        skipped_steps, loss_scale: of the timed steps, and after them; None without;
        mode, reason, tensor_float_32, graph_rewrite, device: what was in force;
        xla: whether Keras compiles the step with XLA;
        host_bytes, device_bytes: peak memory of the process; None where not known;
        parameters, description: the model.
    """
    config = _config_of(config, cell)
    base_config.validate(config)
    precision = config.precision
    with (
        kernel_switches.scope(**precision_config.kernel_keywords(precision)),
        control.enabled(precision.mode, **precision_config.enable_keywords(precision)),
    ):
        keras.utils.set_random_seed(config.seed)
        synthetic = benchmark_inputs.create(config)
        model = synthetic.build_model()
        measured = _trained if cell.job == "train" else _inferred
        figures = measured(model, config, synthetic, steps, warmup)
        status = control.status()
    return {
        **figures,
        "mode": status.effective,
        "reason": status.reason,
        "tensor_float_32": status.tensor_float_32,
        "xla": bool(model.jit_compile),
        "graph_rewrite": status.graph_rewrite if precision.graph_rewrite else "",
        "device": status.device,
        "host_bytes": memory_limit.peak_host(),
        "device_bytes": memory_limit.peak_device(),
        "parameters": model.count_params(),
        "description": synthetic.description,
    }


def _config_of(config, cell):
    scaling = config.precision.loss_scale.enabled
    one = compare.config_of(config, cell.mode, config.seed, scaling)
    one.batch_size, one.jit_compile = cell.batch_size, JIT[cell.jit]
    if cell.sequence_length:
        one.data.sequence_length = cell.sequence_length
    return one


def _trained(model, config, synthetic, steps, warmup):
    """Figures of training steps."""
    metrics = synthetic.metrics()
    window = config.optimizer.accumulation_steps
    total = window * (warmup + steps)
    trainer.compile_model(model, config, total, synthetic.loss, metrics)
    model.make_train_function()
    batches = iter(synthetic.batches)

    def step():
        for _ in range(window):
            logs = model.train_function(batches)
        return float(logs["loss"])

    first, _ = _timed(step, warmup)
    model.reset_metrics()  # The loss is a running mean: from here on.
    before = _scaling(model.optimizer)[0]
    seconds, loss = _timed(step, steps)
    skipped, scale = _scaling(model.optimizer)
    return {
        "seconds": seconds,
        "batches_per_step": window,
        "first_step_seconds": first[0],
        "loss": callbacks.json_number(loss),
        "skipped_steps": None if skipped is None else skipped - before,
        "loss_scale": scale,
    }


def _inferred(model, config, synthetic, steps, warmup):
    """Figures of `predict`'s steps."""
    jit = config.jit_compile
    model.compile(jit_compile="auto" if jit is None else jit)
    model.make_predict_function()
    batches = iter(synthetic.batches)

    def step():
        return model.predict_function([next(batches)]).numpy()

    first, _ = _timed(step, warmup)
    one, outputs = _timed(step, 1)
    rest, _ = _timed(step, steps - 1)
    return {
        "seconds": one + rest,
        "batches_per_step": 1,
        "first_step_seconds": first[0],
        "outputs": [callbacks.json_number(x) for x in outputs.ravel()[:_KEPT]],
        "skipped_steps": None,
        "loss_scale": None,
    }


def _timed(step: Callable, count: int):
    """Returns the seconds of so many steps, and what the last one returned."""
    seconds, result = [], None
    for _ in range(count):
        start = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def _scaling(optimizer):
    """Returns (skipped steps, loss scale); None without loss scaling."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None, None
    skipped = int(callbacks.read_number(optimizer.skipped_steps))
    return skipped, callbacks.read_number(optimizer.loss_scale)


def to_request(
    config,
    cell: Cell,
    steps: int,
    warmup: int,
    output: pathlib.Path,
    identity: dict[str, Any],
    memory: dict[str, int | None] | None = None,
) -> str:
    """Returns this process' request as text."""
    return json.dumps(
        {
            "config": run_files.plain_config(config),
            "cell": cell._asdict(),
            "steps": steps,
            "warmup": warmup,
            "output": str(output),
            "identity": identity,
            "parent": os.getpid(),
            "memory": memory,
        }
    )


def serve(text: str) -> None:
    """Measures what a request asks for and writes the figures; exits with an error."""
    request = json.loads(text)
    try:
        config = config_dict.ConfigDict(_with_tuples(request["config"]))
        cell = Cell(**request["cell"])
        figures = measure(config, cell, request["steps"], request["warmup"])
    except Exception as error:  # Whatever it is becomes the cell's reason.
        line = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {line}")
    text = json.dumps({**figures, "identity": request["identity"]})
    run_files.write_text(pathlib.Path(request["output"]), text)


def _with_tuples(value):
    """Lists as tuples: JSON has no tuples, and configurations have no lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value


def _end_with(parent):
    """Makes Linux end this process when the one that asked ends.

    It would go on beside the next cell, hold its memory, and falsify its times.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>.
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that asked has ended")


def main() -> None:
    """Serves the request on standard input."""
    text = sys.stdin.read()
    request = json.loads(text)
    _end_with(request["parent"])
    with contextlib.suppress(OSError):
        # Where memory runs out Linux is to end this process, not the one that waits.
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    if request["memory"]:
        memory_limit.hold(**request["memory"])
    try:
        serve(text)
    except SystemExit as error:
        os.write(2, f"\n{error}\n".encode())
        # At once: TensorFlow 2.21's XLA, out of memory, crashes where it is taken down
        # ("double free or corruption"), and the reason would be lost.
        os._exit(1)


if __name__ == "__main__":
    main()
