"""tfamp beside its peers, a line a mode."""

import samples

from tfamp.benchmark import side_by_side


def test_a_line_has_ours_and_each_peers_step_and_loss():
    head, *lines = side_by_side.table(samples.make_report(), "digits")
    assert len(lines) == 1  # Of the sample only bfloat16 has peers.
    cells = list(zip(head, lines[0], strict=True))
    assert cells[0] == ("mode", "mixed_bfloat16")
    assert dict(cells)["tfamp"] == "23.5 ms"
    assert (
        dict(cells)["plain Keras"] == "33.3 ms"
        and lines[0][6] == "1.42x (1.42 to 1.42)"
    )
    assert dict(cells)["PyTorch"] == "36.4 ms" and lines[0][9] == "1.55x (1.55 to 1.55)"
    assert "tfamp over PyTorch" in dict(cells) and len(set(head)) == len(head)


def test_mode_without_one_peer_has_dashes_and_without_any_no_line():
    report = samples.make_report()
    rows = tuple(row for row in report.rows if row.framework != "torch")
    rows += (samples.make_row("digits", "torch", "float32", speed=0.5),)
    head, *lines = side_by_side.table(report._replace(rows=rows), "digits")
    assert [line[0] for line in lines] == ["float32", "mixed_bfloat16"]
    assert lines[0][4:7] == ["-"] * 3 and lines[0][9] == "2.00x (2.00 to 2.00)"
    assert lines[1][7:] == ["-"] * 3


def test_without_peers_there_is_no_table():
    report = samples.make_report()
    rows = tuple(row for row in report.rows if row.framework == "tfamp")
    assert side_by_side.table(report._replace(rows=rows), "digits") == []


def test_xla_stands_beside_xla_alone():
    rows = (
        samples.make_row("digits", "tfamp", "float32", xla=True, speed=2.0),
        samples.make_row("digits", "keras", "float32", speed=1.0),
    )
    report = samples.make_report(rows=rows)
    assert side_by_side.table(report, "digits") == []
