"""Differences between methods, paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from atoll.evaluation.metrics import Metric
from atoll.report.groups import Group, Row, result_columns
from atoll.report.html import Html, join, table, tag
from atoll.report.numbers import UNMEASURED
from atoll.report.results_tables import method_label, same_protocol
from atoll.report.same_images import other_images
from atoll.report.wording import either

WORDS = (
    "Mean over the common seeds of a method's result less the first method's, with its 95 % confidence interval "
    "(Student's t). An interval that contains 0 cannot tell the two apart. Of twenty intervals between equal "
    "methods, one misses 0 by chance. A dash stands for another protocol or no common seed; methods that were "
    "evaluated on other images are left out."
)


def paired(row: Mapping[int, float], base: Mapping[int, float]) -> tuple[int, float, float | None]:
    """Number of common seeds, mean difference, and half of its 95 % confidence interval (Student's t).

    Example:
        >>> from atoll.report.paired import paired
        >>> n, mean, half = paired({0: 41.0, 1: 42.0, 2: 43.0}, {0: 40.0, 1: 40.0, 2: 40.0})
        >>> n, mean, round(half, 3)
        (3, 2.0, 2.484)
    """
    differences = [row[seed] - base[seed] for seed in sorted(row.keys() & base.keys())]
    n = len(differences)
    if n < 2:
        return n, differences[0] if differences else math.nan, None
    from scipy.special import stdtrit  # takes a tenth of a second to import, in each command

    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(n)
    return n, statistics.fmean(differences), half


def verdict(n: int, mean: float, half: float | None) -> str:
    """Format a paired difference."""
    if half is None:
        return f"{signed(mean)}, cannot tell (one seed)" if n else UNMEASURED
    interval = with_interval(mean, half)
    return f"{interval}, cannot tell" if abs(mean) <= half else interval


def with_interval(mean: float, half: float | None) -> str:
    """Format a difference and its interval, if there is one."""
    return signed(mean) + ("" if half is None else f" [{signed(mean - half)}, {signed(mean + half)}]")


def signed(number: float) -> str:
    """Format a number with its sign and a typographic minus."""
    return f"{number:+.2f}".replace("-", "−")


def differences_table(groups: Sequence[Group], rows: Sequence[Row]) -> Html:
    """Table of the differences from the first method with results; a sentence if no other has two of its seeds.

    Empty unless two methods have results of two seeds.
    """
    base = next((group for group in groups if group.results), groups[0])
    metrics = [metric for metric in result_columns(rows) if metric.better == "higher"]
    body = []
    for line, group in enumerate(groups):
        if group is base:
            continue
        found = [] if other_images([base, group]) else [_paired(group, base, metric) for metric in metrics]
        if any(half is not None for _, _, half in found):
            common = either([str(n) for n in sorted({n for n, _, _ in found if n})])
            label = method_label(line, group.label, f"{common} common seeds")
            body.append([label, *(_cell(*one) for one in found)])
    if not body:
        several = [set(group.evaluated) for group in groups if len(group.evaluated) > 1 and group is not base]
        shared = any(len(seeds.intersection(base.evaluated)) > 1 for seeds in several)
        if shared or not several or len(base.evaluated) < 2:
            return Html("")
        words = f"No differences are shown: no other method has two of the seeds of {base.label}."
        return tag("p", words, class_="muted")
    head = ["method", *(metric.title for metric in metrics)]
    caption = f"Differences from {base.label}, paired by seed"
    return join([table(caption, head, body), tag("p", WORDS, class_="muted")])


def _cell(n: int, mean: float, half: float | None) -> Html:
    """A difference, with its interval below."""
    words = verdict(n, mean, half)
    difference, _, rest = words.partition(" ")
    below = [" ", tag("small", rest)] if rest else []
    return tag("td", difference.removesuffix(","), *below)


def _paired(group: Group, base: Group, metric: Metric) -> tuple[int, float, float | None]:
    """The paired difference of a metric; of no seeds if the two were measured under different protocols."""
    if not same_protocol([*group.results, *base.results], metric):
        return paired({}, {})
    return paired(_by_seed(group, metric), _by_seed(base, metric))


def _by_seed(group: Group, metric: Metric) -> dict[int, float]:
    return {run.seed: values[0] for run in group.runs if (values := metric.values([run.results]))}
