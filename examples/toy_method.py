"""Custom method: SimCLR with a term that pulls embeddings towards those of the global model.

    atoll run digits-ssd --set method.name=toy_method:METHOD engine.workers=2

Run it from the folder of this file.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.components.base import Batch, ClientContext, Forward, Passes, Term
from atoll.functional import simsiam
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class Anchor(Term):
    """−cos(z, z of the downloaded model), for the first view."""

    name: ClassVar[str] = "anchor"
    weight: float = 0.5

    def forwards(self) -> tuple[Forward, ...]:
        """Pass the first view through the trained and through the downloaded networks."""
        return Forward("view1"), Forward("view1", network="downloaded")

    def start(self, context: ClientContext) -> None:
        """Freeze a copy of the downloaded model."""
        context.frozen("downloaded", context.received)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean over the batch."""
        z, z_downloaded = (passes[forward].z for forward in self.forwards())
        return simsiam(z, z_downloaded)


METHOD = Method(objective=SimCLR(), terms=(Anchor(),), title="Anchored SimCLR")
