"""One client's first steps, driven through the real `Client`, for tests of objectives and terms."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch

from atoll.data.client import FederatedClient
from atoll.data.sources import load_data
from atoll.engines.federation import Federation
from atoll.methods.client import Client
from atoll.parts import Batch
from harness import tiny


@cache
def _splits(data, seed):
    return load_data(data, seed)


def federation(*settings: str) -> Federation:
    """A tiny federation on digits; the images are loaded once for all tests."""
    plan = tiny(*settings).plan()
    return Federation(plan, _splits(plan.data, plan.seed))


class Steps:
    """A client after its `start`, with its data.

    Args:
        settings: of the recipe.
        classes: give the client the samples of these classes instead of its own.
        own: what it kept.
        round: to begin.
    """

    def __init__(self, *settings: str, classes: Collection[int] | None = None, own=None, round: int = 1):
        self.federation = federation(*settings)
        if classes is not None:
            labels = self.federation.splits.train.labels
            self.federation.partition.clients[0] = torch.isin(labels, torch.tensor(list(classes))).nonzero()[
                :, 0
            ]
        plan, setting = self.federation.plan, self.federation.setting
        state = plan.method.init(setting, self.federation.initial_weights())
        self.client: Client = self.federation.client_side(plan.method.constants(setting, {}))
        self.data: FederatedClient = self.federation.client_data(0)
        message = plan.method.send(state, setting, 0, range(setting.num_clients), round)
        self.client.start(message, own, self.data)
        self._batches = self.data.batches(round, 10, plan.method.images)

    @property
    def networks(self) -> torch.nn.ModuleDict:
        return self.client.networks

    def batch(self) -> Batch:
        """The next batch."""
        return next(self._batches)

    def encode(self, images: torch.Tensor, networks=None) -> tuple[torch.Tensor, torch.Tensor]:
        """h and z of some images, by networks in the mode that they are in."""
        networks = networks or self.networks
        with torch.no_grad():
            h = networks["encoder"](images)
            return h, networks["projector"](h) if "projector" in networks else h

    def update(self, loss: torch.Tensor) -> None:
        """An optimiser step."""
        self.client.optimizer.zero_grad()
        loss.backward()
        self.client.optimizer.step()
        self.client.after_step()
