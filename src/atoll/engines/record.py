"""Record of a round: what a run's metrics say of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """Record of a round, as stored in `metrics.jsonl`.

    Attributes:
        round: The round, from 1.
        clients: Number of clients whose updates were used.
        bytes_down: Bytes of all messages that were sent to clients.
        bytes_up: Bytes of all updates that arrived, refused ones included.
        seconds: Duration of the round, without its evaluation.
        angular_divergence: μ_δ, the mean cosine between the updates and the model that was sent (L-DAWA, Fig. 4: 1
            is no divergence); None if it is unknown or must not be revealed.
        losses: Means over clients of each component's loss, and of their sum (``"loss"``).
        idle: Whether no client trained, or no update was used.
        refused: Reason for each refused update, by client id.
        lost: Reason for each missing update, by client id.
        privacy: Privacy budget that was spent until this round (`Aggregation.spent`).
        measures: Measures of the models, by name (`Observer.close`).
        layers: Mean cosine of each layer, by name (`Observer.close`).
    """

    round: int
    clients: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    angular_divergence: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    idle: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Convert the record to one line of metrics."""
        names = ("idle", "refused", "lost", "privacy", "measures", "layers")
        rare = {name: getattr(self, name) for name in names}
        return {
            "round": self.round,
            "loss": self.losses.get("loss"),
            "losses": self.losses,
            "clients": self.clients,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "seconds": round(self.seconds, 3),
            "angular_divergence": self.angular_divergence,
            **{name: value for name, value in rare.items() if value},
        }
