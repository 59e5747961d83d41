import pytest
import torch

from atoll.core.rng import stream
from atoll.methods.fedsc import FedSC
from tests.functional import oracles
from tests.rounds import Rounds

FEDSC = ("method.name=fedsc", "model.projector_dim=6", "options.fedsc.mu=0.5", "options.fedsc.passes=2")


def slot(tree):
    return tree["parts"].get("fedsc")


def first_step(rounds, round):
    """The loss of client 0's first batch in a round, and the embeddings of its two views in float64."""
    rounds.start(0, round)
    batch = next(rounds.federation.client_data(0).batches(round, 1, rounds.method.images))
    loss = rounds.client.step(batch).item()
    networks = rounds.federation.networks.train()
    with torch.no_grad():
        views = (batch.images[view] for view in ("view1", "view2"))
        return loss, *(networks["projector"](networks["encoder"](x)).double() for x in views)


def correlation(rounds, client, draws):
    """The correlation matrix of a client's 40 images in two passes, row by row in float64."""
    networks, total = rounds.federation.networks.eval(), torch.zeros(6, 6).double()
    for _ in range(2):
        for batch in rounds.federation.client_data(client).ordered(draws):
            with torch.no_grad():
                z = networks["projector"](networks["encoder"](batch.images["image"])).double()
            for row in torch.tensor(oracles.clipped(z, 0.5)).double():
                total += torch.outer(row, row) / 2 / 40
    return total


def test_an_odd_round_gathers_matrices_and_trains_nothing():
    rounds = Rounds(*FEDSC, "options.fedsc.noise=0")
    assert rounds.message(0, 1)["epochs"] == 0
    assert slot(rounds.message(0, 1)) is None
    update, _ = rounds.train(0)
    current = rounds.server.state["models"]["global"]
    assert all(torch.equal(update["weights"][name], weight) for name, weight in current.items())
    expected = correlation(rounds, 0, rounds.client.context.stream("fedsc-views"))
    torch.testing.assert_close(slot(update).double(), expected, rtol=1e-4, atol=1e-6)


def test_a_client_gets_the_mean_of_the_others_and_absent_clients_keep_their_matrix():
    rounds = Rounds(*FEDSC)
    updates = {client: rounds.train(client)[0] for client in range(4)}
    rounds.fold(1, updates)
    matrices = [slot(updates[client]) for client in range(4)]
    torch.testing.assert_close(slot(rounds.message(1, 2)), (matrices[0] + matrices[2] + matrices[3]) / 3)
    later = rounds.train(2, 3)[0]
    assert not torch.equal(slot(later), matrices[2])
    rounds.fold(3, {2: later})
    torch.testing.assert_close(slot(rounds.message(1, 4)), (matrices[0] + slot(later) + matrices[3]) / 3)


def test_the_local_loss_is_the_equation_with_the_rounds_share():
    rounds = Rounds(*FEDSC, "train.rounds=10")
    rounds.fold(1, {client: rounds.train(client)[0] for client in range(4)})
    others = slot(rounds.message(0, 6))
    loss, z1, z2 = first_step(rounds, 6)
    share = 1 - 0.8 * 2 / 5  # the third of five rounds that train
    expected = oracles.spectral_contrast(z1, z2, 0.5, others.double(), share)
    assert loss == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_noise_has_its_standard_deviation_and_is_drawn_anew():
    """Of 96² entries, the empirical standard deviation is within 1 % of the true one."""
    wide = (*FEDSC, "model.projector_dim=96")
    clean, noisy = (Rounds(*wide, f"options.fedsc.noise={noise}") for noise in (0, 0.1))
    noise = {}
    for client, round in ((0, 1), (1, 1), (0, 3)):
        with_it, without = (slot(rounds.train(client, round)[0]) for rounds in (noisy, clean))
        noise[client, round] = (with_it - without).flatten()
    first = noise[0, 1].double()
    assert float(first.std()) == pytest.approx(0.1, rel=0.05)
    assert float(first.mean()) == pytest.approx(0.0, abs=4 * 0.1 / 96)
    for other in (noise[1, 1], noise[0, 3]):
        assert abs(float(torch.corrcoef(torch.stack([first, other.double()]))[0, 1])) < 4 / 96


@pytest.mark.parametrize(
    ("gather", "shares"),
    [("updates", {1: 1.0, 2: 0.92, 10: 0.28}), ("rounds", {2: 1.0, 4: 0.84, 10: 0.36})],
)
def test_a_falls_from_the_first_round_that_trains(gather, shares):
    """From 1 by 0.8 in all: by 0.08 in each of ten rounds, or by 0.16 in each of five that train."""
    objective = FedSC(gather=gather)
    assert {round: objective.share(round, 10) for round in shares} == pytest.approx(shares)
    other = FedSC(gather=gather, first_share=0.5, last_share=0.1)
    first, *_, last = shares
    assert other.share(first, 10) == pytest.approx(0.5)
    assert other.share(last, 10) == pytest.approx(0.1 + 0.5 * (shares[last] - 0.2))


def test_with_updates_every_round_trains_and_sends():
    rounds = Rounds(*FEDSC, "options.fedsc.gather=updates")
    assert rounds.message(0, 1)["epochs"] == 1
    updates = {client: rounds.train(client)[0] for client in range(4)}
    assert updates[0]["losses"]
    rounds.fold(1, updates)
    assert slot(rounds.message(0, 2)).shape == (6, 6)
    assert slot(rounds.train(0, 2)[0]).shape == (6, 6)


def test_with_updates_a_client_sends_the_matrix_of_its_trained_networks():
    rounds = Rounds(*FEDSC, "options.fedsc.gather=updates", "options.fedsc.noise=0")
    downloaded = rounds.start(1)
    update, _ = rounds.train(1)

    def matrix(weights):
        rounds.federation.networks.load_state_dict(weights)
        return correlation(rounds, 1, stream(rounds.federation.setting.seed, "fedsc-views", 1, 1))

    torch.testing.assert_close(slot(update).double(), matrix(update["weights"]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(slot(update).double(), matrix(downloaded), rtol=1e-2, atol=1e-4)


def test_with_updates_the_second_round_contrasts_with_the_matrices_of_the_first():
    rounds = Rounds(*FEDSC, "options.fedsc.gather=updates", "train.rounds=10")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    rounds.fold(1, updates)
    others = sum(slot(updates[client]) for client in (1, 2, 3)) / 3
    loss, z1, z2 = first_step(rounds, 2)
    expected = oracles.spectral_contrast(z1, z2, 0.5, others.double(), 0.92)
    assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("noise", [0, 0.00104])
def test_a_matrix_that_no_embeddings_have_is_refused(noise):
    rounds = Rounds(*FEDSC, f"options.fedsc.noise={noise}")
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    for wrong, sentence in (
        (-0.4 * torch.ones(6, 6), "has the eigenvalue -2.4"),
        (0.5 * torch.eye(6), "has the trace 3, above μ = 0.5"),
        (0.05 * torch.ones(6, 6).triu(), "is not symmetric"),
    ):
        assert sentence in rounds.refused({**update, "parts": {"fedsc": wrong}})


def test_a_matrix_beyond_its_bound_is_refused():
    rounds = Rounds(*FEDSC)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    assert "outside" in rounds.refused({**update, "parts": {"fedsc": 2 * torch.ones(6, 6)}})
    assert "has shape" in rounds.refused({**update, "parts": {"fedsc": torch.ones(5, 5)}})


def test_noise_of_wide_matrices_is_accepted_and_what_it_does_not_explain_is_not():
    """Ten standard deviations of a trace; eigenvalues of the noise alone reach √(2d) of an entry's."""
    objective, d = FedSC(mu=4.0, noise=0.05), 256
    for seed in range(3):
        noise = 0.05 * torch.randn(d, d, generator=torch.Generator().manual_seed(seed))
        assert objective.refuse_slice(noise + 4.0 / d * torch.eye(d), None, None) is None
    bound = 10 * 0.05 * 16
    for far, refused in ((0.99, False), (1.01, True)):
        for wrong, word in (
            ((4.0 + far * bound) / d * torch.eye(d), "trace"),
            (-far * bound * torch.eye(d)[:1].T @ torch.eye(d)[:1], "eigenvalue"),
        ):
            sentence = objective.refuse_slice(wrong, None, None)
            assert (word in sentence) if refused else sentence is None
