"""Tables that commands print in a terminal; the tables of results are in `atoll.report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from atoll.commands.egress import Egress, Item
from atoll.commands.reproduce import RowCheck
from atoll.core.config import describe
from atoll.core.run_folder import Run
from atoll.core.text import plural
from atoll.data.partition.partition import Partition
from atoll.data.partition.small_clients import sit_out_words
from atoll.data.sources import Splits
from atoll.methods.method import Method
from atoll.papers.inventory import inventory
from atoll.papers.reproduction import Reproduction, image_names
from atoll.report.client_pictures import chosen_clients
from atoll.report.numbers import number
from atoll.report.reproduction import remarks
from atoll.report.terminal import terminal_table
from atoll.report.wording import source_words

MOST_ROWS = 1000  # maximum number of clients in a table; of more clients, only some are listed
MOST_CLASSES, SHOWN = 12, 3  # maximum number of classes with a column each; of more, the largest are shown
NARROW = 80  # width of a terminal below which shapes are wrapped, like names


def partition_table(splits: Splits, partition: Partition) -> Group:
    """Table of the splits' sizes, and each client's shift, label distance and number of images by class."""
    rows, distances, classes = [], partition.distances(), splits.train.classes
    many = len(classes) > MOST_CLASSES
    shown = range(len(partition)) if len(partition) <= MOST_ROWS else chosen_clients(partition)
    for k in shown:
        name = partition.names[k]
        counts = [] if partition.counts is None else partition.counts[k].tolist()
        by_class = _largest(counts, classes) if many else [str(n) if n else "·" for n in counts]
        facts = [f"{distances[k]:.2f}"] if distances else []
        facts += [partition.shifts[k]] if partition.shifts else []
        rows.append([name, str(len(partition.clients[k])), *facts, *by_class])
    sizes = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    facts = [f"{name} {tuple(images.images.shape)}" for name, images in sizes.items() if images is not None]
    if len(shown) < len(partition):
        least, most = min(partition.sizes), max(partition.sizes)
        facts.append(
            f"{len(shown)} of {plural(len(partition), 'client')}, at equal distances in their order; "
            f"all have {least} to {plural(most, 'image')}"
        )
    if partition.sit_out:
        facts.append(sit_out_words(partition.sit_out))
    if partition.label_distance is not None:
        facts.append(f"label distance {partition.label_distance:.3f}")
    if partition.cluster_counts is not None:
        facts.append(f"split by {partition.cluster_counts.shape[1]} feature clusters")
    head = [
        "client",
        "images",
        *(["distance"] if distances else []),
        *(["shift"] if partition.shifts else []),
    ]
    return terminal_table(
        [*head, *(["classes", "the largest"] if many else classes)], rows, [", ".join(facts)]
    )


def _largest(counts: Sequence[int], classes: Sequence[str]) -> list[str]:
    """The number of a client's classes, and its largest: a terminal is too narrow for all."""
    present = [c for c, n in enumerate(counts) if n]
    largest = sorted(present, key=lambda c: -counts[c])[:SHOWN]
    return [str(len(present)), ", ".join(f"{classes[c]} {counts[c]}" for c in largest)]


def plan_table(job: Reproduction, checks: Sequence[RowCheck]) -> Group:
    """Table of the runs that a paper's table needs, with the clients that a dry run found.

    Values that are the same in all rows are given once, below the table.
    """
    plans = [_plan(job, check) for check in checks]
    common = {
        key: plans[0][key] for key in plans[0] if len(plans) > 1 and len({plan[key] for plan in plans}) == 1
    }
    header = [key for key in plans[0] if key not in common]
    below = [
        *(["all rows: " + ", ".join(f"{key} {value}" for key, value in common.items())] if common else []),
        f"{plural(len(job.rows), 'row')}, {plural(len(job.trainings()) * job.seeds, 'run')} into {job.out}; "
        f"images: {image_names(job.rows)}",
        *dict.fromkeys(f"not on this machine: {check.missing}" for check in checks if check.missing),
        *(f"cannot run: {check.row.name}: {check.fault}" for check in checks if check.fault),
        *remarks({**job.header(), "failures": {}}),
    ]
    rows = [[plan[key] for key in header] for plan in plans]
    return terminal_table(header, rows, below, job.title, numbers=False)


def _plan(job: Reproduction, check: RowCheck) -> dict[str, str]:
    row = check.row
    recipe, partition, train = row.recipe, row.recipe.partition, row.recipe.train
    alpha = {"dirichlet": f"({partition.alpha})", "skew": f"(β {partition.beta})"}.get(partition.kind, "")
    clients = "" if partition.kind == "centralised" else f" × {partition.clients}"
    elsewhere = f" → {source_words(describe(row.measured_on))}" if row.measured_on else ""
    finished = sum(Run(folder).finished for folder in job.folders(row))
    return {
        "row": row.name,
        "method": recipe.composed.title,
        "images": source_words(describe(recipe.data)) + elsewhere,
        "partition": f"{partition.kind}{alpha}{clients}",
        "encoder": recipe.model.encoder,
        "rounds × epochs": f"{train.rounds} × {train.epochs}",
        "clients: images": check.clients or ("cannot run" if check.fault else "images missing"),
        "finished": f"{finished}/{job.seeds}",
    }


def listing() -> Group:
    """Table of the papers' tables and figures, and whether each can run on this machine."""
    entries = inventory()
    rows = [
        [one.name, one.title, str(one.runs or ""), one.images, one.state + ("*" if one.marks else "")]
        for one in entries
    ]
    marks = dict.fromkeys(f"* NOT the paper's {mark}" for one in entries for mark in one.marks)
    return terminal_table(["name", "content", "runs", "images", "state"], rows, list(marks), numbers=False)


def egress_tables(egress: Egress, method: Method, width: int) -> Iterator[Table | Text | str]:
    """Tables of what a client sends, receives and retains, with sums in the headings and a line per tensor.

    Args:
        egress: What was found.
        method: The method.
        width: Width of the terminal.
    """
    every = "every round"
    titles = {
        "up": f"Leaves the client, {every}",
        "down": f"Sent to the client, {every}",
        "once": "Sent to the client, once",
        "kept": "Retained by the client between rounds",
    }
    for place, title in titles.items():
        items: list[Item] = getattr(egress, place)
        total = sum(item.bytes for item in items)
        yield Text(f"{title}: {total:,} bytes", style="italic")
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("what", overflow="fold")
        table.add_column("shape", no_wrap=width >= NARROW)  # otherwise, there would be no room for the names
        table.add_column("bytes", no_wrap=True, justify="right")
        table.add_column("why", max_width=36)  # leaves room for the names
        for item, before in zip(items, [None, *items], strict=False):
            shape = item.dtype if item.shape is None else f"{item.dtype} {list(item.shape)}"
            only = "" if len(item.rounds) > 1 or place == "once" else " (not in every round)"
            why = "″" if before is not None and before.why == item.why and not only else item.why + only
            table.add_row(item.name, shape, f"{item.bytes:,}", why)
        if not items:
            table.add_row("nothing", "", "", "")
        yield table
        yield ""
    yield Text("Summary", style="italic")
    yield f"recipe: {egress.recipe}"
    lines = Table(show_edge=False, pad_edge=False, show_header=False)
    for sentence in method.egress:
        lines.add_row(f"leaves: {sentence}")
    lines.add_row(
        "leaves when the node enrols: a real site's name, the numbers of its training and held-out images, its "
        "class names, its version of Atoll, and its environment (processor, device, threads, libraries)"
    )
    lines.add_row(
        "leaves at evaluations: a real site's accuracies and geometry on its held-out images, as numbers"
    )
    lines.add_row(
        "leaves on failure: a sentence; of images only that they do not fit the recipe or cannot be read"
    )
    for sentence in method.keeps or ("nothing",):
        lines.add_row(f"retained: {sentence}")
    yield lines
    yield ""


def theory_table(summary: Mapping[str, Any]) -> Group:
    """Table of the constants of Dec-SSL's bounds by dimension, and whether they hold."""
    rows = [
        [
            f"{int(dim):,}",
            str(one["seeds"]),
            str(one["sources"]),
            f"{one['loss_local']:.4f}",
            f"{one['loss_global']:.4f}",
            f"{one['c_local']:.2f}",
            f"{one['c_global']:.2f}",
            "yes" if one["holds"] else "no",
            f"{one['own_correlation']:.3f}",
            f"{one['cross_correlation']:.4f}",
            f"{one['c_supervised']:.3f}",
            "yes" if one["holds_supervised"] else "no",
        ]
        for dim, one in summary["dims"].items()
    ]
    slopes = summary["slopes"]
    below = [
        f"self-supervised: every r_j ≥ 1 − c·d^(−4/5) with c = {summary['c']:.3f}, the smallest for d up to "
        f"{summary['fitted_up_to']}",
        f"supervised: every correlation with e_j, j ≠ k, is at most {summary['c_supervised']:.3f}·d^(−1/10)",
    ]
    if slopes["loss_local"] is not None:
        below.append(
            f"powers of d: 1 − r locally {number(slopes['loss_local'], 2)}, globally "
            f"{number(slopes['loss_global'], 2)}; correlation {number(slopes['cross_correlation'], 2)}"
        )
    head = ["d", "seeds", "K", "1 − r local", "global", "c local", "c global", "holds"]
    head += ["own corr.", "other corr.", "c", "holds"]
    return terminal_table(head, rows, below)
