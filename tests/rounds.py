"""Single rounds of single clients, for tests of what a method sends, trains, returns and keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atoll.aggregation.update_geometry import Reference
from atoll.components.base import ClientContext, ClientState, Message, Trained, Update
from atoll.core.tree import Weights, clone
from atoll.engines.client import train_client
from atoll.engines.jobs import Job, Result
from atoll.engines.server import Server
from tests.steps import federation


class Rounds:
    """A federation whose clients are trained by hand; trees come back as copies.

    Args:
        settings: of the recipe.
        prerequisites: what came of earlier runs.
    """

    def __init__(self, *settings: str, prerequisites: Mapping[str, Trained] | None = None) -> None:
        self.federation = federation(*settings)
        start = self.federation.initial_weights()
        self.server = Server(self.federation.recipe, self.federation.setting, start, prerequisites)
        self.client = self.federation.client_side(self.server.constants)
        self.method = self.federation.recipe.composed

    def message(self, client: int, round: int, kept: int | None = None) -> Message:
        """What a client is sent in a round; it kept its state of the round before unless told otherwise."""
        setting = self.federation.setting
        kept = round - 1 if kept is None else kept
        return self.method.send(self.server.state, setting, client, range(setting.num_clients), round, kept)

    def train(
        self,
        client: int,
        round: int = 1,
        retained: ClientState | None = None,
        message: Message | None = None,
    ) -> tuple[Update, ClientState]:
        """A client's update and what it keeps."""
        message = message or self.message(client, round)
        update, kept = train_client(self.client, message, retained, self.federation.client_data(client))
        return clone(update), clone(kept)

    def start(
        self,
        client: int,
        round: int = 1,
        retained: ClientState | None = None,
        message: Message | None = None,
    ) -> Weights:
        """The weights that a client's training would start from."""
        self.client.start(
            message or self.message(client, round), retained, self.federation.client_data(client)
        )
        return clone(self.client.networks.state_dict())

    def client_context(self) -> ClientContext:
        """A client's context after its first start."""
        self.start(0)
        return self.client.context

    def refused(self, update: Update) -> str | None:
        """What the method's components find wrong with an update."""
        return self.method.refuse_update(update, self.federation.setting)

    def fold(self, round: int, updates: dict[int, Update]) -> None:
        """The server's next state."""
        fold = self.method.open(self.server.state, self.federation.setting, round)
        for client, update in updates.items():
            sent = self.method.aggregation.sent(self.server.state["models"], client)
            reference = Reference(self.method.aggregation.reference(sent, update))
            fold.add(client, update, reference.measure(update["weights"]))
        self.server.state = fold.close()


class Fixed:
    """An executor whose clients return what a test lays down."""

    def __init__(self, updates: Mapping[int, Update | str]) -> None:
        self.updates = updates

    def run(self, jobs: list[Job], progress: object = None) -> Iterator[Result]:
        """Yield the answers; a text is the reason why a client is lost."""
        for job in jobs:
            made = self.updates[job.client]
            yield Result(job.client, lost=made) if isinstance(made, str) else Result(job.client, made)
