"""Which weights travel: tensors of whole numbers outside BatchNorm stay where they are."""

import pytest
import torch
from torch import nn

from atoll.core.tree import clone
from atoll.engines.weight_names import frozen_names
from tests.rounds import Fixed, Rounds
from tests.trees import same

pytestmark = pytest.mark.filterwarnings("ignore:model.* does not apply")


class Indexed(nn.Module):
    """Reads a table by an index, as Swin does, and counts its training steps."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 8, 3, 2), nn.BatchNorm2d(8)
        self.table = nn.Embedding(4, 8)
        self.register_buffer("index", torch.tensor([0, 3, 1, 2]))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.norm(self.conv(images)).mean((2, 3)) + self.table(self.index).mean(0)


class Tied(nn.Module):
    """Two layers hold one weight."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(channels, 8, 3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.conv(images).mean((2, 3))).relu())


TIED = [f"encoder.model.{name}.weight" for name in ("first", "second")]


class Slices(nn.Module):
    """Calls one network for each of ten slices."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return sum(self.net(images.roll(turns, 2)).mean((2, 3)) for turns in range(10))


class Repeated(nn.Module):
    """Holds one block under two names."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 3)
        self.first = self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.stem(images)).relu()).mean((2, 3))


def indexed(*settings, network="Indexed"):
    named = (f"model.encoder={__name__}:{network}", "views.mean=[0.5]", "views.std=[0.5]")
    return Rounds("method.name=fed_simclr", *named, *settings)


@pytest.fixture
def rounds():
    return indexed()


def whole_numbers(weights):
    return {name.rpartition(".")[2] for name, tensor in weights.items() if not tensor.is_floating_point()}


class Prefixed(nn.Module):
    """A frozen token of its own, before a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("place", torch.zeros(8))
        self.layer = nn.Linear(8, 8)


def test_a_module_that_does_not_train_keeps_its_buffers_but_not_its_childrens_weights():
    still, half, last = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 2)
    still.requires_grad_(False)
    half.weight.requires_grad_(False)
    networks = nn.ModuleDict({"encoder": nn.Sequential(still, half, Prefixed()), "head": last})
    assert frozen_names(networks) == {
        *(f"encoder.0.{name}" for name in still.state_dict()),
        "encoder.1.weight",
        "encoder.2.token",
        "encoder.2.place",
    }
    last.requires_grad_(False)
    assert frozen_names(last) == {"weight", "bias"}


def test_whole_numbers_leave_a_client_only_as_batchnorms_counters(rounds):
    update, _ = rounds.train(0)
    assert whole_numbers(update["weights"]) == {"num_batches_tracked"}
    sent = rounds.message(0, 1)["models"]["global"]
    assert whole_numbers(sent) == {"num_batches_tracked", "index", "steps"}


def test_an_index_that_a_client_sends_all_the_same_is_refused(rounds):
    updates = {client: rounds.train(client)[0] for client in range(4)}
    model = rounds.server.state["models"]["global"]
    (index,) = (name for name in model if name.endswith("index"))
    before = model[index].clone()
    updates[2]["weights"][index] = torch.full((4,), 10**9)
    record = rounds.server.run_round(Fixed(updates))
    assert record.refused == {"2": f"it contains {index!r}, which was not requested (1 such names)"}
    assert torch.equal(rounds.server.state["models"]["global"][index], before)
    rounds.train(0, 2)  # the model still reads its table


@pytest.mark.parametrize("settings", [(), ("method.share=['encoder.*']",), ("train.bn_buffers=local",)])
def test_a_counter_of_an_encoders_own_begins_each_round_with_its_initial_value(settings):
    rounds = indexed(*settings)
    kept = None
    for round in (1, 2):
        start = rounds.start(0, round, kept)
        (steps,) = (name for name in start if name.endswith("steps"))
        assert start[steps] == 0
        updates, states = {}, {}
        for client in range(4):
            updates[client], states[client] = rounds.train(client, round, kept)
        assert rounds.client.networks.state_dict()[steps] > 0
        kept = states[0]
        assert kept is None or steps not in kept.get("personal", {})
        assert not rounds.server.run_round(Fixed(updates)).refused


@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_tied_weight_is_shared_or_frozen_under_both_its_names(layer):
    """Shared under one of them, the client's own under the other replaced it."""
    both = set(TIED)
    name = f"encoder.model.{layer}.weight"
    shared, _ = indexed(f"method.share=['{name}']", network="Tied").train(0)
    assert shared["weights"].keys() == both
    frozen, _ = indexed(f"model.freeze=['{name}']", network="Tied").train(0)
    assert not frozen["weights"].keys() & both


@pytest.mark.parametrize(
    "settings",
    [
        ("method.server=fedavgm",),
        ("method.server=fedadam",),
        ("method.aggregation=eua", "options.eua.server_lr=0.01"),
        ("method.aggregation=l_dawa", "options.l_dawa.include_buffers=false"),
        ("method.terms=['scaffold']", "train.momentum=0"),
    ],
)
def test_a_tied_weight_moves_under_both_its_names(settings):
    """Its second name was taken for a buffer, which is averaged, and replaced the first at the clients."""
    rounds, kept = indexed(*settings, network="Tied"), {}
    for round in (1, 2):
        trained = {client: rounds.train(client, round, kept.get(client)) for client in range(4)}
        kept = {client: state for client, (_, state) in trained.items()}
        record = rounds.server.run_round(Fixed({client: update for client, (update, _) in trained.items()}))
        assert not record.refused
        first, second = (rounds.server.state["models"]["global"][name] for name in TIED)
        assert torch.equal(first, second)


def test_scaffold_corrects_a_tied_weight_once():
    rounds = indexed("method.terms=['scaffold']", "train.momentum=0", network="Tied")
    context = rounds.client_context()
    scope = context.of(rounds.method.terms[0])
    scope.correction = {name: torch.ones_like(c) for name, c in scope.correction.items()}
    (weight,) = {scope.y[name] for name in TIED}
    rounds.method.terms[0].loss(context, None, {}).backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("merge", ["fedema", "euc"])
def test_a_merge_keeps_a_tied_weight_under_both_its_names(merge):
    rounds = indexed(f"method.merge={merge}", network="Tied")
    update, kept = rounds.train(0)
    if merge == "euc":
        rounds.server.state["parts"]["euc"] = {"slow": list(TIED)}
    start = rounds.start(0, 2, kept)
    for name in TIED:
        model, own = rounds.server.state["models"]["global"][name], update["weights"][name]
        torch.testing.assert_close(start[name], torch.lerp(model, own, 0.7 if merge == "fedema" else 1.0))


def test_an_encoder_may_call_a_norm_many_times_in_a_pass():
    """Its counter was said to count batches that the requested steps cannot have made."""
    rounds = indexed(network="Slices")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    counted = updates[0]["weights"]["encoder.model.net.1.num_batches_tracked"]
    assert int(counted) == 2 * 10 * rounds.federation.client_data(0).num_batches()
    assert not rounds.server.run_round(Fixed(updates)).refused


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        (("train.bn_buffers=local",), "1.running_mean"),
        (("train.bn_buffers=leave",), "1.running_mean"),
        (("method.merge=fedbn",), "1.weight"),
        (("model.freeze=['encoder.model.first.*']",), "1.bias"),
    ],
)
def test_what_stays_at_a_client_stays_under_both_names_of_a_block(settings, stay):
    """Under its second name it left, and the mean of all clients' replaced the client's own."""
    rounds = indexed(*settings, network="Repeated")
    update, kept = rounds.train(0)
    own = rounds.client.networks.state_dict()[f"encoder.model.first.{stay}"].clone()
    assert not {f"encoder.model.{name}.{stay}" for name in ("first", "second")} & update["weights"].keys()
    rounds.fold(1, {client: rounds.train(client)[0] for client in range(4)})
    if "leave" not in settings[0]:
        assert torch.equal(rounds.start(0, 2, kept)[f"encoder.model.first.{stay}"], own)


FROZEN = "encoder.conv1.weight"


def models_in(state):
    """All models in a client state."""
    if not isinstance(state, dict):
        return []
    inner = [model for value in state.values() for model in models_in(value)]
    return [*inner, state] if any(name.startswith("encoder.") for name in state) else inner


@pytest.mark.parametrize(
    "settings",
    [
        ("fed_byol",),
        ("fed_dino", "options.dino.prototypes=8"),
        ("fedema",),
        ("featarc",),
        ("moon",),
        ("orchestra", "options.orchestra.target=kept"),
    ],
    ids=" ".join,
)
def test_a_client_retains_no_copy_of_what_the_recipe_freezes(settings):
    """With adapters, that is nearly all of an encoder, and each client has it already."""
    name, *more = settings
    rounds = Rounds(f"method.name={name}", f"model.freeze=['{FROZEN}']", *more)
    _, kept = rounds.train(0)
    assert models_in(kept)
    assert all(FROZEN not in model for model in models_in(kept))
    whole = clone(kept)
    for model in models_in(whole):
        model[FROZEN] = rounds.server.constants["base"][FROZEN]
    assert same(rounds.train(0, 2, kept)[0], rounds.train(0, 2, whole)[0])
