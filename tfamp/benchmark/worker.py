"""The process of a benchmark: a cell, the calibration, a run up to an accuracy.

    python -c "import tfamp.benchmark.worker as worker; worker.main()" < request.json

Requests are those of `child_process`, with "job", a key of `JOBS`, and its arguments.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import config_dict

from tfamp.benchmark import (
    calibration,
    cell_figures,
    exchange,
    plan,
    records,
    source,
    time_to_accuracy,
)
from tfamp.training import benchmark_process, child_process, fork_server

Program = Sequence[str] | fork_server.ForkServer

# Not -m: the package imports the module itself, and Python warns of a second one.
_COMMAND = (
    *(sys.executable, "-P", "-c"),
    f"import {__name__} as worker; worker.main()",
)
_TEXTS = ("keras_hub",)  # What models of texts import.


@contextlib.contextmanager
def processes(texts: bool) -> Iterator[Program]:
    """Yields what `benchmark_process.run` starts a process of this module by.

    Args:
      texts: Whether some of the tasks are on texts.
    """
    if not fork_server.SUPPORTED:
        yield _COMMAND
        return
    extra = _TEXTS if texts else ()
    environment = benchmark_process.environment()
    with fork_server.ForkServer(__name__, extra, environment) as server:
        yield server


def _config(plain):
    return config_dict.ConfigDict(child_process.with_tuples(plain))


def _cell(request):
    cell = records.Cell(**request["cell"])
    figures = cell_figures.measure(
        _config(request["task"]),
        cell,
        request["seed"],
        request["steps"],
        request["warmup"],
        request["profile_steps"],
        request["count"],
    )
    return figures | {"task": cell.task, "batch_size": cell.batch_size}


def _calibration(request):
    return {"calibration": calibration.measure(request["seconds"])._asdict()}


def _exchange(request):
    """Writes weights and batches for PyTorch; "files" has the file of each seed."""
    task = _config(request["task"])
    cell = records.Cell("", "tfamp", "float32", request["batch_size"], False)
    for seed, file in request["files"].items():
        config = plan.config_of(task, cell, int(seed))
        found, _ = source.create(config, task.synthetic, request["steps"])
        exchange.write(file, config, found, request["steps"])
    return {}


def _accuracy(request):
    time_to_accuracy.run(_config(request["config"]), request["folder"])
    return {}


JOBS = {
    "cell": _cell,
    "calibration": _calibration,
    "exchange": _exchange,
    "accuracy": _accuracy,
}


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Does what a request asks for; returns figures as plain data."""
    return JOBS[request["job"]](request)


def main() -> None:
    """Serves the request on standard input."""
    child_process.main(serve)


if __name__ == "__main__":
    main()
