"""Audits a machine, and a recipe on it; the command line of scripts/doctor.py."""

import json
import pathlib

from absl import flags

import tfamp
from tfamp.diagnostics import doctor as machine_doctor
from tfamp.facts import hardware, modes
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.kernels import bias_gradient
from tfamp.runs import base_config, tasks


def run_flags() -> None:
    """Prints the report that the flags ask for, and writes it if a file is named."""
    values = flags.FLAGS
    config, mode, audit = values.config, "", None
    report = machine = machine_doctor.describe(values.simulate)
    if config is not None:
        mode, audit = audit_recipe(config, values.simulate)
        report = f"Mode of the recipe: {mode}\n{audit}"
    if values.output.endswith(".json"):
        content = {
            "machine": machine.to_dict(),
            "mode": mode,
            "audit": audit and audit.to_dict(),
        }
        pathlib.Path(values.output).write_text(json.dumps(content, indent=2) + "\n")
    elif values.output:
        text = machine.to_markdown()
        if audit:
            text += f"\nMode of the recipe: {mode}\n\n{audit.to_markdown()}"
        pathlib.Path(values.output).write_text(text)
    print(report)


def audit_recipe(
    config, device: str | hardware.DeviceDescription | None = None
) -> tuple[str, tfamp.AuditReport]:
    """Builds a recipe's model in its mode and audits it with its batch size.

    Args:
      config: The resolved configuration. Its data are not read.
      device: None for this host, or another as for `tfamp.audit`.

    Returns:
      The mode's name, and the `AuditReport`; nothing is trained or written.

    Raises:
      ValueError: If a setting is invalid, or the device is not in the table.
    """
    base_config.validate(config)
    settings, description = config.precision, hardware.find_device(device)
    best = hardware.choose_mode([description]).mode
    mode = modes.get_mode(best if settings.mode == "auto" else settings.mode)
    synthetic = tasks.synthetic(config)
    rewrite = None
    if settings.graph_rewrite and settings.overrides:
        raise ValueError(
            "The graph rewrite does not see layers and cannot apply overrides. "
            "Received: config.precision.graph_rewrite=True and config.precision."
            f"overrides={settings.overrides!r}. Expected one of them."
        )
    if settings.graph_rewrite:
        dtype = "auto" if settings.mode == "auto" else mode.compute_format
        rewrite, _ = graph_rewrite.choose_dtype(dtype, [description], {})
    # As it trains: the trainer enables tfamp, which sums bias gradients rightly.
    scope = tfamp.policy_scope("float32" if rewrite else mode.name)
    with scope, bias_gradient.HOOKS.installed():
        model = synthetic.build_model()
        if not rewrite:
            tfamp.set_precision(model, mode.name, dict(settings.overrides))
        inputs, _ = next(iter(synthetic.batches))
        jit_compile = config.jit_compile
        if jit_compile is None and config.strategy != "none":
            jit_compile = False  # As Keras chooses under a strategy.
        report = tfamp.audit(
            model,
            inputs=inputs,
            device=device,
            jit_compile=jit_compile,
            rewrite=rewrite,
        )
    return f"graph rewrite to {rewrite}" if rewrite else mode.name, report
