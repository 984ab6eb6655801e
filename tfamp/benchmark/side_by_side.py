"""tfamp beside its peers in the same mode: a table of texts."""

from tfamp.benchmark import records, words


def table(report: records.Report, task: str) -> list[list[str]]:
    """Returns step times and losses in columns, one line a mode, the head first.

    "tfamp over" a peer is how many times as fast it is, repeat by repeat: median,
    smallest and largest. Losses are differences from float32's.

    Args:
      report: The benchmark.
      task: Name of the task.

    Returns:
      Lines of cells; empty if there is no peer.
    """
    measured = [r for r in report.rows if r.task == task and not r.failed]
    names = {row.framework for row in measured}
    peers = [framework for framework in words.PEERS if framework in names]
    lines = [
        _line(row, [_find(measured, row, framework) for framework in peers])
        for row in measured
        if row.framework == "tfamp"
        and any(_find(measured, row, framework) for framework in peers)
    ]
    head = ["mode", "batch", "tfamp", "tfamp's loss"]
    for name in (words.PEERS[framework] for framework in peers):
        head += [name, f"{name}'s loss", f"tfamp over {name}"]
    return [head, *lines] if lines else []


def _find(rows, row, framework):
    """The peer's row of the same mode, batch size and XLA."""
    wanted = row.cell._replace(framework=framework)
    return next((other for other in rows if other.cell == wanted), None)


def _line(row, peers):
    mode = f"{row.mode}, XLA" if row.xla else row.mode
    line = [mode, f"{row.batch_size}", _step(row), _loss(row)]
    for peer in peers:
        if peer is None:
            line += [words.NONE] * 3
        else:
            ratio = words.speed_up(row.times_as_fast_as(peer))
            line += [_step(peer), _loss(peer), ratio]
    return line


def _step(row):
    return f"{words.number(row.step_ms.median)} ms"


def _loss(row):
    parity = row.parity
    if parity is None or parity.loss_difference is None:
        return words.verdict(parity)[1]
    return words.difference(parity.loss_difference)
