import copy

import pytest
import torch

from atoll.core.errors import UserError
from tests.functional import oracles
from tests.harness import tiny
from tests.steps import Steps

TEMPERATURES = ("options.fedx.temperature=0.2", "options.fedx.target_temperature=0.3")


def outputs(networks, images):
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](images))
        q = networks["predictor"](z)
    return z.double(), q.double()


def components(steps, batch, downloaded):
    """FedX's three losses by loops, from networks that are run again."""
    (z1, q1), (z2, q2) = (outputs(steps.networks, batch.images[view]) for view in ("view1", "view2"))
    other, _ = outputs(steps.networks, batch.images["other"])
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
    steps = Steps("method.name=fedx", *TEMPERATURES, *flags)
    steps.networks["predictor"] = (
        steps.networks["predictor"] if "predictor" in steps.networks else torch.nn.Identity()
    )
    downloaded = copy.deepcopy(steps.networks).eval()
    # A first step moves the local networks away from the downloaded ones, which must stay as they came.
    steps.update(steps.client.step(steps.batch()))
    batch = steps.batch()
    needed = {"view1", "view2"} | ({"other"} if on != "global_contrast" else set())
    assert batch.images.keys() == needed
    batch.images.setdefault("other", batch.images["view1"])
    steps.client.step(batch)
    expected = components(steps, batch, downloaded)
    expected = sum(expected.values()) if on is None else expected[on]
    assert steps.client._losses["fedx"][-1].item() == pytest.approx(expected, rel=1e-3)


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
