"""Times one cell of a benchmark; as a program, in a process of its own.

    python -c "import tfamp.training.benchmark_cell as c; c.main()" < request.json

A request of `child_process` with {"config", "cell", "steps", "warmup"}: a plain
configuration, the fields of a `Cell`, how many steps are timed and how many come before
them.
"""

import pathlib
from typing import Any, NamedTuple

import keras
from ml_collections import config_dict

from tfamp.kernels import bias_gradient, switches
from tfamp.precision import control
from tfamp.training import (
    base_config,
    benchmark_inputs,
    callbacks,
    child_process,
    compare,
    memory_limit,
    run_files,
    timed_steps,
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

    Training steps are those of `timed_steps`, with the configuration's optimizer, loss
    and loss scaling; inference is the function of `predict`, its output read back.

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
        switches.scope(**base_config.kernel_keywords(precision)),
        control.enabled(precision.mode, **base_config.enable_keywords(precision)),
        bias_gradient.HOOKS.installed(),  # In float32, too: modes are compared.
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
    step = timed_steps.training_step(model, config, synthetic, warmup + steps)
    first, _ = timed_steps.timed(step, warmup)
    model.reset_metrics()  # The loss is a running mean: from here on.
    before = timed_steps.scaling(model.optimizer)[0]
    seconds, logs = timed_steps.timed(step, steps)
    skipped, scale = timed_steps.scaling(model.optimizer)
    return {
        "seconds": seconds,
        "batches_per_step": config.optimizer.accumulation_steps,
        "first_step_seconds": first[0],
        "loss": callbacks.json_number(logs["loss"]),
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

    first, _ = timed_steps.timed(step, warmup)
    one, outputs = timed_steps.timed(step, 1)
    rest, _ = timed_steps.timed(step, steps - 1)
    return {
        "seconds": one + rest,
        "batches_per_step": 1,
        "first_step_seconds": first[0],
        "outputs": [callbacks.json_number(x) for x in outputs.ravel()[:_KEPT]],
        "skipped_steps": None,
        "loss_scale": None,
    }


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
    asked = {
        "config": run_files.plain_config(config),
        "cell": cell._asdict(),
        "steps": steps,
        "warmup": warmup,
    }
    return child_process.to_request(asked, output, identity, memory)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Measures what a request asks for."""
    config = config_dict.ConfigDict(child_process.with_tuples(request["config"]))
    cell = Cell(**request["cell"])
    return measure(config, cell, request["steps"], request["warmup"])


def main() -> None:
    """Serves the request on standard input."""
    child_process.main(serve)


if __name__ == "__main__":
    main()
