"""With which weights a client begins a round, and which it sends and keeps."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from atoll.components.base import Merge, Term
from atoll.core.tree import clone, map_tensors
from tests.rounds import Rounds
from tests.trees import same

WIDE = ("model.encoder=resnet-narrow", "model.width=16", "model.stem=cifar", "train.momentum=0.9")


class Counting(nn.Module):
    """An encoder that replaces its buffer by another tensor, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(images)
        return self.layer(images.flatten(1))


@pytest.mark.filterwarnings("ignore:model.* does not apply")
def test_a_buffer_that_is_another_tensor_by_now_is_sent_and_loaded():
    encoder = (
        "model.encoder=tests.engines.test_client_weights:Counting",
        "views.mean=[0.5]",
        "views.std=[0.5]",
    )
    rounds = Rounds("method.name=fed_simclr", *encoder)
    start = rounds.start(0)
    sent = [rounds.train(client)[0]["weights"] for client in (0, 1, 0)]
    (name,) = (name for name in start if name.endswith("seen"))
    images = [2 * rounds.federation.client_data(client).num_samples for client in (0, 1, 0)]  # two views
    assert [float(weights[name] - start[name]) for weights in sent] == images


@dataclass(frozen=True)
class FreezeFirst(Term):
    """Freezes the encoder of the first client."""

    name: ClassVar[str] = "freeze_first"
    source: ClassVar[str] = "a test"

    def start(self, context):
        if context.client == 0:
            context.networks["encoder"].requires_grad_(False)

    def loss(self, context, batch, passes):
        return torch.zeros(())


def test_what_a_component_freezes_for_one_client_is_trained_for_the_next():
    """Else the weights would depend on which clients a worker has trained before."""
    rounds = Rounds("method.name=fed_simclr", f"method.terms=['{__name__}:FreezeFirst']")
    start = rounds.start(0)
    weights = [name for name in start if name.startswith("encoder.") and name.endswith("conv1.weight")]
    assert weights
    for client in (0, 1, 0):
        sent = rounds.train(client)[0]["weights"]
        assert all(torch.equal(sent[name], start[name]) == (client == 0) for name in weights)


def test_kept_optimizer_states_have_the_layout_of_their_weights():
    """Client states are stored contiguously; a GPU's fused kernels refuse other strides than the weight's."""
    rounds = Rounds("method.name=fed_simclr", "train.keep_optimizer=true", "engine.channels_last=true", *WIDE)
    _, kept = rounds.train(0)
    rounds.start(0, 2, map_tensors(torch.Tensor.contiguous, kept))  # as a client state on disk is
    state = rounds.client.optimizer.state
    assert any(not weight.is_contiguous() for weight in state)
    assert all(own["momentum_buffer"].stride() == weight.stride() for weight, own in state.items())


@dataclass(frozen=True)
class ChangesSlices(Term):
    """Changes its slices of the server's state and of the message in place."""

    name: ClassVar[str] = "changes_slices"
    source: ClassVar[str] = "a test"

    def init(self, setting):
        return {"sum": torch.zeros(2), "clients": []}

    def send(self, state, client, cohort, round):
        state["sum"] += 1
        state["clients"] = [*state["clients"], client]
        return state

    def start(self, context):
        self.seen.append(float(context.of(self).message["sum"].add_(1)[0]))

    def loss(self, context, batch, passes):
        return torch.zeros(())

    seen: ClassVar[list[float]] = []


@dataclass(frozen=True)
class ChangesModel(Merge):
    """Changes the downloaded weights in place."""

    name: ClassVar[str] = "changes_model"
    source: ClassVar[str] = "a test"

    def join(self, context, downloaded):
        for weight in downloaded.values():
            weight.zero_()
        return downloaded


def test_what_a_component_changes_in_place_is_its_own():
    """Clients in one process, and the server, share the tensors of a message."""
    added = (f"method.terms=['{__name__}:ChangesSlices']", f"method.merge={__name__}:ChangesModel")
    rounds = Rounds("method.name=fed_simclr", *added)
    before, ChangesSlices.seen[:] = clone(rounds.server.state), []
    for _ in range(2):
        job, *others = rounds.server.jobs(1)
        for other in (job, *others):
            slice = other.message["parts"]["changes_slices"]
            assert slice["sum"].tolist() == [1, 1]
            assert slice["clients"] == [other.client]
        assert others
        sent = clone(job.message)
        for _ in range(2):
            rounds.train(0, message=job.message)
        assert same(job.message, sent)
    assert same(rounds.server.state, before)
    assert ChangesSlices.seen == 4 * [2.0]


def test_a_client_receives_of_others_what_clients_send():
    """The server's other weights are those that a run begins with."""
    rounds = Rounds("method.name=fed_simclr", "train.bn_buffers=local")
    update, retained = rounds.train(0)
    rounds.start(0, 2, retained)
    received = rounds.client.context.received
    assert received.keys() == update["weights"].keys()
    assert "encoder.bn1.running_mean" not in received
    assert all(torch.equal(w, rounds.server.state["models"]["global"][n]) for n, w in received.items())


@pytest.mark.parametrize(
    ("setting", "kind", "where"),
    [
        ("method.share=['encoder.*']", "personal", "projector."),
        ("train.bn_buffers=local", "buffers", "encoder.bn1.running"),
    ],
)
def test_a_client_goes_on_with_its_own_weights_and_a_new_one_with_those_of_the_start(setting, kind, where):
    rounds = Rounds("method.name=fed_simclr", setting)
    begin = rounds.start(0)
    _, kept = rounds.train(0)
    rounds.train(1)
    own = kept[kind]
    assert (
        {name for name in own if name.startswith(where)} == {n for n in begin if n.startswith(where)} != set()
    )
    assert not same(own, {name: begin[name] for name in own})
    for retained, expected in ((kept, own), (None, begin)):
        found = rounds.start(0, 2, retained)
        assert same({name: found[name] for name in own}, {name: expected[name] for name in own})
