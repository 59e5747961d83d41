"""What one client's training leaves in the networks does not reach the next client."""

import pytest
import torch
from torch import nn

from atoll.core.tree import clone, same
from atoll.engines.network_state import NetworkState
from atoll.models.unsaved_buffers import unsaved_buffers
from tests.rounds import Rounds


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
    """Keeps what belongs to the largest number of images so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(2.0), persistent=False)
        self.count = 2

    def forward(self, x):
        if len(x) > self.count:
            self.count = len(x)
            self.places = torch.arange(float(self.count))
        return x + self.places[: len(x)]


@pytest.mark.parametrize("method", ["fed_simclr", "fed_byol"])
def test_unsaved_buffers_begin_with_each_client_anew(method):
    """Those of the target network, too, which is a copy."""
    own = (
        f"model.encoder={__name__}:Counts",
        "model.width=",
        "model.stem=",
        "views.mean=[0]",
        "views.std=[1]",
    )
    settings = (f"method.name={method}", *own)
    rounds = Rounds(*settings)
    rounds.train(0)
    (calls,) = unsaved_buffers(rounds.client.networks).values()
    assert calls > 1
    second, _ = rounds.train(1)
    alone, _ = Rounds(*settings).train(1)
    assert same(second["weights"], alone["weights"])
    encoder = rounds.federation.load(rounds.server.state["models"]["global"])
    assert encoder.model.calls == 0


def test_a_cache_that_has_grown_is_left_alone():
    networks = nn.ModuleDict({"encoder": Caches()})
    state = NetworkState(networks)
    networks["encoder"](torch.zeros(5))
    state.reset()
    assert networks["encoder"](torch.zeros(5)).tolist() == [0, 1, 2, 3, 4]


def test_what_is_read_is_the_state_dict_and_what_is_loaded_is_copied():
    networks = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "head": Caches()})
    state, given = NetworkState(networks), clone(networks.state_dict())
    assert same(state.weights(), networks.state_dict())
    assert "head.places" not in state.weights()
    given["encoder.0.weight"] += 1
    state.load(given, whole=True)
    assert same(networks.state_dict(), given)
    given["encoder.0.weight"] += 1
    assert not same(networks.state_dict(), given)
