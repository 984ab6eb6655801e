"""What to use on this machine, and why, for a reader without experience."""

from collections.abc import Mapping, Sequence
from typing import Any

from tfamp.benchmark import advice_reasons, choices, parity, records, words


def make(
    rows: Sequence[records.Row],
    accuracy_rows: Sequence[records.AccuracyRow],
    machine: Mapping[str, Any],
) -> records.Advice:
    """Returns the advice of a report.

    The fastest of tfamp's ways to train whose loss nowhere differs from float32's
    beyond noise and what is explained, if it is 5 % faster or more and its slowest
    repeats are faster, too; of those that were measured on most tasks and batch sizes.

    Args:
      rows: The cells' rows.
      accuracy_rows: Time to accuracy; may be empty.
      machine: What `diagnostics.doctor` says of this host, as a dict.
    """
    device = machine["device"]
    found = choices.find(rows)
    reason = _reason_against(rows, found)
    if reason:
        return records.Advice(
            f"No advice for this machine ({device}): {reason}.",
            tuple(advice_reasons.on_failures(rows)),
            tuple(advice_reasons.on_others(found, None, machine)),
        )
    best = _best(found, accuracy_rows)
    reasons = [
        *(advice_reasons.on_best(best, rows, accuracy_rows, machine) if best else ()),
        *advice_reasons.on_failures(rows),
    ]
    others = (
        *advice_reasons.on_others(found, best, machine),
        *advice_reasons.on_lateness(found, accuracy_rows),
    )
    return records.Advice(_headline(best, found, device), tuple(reasons), others)


def _reason_against(rows, found):
    """Why nothing can be said; "" if something can."""
    if not rows:
        return "no steps were timed"
    if not any(map(choices.is_base, rows)):
        return "float32 has no figures to compare with"
    if not found:
        return "no other mode has figures beside float32's"
    if not any(choice.repeated for choice in found):
        return "fewer than three repeats do not show the noise (--config.repeats=3)"
    return ""


def _best(found, accuracy_rows):
    """The fastest that is safe and worth it, of those measured on most workloads.

    XLA must earn its compilation: without it, unless that is slower by more than noise.
    """
    good = [
        choice
        for choice in choices.on_most(found)
        if choice.safe
        and choice.repeated
        and choice.worth_it
        and not choices.is_late(choice.mode, accuracy_rows)
    ]
    return max(
        good,
        key=lambda choice: choice.speed_up / (choices.WORTH_IT if choice.xla else 1),
        default=None,
    )


def _headline(best, found, device):
    if best is None:
        fastest = max(choices.on_most(found), key=lambda choice: choice.speed_up)
        return (
            f"Stay with float32 on this machine ({device}): no other mode was reliably "
            f"{choices.WORTH_IT:.2f} times as fast with float32's loss and time to "
            f"accuracy ({fastest.name}: {fastest.speed_up:.2f} times, {fastest.range})."
        )
    return (
        f"Train in {best.name} on this machine ({device}): {best.speed_up:.2f} times "
        f"as fast as float32 ({best.range}), with {_loss_in_words(best)}."
    )


def _loss_in_words(best):
    reach = max(parity.reach(row.parity) for row in best.rows)
    if reach == 0:
        return "the same loss"
    what = "noise" if best.within_noise else "noise and what is explained"
    return f"no difference of the loss beyond {what}, at most {words.percent(reach)}"
