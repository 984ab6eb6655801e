"""Times one cell of a benchmark in PyTorch, with its automatic mixed precision.

    python tfamp/measuring/torch_peer/cell.py < request.json

Imports nothing of tfamp. A request is {"mode", "exchange", "steps", "warmup",
"threads"}; the figures are one line of JSON, an error the last line of standard error.
"""

import json
import math
import pathlib
import re
import resource
import sys
import time
from typing import Any

import networks  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import training  # pyright: ignore[reportMissingImports]
from safetensors import safe_open  # pyright: ignore[reportMissingImports]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a request, as `measure.measure` has them."""
    mode, steps, warmup = (request[name] for name in ("mode", "steps", "warmup"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    description, tensors = _read(request["exchange"])
    tf32 = training.configure(device, mode, request["threads"], description["seed"])
    build, layout = networks.NETWORKS[description["network"]["kind"]]
    batches = [
        [_pinned(tensors[f"batches/{i}/{name}"], device) for name in names]
        for names in [(*description["features"], "labels")]
        for i in range(warmup + steps)
    ]
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if prefix in k}
    before = _peak()
    network = build(description["network"])
    network.load_state_dict(weights)
    network.to(device=device, memory_format=torch.channels_last).train()
    trainer = training.Trainer(
        network, mode, description["optimizer"], description["loss_scale"]
    )
    seconds, losses = _time(trainer, batches, device)
    gpu, scaled = device.type == "cuda", trainer.scaler.is_enabled()
    return {
        "seconds": seconds[warmup:],
        "examples": len(batches[0][-1]),
        "first_step_seconds": seconds[0],
        "losses": losses,
        "outputs": None,
        "skipped_steps": trainer.skipped if scaled else None,
        "loss_scale": trainer.scale if scaled else None,
        "host_bytes": _peak() - before,
        "device_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "xla": False,
        "tensor_float_32": tf32,
        "note": _note(trainer, mode, layout),
        "unit": "",
        "description": "",
        "parameters": sum(value.numel() for value in weights.values()),
    }


def _read(file):
    """Returns what `exchange` described, and its tensors by name."""
    with safe_open(file, "pt") as opened:
        description = json.loads(opened.metadata()["request"])
        names = opened.keys()
        return description, {name: opened.get_tensor(name) for name in names}


def _time(trainer, batches, device):
    """Returns seconds and losses of all steps; None for those that are not finite."""
    seconds, losses = [], []
    for *features, labels in batches:
        start = time.perf_counter()
        features = [each.to(device, non_blocking=True) for each in features]
        loss = trainer.step(features, labels.to(device, non_blocking=True))
        seconds.append(time.perf_counter() - start)
        losses.append(loss if math.isfinite(loss) else None)
    return seconds, losses


def _pinned(tensor, device):
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _peak():
    """Bytes; as `process_memory.peak_host`, which needs TensorFlow."""
    status = pathlib.Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    if match := re.search(r"VmHWM:\s*(\d+) kB", text):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _note(trainer, mode, layout):
    """What was in force, in a line."""
    dtype = training.MODES[mode]
    fused = "fused " if trainer.optimizer.defaults.get("fused") else ""
    parts = (
        f"PyTorch {torch.__version__}, eager",
        f"autocast to {dtype}".replace("torch.", "") if dtype else "no autocast",
        "GradScaler" if trainer.scaler.is_enabled() else "no GradScaler",
        layout,
        f"{fused}{type(trainer.optimizer).__name__}",
    )
    return ", ".join(parts)


if __name__ == "__main__":
    try:
        print(json.dumps(measure(json.load(sys.stdin))))
    except Exception as error:  # Whatever it is becomes the cell's reason.
        text = " ".join(str(error).split())
        # PyTorch's allocator on a CPU raises no error of its own.
        full = "can't allocate memory" in text
        sys.exit(f"\n{'MemoryError' if full else type(error).__name__}: {text}")
