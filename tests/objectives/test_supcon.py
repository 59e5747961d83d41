import pytest
import torch
import torch.nn.functional as F

from tests.functional import oracles
from tests.steps import Steps


@pytest.mark.parametrize("cross_entropy", [False, True])
def test_the_local_loss_is_the_equation_on_both_views(cross_entropy):
    steps = Steps(
        "method.name=supcon",
        "options.supcon.temperature=0.2",
        "options.supcon.base_temperature=0.1",
        f"options.supcon.cross_entropy={str(cross_entropy).lower()}",
    )
    batch = steps.batch()
    loss = steps.client.step(batch)
    (h1, z1), (_, z2) = (steps.encode(batch.images[view]) for view in ("view1", "view2"))
    labels = torch.cat([batch.labels, batch.labels])
    expected = oracles.supcon(torch.cat([z1, z2]).double(), labels, 0.2, 0.1)
    if cross_entropy:
        with torch.no_grad():
            expected += F.cross_entropy(steps.networks["classifier"](h1), batch.labels).item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert ("classifier" in steps.networks) == cross_entropy  # it travels, and counts in distances
