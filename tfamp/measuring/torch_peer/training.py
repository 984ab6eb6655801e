"""Training in PyTorch as Keras means it; a part of `cell`, imports no tfamp."""

import functools
from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

# Mode -> what operations are cast to.
MODES = {
    "float32": None,
    "tf32": None,
    "mixed_bfloat16": torch.bfloat16,
    "mixed_float16": torch.float16,
}


def configure(device: torch.device, mode: str, threads: int, seed: int) -> bool:
    """Sets threads, the random seed and TF32.

    Returns:
      Whether TF32 is allowed: on a GPU in all modes but float32.
    """
    tf32 = device.type == "cuda" and mode != "float32"
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    return tf32


def make_optimizer(
    network: torch.nn.Module, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Returns the optimizer; biases and normalization, the vectors, decay not.

    Args:
      network: The network.
      settings: {"name", "learning_rates", "epsilon", "weight_decay", "momentum",
        "nesterov"}; `prepare_update` reads them, too.

    Adam is fused, one kernel. SGD is not: PyTorch 2.13's fused one, where loss scaling
    skips the first step, goes on from uninitialized momentum.
    """
    rate = settings["learning_rates"][0]
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if settings["name"] == "sgd":
        return torch.optim.SGD(
            groups, rate, momentum=settings["momentum"], nesterov=settings["nesterov"]
        )
    # Without decay AdamW is Adam.
    decay = settings["weight_decay"]
    return torch.optim.AdamW(groups, rate, weight_decay=decay, fused=True)


def prepare_update(
    optimizer: torch.optim.Optimizer, settings: dict[str, Any], update: int
) -> None:
    """Makes the next update mean what Keras' means.

    - Keras adds epsilon before it corrects the bias of the second moment.
    - SGD's momentum has the learning rates within, and its decay is not part of it.

    Args:
      optimizer: From `make_optimizer`.
      settings: As there.
      update: How many updates came before; skipped steps are none.
    """
    rate = settings["learning_rates"][update]
    before = optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] = rate
        if "betas" in group:
            correction = 1 - group["betas"][1] ** (update + 1)
            group["eps"] = settings["epsilon"] / correction**0.5
    if settings["name"] == "sgd":
        _prepare_sgd(optimizer, settings["weight_decay"] * rate, before / rate)


@torch.no_grad()
def _prepare_sgd(optimizer, decay, change):
    buffers = [state.get("momentum_buffer") for state in optimizer.state.values()]
    buffers = [buffer for buffer in buffers if buffer is not None]
    if buffers and change != 1:
        torch._foreach_mul_(buffers, change)
    if decay:
        torch._foreach_mul_(optimizer.param_groups[0]["params"], 1 - decay)


class Trainer:
    """Steps of training as PyTorch's documentation of AMP has them.

    Args:
      network: On its device.
      mode: A key of `MODES`.
      settings: As of `make_optimizer`, and "clip_global_norm", 0 for none.
      loss_scale: Keywords of `GradScaler`; None: mixed_float16 has no loss scaling.

    Attributes:
      skipped: Steps that loss scaling skipped.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        mode: str,
        settings: dict[str, Any],
        loss_scale: dict[str, Any] | None,
    ):
        device = next(network.parameters()).device
        self.network, self.settings = network, settings
        self.optimizer = make_optimizer(network, settings)
        self.optimizer.register_step_pre_hook(self._prepare)
        scaled = mode == "mixed_float16" and loss_scale is not None
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=scaled, **(loss_scale or {})
        )
        low = MODES[mode]
        self.autocast = functools.partial(
            torch.autocast, device.type, low, enabled=low is not None
        )
        self.scale = self.scaler.get_scale()
        self.steps = self.skipped = 0

    def _prepare(self, optimizer, *_):
        prepare_update(optimizer, self.settings, self.steps - self.skipped)

    def step(self, features: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        """Trains one step; returns the loss, read back.

        Args:
          features: Tensors, the arguments of the network.
          labels: int64 [batch].
        """
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits = self.network(*features)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.scaler.scale(loss).backward()
        if norm := self.settings["clip_global_norm"]:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        before, self.scale = self.scale, self.scaler.get_scale()
        self.skipped += self.scale < before
        self.steps += 1
        return loss.item()
