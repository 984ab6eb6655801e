"""Measures a cell of TensorFlow in this process: tfamp's, or plain Keras'."""

import contextlib
import importlib.metadata
import itertools
import statistics
import time
from typing import Any

import keras

from tfamp import hardware
from tfamp.benchmark import calibration, kernel_times, plan, records, source, step_flops
from tfamp.kernels import bias_gradient, switches
from tfamp.precision import control, policy
from tfamp.training import (
    base_config,
    callbacks,
    memory_limit,
    tasks,
    timed_steps,
)

_DRAWN = 32  # Batches beside those of the steps, for the time to draw one.
_WARM_UP_BATCHES, _DRAWN_BATCHES = 2, 20


def measure(
    task,
    cell: records.Cell,
    seed: int,
    steps: int,
    warmup: int,
    profile_steps: int = 0,
    count: bool = False,
) -> dict[str, Any]:
    """Trains some steps and tells what they took, and what they learned.

    Args:
      task: The cell's task, from `suite_config.get_task`.
      cell: The cell; its framework is "tfamp" or "keras".
      seed: Seed of the weights, of dropout and of the order of the data.
      steps: Steps that are timed.
      warmup: Steps before them, the first one included.
      profile_steps: Steps that are profiled after them; 0: none.
      count: Whether operations are counted.

    Returns:
      Plain data; what `torch_cell` writes, and
        pipeline_seconds: to draw a batch; None of random batches;
        operations: {"flops", "elements", "uncounted"} of `step_flops`, or None;
        kernels: {"matrix_share", "others", "reason"} of `kernel_times`, or None;
        description, unit: the model, and what a batch holds.
    """
    config = plan.config_of(task, cell, seed)
    total = (warmup + steps + profile_steps) * config.optimizer.accumulation_steps
    before = memory_limit.anonymous_host()
    with _in_force(cell, config.precision) as note:
        found, metric = source.create(config, task.synthetic, total + _DRAWN)
        keras.utils.set_random_seed(seed)  # As `exchange.write` before its model.
        model = found.build_model()
        step = timed_steps.training_step(model, config, found, warmup + steps)
        figures = _figures(model, step, steps, warmup, metric)
        state = policy.read()
        figures |= {
            "host_bytes": before and memory_limit.peak_anonymous_host() - before,
            "device_bytes": memory_limit.peak_device(),
            "clocks": calibration.clocks()[1],
            "note": note(),
            "tensor_float_32": state.tensor_float_32,
            "xla": bool(model.jit_compile),
        }
        figures["kernels"] = _profile(step, profile_steps)
        figures["operations"] = _operations(model, found) if count else None
    draws = None if task.synthetic else _draw_seconds(found.batches)
    return {
        **figures,
        "metric_name": metric,
        "pipeline_seconds": draws,
        "batches_per_step": config.optimizer.accumulation_steps,
        "device": hardware.device_label(hardware.read_devices()),
        "parameters": model.count_params(),
        "description": found.description,
        "unit": found.unit,
        "versions": {
            name: importlib.metadata.version(name) for name in ("tensorflow", "keras")
        },
    }


@contextlib.contextmanager
def _in_force(cell, precision):
    """The cell's precision; yields a function that tells of it after the steps."""
    if cell.framework == "keras":
        with policy.policy_scope(records.VARIANTS[cell.mode][0]):
            yield lambda: "plain Keras: its policy set by hand, its own loss scaling"
        return
    with (
        switches.scope(**base_config.kernel_keywords(precision)),
        control.enabled(precision.mode, **base_config.enable_keywords(precision)),
        bias_gradient.HOOKS.installed(),  # In float32, too: modes are compared.
    ):

        def note():
            status = control.status()
            rewrite = status.graph_rewrite if precision.graph_rewrite else ""
            kernels = status.fused_kernels
            fused = "" if kernels == "off" else f"fused kernels: {kernels}"
            return "; ".join(filter(None, [status.reason, rewrite, fused]))

        yield note


def _figures(model, step, steps, warmup, metric):
    """Runs the steps; each has its own loss, and the clock stands between them."""
    seconds, losses, values, scales = [], [], [], []
    for _ in range(warmup + steps):
        model.reset_metrics()
        start = time.perf_counter()
        logs = step()
        seconds.append(time.perf_counter() - start)
        losses.append(callbacks.json_number(logs["loss"]))
        values.append(float(logs[metric]) if metric else 0.0)
        scales.append(timed_steps.scaling(model.optimizer)[1])
    scaled = scales[-1] is not None
    return {
        "seconds": seconds[warmup:],
        "first_step_seconds": seconds[0],
        "losses": losses,
        "metric": statistics.fmean(values[warmup:]) if metric else None,
        "loss_scales": scales if scaled else [],
        "loss_scale": scales[-1],
        "skipped_steps": skipped_steps(model.optimizer, warmup + steps)
        if scaled
        else None,
    }


def skipped_steps(optimizer, steps: int) -> int | None:
    """Returns how many steps made no update; Keras' own loss scaling counts none.

    Args:
      optimizer: With loss scaling.
      steps: How many steps there were.
    """
    counted, _ = timed_steps.scaling(optimizer)
    if counted is not None:
        return counted
    inner = optimizer.inner_optimizer
    if inner.gradient_accumulation_steps:
        return None
    return steps - int(callbacks.read_number(inner.iterations))


def _draw_seconds(batches):
    """The least of three means: what else the machine does is not the pipeline's."""
    return min(_mean_draw_seconds(iter(batches)) for _ in range(3))


def _mean_draw_seconds(batches):
    for _ in itertools.islice(batches, _WARM_UP_BATCHES):
        pass
    start = time.perf_counter()
    drawn = sum(1 for _ in itertools.islice(batches, _DRAWN_BATCHES))
    return (time.perf_counter() - start) / drawn


def _profile(step, count):
    return kernel_times.profile(step, count)._asdict() if count else None


def _operations(model, found: tasks.Synthetic):
    batch = next(iter(found.batches))
    return step_flops.count(model, found.loss, batch)._asdict()
