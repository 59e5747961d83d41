"""One client's first steps, driven through the real `Client`, for tests of objectives and terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import cache

import pytest
import torch

from atoll.components.base import Batch
from atoll.data.client_data import FederatedClient
from atoll.data.sources import load_data
from atoll.engines.client import Client
from atoll.engines.federation import Federation
from tests.harness import tiny


@cache
def _splits(data, seed):
    return load_data(data, seed)


def federation(*settings: str) -> Federation:
    """A tiny federation on digits; the images are loaded once for all tests."""
    recipe = tiny(*settings)
    return Federation(recipe, _splits(recipe.data, recipe.seed))


class Steps:
    """A client after its `start`, with its data.

    Args:
        settings: of the recipe.
        classes: give the client the samples of these classes instead of its own.
        own: what it kept.
        round: to begin.
    """

    def __init__(self, *settings: str, classes: Collection[int] | None = None, retained=None, round: int = 1):
        self.federation = federation(*settings)
        if classes is not None:
            labels = self.federation.splits.train.labels
            self.federation.partition.clients[0] = torch.isin(labels, torch.tensor(list(classes))).nonzero()[
                :, 0
            ]
        recipe, setting = self.federation.recipe, self.federation.setting
        state = recipe.composed.init(setting, self.federation.initial_weights())
        self.client: Client = self.federation.client_side(recipe.composed.constants(setting, {}))
        self.data: FederatedClient = self.federation.client_data(0)
        message = recipe.composed.send(state, setting, 0, range(setting.num_clients), round)
        self.client.start(message, retained, self.data)
        self._batches = self.data.batches(round, 10, recipe.composed.images)

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


def check_gradient(
    networks: torch.nn.ModuleDict, loss: torch.Tensor, oracle: Callable[[torch.nn.ModuleDict], float]
) -> None:
    """Compare a step's gradient with the slope of an oracle along random directions, by differences in float64.

    Args:
        networks: the networks of the step.
        loss: its loss.
        oracle: the same loss, of networks in float64.
    """
    draws, width = torch.Generator().manual_seed(0), 1e-7
    weights = [weight for weight in networks.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    for _ in range(2):
        directions = [torch.randn(weight.shape, generator=draws, dtype=torch.float64) for weight in weights]
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(networks).double()
            with torch.no_grad():
                trained = [weight for weight in moved.parameters() if weight.requires_grad]
                for weight, direction in zip(trained, directions, strict=True):
                    weight += sign * width * direction
            ends.append(oracle(moved))
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * width), rel=1e-4)
