"""The losses in an update: their names, their bounds, and the one that weighs a client."""

import math

import pytest

from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.update_geometry import UpdateGeometry
from atoll.engines.update_checks import WEIGHING
from atoll.methods.dcco import DCCO
from atoll.methods.fedmar import MAR
from atoll.methods.fedprox import FedProx
from atoll.methods.fedsc import FedSC
from atoll.methods.ldawa import LDAWA
from atoll.methods.least_loss import least_loss
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform
from atoll.objectives.barlow_twins import BarlowTwins
from atoll.objectives.metric_learning import Triplet
from atoll.objectives.simclr import SimCLR
from atoll.objectives.simsiam import SimSiam
from tests.rounds import Fixed, Rounds
from tests.trees import same
from tests.updates import A_LOSS, DIVERGED, LOSSES, MODEL, asked, healthy, known


@pytest.mark.parametrize("names", [{"loss": 1.0}, {**LOSSES, "x": 1.0}, {f"l{k}": 1.0 for k in range(100)}])
def test_losses_have_exactly_the_declared_names(names):
    verdict = known().examine({**healthy(), "losses": names}, {"global": MODEL}, asked())
    assert isinstance(verdict, str)
    assert verdict.startswith("its losses")
    assert len(verdict) < 200


def test_losses_are_bounded_by_those_before():
    """10 × the larger of 10 and the median; a loss may shrink and come back."""
    guard = known(objective=FedSC())

    def of(loss):
        update = {**healthy(), "losses": {"loss": loss, "fedsc": loss}}
        return guard.examine(update, {"global": MODEL}, {**asked(), "round": 2})

    assert of(-1e30) == f"its loss 'fedsc' is -1e+30, {A_LOSS}"
    assert isinstance(of(-40.0), UpdateGeometry)
    guard.close_round()
    assert isinstance(of(-399.0), UpdateGeometry)
    assert "not a float from -400 to 400 (train.norm_factor)" in of(-401.0)
    guard = known(objective=FedSC())
    assert isinstance(of(0.01), UpdateGeometry)
    guard.close_round()
    assert isinstance(of(99.0), UpdateGeometry)
    assert "not a float from -100 to 100 (train.norm_factor)" in of(101.0)


@pytest.mark.parametrize("aggregation", [LossWeighted(), LDAWA(weights="loss")])
def test_a_loss_that_weighs_gives_no_client_ten_times_the_largest_weight_so_far(aggregation):
    """exp(−L) of earlier clients is at most exp(−5): the next may be 5 − ln 10 = 2.697 at least."""
    guard = known(aggregation)

    def of(loss):
        update = {**healthy(), "losses": {"loss": 5.0, "simclr": 5.0}, "loss": loss}
        return guard.examine({k: v for k, v in update.items() if k != "samples"}, {"global": MODEL}, asked())

    assert of(-99.0) == "its 'loss' is -99, and it cannot be below 0"
    assert isinstance(of(7.0), UpdateGeometry)
    assert isinstance(of(5.0), UpdateGeometry)
    guard.close_round()
    for loss, weighs in ((7.0, 7.0), (2.7, 2.7), (0.0, 5 - math.log(10))):
        assert isinstance(of(loss), UpdateGeometry)
        assert guard.weighed({**healthy(), "loss": loss})["loss"] == weighs
    guard.close_round()  # the next bound follows from what weighed, not from what was claimed
    assert guard.weighed({**healthy(), "loss": 0.0})["loss"] == 5 - 2 * math.log(10)


@pytest.mark.parametrize("method", ["fed_loss", "l_dawa_loss"])
def test_the_fold_weighs_by_the_bounded_loss(method):
    ours, bounded = (Rounds(f"method.name={method}") for _ in range(2))
    ours.server.checks.history.earlier[WEIGHING] = [9.0]
    updates = {
        client: {**ours.train(client)[0], "loss": loss} for client, loss in enumerate((1.0, 6.0, 8.0, 9.0))
    }
    record = ours.server.run_round(Fixed(updates))
    assert record.clients == 4
    least = 9 - math.log(10)
    bounded.fold(
        1, {client: {**update, "loss": max(update["loss"], least)} for client, update in updates.items()}
    )
    assert same(ours.server.state, bounded.server.state)


def test_no_factor_admits_a_loss_that_is_not_finite():
    guard = known(LossWeighted(), norm_factor=math.inf, first_norm=math.inf)

    def of(loss):
        update = {**healthy(), "losses": {"loss": loss, "simclr": loss}, "loss": loss}
        return guard.examine({k: v for k, v in update.items() if k != "samples"}, {"global": MODEL}, asked())

    assert isinstance(of(5.0), UpdateGeometry)
    guard.close_round()
    assert isinstance(of(1e6), UpdateGeometry)
    assert of(math.inf) == f"its 'loss' is inf: {DIVERGED}"
    assert "not a float from -1e+30 to 1e+30" in of(1e31)


def test_a_component_that_overrides_its_loss_does_not_inherit_its_lower_bound():
    class Shifted(SimCLR):
        def loss(self, context, batch, passes):
            return super().loss(context, batch, passes) - 100

    assert least_loss(Method(objective=SimCLR(), terms=(FedProx(weight=0.1),)), "loss") == 0
    assert least_loss(Method(objective=SimSiam(), terms=(FedProx(),)), "loss") == -1
    assert least_loss(Method(objective=SimCLR(), terms=(FedProx(weight=-1.0),)), "loss") == -math.inf
    assert least_loss(Method(objective=Shifted()), "simclr") == -math.inf


@pytest.mark.parametrize(
    ("objective", "least"),
    [
        (AlignUniform(beta=0.5, t=3.0), -6.0),  # β log exp(−t · 2²)
        (AlignUniform(beta=-1.0), 0.0),
        (BarlowTwins(lambd=0.0), 0.0),
        (BarlowTwins(lambd=-0.1), -math.inf),
        (DCCO(lambd=0.0), 0.0),
        (DCCO(lambd=-0.1), -math.inf),
        (MAR(first_weight=0.5, last_weight=0.25), -1.0),
        (MAR(first_weight=0.25, last_weight=0.5), -1.0),
        (Triplet(beta=0.0, cross_entropy=True), 0.0),
        (Triplet(beta=-0.1), -math.inf),
    ],
)
def test_the_lower_bound_follows_from_the_options(objective, least):
    assert least_loss(Method(objective=objective), objective.name) == least


def test_losses_may_be_kept_at_the_site_but_not_the_one_that_weighs():
    assert isinstance(
        known().examine({**healthy(), "losses": {}}, {"global": MODEL}, asked()), UpdateGeometry
    )
    assert "its losses contain" in known().examine(healthy(), {"global": MODEL}, asked(epochs=0))
    kept = {name: value for name, value in healthy().items() if name != "samples"}
    verdict = known(LossWeighted()).examine({**kept, "losses": {}}, {"global": MODEL}, asked())
    assert verdict == f"its 'loss' is None, {A_LOSS}"
