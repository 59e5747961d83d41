import pytest
import torch

from atoll import functional as F
from atoll.components.base import run_forwards
from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.core.tree import clone
from atoll.engines.client import train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from tests.functional import oracles
from tests.harness import tiny
from tests.trees import same


def first_step(*settings, client=2):
    """The loss of a client's first batch, and what it was made from."""
    federation = Federation(tiny("method.name=ssd", *settings))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    side = federation.client_side(server.constants)
    job = next(job for job in server.jobs(1) if job.client == client)
    data = federation.client_data(client)
    side.start(job.message, None, data)
    batch = next(iter(data.batches(1, 1, ["view1", "view2"])))
    loss = side.step(batch)
    networks = federation.networks
    h = [networks["encoder"](batch.images[name]) for name in ("view1", "view2")]
    z = [networks["projector"](one) for one in h]
    return loss, h, z, server, federation


def own_dimensions(federation, place):
    d, k = federation.setting.embedding_dim, federation.setting.num_clients
    inside = torch.zeros(d)
    inside[place * (d // k) : (place + 1) * (d // k)] = 1
    return inside


@pytest.mark.parametrize("basis", ["axes", "random"])
@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
def test_the_local_loss_is_equation_10(basis, reduction):
    settings = (f"options.dsr.basis={basis}", f"options.dsr.reduction={reduction}", "options.dsr.weight=0.7")
    loss, h, z, server, federation = first_step(*settings)
    scales = 1 + 9 * own_dimensions(federation, 2)
    q = server.constants.get("dsr")
    expected = F.alignment(*z) + sum(F.uniformity(one) for one in z) / 2
    expected = expected + 0.7 * sum(F.dimension_scaling(one, scales, q, reduction) for one in z) / 2
    pd = sum(F.projector_distillation(a, b, "kl", "zh", 0.5) for a, b in zip(h, z, strict=True)) / 2
    torch.testing.assert_close(loss, expected + 0.1 * pd)
    assert (q is None) == (basis == "axes")
    if q is not None:
        torch.testing.assert_close(q @ q.T, torch.eye(len(q)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("basis", ["axes", "random"])
def test_equation_7_may_be_read_literally(basis):
    settings = (
        "options.dsr.renormalise=false",
        "options.dsr.reduction=mean_sq",
        f"options.dsr.basis={basis}",
    )
    loss, _, z, server, federation = first_step(*settings, "method.terms=['dsr']")
    inside, q = own_dimensions(federation, 2), server.constants.get("dsr")
    # z − P z is (1 − α) z on S_k and 0 elsewhere, so a row's loss is (α − 1)² ‖z on S_k‖².
    retained = [one if q is None else one @ q for one in z]
    dsr = sum(81 * ((one * inside) ** 2).sum() / len(one) for one in retained) / 2
    torch.testing.assert_close(loss, F.alignment(*z) + sum(F.uniformity(one) for one in z) / 2 + dsr)


def test_distillation_options():
    loss, h, z, *_ = first_step(
        "options.dsr.weight=0", "options.pd.kind=mse", "options.pd.weight=2.0", "options.align_uniform.beta=0"
    )
    mse = sum(((a - b) ** 2).mean() for a, b in zip(h, z, strict=True)) / 2
    torch.testing.assert_close(loss, F.alignment(*z) + 2 * mse)


PLAIN = {
    "dsr.weight": 1.0,
    "dsr.scale": 10.0,
    "dsr.reduction": "fro_over_n",
    "dsr.renormalise": "true",
    "dsr.basis": "axes",
    "dsr.draw": 0,
    "pd.weight": 0.1,
    "pd.kind": "kl",
    "pd.direction": "zh",
    "pd.temperature": 0.5,
    "align_uniform.beta": 1.0,
    "align_uniform.t": 2.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"dsr.scale": 3.0},
        {"dsr.scale": 0.25, "dsr.reduction": "mean_sq"},
        {"dsr.scale": 3.0, "dsr.renormalise": "false", "dsr.basis": "random", "dsr.draw": 2},
        {"dsr.basis": "random", "dsr.draw": 3},
        {"pd.direction": "hz", "pd.weight": 2.0},
        {"pd.temperature": 0.2, "pd.weight": 1.5},
        {"pd.temperature": 2.0, "pd.direction": "hz", "pd.weight": 3.0},
        {"pd.kind": "mse", "pd.temperature": 3.0},
        {"align_uniform.t": 0.5},
        {"align_uniform.t": 7.0, "align_uniform.beta": 0.4, "dsr.weight": 0.0},
    ],
)
def test_every_option_has_its_place_in_equation_10(changes):
    """Against loops in float64; each case also differs from the loss with the default options."""
    options = {**PLAIN, **changes}
    loss, h, z, _, federation = first_step(*(f"options.{name}={value}" for name, value in options.items()))
    h, z = ([one.detach().double() for one in pair] for pair in (h, z))
    scales = 1 + (options["dsr.scale"] - 1) * own_dimensions(federation, 2)
    basis = torch.eye(len(scales)).double()
    if options["dsr.basis"] == "random":
        basis = random_basis(federation, options["dsr.draw"])

    def expected(options, scales, basis):
        total, renormalise = oracles.alignment(*z), options["dsr.renormalise"] == "true"
        for one, other in zip(h, z, strict=True):
            total += options["align_uniform.beta"] * oracles.uniformity(other, options["align_uniform.t"]) / 2
            dsr = oracles.dimension_scaling(other, scales, basis, options["dsr.reduction"], renormalise)
            pd = (
                oracles.squared_error(one, other)
                if options["pd.kind"] == "mse"
                else oracles.projector_distillation(
                    one, other, options["pd.direction"], options["pd.temperature"]
                )
            )
            total += options["dsr.weight"] * dsr / 2 + options["pd.weight"] * pd / 2
        return total

    assert loss.item() == pytest.approx(expected(options, scales, basis), rel=1e-5, abs=1e-5)
    usual = expected(PLAIN, 1 + 9 * own_dimensions(federation, 2), torch.eye(len(scales)).double())
    assert loss.item() != pytest.approx(usual, rel=1e-3)


def random_basis(federation, draw):
    """Q of a Gaussian matrix of the documented stream; draw 0 has no number."""
    d, keys = federation.setting.embedding_dim, [draw] if draw else []
    draws = stream(federation.setting.seed, "ssd-basis", *keys)
    q, r = torch.linalg.qr(torch.randn(d, d, generator=draws, dtype=torch.float64))
    torch.testing.assert_close(q @ q.T, torch.eye(d).double())
    assert torch.equal(r, r.triu())
    return q


@pytest.mark.parametrize("seed", [0, 4])
def test_another_draw_gives_another_basis_and_nothing_else(seed):
    found, starts = [], []
    for draw in (0, 1, 2):
        federation = Federation(
            tiny("method.name=ssd", "options.dsr.basis=random", f"options.dsr.draw={draw}", f"seed={seed}")
        )
        start = federation.initial_weights()
        q = Server(federation.recipe, federation.setting, start).constants["dsr"]
        torch.testing.assert_close(q.double(), random_basis(federation, draw), rtol=1e-5, atol=1e-6)
        found.append(q)
        starts.append(start)
    assert not torch.allclose(found[0], found[1], atol=0.1)
    assert not torch.allclose(found[1], found[2], atol=0.1)
    assert same(starts[0], starts[1])


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
def test_hard_separation_may_have_a_random_basis(reduction):
    settings = ("options.hsd.basis=random", f"options.hsd.reduction={reduction}", "options.hsd.weight=0.6")
    loss, _, z, _, federation = first_step("method.terms=['hsd']", *settings)
    z = [one.detach().double() for one in z]
    inside, q = own_dimensions(federation, 2), random_basis(federation, 0)
    hsd = sum(oracles.dimension_scaling(one, inside, q, reduction) for one in z) / 2
    expected = oracles.alignment(*z) + sum(oracles.uniformity(one, 2.0) for one in z) / 2 + 0.6 * hsd
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_mask_may_have_a_random_basis():
    """z becomes Q_k Q_kᵀ z, with the client's eight columns of Q, before the loss reads it."""
    loss, _, z, _, federation = first_step(
        "method.terms=['hsd']", "options.hsd.kind=mask", "options.hsd.basis=random"
    )
    own = random_basis(federation, 0)[:, own_dimensions(federation, 2).bool()]
    assert own.shape == (32, 8)
    projected = [one.detach().double() @ own @ own.T for one in z]
    expected = oracles.alignment(*projected) + sum(oracles.uniformity(one, 2.0) for one in projected) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_clients_have_dimensions_of_their_own():
    federation = Federation(tiny("method.name=ssd"))
    places = [own_dimensions(federation, client) for client in range(4)]
    assert torch.equal(sum(places), torch.ones(federation.setting.embedding_dim))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    assert [job.message["parts"]["dsr"] for job in server.jobs(1)] == [0, 1, 2, 3]


def test_by_slot_the_subspace_follows_the_order_of_the_draw():
    federation = Federation(tiny("method.name=ssd", "options.dsr.index_by=slot", "train.participation=0.5"))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    for round in range(1, 6):
        cohort = server.cohort(round)
        assert {job.client: job.message["parts"]["dsr"] for job in server.jobs(round)} == {
            cohort[0]: 0,
            cohort[1]: 1,
        }


def test_hard_separation_draws_towards_the_projection():
    loss, _, z, _, federation = first_step("method.terms=['hsd']")
    inside = own_dimensions(federation, 2)
    unit = [torch.nn.functional.normalize(one, dim=1) for one in z]
    target = [torch.nn.functional.normalize(one * inside, dim=1).detach() for one in unit]
    hsd = sum((a - b).norm() / len(a) for a, b in zip(unit, target, strict=True)) / 2
    expected = F.alignment(*z) + sum(F.uniformity(one) for one in z) / 2 + hsd
    torch.testing.assert_close(loss, expected)


def masked(*terms):
    """A federation under the mask and a way to train its clients, one after the other on the same networks."""
    federation = Federation(tiny("method.name=ssd", f"method.terms={list(terms)}", "options.hsd.kind=mask"))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    side = federation.client_side(server.constants)
    messages = {job.client: job.message for job in server.jobs(1)}

    def train(client):
        return clone(train_client(side, messages[client], None, federation.client_data(client))[0])

    return federation, side, messages, train


def test_masked_hard_separation_keeps_every_embedding_inside_and_the_projector_as_it_is():
    federation, side, messages, _ = masked("hsd", "moon")
    data = federation.client_data(1)
    side.start(messages[1], None, data)
    batch = next(iter(data.batches(1, 1, side.method.images)))
    networks = {"local": side.networks, **side.copies}
    assert {"local", "global", "previous"} <= networks.keys()
    outside = own_dimensions(federation, 1) == 0
    for joint in (True, False):
        passes = run_forwards(side.method.forwards, networks, batch.images, joint, side.context.after)
        for features in passes.values():
            assert features.z[:, outside].abs().max() == 0
            assert features.z[:, ~outside].abs().max() > 0
    assert side.context.outputs(side.networks, "z")[0][:, outside].abs().max() == 0
    h = torch.randn(5, federation.setting.encoder_dim)
    assert all(network["projector"](h)[:, outside].abs().max() > 0 for network in networks.values())


@pytest.mark.parametrize("other", ["fedx", "moon"])
def test_a_masked_client_does_not_depend_on_who_trained_before_it(other):
    """Other terms freeze copies of the networks, which stay for the clients that follow."""
    *_, train = masked("hsd", other)
    train(0)
    after = train(1)
    *_, train = masked("hsd", other)
    assert same(train(1), after)


def test_the_mask_does_not_depend_on_the_order_of_the_terms():
    updates = [masked(*terms)[-1](1) for terms in (("hsd", "moon"), ("moon", "hsd"))]
    assert same(*(update["weights"] for update in updates))


def test_the_mask_holds_before_any_component_starts():
    """Orchestra's objective stands before the terms, and fills its memory of embeddings at its start."""
    federation = Federation(tiny("method.name=orchestra", "method.terms=['hsd']", "options.hsd.kind=mask"))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    side = federation.client_side(server.constants)
    side.start(server.jobs(1)[1].message, None, federation.client_data(1))
    memory = side.context.of(side.method.objective).memory
    outside = own_dimensions(federation, 1) == 0
    assert memory[:, outside].abs().max() == 0
    assert memory[:, ~outside].abs().max() > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.projector_dim=16"], "'pd' compares representations"),
        (["model.projector_dim=3", "method.terms=['dsr']"], "4 clients"),
        (["method.aggregation=relay", "options.dsr.index_by=slot"], "the same dimensions"),
    ],
)
def test_what_cannot_work_is_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Federation(tiny("method.name=ssd", *settings))


def test_nothing_but_weights_and_numbers_leaves_the_client():
    method = tiny("method.name=ssd").composed
    assert method.keeps == ()
    assert method.egress[1:] == ("its number of samples", "the mean of each loss over the round")
