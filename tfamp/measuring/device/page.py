"""The page of the plan for a GPU, its figures as JSON, and a picture."""

import collections
import datetime
import statistics

from tfamp import tables
from tfamp.measuring import trials
from tfamp.measuring.device import parts
from tfamp.runs import plots, run_files

_GIB, _MIB = 2**30, 2**20
_TINY = "Small models, as a check: no figure here describes the device."
_KERNELS = 8  # That are shown of a profile.
_LINES = 15  # The same of a text.
_REASON = 300  # Characters.


def write(
    device_trials: trials.Trials,
    options: parts.Asked,
    took: dict[str, float],
    failures: dict[str, str],
    command: str,
) -> None:
    """Writes `report.md`, `report.json` and `steps.png`.

    Args:
      device_trials: Those in the device's folder.
      options: What the last call was asked for.
      took: Label of what it has run -> seconds.
      failures: Label -> why it is missing.
      command: The last call's.
    """
    folder = device_trials.folder
    figures = {
        name: trial
        for name in sorted(file.stem for file in (folder / "cells").glob("*.json"))
        if not name.startswith("new-")  # A call that was killed left it.
        and not name.endswith("-done")
        and (trial := device_trials.read(name)) is not None
    }
    facts = {k: v for k, v in trials.place(device_trials.machine)["facts"].items() if v}
    content = {
        "schema_version": 1,
        "date": datetime.date.today().isoformat(),
        "commits": sorted({each.get("commit", "") for each in figures.values()}),
        "command": command,
        "tiny": options.tiny,
        "device": device_trials.machine.device,
        "facts": facts,
        "figures": figures,
        "seconds": took,
        "missing": failures,
    }
    run_files.write_json(folder / "report.json", content, indent=None)
    commits = ", ".join(filter(None, content["commits"])) or "not of a checkout"
    lines = [
        f"# What {device_trials.machine.device} shows",
        f"{content['date']}; commit: {commits}; `{command}`",
        *([_TINY] * options.tiny),
        _table([{"fact": k, "value": v} for k, v in facts.items()]),
    ]
    for title, text in _sections(options, figures, took, failures).items():
        lines += [f"## {title}", text] if text.strip() else []
    if (models := _milliseconds(figures)) and plots.can_draw():
        plots.write(folder / "steps.png", _draw, models)
        lines.insert(2 + options.tiny, "![steps](steps.png)")
    run_files.write_text(folder / "report.md", "\n\n".join(lines) + "\n")


def _sections(options, figures, took, failures):
    """Returns title -> text of each."""
    missing = [{"what": x, "why": shortened(why)} for x, why in failures.items()]
    return {
        "Parts": _table(_parts(options, figures, took)),
        "Steps": _steps(figures),
        "Where a step's time goes": _profiles(figures),
        "Numerics": _table(_numerics(figures)),
        "Memory": _table(_memory(figures)),
        "Tests": _texts(figures, "tests"),
        "Accuracy": _table(_accuracy(figures)),
        "float8 and the graph rewrite": _table(_features(figures)),
        "What fits into memory": _texts(figures, "fit_memory"),
        "Not measured": _table(missing),
    }


def shortened(why: str) -> str:
    """Returns the end of a reason, where TensorFlow has the cause.

    Args:
      why: The reason.
    """
    return why if len(why) <= _REASON else f"... {why[-_REASON:]}"


def _table(rows):
    rows = [*rows]
    return tables.of_dicts(rows) if rows else ""


def _of(figures, *prefixes):
    return {k: v for k, v in figures.items() if k.split("-")[0] in prefixes}


def _parts(options, figures, took):
    """How far the parts are; what there was before took no time in the last call."""
    for part in options.parts:
        own = [s for label, s in took.items() if label.startswith(f"{part}: ")]
        yield {
            "part": part,
            "figures": str(len(_of(figures, part))),
            "processes and groups of this call": str(len(own)),
            "seconds, the longest": f"{max(own, default=0):.0f}",
        }


def _timed(figures):
    """Yields model, variant and figures of what was timed."""
    order = "time", "compiled", "stock_xla"
    names = (name.split("-") for name in _of(figures, *order))
    # A group's base comes first.
    key = lambda x: (order.index(x[0]), *x[1:3], x[3] != "keras", x)  # noqa: E731
    for words in sorted(names, key=key):
        _, model, _, side, mode, compiled = words
        each = figures["-".join(words)]
        how = {"compiled": {"torch": ", compiled"}.get(side, ", XLA"), "plain": ""}
        label = {"keras": "stock Keras", "torch": "PyTorch"}.get(side, side)
        if each["seconds"]:
            yield model, f"{label} {mode}{how[compiled]}", each


def _ratio(each):
    """Median over the rounds of the base's time over this one's."""
    pairs = zip(each["base_seconds"], each["seconds"], strict=False)
    ratios = [statistics.median(base) / statistics.median(own) for base, own in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _steps(figures):
    rows = []
    for model, label, each in _timed(figures):
        seconds = [1000 * x for some in each["seconds"] for x in some]
        peak, seen = each["device_bytes"], each.get("profile")
        median = statistics.median(seconds)
        rows.append(
            {
                "model": model,
                "step": label,
                "ms (smallest to largest)": f"{median:.1f} "
                f"({min(seconds):.1f} to {max(seconds):.1f})",
                "speed-up": _ratio(each),
                "first step, s": f"{each['first_step_seconds']:.0f}",
                "peak, GiB": f"{peak / _GIB:.2f}" if peak else "-",
                "launches": f"{seen['launches']:,.0f}" if seen else "-",
                "busy, ms": f"{seen['busy']:.1f}" if seen else "-",
                "waiting": f"{1 - seen['busy'] / median:.0%}" if seen else "-",
            }
        )
    if not rows:
        return ""
    of = next(each["sizes"] for *_, each in _timed(figures))
    return (
        f"BERT: {of['depth']} layers of {of['width']}, {of['batch']} x {of['length']} "
        f"tokens, AdamW with clipping; ResNet-50: {of['images']} images of "
        f"{of['side']} x {of['side']}, SGD. {parts.ROUNDS} rounds of {parts.COUNT} "
        "steps in turns; a speed-up is over the first variant of its group, stock "
        "Keras without XLA in TF32 or float32. First steps are taken side by side. "
        "Launches: kernels and copies, those of a CUDA graph one by one. Busy: "
        "milliseconds of a step in which the GPU does something, by TensorFlow's "
        "profiler; waiting: the rest of a step without the profiler.\n\n" + _table(rows)
    )


def _profiles(figures):
    texts = []
    for model, label, each in _timed(figures):
        if seen := each.get("profile"):
            rows = [
                {"kernel": name, "ms a step": f"{ms:.2f}", "times": f"{times:.0f}"}
                for name, ms, times in seen["kernels"][:_KERNELS]
            ]
            head = f"{model}, {label}: {seen['busy']:.1f} ms a step"
            texts.append(f"{head}\n\n{_table(rows)}")
    return "\n\n".join(texts)


def _numerics(figures):
    for each in _of(figures, "numerics").values():
        failed = each.get("failed")
        error, most = each.get("error"), each.get("expected")
        yield {
            "layer": each["name"],
            "mode": each["mode"] + ", XLA" * each["xla"],
            "error": failed or f"{error:.2e}",
            "of": each.get("of", ""),
            "expected at most": "" if failed else f"{most:.2e}",
            "": "" if not failed and error <= most else "**more**",
        }


def _memory(figures):
    for name, each in _of(figures, "memory").items():
        _, recipe, mode, xla, *what, _ = name.split("-")
        computed, later = each["computed"]["total"], each["later_bytes"]
        sizes = {
            "computed, MiB": computed,
            "peak after the first step": later,
            "peak": each["device_bytes"],
            "with workspaces": each["computed"]["bound"],
        }
        yield {
            "recipe": recipe.replace(".", "/"),
            "mode": f"{mode}{', XLA' * (xla == 'xla')}",
            "with": " ".join(what).replace("_", " "),
            **{k: f"{v / _MIB:,.0f}" if v else "-" for k, v in sizes.items()},
            "ratio": f"{computed / later:.2f}" if later else "-",
        }


def _accuracy(figures):
    scores = collections.defaultdict(list)
    for name, each in _of(figures, "accuracy").items():
        _, recipe, mode, *_ = name.split("-")
        scores[recipe.replace(".", "/"), mode].append(each["test_score"])
    for (recipe, mode), some in scores.items():
        yield {
            "recipe": recipe,
            "mode": mode,
            "test score": f"{statistics.mean(some):.4f}",
            "deviation": f"{statistics.stdev(some):.4f}" if some[1:] else "-",
            "seeds": str(len(some)),
        }


def _features(figures):
    for name, each in _of(figures, "float8", "rewrite").items():
        yield {
            "what": name.rpartition("-")[0],
            "first loss": f"{each['losses'][0]:.4f}",
            "last loss": f"{each['losses'][-1]:.4f}",
            "ms": f"{1000 * statistics.median(each['seconds'][2:]):.1f}",
            "in force": each["in_force"],
        }


def _texts(figures, part):
    texts = []
    for name, each in _of(figures, part).items():
        last = "\n".join(each["text"].splitlines()[-_LINES:])
        title = name.split("-")[1]
        texts.append(f"{title}: exit code {each['code']}\n\n```text\n{last}\n```")
    return "\n\n".join(texts)


def _milliseconds(figures):
    """Returns model -> {variant: milliseconds of a step}."""
    models = collections.defaultdict(dict)
    for model, label, each in _timed(figures):
        models[model][label] = 1000 * statistics.median(sum(each["seconds"], []))
    return models


def _draw(models):
    shapes = [len(each) for each in models.values()]
    size = 9, 1.5 + 0.3 * sum(shapes)
    picture = plots.empty_figure("ms of a training step", size)
    drawn = picture.subplots(len(models), 1, squeeze=False, height_ratios=shapes)
    for axes, name in zip(drawn[:, 0], models, strict=True):
        bars = axes.barh([*models[name]], [*models[name].values()], color="steelblue")
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(name)
    return picture
