import pytest

from tests.functional import oracles
from tests.steps import Steps

VARIANTS = {
    "exact": lambda z1, z2: oracles.nt_xent(z1, z2, 0.2),
    "one_sided": lambda z1, z2: oracles.one_sided_nt_xent(z1, z2, 0.2),
    "zero_self": lambda z1, z2: oracles.nt_xent(z1, z2, 0.2, zero_self=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_variants(variant):
    steps = Steps(
        "method.name=fed_simclr", "options.simclr.temperature=0.2", f"options.simclr.variant={variant}"
    )
    batch = steps.batch()
    z1, z2 = (steps.encode(batch.images[view])[1].double() for view in ("view1", "view2"))
    assert steps.client.step(batch).item() == pytest.approx(VARIANTS[variant](z1, z2), rel=1e-5)
