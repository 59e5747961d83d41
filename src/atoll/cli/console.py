"""What the command shows while it works: a bar with rate and time left, a line for each evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from atoll.commands.egress import Egress, Item
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits
from atoll.engines.federation import Federation
from atoll.engines.server import Record, Server
from atoll.methods.method import Method


class Bar:
    """A progress bar over a run's images; plain lines where there is no terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self._title = title
        self._progress: Progress | None = None

    def begin(self, federation: Federation, server: Server) -> None:
        """Before the first round that runs now."""
        setting, train = federation.setting, federation.recipe.train
        clients = len(server.cohort(1)) / setting.num_clients
        self._per_round = int(sum(setting.sizes) * clients * train.epochs) or 1
        self._rounds = train.rounds
        if not self.console.is_terminal or server.round >= train.rounds:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(
            self._title,
            total=train.rounds * self._per_round,
            completed=server.round * self._per_round,
            facts=f"round {server.round + 1}/{train.rounds}",
        )
        self._progress.start()

    def step(self, images: int) -> None:
        """Some client trained on so many images."""
        if self._progress:
            self._progress.advance(self._task, images)

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """A round is complete."""
        facts = f"round {record.round}/{self._rounds}"
        loss = record.losses.get("loss")
        if loss is not None:
            facts += f"  loss {loss:.3f}"
        if record.privacy:
            facts += "  ε {epsilon:.3g}".format(**record.privacy)
        if record.seconds > 0:
            facts += f"  {self._per_round / record.seconds:,.0f} images/s"
        for client, reason in record.refused.items():
            self.console.print(f"round {record.round}: client {client} refused: {reason}", style="yellow")
        if self._progress:
            self._progress.update(self._task, completed=record.round * self._per_round, facts=facts)
            if record.round == self._rounds:
                self._progress.stop()
        elif "evaluation" in line or record.privacy or record.round == self._rounds:
            self.console.print(f"{self._title}: {facts}{_knn(line)}", highlight=False)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._progress:
            self._progress.stop()


def _knn(line: dict[str, Any]) -> str:
    accuracy = line.get("evaluation", {}).get("knn/accuracy")
    return "" if accuracy is None else f"  kNN {100 * accuracy:.1f} %"


def partition_table(splits: Splits, partition: Partition) -> Table:
    """A split's sizes and every client's share of each class."""
    classes = splits.train.classes
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("client", "images", *classes):
        table.add_column(heading, justify="right", overflow="fold")
    for k, name in enumerate(partition.names):
        counts = (
            [] if partition.counts is None else [str(n) if n else "·" for n in partition.counts[k].tolist()]
        )
        table.add_row(name, str(len(partition.clients[k])), *counts)
    sizes = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    said = [f"{name} {tuple(images.images.shape)}" for name, images in sizes.items() if images is not None]
    if partition.label_distance is not None:
        said.append(f"label distance {partition.label_distance:.3f}")
    table.caption = ", ".join(said)
    table.caption_justify = "left"
    return table


def make_console(width: int = 120) -> Console:
    """Where progress and tables go; ``width`` is for where there is no terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else width)


def egress_tables(egress: Egress, method: Method) -> Iterator[Table | str]:
    """What leaves a client, what it gets and what it keeps: headings with sums, a line for each tensor."""
    every = "every round"
    titles = {
        "up": f"Leaves the client, {every}",
        "down": f"Comes to the client, {every}",
        "once": "Comes to the client, once",
        "kept": "Stays with the client, and is kept from round to round",
    }
    for place, title in titles.items():
        items: list[Item] = getattr(egress, place)
        total = sum(item.bytes for item in items)
        yield f"[i]{title}: {total:,} bytes[/i]"
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("what", overflow="fold")
        table.add_column("shape", no_wrap=True)
        table.add_column("bytes", no_wrap=True, justify="right")
        table.add_column("why", max_width=36)  # so that names stay whole where there is room for them
        for item, before in zip(items, [None, *items], strict=False):
            shape = item.dtype if item.shape is None else f"{item.dtype} {list(item.shape)}"
            only = "" if len(item.rounds) > 1 or place == "once" else " (not in every round)"
            why = "″" if before is not None and before.why == item.why and not only else item.why + only
            table.add_row(item.name, shape, f"{item.bytes:,}", why)
        if not items:
            table.add_row("nothing", "", "", "")
        yield table
        yield ""
    yield "[i]In words[/i]"
    lines = Table(show_edge=False, pad_edge=False, show_header=False)
    for sentence in method.egress:
        lines.add_row(f"leaves: {sentence}")
    lines.add_row(
        "leaves once: a real site's name, its numbers of training and held-out images, its class names"
    )
    lines.add_row(
        "leaves at evaluations: a real site's accuracies and geometry on its held-out images, as numbers"
    )
    lines.add_row(
        "leaves on failure: the sentence that the site's log shows, which may name a file or folder"
    )
    for sentence in method.keeps or ("nothing",):
        lines.add_row(f"keeps: {sentence}")
    yield lines
    yield ""
