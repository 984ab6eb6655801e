"""Stands for the process of a benchmark: makes figures up, or fails as asked.

A batch of 512 or more runs out of memory; the mode tf32 is not there; a file named by
STOPS_AT ends the process that asked, as a kill would.
"""

import json
import math
import os
import random
import signal
import sys

UNCOUNTED = ["a made-up one is not counted"]
# What PyTorch's cells do not tell.
OF_KERAS = (
    *("kernels", "operations", "pipeline_seconds", "batches_per_step", "description"),
    *("unit", "task", "batch_size", "clocks"),
)
SPEED = {"float32": 1.0, "mixed_bfloat16": 1.7, "mixed_float16": 0.5}


def cell(request):
    asked = request["cell"]
    if asked["batch_size"] >= 512:
        sys.exit("MemoryError: 1,600 MiB resident, the limit is 1,500 MiB")
    if asked["mode"] == "tf32":
        sys.exit("UnsupportedModeError: no TF32 here")
    chance = random.Random(f"{asked}{request.get('seed', 0)}")
    second = 0.1 / SPEED.get(asked["mode"], 1.3)
    steps = request["warmup"] + request["steps"]
    scaled = asked["mode"] == "mixed_float16"
    found = {
        "seconds": [second * chance.uniform(1, 1.1) for _ in range(request["steps"])],
        "first_step_seconds": 2.0,
        "losses": [
            2 * math.exp(-i / 30) * chance.uniform(0.99, 1.01) for i in range(steps)
        ],
        "metric": chance.uniform(0.8, 0.81),
        "metric_name": "accuracy",
        "loss_scales": [2.0**15] * steps if scaled else [],
        "loss_scale": 2.0**15 if scaled else None,
        "skipped_steps": 0 if scaled else None,
        "host_bytes": 8 * 10**8,
        "device_bytes": None,
        "clocks": "CPU 3,000 MHz",
        "note": "made up",
        "tensor_float_32": False,
        "xla": asked["xla"],
        "kernels": (
            {"matrix_share": 0.6, "others": [["Adam", 0.2]], "reason": ""}
            if request.get("profile_steps")
            else None
        ),
        "operations": (
            {"flops": 1e9, "elements": 1e7, "uncounted": UNCOUNTED}
            if request.get("count")
            else None
        ),
        "pipeline_seconds": 0.001,
        "batches_per_step": 1,
        "device": "CPU",
        "parameters": 7,
        "description": "made up",
        "unit": "images",
        "versions": {},
        "task": asked["task"],
        "batch_size": asked["batch_size"],
    }
    if asked["framework"] == "torch":
        found = {name: value for name, value in found.items() if name not in OF_KERAS}
    return found


def calibration(request):
    base = float(os.environ.get("PEAK", "1e11"))
    peaks = {"float32": base, "bfloat16": 2 * base, "float16": base / 10}
    return {
        "calibration": {
            "peaks": peaks,
            "sizes": dict.fromkeys(peaks, (64, 64, 64)),
            "bandwidth": 2e10,
            "bandwidth_bytes": 1000,
            "clock_mhz": 3000.0,
            "device": "CPU",
            "failed": "",
        }
    }


def exchange(request):
    for file in request["files"].values():
        for name in (file, file.removesuffix("npz") + "json"):
            with open(name, "w") as stream:
                stream.write("{}")
    return {}


def accuracy(request):
    """What a run leaves: the mixed mode learns as fast, each epoch is shorter."""
    config = request["config"]
    mode = config["precision"]["mode"]
    os.makedirs(request["folder"], exist_ok=True)
    second = 1 / SPEED[mode]
    lines = [
        {
            "kind": "epoch",
            "epoch": i + 1,
            "val_accuracy": 0.9 + 0.02 * i + 0.001 * config["seed"],
            "seconds": second * (i + 1),
            **({"first_step_seconds": 0.5} if i == 0 else {}),
        }
        for i in range(4)
    ]
    with open(os.path.join(request["folder"], "metrics.jsonl"), "w") as stream:
        stream.write("".join(json.dumps(line) + "\n" for line in lines))
    result = {
        **{"mode": mode, "seed": config["seed"], "score": 0.95, "test_loss": 0.1},
        **{"score_name": "accuracy", "final_loss": 0.1, "best_validation_score": 0.9},
        **{"steps_per_second": 10.0, "skipped_steps": None, "loss_scale": None},
        **{"description": "made up", "reason": "asked for"},
        **{"scores": {"accuracy": 0.95}, "errors": []},
    }
    with open(os.path.join(request["folder"], "result.json"), "w") as stream:
        json.dump(result, stream)
    return {}


def main():
    request = json.load(sys.stdin)
    if os.path.basename(request["output"]) == os.environ.get("STOPS_AT"):
        os.kill(os.getppid(), signal.SIGINT)
        sys.exit(1)
    job = globals()[request.get("job", "cell")]
    figures = {**job(request), "identity": request["identity"]}
    with open(request["output"], "w") as stream:
        json.dump(figures, stream)


if __name__ == "__main__":
    main()
