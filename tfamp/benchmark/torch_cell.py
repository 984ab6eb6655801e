"""Times one cell of a benchmark in PyTorch, with its automatic mixed precision.

    python -P tfamp/benchmark/torch_cell.py < request.json

For an interpreter that may have PyTorch and nothing of tfamp, so nothing of tfamp is
imported; `exchange` wrote model, weights and batches. A request is {"cell", "exchange",
"steps", "warmup", "threads"} and what `child_process` adds to it; an error is one line,
the last of standard error.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import math
import os
import pathlib
import re
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

# Last, and -P: the modules beside this file are not to hide others of their names.
sys.path.append(str(pathlib.Path(__file__).parent))

import torch_networks
import torch_training


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a request as plain data."""
    cell, warmup = request["cell"], request["warmup"]
    if cell["mode"] not in torch_training.MODES or cell["xla"]:
        raise ValueError(
            "PyTorch has no twin of this cell. Received: mode="
            f"{cell['mode']!r}, xla={cell['xla']}. Expected one of "
            f"{', '.join(torch_training.MODES)}, and no XLA."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = pathlib.Path(request["exchange"])
    asked = json.loads(file.with_suffix(".json").read_text())
    tf32 = torch_training.configure(
        device, cell["mode"], request["threads"], asked["seed"]
    )
    build, layout = torch_networks.NETWORKS[asked["network"]["kind"]]
    weights, batches = read(file, asked["features"], warmup + request["steps"], device)
    with contextlib.suppress(ImportError):  # Its code is no memory of the training.
        import transformers  # noqa: F401  # pyright: ignore[reportMissingImports]
    before = resident("RssAnon")
    network = build(asked["network"])
    network.load_state_dict(weights)
    parameters = sum(value.numel() for value in weights.values())
    del weights  # Copied; they would count as memory of the training.
    network.to(device=device, memory_format=torch.channels_last).train()
    trainer = torch_training.Trainer(
        network, cell["mode"], asked["optimizer"], asked["loss_scale"]
    )
    return {
        **train(trainer, batches, warmup, device),
        **facts(device, before),
        "tensor_float_32": tf32,
        "xla": False,
        "note": note(trainer, cell["mode"], layout),
        "parameters": parameters,
    }


def read(
    file: pathlib.Path, features: list[str], steps: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[tuple]]:
    """Returns weights and batches of an exchange, the latter pinned for a GPU.

    Args:
      file: The .npz file.
      features: Names of the features, in order.
      steps: How many batches.
      device: A GPU reads pinned batches faster.

    Returns:
      {name: tensor} and [(features, labels)].
    """
    with np.load(file) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    prefix = "weights/"
    weights = {
        k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)
    }
    if f"batches/{steps - 1}/labels" not in found:
        raise ValueError(
            f"The exchange has too few batches. Received: {file}. Expected {steps}."
        )
    pin = torch.Tensor.pin_memory if device.type == "cuda" else lambda tensor: tensor
    batches = [
        [pin(found[f"batches/{i}/{name}"]) for name in (*features, "labels")]
        for i in range(steps)
    ]
    return weights, [(batch[:-1], batch[-1]) for batch in batches]


def train(
    trainer: torch_training.Trainer,
    batches: list[tuple],
    warmup: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains a step on each batch; returns the figures of the steps."""
    seconds, losses, scales, right = [], [], [], []
    for features, labels in batches:
        start = time.perf_counter()
        features = [each.to(device, non_blocking=True) for each in features]
        loss, hits = trainer.step(features, labels.to(device, non_blocking=True))
        seconds.append(time.perf_counter() - start)
        losses.append(loss if math.isfinite(loss) else None)
        scales.append(trainer.scale)
        right.append(hits)
    scaled = trainer.scaler.is_enabled()
    examples = sum(len(labels) for _, labels in batches[warmup:])
    return {
        "seconds": seconds[warmup:],
        "first_step_seconds": seconds[0],
        "losses": losses,
        "metric": sum(map(int, right[warmup:])) / examples,
        "metric_name": "accuracy",
        "loss_scales": scales if scaled else [],
        "loss_scale": scales[-1] if scaled else None,
        "skipped_steps": trainer.skipped if scaled else None,
    }


def facts(device: torch.device, before: int | None = 0) -> dict[str, Any]:
    """Returns peak memory in bytes, versions and the device's name.

    Args:
      device: The device.
      before: Bytes of host memory that do not count; None if that is not known.
    """
    # As `memory_limit.peak_anonymous_host`: without programs and libraries.
    parts = resident("VmHWM"), resident("RssFile"), before
    gpu = device.type == "cuda"
    return {
        "host_bytes": None if None in parts else parts[0] - parts[1] - parts[2],
        "device_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of PyTorch and, where it is installed, transformers."""
    found = {"torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    return found


def note(trainer: torch_training.Trainer, mode: str, layout: str) -> str:
    """Returns what was in force, in a line."""
    dtype = str(torch_training.MODES[mode]).removeprefix("torch.")
    fused = "fused " if trainer.optimizer.defaults["fused"] else ""
    parts = (
        f"PyTorch {torch.__version__}, eager",
        f"autocast to {dtype}" if torch_training.MODES[mode] else "no autocast",
        "GradScaler" if trainer.scaler.is_enabled() else "no GradScaler",
        layout,
        f"{fused}{type(trainer.optimizer).__name__}",
    )
    return ", ".join(parts)


def resident(name: str) -> int | None:
    """Returns resident memory of this process in bytes; None if not known.

    Args:
      name: "VmHWM" for its peak, "RssFile" and "RssAnon" for files and the rest now.
    """
    with contextlib.suppress(OSError):
        status = pathlib.Path("/proc/self/status").read_text()
        if found := re.search(rf"{name}:\s*(\d+) kB", status):
            return int(found.group(1)) * 1024
    return None


# ---- The process: as `child_process` and `memory_limit`, which need TensorFlow ----


def hold(host: int, device: int | None) -> None:
    """Holds this process to bytes of resident memory, and of the GPU's or None."""
    if device is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, device / total))
    threading.Thread(target=_watch, args=(host,), daemon=True).start()


def _watch(limit):
    page, mib = os.sysconf("SC_PAGE_SIZE"), 2**20
    with open("/proc/self/statm", "rb", buffering=0) as file:
        while True:
            held = int(file.read(200).split()[1]) * page
            if held > limit:
                text = (
                    f"{held / mib:,.0f} MiB resident, the limit is {limit / mib:,.0f}"
                )
                os.write(2, f"\nMemoryError: {text} MiB\n".encode())
                os._exit(1)
            file.seek(0)
            time.sleep(0.005)


def _end_with(parent):
    with contextlib.suppress(AttributeError, OSError, TypeError):
        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>.
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that asked has ended")


def _reason(error):
    line = " ".join(str(error).split())
    # PyTorch's allocator on a CPU raises no error of its own.
    kind = "MemoryError" if "can't allocate memory" in line else type(error).__name__
    return f"{kind}: {line}"


def main() -> None:
    """Serves the request on standard input."""
    request = json.load(sys.stdin)
    _end_with(request["parent"])
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    if request["memory"]:
        hold(**request["memory"])
    try:
        figures = measure(request)
    except Exception as error:  # Whatever it is becomes the cell's reason.
        sys.exit(f"\n{_reason(error)}")
    output = pathlib.Path(request["output"])
    part = output.with_name(f"{output.name}.tmp")
    part.write_text(json.dumps({**figures, "identity": request["identity"]}))
    os.replace(part, output)


if __name__ == "__main__":
    main()
