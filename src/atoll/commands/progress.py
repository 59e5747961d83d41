"""Progress of a run, or of the parts of another work: a bar in a terminal or a notebook, and lines elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from atoll.core.text import clean
from atoll.engines.callbacks import Callback

if TYPE_CHECKING:  # so that a callback costs no further imports
    from atoll.engines.federation import Federation
    from atoll.engines.record import Record
    from atoll.engines.server import Server


class Bar(Callback):
    """Progress bar over a run's images; plain lines if the output is neither a terminal nor a notebook.

    In a notebook, the bar needs the library ipywidgets.
    """

    guarded: ClassVar[bool] = False

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self._title = title
        self._progress: Progress | None = None

    def begin(self, federation: Federation, server: Server) -> None:
        """Start the bar, before the first round of this process."""
        setting, train = federation.setting, federation.recipe.train
        clients = setting.cohort_size / setting.num_clients
        self._per_round = int(sum(setting.sizes) * clients * train.epochs) or 1
        self._rounds = train.rounds
        if federation.warm_start and not server.round:
            self.console.print(clean(f"weights: {federation.warm_start}"), markup=False, highlight=False)
        shown = self.console.is_terminal or (self.console.is_jupyter and find_spec("ipywidgets"))
        if not shown or server.round >= train.rounds:
            return
        self._progress = _make_progress(self.console)
        self._task: TaskID = self._progress.add_task(
            self._title,
            total=train.rounds * self._per_round,
            completed=server.round * self._per_round,
            facts=f"round {server.round + 1}/{train.rounds}",
        )
        self._progress.start()

    def step(self, images: int) -> None:
        """Advance the bar after a batch of images."""
        if self._progress:
            self._progress.advance(self._task, images)

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """Show a complete round."""
        facts = f"round {record.round}/{self._rounds}"
        from atoll.evaluation.metrics import LOSS
        from atoll.report.numbers import number

        for loss in LOSS.values([record.losses]):
            facts += f"  loss {number(loss, LOSS.digits)}"
        if record.privacy:
            facts += "  ε {epsilon:.3g}".format(**record.privacy)
        if record.seconds > 0:
            facts += f"  {self._per_round / record.seconds:,.0f} images/s"
        for client, reason in record.refused.items():
            refusal = f"round {record.round}: client {client} refused: {clean(reason)}"
            self.console.print(refusal, style="yellow")
        if self._progress:
            self._progress.update(self._task, completed=record.round * self._per_round, facts=facts)
            if record.round == self._rounds:
                self._progress.stop()
        stays = "evaluation" in line or record.round == self._rounds
        if stays or (record.privacy and not self._progress):
            self.console.print(f"{self._title}: {facts}{_knn(line)}", highlight=False)

    def stop(self) -> None:
        """Remove the bar."""
        if self._progress:
            self._progress.stop()


class PartBar:
    """Progress bar over the parts of a work; one line for each part if the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    def begin(self, title: str, done: int, total: int, unit: str) -> None:
        """Start a part of ``total`` steps or images (``unit``), of which ``done`` are done."""
        self.stop()
        if not self.console.is_terminal:
            self.console.print(f"{title}: {total - done} of {total} {unit} to do", highlight=False)
            return
        self._progress = _make_progress(self.console)
        self._task: TaskID = self._progress.add_task(title, total=total, completed=done, facts=unit)
        self._progress.start()

    def advance(self, amount: int, facts: str = "") -> None:
        """Show that more of the part is done."""
        if self._progress:
            self._progress.update(self._task, advance=amount)
            if facts:
                self._progress.update(self._task, facts=facts)

    def stop(self) -> None:
        """Remove the bar."""
        if self._progress:
            self._progress.stop()
            self._progress = None


def _make_progress(console: Console) -> Progress:
    """Create a progress bar with facts beside it, and the time that is left."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _knn(line: dict[str, Any]) -> str:
    from atoll.evaluation.metrics import KNN
    from atoll.report.numbers import number

    values = KNN.values([line.get("evaluation", {})])
    return f"  {KNN.heading} {number(values[0], KNN.digits)} {KNN.unit}" if values else ""
