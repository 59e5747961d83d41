"""What is read of networks, loaded into them, and what passes from one client to the next unseen."""

import pytest
import torch
from torch import nn

from atoll.core.tree import clone
from atoll.engines.network_state import NetworkState
from tests.rounds import Rounds
from tests.trees import same


class Counts(nn.Module):
    """Counts its calls in train mode, and computes with their number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, images):
        if self.training:
            self.calls += 1
        return self.layers(images) * (1 + self.calls)


class Caches(nn.Module):
    """Keeps more with each call, and what does not change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.register_buffer("places", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, torch.nan]), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("tied", self.layers[1].weight.detach(), persistent=False)

    def forward(self, images):
        self.mask.copy_(self.mask.clone())
        self.later = torch.ones(3)
        self.places = torch.arange(len(self.places) + 1.0)
        return self.layers(images)


def settings(network):
    """Settings of a run with a network of one's own."""
    own = (f"model.encoder={__name__}:{network}", "model.width=", "model.stem=")
    return (*own, "method.name=fed_simclr", "views.mean=[0]", "views.std=[1]")


def test_a_buffer_that_nothing_saves_and_that_changes_is_warned_of_once():
    rounds = Rounds(*settings("Counts"))
    rounds.train(0)
    with pytest.warns(UserWarning, match=r"buffer encoder\.model\.calls has persistent=False and changes"):
        rounds.train(1)
    rounds.train(2)
    rounds.train(3)


def test_caches_and_constants_are_not_warned_of():
    """Here they are filled by the first client, grow with the second, and hold no number at one place."""
    rounds = Rounds(*settings("Caches"))
    rounds.train(0)
    rounds.train(1)


def test_what_is_read_is_the_state_dict_and_what_is_loaded_is_copied():
    networks = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "head": Counts()})
    state, given = NetworkState(networks), clone(networks.state_dict())
    assert same(state.weights(), networks.state_dict())
    assert "head.calls" not in state.weights()
    given["encoder.0.weight"] += 1
    state.load(given, whole=True)
    assert same(networks.state_dict(), given)
    given["encoder.0.weight"] += 1
    assert not same(networks.state_dict(), given)
