import pytest

from atoll.core.errors import UserError
from tests.functional import oracles
from tests.harness import tiny
from tests.steps import Steps


@pytest.mark.parametrize("on", ["h", "z"])
def test_the_term_is_the_mean_of_both_views(on):
    steps = Steps("method.name=feddecorr", f"options.feddecorr.on={on}", "model.projector_dim=6")
    batch = steps.batch()
    total = steps.client.step(batch).item()
    losses = {name: values[-1].item() for name, values in steps.client._losses.items()}
    outputs = [steps.encode(batch.images[view])[on == "z"].double() for view in ("view1", "view2")]
    expected = sum(oracles.decorrelation(output) for output in outputs) / 2
    assert losses["feddecorr"] == pytest.approx(expected, rel=1e-3)
    assert total == pytest.approx(losses["align_uniform"] + 0.1 * expected, rel=1e-3)


def test_beside_a_supervised_objective_it_can_share_its_pass():
    steps = Steps("method.name=fed_sl", "method.terms=['feddecorr']", "options.feddecorr.images_of=['image']")
    assert "projector" not in steps.networks
    batch = steps.batch()
    assert batch.images.keys() == {"image"}
    steps.client.step(batch)
    h, _ = steps.encode(batch.images["image"])
    expected = oracles.decorrelation(h.double())
    assert steps.client._losses["feddecorr"][0].item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ("['view3']", "names 'view3'; did you mean 'view2'"),
        ("[]", "is \\[\\]; it must be a list of at least 1"),
    ],
)
def test_unknown_images_are_refused(images, sentence):
    with pytest.raises(UserError, match=rf"options\.feddecorr\.images_of {sentence}"):
        tiny("method.name=feddecorr", f"options.feddecorr.images_of={images}")
