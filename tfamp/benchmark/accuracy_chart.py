"""Scores over time, up to a target: which mode gets there first."""

import math

from tfamp.benchmark import plot_style, records, words

_PANEL = 2.3  # Inches.


def draw_time_to_accuracy(
    figure, report: records.Report, theme: plot_style.Theme
) -> None:
    """Draws scores over seconds, a panel for each task.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark.
      theme: The colors.
    """
    tasks = timed_tasks(report)
    rows = {
        task: [row for row in report.accuracy_rows if row.task == task]
        for task in tasks
    }
    labels = {task: _labels(report, task, rows[task]) for task in tasks}
    lines = [plot_style.key_lines(1 + len(labels[task]), 1) for task in tasks]
    heights = [_PANEL + 1.1 * plot_style.LINE * count for count in lines]
    plot_style.set_height(figure, sum(heights))
    panels = figure.subplots(len(tasks), 1, height_ratios=heights, squeeze=False)
    for axes, task in zip(panels.flat, tasks, strict=True):
        plot_style.dress(axes, theme)
        for mode, label in labels[task].items():
            axes.plot([], [], color=plot_style.COLORS[mode], label=label)
        for run in report.accuracy_runs:
            if run.task == task:
                _draw_run(axes, run, theme)
        _draw_target(axes, rows[task], theme)
        axes.set_xlabel("seconds of training and validation")
        plot_style.key_above(axes, task, columns=1)


def timed_tasks(report: records.Report) -> list[str]:
    """Returns the tasks with a score over time."""
    return list(
        dict.fromkeys(
            run.task
            for run in report.accuracy_runs
            if any(score is not None for _, score in run.points)
        )
    )


def time_text(row: records.AccuracyRow) -> str:
    """Returns a mode's time: "tf32: 8.1 s, 1.42x as fast, 3 of 3 seeds"."""
    text = f"{row.mode}: "
    if row.seconds:
        text += f"{words.seconds(row.seconds.median)}, "
    if row.ratio:
        text += f"{words.ratio(row.ratio)} as fast, "
    return f"{text}{row.reached} of {row.seeds} seeds"


def _labels(report, task, rows):
    """{mode: what the legend says of it}, also of modes without a row."""
    runs = [run for run in report.accuracy_runs if run.task == task]
    return {run.mode: run.mode for run in runs} | {
        row.mode: time_text(row) for row in rows
    }


def _draw_run(axes, run, theme):
    color = plot_style.COLORS[run.mode]
    seconds = [second for second, _ in run.points]
    scores = [math.nan if score is None else score for _, score in run.points]
    marker = "." if sum(map(math.isfinite, scores)) == 1 else ""
    axes.plot(seconds, scores, color=color, linewidth=1.0, marker=marker)
    for second, score in zip(seconds, scores, strict=True):
        if second == run.reached_seconds:
            style = {"markeredgecolor": theme.ink, "markersize": 5.5, "zorder": 5}
            axes.plot(second, score, marker="o", color=color, **style)


def _draw_target(axes, rows, theme):
    for target, metric in dict.fromkeys((row.target, row.metric) for row in rows):
        label = f"target {target:g} of {metric}, a circle where it was reached"
        style = {"color": theme.ink, "linewidth": 1.0, "linestyle": (0, (4, 3))}
        axes.axhline(target, label=label, **style)
    names = dict.fromkeys(row.metric for row in rows)
    label = axes.set_ylabel(" / ".join(names) or "score", **plot_style.AS_IT_IS)
    plot_style.fit(label, 0.4 * plot_style.POINTS)
    axes.grid(color=theme.line, linewidth=0.6)
