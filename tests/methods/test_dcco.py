import copy
from pathlib import Path

import pytest
import torch

from atoll.commands.run import run_recipe
from atoll.core.tree import clone
from atoll.recipe.recipe import load_recipe
from tests.functional import oracles
from tests.rounds import Fixed, Rounds
from tests.steps import check_gradient
from tests.trees import same

DCCO = ("method.name=dcco", "model.projector_dim=6", "train.batch_size=40")


def slot(tree):
    return tree["parts"].get("dcco")


def gathered(*settings):
    """A federation after its first round, which gathers."""
    rounds = Rounds(*DCCO, *settings)
    updates = {client: rounds.train(client)[0] for client in range(4)}
    rounds.fold(1, updates)
    return rounds, updates


def embeddings(rounds, client, round):
    """Both views' embeddings of a client's first batch of a round, with BatchNorm as in training."""
    rounds.start(client, round)
    batch = next(rounds.federation.client_data(client).batches(round, 1, ("view1", "view2")))
    networks = rounds.federation.networks.train()
    with torch.no_grad():
        return [networks["projector"](networks["encoder"](batch.images[v])) for v in ("view1", "view2")]


def test_a_round_that_trains_sees_the_loss_of_the_union():
    rounds, _ = gathered()
    z1, z2 = (torch.cat(z) for z in zip(*(embeddings(rounds, client, 2) for client in range(4)), strict=True))
    expected = oracles.barlow_twins(z1.double(), z2.double(), 0.0051, False)
    for client in range(4):
        update, _ = rounds.train(client, 2)  # one batch
        assert update["losses"]["dcco"] == pytest.approx(expected, rel=1e-4)
    assert slot(update) is None


def test_a_round_that_gathers_trains_nothing_and_leaves_the_networks_as_they_are():
    rounds, updates = gathered()
    assert rounds.message(0, 1)["epochs"] == 0
    assert rounds.message(0, 2)["epochs"] == 1
    assert slot(rounds.message(0, 1)) is None
    current = rounds.server.state["models"]["global"]
    assert all(torch.equal(updates[0]["weights"][name], weight) for name, weight in current.items())


def test_clients_weigh_by_their_images():
    rounds, updates = gathered()
    wrong = {**slot(updates[0]), "count": 10**6}  # counts no more than the partition's 40
    rounds.fold(3, {0: {**updates[0], "parts": {"dcco": wrong}}, 1: updates[1]})
    mean = (slot(updates[0])["product"] + slot(updates[1])["product"]) / 2
    torch.testing.assert_close(slot(rounds.message(2, 4))["product"], mean)


@pytest.mark.parametrize("views", ["separate", "joint"])
def test_several_batches_count_together(views):
    rounds, updates = gathered("train.batch_size=20", f"train.views_batch={views}")
    data = rounds.federation.client_data(0)
    rounds.start(0, 1)
    networks = rounds.federation.networks.train()
    f, g = [], []
    for batch in data.batches(2, 1, ("view1", "view2")):
        images = [batch.images["view1"], batch.images["view2"]]
        with torch.no_grad():
            z = (
                [networks["projector"](networks["encoder"](torch.cat(images)))]
                if views == "joint"
                else [networks["projector"](networks["encoder"](one)) for one in images]
            )
        for kept, rows in zip((f, g), torch.cat(z).double().chunk(2), strict=True):
            kept.extend(rows)
    sent = slot(updates[0])
    assert sent["count"] == len(f) == 40
    products = [torch.outer(a, b) for a, b in zip(f, g, strict=True)]
    expected = {"mean1": f, "mean2": g, "square1": [a**2 for a in f], "square2": [b**2 for b in g]}
    for name, terms in {**expected, "product": products}.items():
        torch.testing.assert_close(sent[name], sum(terms) / 40, rtol=1e-4, atol=1e-6)


def test_with_updates_the_first_round_is_barlow_twins():
    rounds = Rounds(*DCCO, "options.dcco.gather=updates")
    z1, z2 = embeddings(rounds, 0, 1)
    update, _ = rounds.train(0)
    expected = oracles.barlow_twins(z1.double(), z2.double(), 0.0051, False)
    assert update["losses"]["dcco"] == pytest.approx(expected, rel=1e-4)
    assert slot(update)["product"].shape == (6, 6)


def test_with_updates_a_client_sends_statistics_of_its_trained_networks():
    rounds = Rounds(*DCCO, "options.dcco.gather=updates", "train.batch_size=20")
    networks = rounds.federation.networks
    downloaded = rounds.start(1)
    update, _ = rounds.train(1)

    def product(weights):
        networks.load_state_dict(weights)
        networks.train()
        pairs = []
        for batch in rounds.federation.client_data(1).batches(2, 1, ("view1", "view2")):
            with torch.no_grad():
                z = [networks["projector"](networks["encoder"](batch.images[v])) for v in ("view1", "view2")]
            pairs += zip(*(one.double() for one in z), strict=True)
        return sum(torch.outer(a, b) for a, b in pairs) / len(pairs)

    torch.testing.assert_close(slot(update)["product"], product(update["weights"]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(slot(update)["product"], product(downloaded), rtol=1e-2)


def from_means(means, lambd):
    """The loss from the docstring's means, entry by entry."""
    f, g, f2, g2, fg = (means[name].tolist() for name in ("mean1", "mean2", "square1", "square2", "product"))
    loss = 0.0
    for i in range(len(f)):
        for j in range(len(g)):
            deviations = ((f2[i] - f[i] ** 2) * (g2[j] - g[j] ** 2)) ** 0.5
            c = (fg[i][j] - f[i] * g[j]) / deviations
            loss += (1 - c) ** 2 if i == j else lambd * c**2
    return loss


def test_with_updates_the_second_round_has_the_loss_of_the_first_rounds_means():
    rounds = Rounds(*DCCO, "options.dcco.gather=updates", "options.dcco.lambd=0.3")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    rounds.fold(1, updates)
    names = ("mean1", "mean2", "square1", "square2", "product")
    means = {name: sum(slot(update)[name] for update in updates.values()) / 4 for name in names}
    for client in (0, 3):
        update, _ = rounds.train(client, 2)  # one batch
        assert update["losses"]["dcco"] == pytest.approx(from_means(means, 0.3), rel=1e-5)


@pytest.mark.parametrize("gather", ["rounds", "updates"])
def test_every_batch_has_the_cohorts_loss_before_the_networks_move(gather):
    rounds, updates = gathered(f"options.dcco.gather={gather}", "train.batch_size=4", "train.lr=1e-9")
    names = ("mean1", "mean2", "square1", "square2", "product")
    means = {name: sum(slot(update)[name] for update in updates.values()) / 4 for name in names}
    for client in range(4):
        update, _ = rounds.train(client, 2)  # the mean over ten batches
        assert update["losses"]["dcco"] == pytest.approx(from_means(means, 0.0051), rel=1e-4)


def test_the_gradient_is_that_of_the_cohorts_means_moved_by_the_client():
    """⟨·⟩_T = ⟨·⟩_k + ⟨·⟩_A − ⟨·⟩_k⁰, also after a first step, when ⟨·⟩_k is no more ⟨·⟩_k⁰."""
    rounds, _ = gathered("train.lr=0.05", "train.batch_size=20", "options.dcco.lambd=0.3")
    rounds.start(0, 2)
    client, networks = rounds.client, rounds.federation.networks
    downloaded = copy.deepcopy(networks).double()
    first, batch = rounds.federation.client_data(0).batches(2, 1, ("view1", "view2"))
    client.step(first).backward()
    client.optimizer.step()
    client.optimizer.zero_grad()

    def means(of):
        with torch.no_grad():
            f, g = (of["projector"](of["encoder"](batch.images[v].double())) for v in ("view1", "view2"))
        powers = {"mean1": f, "mean2": g, "square1": f**2, "square2": g**2}
        products = torch.stack([torch.outer(a, b) for a, b in zip(f, g, strict=True)])
        return {name: rows.mean(dim=0) for name, rows in {**powers, "product": products}.items()}

    cohort, before = slot(rounds.server.state), means(downloaded)

    def loss(moved):
        return from_means(
            {name: now + cohort[name] - before[name] for name, now in means(moved).items()}, 0.3
        )

    made = client.step(batch)
    assert made.item() == pytest.approx(loss(copy.deepcopy(networks).double()), rel=1e-4)
    check_gradient(networks, made, loss)


@pytest.mark.parametrize("lambd", [0.0, 0.3, 2.0])
def test_lambda_weighs_the_entries_off_the_diagonal(lambd):
    rounds, _ = gathered(f"options.dcco.lambd={lambd}")
    z1, z2 = (torch.cat(z) for z in zip(*(embeddings(rounds, client, 2) for client in range(4)), strict=True))
    expected = oracles.barlow_twins(z1.double(), z2.double(), lambd, False)
    assert rounds.train(0, 2)[0]["losses"]["dcco"] == pytest.approx(expected, rel=1e-4)


def test_the_value_of_the_loss_moves_with_the_clients_steps():
    """Several steps on the cohort's statistics as they were would all have the gradient of the first."""
    one, many = (gathered("train.lr=0.05", f"train.epochs={epochs}")[0] for epochs in (1, 20))
    first, mean = (rounds.train(0, 2)[0]["losses"]["dcco"] for rounds in (one, many))
    assert mean < 0.95 * first


def test_the_pages_recipe_trains(tmp_path):
    text = (Path(__file__).parents[2] / "docs/methods/dcco.md").read_text()
    (tmp_path / "dcco.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    settings = ["train.rounds=4", "evaluation.every=0", "evaluation.at_end=[]", "engine.workers=1"]
    run = run_recipe(load_recipe(str(tmp_path / "dcco.toml"), settings), tmp_path / "run")
    assert not any("refused" in line for line in run.metrics)
    losses = [line["loss"] for line in run.metrics if line.get("loss")]
    assert losses[-1] < losses[0]


def test_honest_statistics_may_grow_with_the_embeddings():
    rounds, updates = gathered()
    assert rounds.server.run_round(Fixed(updates)).clients == 4

    def scaled(factor):
        powers = {"count": 0, "mean1": 1, "mean2": 1}
        slice = {name: value * factor ** powers.get(name, 2) for name, value in slot(updates[0]).items()}
        return rounds.server.checks.examine(
            {**updates[0], "parts": {"dcco": slice}}, rounds.server.state["models"]
        )

    assert not isinstance(scaled(30), str)
    assert "the norm of its slice of 'dcco' is" in scaled(10**8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"square1": torch.full((6,), -1.0).double()},
            "'square1' in its slice of 'dcco' holds values outside",
        ),
        ({"mean1": torch.full((6,), 5e3).double()}, "means that no embeddings have"),
        ({"product": torch.full((6, 6), 5e6).double()}, "means that no embeddings have"),
        ({"count": 0}, "'count' in its slice of 'dcco' is 0"),
        ({"mean1": torch.ones(5).double()}, "has shape"),
        ({"mean1": torch.full((6,), float("nan")).double()}, "not finite"),
    ],
)
def test_statistics_of_another_form_are_refused(change, sentence):
    rounds, updates = gathered()
    assert rounds.refused(updates[0]) is None
    reason = rounds.refused({**updates[0], "parts": {"dcco": {**slot(updates[0]), **change}}})
    assert sentence in reason


@pytest.mark.parametrize("name", ["mean1", "mean2", "product"])
def test_means_are_bounded_by_the_mean_squares_up_to_rounding(name):
    """By Jensen ⟨f⟩² <= ⟨f²⟩, and by Cauchy and Schwarz ⟨f_i g_j⟩² <= ⟨f_i²⟩⟨g_j²⟩; equal embeddings reach both."""
    rounds, updates = gathered()
    piece = slot(updates[0])
    squares1, squares2 = piece["square1"], piece["square2"]
    largest = {
        "mean1": squares1.sqrt(),
        "mean2": squares2.sqrt(),
        "product": torch.outer(squares1.sqrt(), squares2.sqrt()),
    }[name]
    for factor, possible in ((1 + 2e-7, True), (-1 - 2e-7, True), (1.01, False), (-1.01, False)):
        reason = rounds.refused({**updates[0], "parts": {"dcco": {**piece, name: factor * largest}}})
        assert (reason is None) == possible


def test_a_client_may_count_fewer_images_than_it_has():
    rounds, updates = gathered()
    fewer = {**slot(updates[0]), "count": 10}
    rounds.fold(3, {0: {**updates[0], "parts": {"dcco": fewer}}, 1: updates[1]})
    for name in ("mean1", "square2", "product"):
        mean = (10 * fewer[name] + 40 * slot(updates[1])[name]) / 50
        torch.testing.assert_close(slot(rounds.server.state)[name], mean)


def test_without_new_statistics_the_last_ones_stay():
    rounds, _ = gathered()
    before = clone(slot(rounds.server.state))
    rounds.fold(3, {})
    assert same(slot(rounds.server.state), before)
