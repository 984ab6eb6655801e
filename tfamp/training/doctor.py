"""Audits a recipe: its model, built in its mode, with a batch of random content."""

import tfamp
from tfamp import hardware, modes
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.kernels import bias_gradient
from tfamp.training import base_config, tasks


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
      ValueError: If a setting makes no sense, or the device is not in the table.
    """
    base_config.validate(config)
    settings, found = config.precision, hardware.find_device(device)
    best = hardware.choose_mode([found]).mode
    mode = modes.get_mode(best if settings.mode == "auto" else settings.mode)
    synthetic = tasks.import_task(config.task).synthetic(config)
    rewrite = None
    if settings.graph_rewrite and settings.overrides:
        raise ValueError(
            "The graph rewrite knows no layers, so overrides have no meaning with it. "
            "Received: config.precision.graph_rewrite=True and config.precision."
            f"overrides={settings.overrides!r}. Expected one of them."
        )
    if settings.graph_rewrite:
        dtype = "auto" if settings.mode == "auto" else mode.compute_format
        rewrite, _ = graph_rewrite.choose_dtype(dtype, [found], {})
    # As it trains: the trainer enables tfamp, which sums bias gradients rightly.
    scope = tfamp.policy_scope("float32" if rewrite else mode.name)
    with scope, bias_gradient.HOOKS.installed():
        model = synthetic.build_model()
        if settings.overrides:
            model = tfamp.set_precision(model, mode.name, dict(settings.overrides))
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
