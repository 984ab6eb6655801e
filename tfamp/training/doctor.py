"""What `scripts/doctor.py` does: describe a machine, audit a recipe; no training."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import keras

from tfamp import errors, hardware, modes
from tfamp.diagnostics import audit, audit_report, devices, machine, machine_text
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import control, layer_policies, policy, training_hooks
from tfamp.training import base_config, pipeline, precision_config, run_files, tasks

_EXAMPLES = 512  # Enough to know a recipe's classes and inputs; training reads all.


class Report(NamedTuple):
    """What the doctor says.

    Attributes:
      machine: The machine, or the simulated device.
      audit: The recipe's audit; None where only the machine was asked for.
      mode: The mode that the recipe would train in; "" without one.
    """

    machine: machine.MachineReport
    audit: audit_report.AuditReport | None = None
    mode: str = ""

    def to_json(self) -> str:
        """Returns the report as JSON."""
        content = {
            "machine": self.machine.to_dict(),
            "mode": self.mode,
            "audit": self.audit.to_dict() if self.audit else None,
        }
        return json.dumps(content, indent=2) + "\n"

    def to_markdown(self) -> str:
        """Returns the report as Markdown."""
        text = machine_text.to_markdown(self.machine)
        if self.audit:
            text += f"\nMode of the recipe: {self.mode}\n\n{self.audit.to_markdown()}"
        return text

    def __str__(self) -> str:
        if self.audit is None:
            return machine_text.to_text(self.machine)
        return f"Mode of the recipe: {self.mode}\n{self.audit}"


def report(config=None, device: devices.Device = None, time: bool = False) -> Report:
    """Describes a machine, and audits a recipe if there is one.

    Args:
      config: Configuration from `configs/`, or None.
      device: None for this host, or as for `devices.subject`.
      time: Whether to time the recipe's input against its step, on this host.

    Returns:
      A `Report`; nothing is trained and no file is written.

    Raises:
      DataError: If the recipe's data are missing.
      ValueError: If a setting makes no sense, or the device is not in the table.
    """
    described = machine.describe(device)
    if time and config is None:
        raise ValueError(
            "Times are those of a recipe. Received: --time without --config. Pass "
            "--config, or leave out --time."
        )
    if time and described.simulated:
        raise ValueError(
            "Times are measured on this host. Received: --time for "
            f"{described.device}, simulated. Leave out --time or --simulate."
        )
    if config is None:
        return Report(described)
    mode, found = audit_recipe(config, device, time)
    return Report(described, found, mode)


def audit_recipe(
    config, device: devices.Device = None, time: bool = False
) -> tuple[str, audit_report.AuditReport]:
    """Builds a recipe's model in its mode and audits it with its batch size.

    Args:
      config: The resolved configuration.
      device: As for `report`.
      time: As for `report`.

    Returns:
      The mode's name, and the `AuditReport`.

    Raises:
      ValueError: As `report`.
    """
    base_config.validate(config)
    about = devices.subject(device)
    task = tasks.from_config(config if time else _smaller(config))
    scope = _simulated if about.simulated else _enabled
    with scope(config, about.device) as (mode, rewrite):
        model = task.build_model()
        if not (about.simulated and rewrite):  # None is in force here.
            # Overrides that match no layer are told, and loss scaling is added.
            model.compile("sgd", task.loss, jit_compile=False)
        batches = None
        if time:
            batches = pipeline.training_batches(
                task.train.cache() if config.data.cache else task.train,
                batch_size=config.batch_size,
                seed=config.seed,
                first_epoch=0,
                last_epoch=config.epochs,
            )
        found = audit.audit(
            model,
            inputs=_first_batch(task.train, config.batch_size),
            device=device,
            jit_compile=_jit_compile(config),
            tensor_float_32=modes.get_mode(mode).tensor_float_32,
            bias_gradient_fixed=True,  # The trainer enables tfamp.
            rewrite=rewrite,
            dataset=batches,
        )
    return f"graph rewrite to {rewrite}" if rewrite else mode, found


def _first_batch(examples, batch_size):
    """Inputs of a whole batch, however few examples there are."""
    inputs, _ = next(iter(examples.repeat().batch(batch_size)))
    return inputs


def _smaller(config):
    """A copy that reads fewer examples; nothing else of the model depends on them."""
    small = config.copy_and_resolve_references()
    least = max(_EXAMPLES, 2 * config.batch_size)
    with small.unlocked():
        small.limit_examples = min(config.limit_examples or least, least)
    return small


def _jit_compile(config):
    """As the trainer compiles; Keras leaves XLA off under a strategy."""
    if config.jit_compile is not None:
        return config.jit_compile
    return "auto" if config.strategy == "none" else False


@contextlib.contextmanager
def _enabled(config, device) -> Iterator[tuple[str, str | None]]:
    """The precision of the recipe on this host, as the trainer sets it."""
    keywords = precision_config.enable_keywords(config.precision)
    with control.enabled(config.precision.mode, **keywords):
        yield _mode_name(config.precision, device), graph_rewrite.requested_dtype()


@contextlib.contextmanager
def _simulated(config, device) -> Iterator[tuple[str, str | None]]:
    """The precision of the recipe on another device; no rewrite is set up here."""
    settings = config.precision
    mode = modes.get_mode(_mode_name(settings, device))
    rewrite = None
    if settings.graph_rewrite:
        dtype = "auto" if settings.mode == "auto" else mode.compute_format
        rewrite, _ = graph_rewrite.choose_dtype(dtype, [device], {})
    if rewrite:
        with policy.policy_scope("float32"):
            yield mode.name, rewrite
    else:
        with _overridden(mode, dict(settings.overrides)):
            yield mode.name, rewrite


@contextlib.contextmanager
def _overridden(mode, overrides) -> Iterator[None]:
    """What `enable` does to layers and to `compile`, without asking this host."""
    before = policy.read()
    resolver = layer_policies.Resolver(mode, overrides) if overrides else None
    chosen = keras.dtype_policies.get(mode.policy)
    try:
        # TF32 stays: the audit is told of it.
        policy.write(
            before._replace(dtype_policy=resolver.policy if resolver else chosen)
        )
        training_hooks.install({}, resolver)
        yield
    finally:
        policy.write(before)
        control.refresh_hooks()


def _mode_name(settings, device):
    """The mode asked for, "auto" resolved."""
    if settings.mode == "auto":
        return hardware.choose_mode([device]).mode
    return settings.mode


def check_output(path: str) -> None:
    """Raises unless a report can be written there, before any work is done.

    Raises:
      RunError: If the folder does not exist, or the path is one.
    """
    folder = os.path.dirname(os.path.abspath(path))
    why = "there is no such folder" if not os.path.isdir(folder) else ""
    if os.path.isdir(path):
        why = "that is a folder"
    if why:
        raise errors.RunError(
            f"Cannot write the report. Received: --output={path}: {why}. Pass the name "
            "of a file in a folder that exists."
        )


def write(result: Report, path: str) -> None:
    """Writes a report to a file: JSON if its name ends so, else Markdown.

    Raises:
      RunError: If it cannot be written.
    """
    check_output(path)
    is_json = os.path.splitext(path)[1] == ".json"
    text = result.to_json() if is_json else result.to_markdown()
    try:
        run_files.write_text(pathlib.Path(path), text)
    except OSError as e:
        raise errors.RunError(
            f"Cannot write the report. Received: --output={path}: {e.strerror or e}."
        ) from e
