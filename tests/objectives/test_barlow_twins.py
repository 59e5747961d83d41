import pytest

from tests.functional import oracles
from tests.steps import Steps


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_local_loss_is_the_equation_on_both_views(unbiased):
    steps = Steps(
        "method.name=fed_barlow",
        f"options.barlow_twins.unbiased={str(unbiased).lower()}",
        "options.barlow_twins.lambd=0.05",
    )
    batch = steps.batch()
    loss = steps.client.step(batch)
    z1, z2 = (steps.encode(batch.images[view])[1].double() for view in ("view1", "view2"))
    assert loss.item() == pytest.approx(oracles.barlow_twins(z1, z2, 0.05, unbiased), rel=1e-3)
