import pytest

from tests.functional import oracles
from tests.steps import Steps


@pytest.mark.parametrize("official", [False, True])
def test_the_local_loss_is_the_equation_on_both_views(official):
    steps = Steps(
        "method.name=fed_vicreg",
        f"options.vicreg.official={str(official).lower()}",
        "options.vicreg.invariance=2.0",
        "options.vicreg.variance=3.0",
        "options.vicreg.covariance=0.5",
    )
    batch = steps.batch()
    loss = steps.client.step(batch)
    z1, z2 = (steps.encode(batch.images[view])[1].double() for view in ("view1", "view2"))
    assert loss.item() == pytest.approx(oracles.vicreg(z1, z2, 2.0, 3.0, 0.5, official), rel=1e-3)
