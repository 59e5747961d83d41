import copy
from types import SimpleNamespace

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.tree import clone
from tests.functional import oracles
from tests.harness import tiny
from tests.rounds import Rounds
from tests.steps import Steps, check_gradient

TEMPERATURES = ("options.fedx.temperature=0.2", "options.fedx.target_temperature=0.3")


def outputs(networks, images):
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](images))
        q = networks["predictor"](z) if "predictor" in networks else z
    return z.double(), q.double()


def spread(rounds):
    """Give the server a model with embeddings of all directions; a new one's are all alike in evaluation mode."""
    networks, data = rounds.federation.networks, rounds.federation.client_data(0)
    images = data.pick(torch.arange(data.num_samples))
    with torch.no_grad():
        for head in ("projector", "predictor"):
            for _ in range(100):  # so that running statistics are those of the images
                z, q = outputs(networks, images)
            if head in networks:
                networks[head][-1].bias -= {"projector": z, "predictor": q}[head].mean(dim=0).float()
    rounds.server.state["models"]["global"] = clone(networks.state_dict())


def components(networks, batch, downloaded):
    """FedX's three losses by loops, from networks that are run again."""
    (z1, q1), (z2, q2) = (outputs(networks, batch.images[view]) for view in ("view1", "view2"))
    other, _ = outputs(networks, batch.images["other"])
    (global2, _), (global_other, _) = (outputs(downloaded, batch.images[name]) for name in ("view2", "other"))
    return {
        "local_relation": oracles.relational(z1, z2, other, 0.2, 0.3),
        "global_contrast": oracles.nt_xent(q1, global2, 0.2),
        "global_relation": oracles.relational(q1, q2, global_other, 0.2, 0.3),
    }


@pytest.mark.parametrize("on", [None, "local_relation", "global_contrast", "global_relation"])
def test_the_term_is_the_sum_of_the_losses_that_are_on(on):
    names = ("local_relation", "global_contrast", "global_relation")
    flags = [f"options.fedx.{name}={str(on in (None, name)).lower()}" for name in names]
    rounds = Rounds("method.name=fedx", *TEMPERATURES, *flags)
    spread(rounds)
    rounds.start(0)
    client, networks = rounds.client, rounds.federation.networks
    assert ("global" in client.copies) == ("predictor" in networks) == (on != "local_relation")
    downloaded = copy.deepcopy(networks).eval()
    batches = rounds.federation.client_data(0).batches(1, 2, rounds.method.images)
    # A first step moves the local networks away from the downloaded ones, which must stay as they came.
    client.step(next(batches)).backward()
    client.optimizer.step()
    client.optimizer.zero_grad()
    batch = next(batches)
    needed = {"view1", "view2"} | ({"other"} if on != "global_contrast" else set())
    assert batch.images.keys() == needed
    batch.images.setdefault("other", batch.images["view1"])

    def loss():
        losses = components(networks, batch, downloaded)
        return sum(losses.values()) if on is None else losses[on]

    client.step(batch)
    (made,) = client._losses["fedx"][-1:]
    assert made.item() == pytest.approx(loss(), rel=1e-3)


def test_the_gradient_flows_through_all_local_outputs():
    """Also through the targets of the relations, which are not detached in the released code."""
    rounds = Rounds("method.name=fedx", *TEMPERATURES)
    spread(rounds)
    rounds.start(0)
    networks = rounds.federation.networks
    downloaded = copy.deepcopy(networks).eval()
    batch = next(rounds.federation.client_data(0).batches(1, 1, rounds.method.images))

    def loss(moved):
        precise = SimpleNamespace(images={name: images.double() for name, images in batch.images.items()})
        (z1, _), (z2, _) = (outputs(moved, precise.images[view]) for view in ("view1", "view2"))
        return oracles.nt_xent(z1, z2, 0.1) + sum(components(moved, precise, downloaded.double()).values())

    check_gradient(networks, rounds.client.step(batch), loss)


def test_the_preset_adds_the_local_contrast_at_the_same_temperature():
    method = tiny("method.name=fedx").composed
    assert (method.objective.name, method.objective.temperature) == ("simclr", 0.1)
    assert [(term.name, term.weight, term.temperature) for term in method.terms] == [("fedx", 1.0, 0.1)]


def test_only_global_losses_need_a_predictor():
    alone = ("options.fedx.global_contrast=false", "options.fedx.global_relation=false")
    assert "predictor" not in Steps("method.name=fedx", *alone).networks
    assert "predictor" in Steps("method.name=fedx").networks


def test_nothing_left_is_refused():
    flags = [
        f"options.fedx.{name}=false" for name in ("local_relation", "global_contrast", "global_relation")
    ]
    with pytest.raises(UserError, match="all of fedx's losses are disabled"):
        tiny("method.name=fedx", *flags)
