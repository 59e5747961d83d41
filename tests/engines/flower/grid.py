"""A Flower grid without Flower's processes: nodes are functions, called when their answers are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from atoll.core.tree import Tree
from atoll.engines.flower.client_app import app

Answer = Message | list[Message] | None
Handler = Callable[[Message], Answer]


def be_a_task() -> None:
    """Flower makes messages inside its tasks only."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@dataclass
class FakeGrid:
    """Nodes by id; each answers a message, or does not."""

    nodes: dict[int, Handler]
    keys: dict[int, bytes] = field(default_factory=dict)
    activated: dict[int, str] = field(default_factory=dict)  # when a node connected
    sent: list[tuple[int, str, RecordDict]] = field(default_factory=list)
    late_first: bool = False  # answers come in the reverse of the order of sending

    def __post_init__(self) -> None:
        be_a_task()
        self._messages: dict[str, tuple[int, Message]] = {}
        self._replies: dict[str, list[Message]] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(
                node_id=node,
                public_key=self.keys.get(node, b""),
                last_activated_at=self.activated.get(node, "at first"),
            )
            for node in self.nodes
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append((message.metadata.dst_node_id, message.metadata.message_type, message.content))
            self._messages[name] = (message.metadata.dst_node_id, message)
            ids.append(name)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        replies = []
        for name in ids:
            if name in self._messages and not (self.late_first and name != next(reversed(self._messages))):
                node, message = self._messages.pop(name)
                answer = self.nodes[node](message) if node in self.nodes else None
                # As a SuperLink does, whatever comes is filed under the message that it answers.
                for reply in [answer] if isinstance(answer, Message) else answer or []:
                    self._replies.setdefault(reply.metadata.reply_to_message_id, []).append(reply)
            replies += self._replies.pop(name, [])
        return replies


def node(number: int, config: dict[str, Tree], spoil: Callable[[Message], Answer] | None = None) -> Handler:
    """A node that runs our ClientApp; ``spoil`` may change or withhold its answer."""
    context = Context(run_id=1, node_id=number, node_config=config, state=RecordDict(), run_config={})

    def handle(message: Message) -> Answer:
        reply = app(message, context)
        return spoil(reply) if spoil else reply

    return handle


def shares(count: int, **config: Tree) -> FakeGrid:
    """Nodes as in Flower's simulation."""
    return FakeGrid({100 + k: node(100 + k, {"partition-id": k, **config}) for k in range(count)})
