"""The page's tables of runs: recipes, traffic, refused updates, egress, partitions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.text import byte_size
from atoll.data.partition.small_clients import sit_out_words
from atoll.evaluation.metrics import BYTES_DOWN, BYTES_UP
from atoll.recipe.table import catalogue
from atoll.report.client_pictures import samples_table
from atoll.report.folders import Folder
from atoll.report.groups import EXPECTED, Group, differences
from atoll.report.html import Html, bullets, folded, join, table, tag
from atoll.report.numbers import UNMEASURED
from atoll.report.results_tables import method_label
from atoll.report.wording import partition_words, show, without_folders

MAX_LISTED = 20  # largest number of refused and lost updates that are listed
MAX_SAMPLED = 5  # largest number of partitions whose sample images are shown
MAX_CELLS = 2000  # largest number of cells in a partition's table


def recipe_differences(groups: Sequence[Group]) -> Html:
    """Table of the recipes' differences other than the method, whose effects are not the method's."""
    if len(groups) < 2:
        return Html("")
    different = differences([group.recipe for group in groups], EXPECTED)
    if not different:
        return tag("p", "The recipes differ only in their method and its options.")
    body = [[name, *map(show, values)] for name, values in different.items()]
    caption = "Differences between the recipes other than the method and its options"
    return table(caption, ["recipe key", *(group.label for group in groups)], body)


def provenance(groups: Sequence[Group]) -> Html:
    """Table of the runs, and each complete recipe."""
    body = [
        [
            method_label(i, group.label),
            run.name,
            str(run.seed),
            f"{run.rounds} of {run.planned}{', stopped early' if run.stopped_early else ''}",
            tag("td", tag("code", run.digest)),
            str(run.results.get("version", UNMEASURED)),
        ]
        for i, group in enumerate(groups)
        for run in group.runs
    ]
    head = ["method", "folder", "seed", "rounds", "recipe", "Atoll"]
    recipes = (
        folded(
            f"Recipe of {group.label}", tag("pre", without_folders(group.runs[0].recipe_text), tabindex="0")
        )
        for group in groups
    )
    runs = table("Runs, each with the digest of its recipe.toml (SHA-256)", head, body)
    return join([runs, *recipes, _citations(groups)])


def _citations(groups: Sequence[Group]) -> Html:
    """What to cite."""
    papers = {one["name"]: one["paper"] for family in catalogue()["methods"].values() for one in family}
    used = dict.fromkeys(str(group.recipe.get("method", {}).get("name")) for group in groups)
    cited = dict.fromkeys(papers[name] for name in used if papers.get(name))
    atoll = "the Atoll developers, Atoll: federated self-supervised representation learning for PyTorch"
    return tag("p", f"To cite: {atoll}; and {'; '.join(cited)}.", class_="muted") if cited else Html("")


def traffic_table(groups: Sequence[Group]) -> Html:
    """Table of the bytes up and down, the refused or lost updates, and the time."""
    body = []
    for i, group in enumerate(groups):
        runs = [[line for line in run.metrics if BYTES_UP.key in line] for run in group.runs]
        runs = [lines for lines in runs if lines]
        if not runs:
            continue
        cells = []
        for metric in (BYTES_UP, BYTES_DOWN):
            totals = [sum(line[metric.key] for line in lines) for lines in runs]
            rounds = [total / len(lines) for total, lines in zip(totals, runs, strict=True)]
            cells += [byte_size(statistics.fmean(rounds)), byte_size(statistics.fmean(totals))]
        counts = [
            str(sum(len(line.get(name, ())) for lines in runs for line in lines))
            for name in ("refused", "lost")
        ]
        seconds = statistics.median(line.get("seconds", 0.0) for lines in runs for line in lines)
        seeds = f"mean of {len(runs)} seeds" if len(runs) > 1 else ""
        body.append([method_label(i, group.label, seeds), *cells, *counts, f"{seconds:.1f} s"])
    if not body:
        return tag("p", "No round has been completed yet.")
    head = ["method"]
    head += [
        f"{metric.heading} {span}" for metric in (BYTES_UP, BYTES_DOWN) for span in ("per round", "in total")
    ]
    head += ["refused", "lost", "time per round"]
    seeded = "; over several seeds, bytes are means, and refused and lost updates are sums"
    several = any(len(group.runs) > 1 for group in groups)
    caption = f"Traffic of all clients together, and the median time{seeded if several else ''}"
    return table(caption, head, body)


def failed_updates(groups: Sequence[Group]) -> Html:
    """List of the refused and lost updates."""
    sentences = [
        f"{group.label}, seed {run.seed}, round {line['round']}: {_client(run, client)}’s update was {name} "
        f"({reason})"
        for group in groups
        for run in group.runs
        for line in run.metrics
        for name in ("refused", "lost")
        for client, reason in line.get(name, {}).items()
    ]
    sentences += [
        f"{run.name}: its metrics cannot be read, so refused and lost updates are unknown"
        for group in groups
        for run in group.runs
        if run.rounds and not run.metrics
    ]
    if not sentences:
        return tag("p", "No update was refused or lost.", class_="muted")
    more = len(sentences) - MAX_LISTED
    listed = sentences[:MAX_LISTED] + ([f"and {more:,} more, listed in metrics.jsonl"] if more > 0 else [])
    return bullets(listed)


def _client(run: Folder, client: str) -> str:
    """A client's number, with its name if that is another."""
    clients = run.partition.get("clients") or []
    name = str(clients[int(client)]["name"]) if int(client) < len(clients) else client
    return f"client {client}" + (f" ({name})" if name != client else "")


def egress_table(groups: Sequence[Group]) -> Html:
    """Table of what left each client, and what the client retained."""
    body = []
    for i, group in enumerate(groups):
        known = next((result for result in group.results if "egress" in result), None)
        lists = [None, None] if known is None else [known["egress"], known.get("keeps", [])]
        cells = (
            tag("td", "not recorded in this run" if items is None else bullets(items) if items else "nothing")
            for items in lists
        )
        body.append([method_label(i, group.label), *cells])
    return table(
        "Data that left each client, and data that each client retained",
        ["method", "left the client", "retained by the client between rounds"],
        body,
        "prose",
    )


def distinct_partitions(groups: Sequence[Group]) -> list[tuple[str, dict[str, Any]]]:
    """Distinct partitions of the runs, with the methods and seeds that share them."""
    users: dict[str, list[tuple[str, int]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for run in group.runs:
            if run.partition.get("clients"):
                key = repr(run.partition["clients"])
                found.setdefault(key, run.partition)
                users.setdefault(key, []).append((group.label, run.seed))
    return [(_users(users[key]), partition) for key, partition in found.items()]


def _users(runs: Sequence[tuple[str, int]]) -> str:
    labels = list(dict.fromkeys(label for label, _ in runs))
    seeds = ", ".join(map(str, sorted({seed for _, seed in runs})))
    others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return f"{labels[0]}{others}, seed {seeds}"


def sampled_clients(groups: Sequence[Group]) -> Html:
    """Tables of the clients' sample images, of the first partitions that have them."""
    found: dict[str, Html] = {}
    for group in groups:
        for run in group.runs:
            clients = run.partition.get("clients") or []
            if run.samples is None or run.samples["of"] != len(clients):
                continue
            shifts = [str(client["shift"]) for client in clients if "shift" in client]
            key = repr([(client.get("indices"), client.get("shift")) for client in clients])
            if key not in found:
                names = [str(client["name"]) for client in clients]
                label = f"{group.label}, seed {run.seed}"
                found[key] = samples_table(names, shifts, run.samples, label)
    if len(found) <= 1:
        return join(found.values())
    shown = list(found.values())[:MAX_SAMPLED]
    return folded("Sample images of the clients", *shown)


def partition_facts(partitions: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """Table of the partitions of the training images."""
    body = []
    for label, partition in partitions:
        sizes = [client["size"] for client in partition["clients"]]
        total, distance = sum(sizes), partition.get("label_distance")
        # Sites tell their classes, and not how many images of each they have.
        without = "unknown" if partition.get("classes") else "no labels"
        body.append(
            [
                label,
                f"{len(sizes):,}",
                partition_words(partition),
                f"{total:,} of {partition.get('num_samples', total):,}",
                f"{min(sizes):,} – {max(sizes):,}",
                without if distance is None else f"{distance:.3f}",
            ]
        )
    head = ["runs", "clients", "partition", "training images held", "smallest – largest", "label distance"]
    words = (
        "The label distance is the mean L1 distance between a client’s label distribution and the overall one: 0 "
        "if all are equal, at most 2."
    )
    absent = [
        tag("p", f"{label}: {sit_out_words(partition['sit_out'])}.")
        for label, partition in partitions
        if partition.get("sit_out")
    ]
    shown = table("Partition of the training images", head, body)
    return join([shown, *absent, tag("p", words, class_="muted")])


def partition_tables(partitions: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """Tables of the partitions that are small enough to be read."""
    found = [shown for label, partition in partitions if (shown := _partition_table(label, partition))]
    return folded("As a table", *found) if found else Html("")


def _partition_table(label: str, partition: Mapping[str, Any]) -> Html:
    clients, classes = partition["clients"], [str(name) for name in partition.get("classes") or ()]
    counted = all(client.get("label_counts") for client in clients)
    width = max(len(client["label_counts"]) for client in clients) if counted else 0
    heads = [*classes, *(str(i) for i in range(len(classes), width))][:width]
    if len(clients) * (width + 1) > MAX_CELLS:
        return Html("")
    body = [
        [str(client["name"]), f"{client['size']:,}", *(map(str, client["label_counts"]) if counted else ())]
        for client in clients
    ]
    caption = f"Images by client{' and class' if counted else ''}: {label}"
    return table(caption, ["client", "images", *heads], body)
