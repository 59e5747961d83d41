import copy
import math

import pytest
import torch
from torch.nn.functional import normalize

from atoll.core.rng import stream
from atoll.core.tree import clone
from atoll.functional import sinkhorn_assignments
from atoll.methods.orchestra import CentroidFold, Orchestra, balanced_centroids, fit_centroids
from tests.functional.oracles import dot, log_softmax, units
from tests.harness import run_tiny
from tests.rounds import Rounds
from tests.trees import same

ORCHESTRA = (
    "method.name=orchestra",
    "options.orchestra.global_clusters=6",
    "options.orchestra.local_clusters=4",
    "options.orchestra.memory=25",
    "options.orchestra.server_steps=10",
)


def slot(tree):
    return tree["parts"]["orchestra"]


def groups(count, each, d=8, seed=0, spread=0.02):
    """Tight groups of directions around orthogonal axes."""
    draws = torch.Generator().manual_seed(seed)
    axes = torch.eye(d)[:count].repeat_interleave(each, dim=0)
    return normalize(axes + spread * torch.randn(axes.shape, generator=draws))


def test_local_centroids_are_the_means_of_balanced_groups():
    z = groups(4, 6)
    centroids = balanced_centroids(z, 4, torch.Generator().manual_seed(5))
    expected = normalize(z.reshape(4, 6, 8).mean(dim=1))
    for mean in expected:
        assert (centroids - mean).norm(dim=1).min() < 1e-5


def test_local_centroids_are_directions_however_few_rows_there_are():
    z = groups(1, 3)
    centroids = balanced_centroids(z, 5, torch.Generator().manual_seed(0))
    assert centroids.shape == (5, 8)
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(5))


def agreement(c, z, temperature):
    balanced = sinkhorn_assignments(z @ c.T)
    soft = (z @ c.T / temperature).softmax(dim=1)
    return float(torch.nn.functional.cosine_similarity(balanced, soft).mean())


def test_global_centroids_come_to_agree_with_balanced_assignments():
    z = groups(3, 5)
    c = normalize(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
    fitted = fit_centroids(c, z, 0.1, 300)
    torch.testing.assert_close(fitted.norm(dim=1), torch.ones(3))
    assert agreement(fitted, z, 0.1) > agreement(c, z, 0.1) + 0.05
    of_groups = (z @ fitted.T).argmax(dim=1).reshape(3, 5)
    assert all(len(set(group.tolist())) == 1 for group in of_groups)
    assert len(set(of_groups[:, 0].tolist())) == 3


def disagreement(c, z, balanced, temperature):
    """−mean cos(P, softmax(ẐCᵀ / T)) for given assignments P, one row at a time."""
    total = 0.0
    for row, p in zip(units(z), balanced.tolist(), strict=True):
        soft = [math.exp(s) for s in log_softmax([dot(row, one) / temperature for one in c.tolist()])]
        total -= dot(p, soft) / math.sqrt(dot(p, p) * dot(soft, soft)) / len(z)
    return total


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_each_step_on_the_global_centroids_is_sgd_by_finite_differences(temperature):
    """Momentum 0.9, weight decay 1e-4, and the assignments P constant in each step."""
    draws = torch.Generator().manual_seed(4)
    c, z = (torch.randn(n, 4, generator=draws, dtype=torch.float64) for n in (3, 5))
    c = normalize(c)
    found = fit_centroids(c, z, temperature, steps=3, lr=0.05, lam=4.0)
    assert torch.equal(fit_centroids(c, z, temperature, steps=0), c)
    velocity = torch.zeros_like(c)
    for _ in range(3):
        balanced, slope = sinkhorn_assignments(z @ c.T, 4.0), torch.zeros_like(c)
        for place in range(c.numel()):
            step = torch.zeros(c.numel()).double()
            step[place] = 1e-6
            above, below = (
                disagreement(c + sign * step.view_as(c), z, balanced, temperature) for sign in (1, -1)
            )
            slope.view(-1)[place] = (above - below) / 2e-6
        velocity = 0.9 * velocity + slope + 1e-4 * c
        c = c - 0.05 * velocity
        c = torch.tensor(units(c), dtype=torch.float64)
    torch.testing.assert_close(found, c, rtol=1e-7, atol=1e-8)


def test_centroids_have_the_released_learning_rate_and_sharpness():
    draws = torch.Generator().manual_seed(4)
    c, z = (normalize(torch.randn(n, 4, generator=draws)) for n in (3, 30))
    assert torch.equal(fit_centroids(c, z, 0.1, 3), fit_centroids(c, z, 0.1, 3, lr=0.01, lam=25.0))
    found, expected = (
        balanced_centroids(z, 6, torch.Generator().manual_seed(9), **options)
        for options in ({}, {"lam": 25.0})
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("lam", "tight"), [(25.0, False), (2.0, False), (2.0, True)])
def test_local_centroids_are_those_of_a_slow_loop(lam, tight):
    """Five iterations of: assign each row to the largest of ten balanced scalings, and average each cluster.

    Of two tight groups, some clusters lose all rows.
    """
    z = normalize(torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    if tight:
        z = normalize(groups(2, 30, d=5, seed=1).double())
    emptied = 0
    draws = torch.Generator().manual_seed(9)
    centroids = z[torch.randperm(60, generator=draws)[:6]].tolist()
    for _ in range(5):
        scores = [[dot(row, c) for c in centroids] for row in z.tolist()]
        soft = sinkhorn_assignments(torch.tensor(scores, dtype=torch.float64), lam, iterations=10).tolist()
        spare = torch.randint(60, (6,), generator=draws).tolist()
        clusters = [[] for _ in centroids]
        for row, p in zip(z.tolist(), soft, strict=True):
            clusters[p.index(max(p))].append(row)
        emptied += clusters.count([])
        for j, members in enumerate(clusters):
            mean = [sum(column) / len(members) for column in zip(*members, strict=True)] or z[
                spare[j]
            ].tolist()
            centroids[j] = units(torch.tensor([mean], dtype=torch.float64))[0]
    assert (emptied > 0) == tight
    found = balanced_centroids(z, 6, torch.Generator().manual_seed(9), lam=lam)
    torch.testing.assert_close(found, torch.tensor(centroids, dtype=torch.float64))


def test_a_centroid_without_rows_becomes_a_random_row():
    """Of three equal rows, one cluster takes all, and the other centroids are rows drawn again."""
    z = torch.eye(4)[:1].expand(3, 4)
    found = balanced_centroids(z, 2, torch.Generator().manual_seed(0), iterations=1)
    torch.testing.assert_close(found, torch.eye(4)[:1].expand(2, 4))


def test_the_temperature_is_that_of_the_server_too():
    warm = Rounds(*ORCHESTRA, "options.orchestra.temperature=0.7")
    updates = {client: warm.train(client)[0] for client in range(4)}
    before = slot(warm.server.state)
    warm.fold(1, updates)
    z = torch.cat([slot(update) for update in updates.values()])
    assert torch.equal(slot(warm.server.state), fit_centroids(before, z, 0.7, 10))
    assert not torch.allclose(slot(warm.server.state), fit_centroids(before, z, 0.1, 10), atol=1e-3)


def test_the_first_round_makes_centroids_and_trains_nothing():
    rounds = Rounds(*ORCHESTRA)
    assert rounds.message(0, 1)["epochs"] == 0
    assert rounds.message(0, 2)["epochs"] == 1
    before = clone(rounds.server.state)
    updates, kept = {}, {}
    for client in range(4):
        updates[client], kept[client] = rounds.train(client)
    assert same(updates[0]["weights"], before["models"]["global"])
    assert slot(updates[0]).shape == (4, 32)
    assert slot(kept[0])["memory"].shape == (25, 32)
    rounds.fold(1, updates)
    assert same(rounds.server.state["models"], before["models"])
    z = torch.cat([slot(update) for update in updates.values()])
    expected = fit_centroids(slot(before), z, 0.1, 10)
    assert torch.equal(slot(rounds.server.state), expected)
    assert not torch.equal(slot(rounds.server.state), slot(before))
    assert torch.equal(slot(rounds.message(2, 2)), expected)


@pytest.mark.parametrize("temperature", [0.1, 0.6])
def test_the_local_loss_is_the_cross_entropy_of_the_two_networks_assignments(temperature):
    rounds = Rounds(*ORCHESTRA, f"options.orchestra.temperature={temperature}")
    rounds.start(0, 2)
    batch = next(rounds.federation.client_data(0).batches(2, 1, rounds.method.images))
    rounds.client.step(batch)
    loss = rounds.client._losses["orchestra"][0].item()
    networks = rounds.federation.networks
    with torch.no_grad():  # before the first step the target is a copy of the online network
        z1, z2 = (networks["projector"](networks["encoder"](batch.images[v])) for v in ("view1", "view2"))
    c = slot(rounds.server.state).double().tolist()
    expected = 0.0
    for target, online in zip(units(z1.double()), units(z2.double()), strict=True):
        given = [math.exp(p) for p in log_softmax([dot(target, row) / temperature for row in c])]
        made = log_softmax([dot(online, row) / temperature for row in c])
        expected -= dot(given, made) / len(z1)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_turn_of_each_third_view_is_predicted_from_its_embedding():
    rounds = Rounds(*ORCHESTRA)
    rounds.start(0, 2)
    batch = next(rounds.federation.client_data(0).batches(2, 1, rounds.method.images))
    rounds.client.step(batch)
    turned, third, networks = batch.images["rotation_term"], batch.images["view3"], rounds.federation.networks
    turns = [
        next(t for t in range(4) if torch.equal(one.rot90(t, (1, 2)), rotated))
        for one, rotated in zip(third, turned, strict=True)
    ]
    with torch.no_grad():
        logits = networks["rotation_head"](networks["projector"](networks["encoder"](turned))).double()
    expected = [-log_softmax(row)[turn] for row, turn in zip(logits.tolist(), turns, strict=True)]
    assert rounds.client._losses["rotation_term"][0].item() == pytest.approx(
        sum(expected) / len(turns), rel=1e-4
    )


def test_the_memory_holds_the_newest_target_embeddings():
    rounds = Rounds(*ORCHESTRA)
    rounds.start(0, 2)
    scope = rounds.client.context.of(rounds.method.objective)
    before, newest = scope.memory.clone(), []
    for batch in rounds.federation.client_data(0).batches(2, 1, rounds.method.images):
        loss = rounds.client.step(batch)
        loss.backward()
        newest += scope.newest
        rounds.client.after_step()
    everything = torch.cat([before, *newest])
    assert torch.equal(scope.memory, everything[-25:])
    assert torch.equal(slot(rounds.client.finish()[1])["memory"], scope.memory)


def test_targets_are_those_of_the_code_whose_target_moves_before_each_step():
    rounds = Rounds(*ORCHESTRA, "options.orchestra.momentum=0.6")
    rounds.start(0, 2)
    scope = rounds.client.context.of(rounds.method.objective)
    online = rounds.federation.networks
    target = copy.deepcopy(online).requires_grad_(False)
    for batch in rounds.federation.client_data(0).batches(2, 1, rounds.method.images):
        for ours, theirs in zip(target.parameters(), online.parameters(), strict=True):
            ours.copy_(0.6 * ours + 0.4 * theirs)
        loss = rounds.client.step(batch)
        z = target["projector"](target["encoder"](batch.images["view1"]))
        torch.testing.assert_close(torch.cat(scope.newest), normalize(z))
        loss.backward()
        rounds.client.optimizer.step()
        rounds.client.optimizer.zero_grad()
        rounds.client.after_step()


@pytest.mark.parametrize("memory", [25, 100])
def test_the_first_memory_is_of_embeddings_of_random_images(memory):
    rounds = Rounds(*ORCHESTRA, f"options.orchestra.memory={memory}")
    rounds.start(1)
    data, networks = rounds.federation.client_data(1), rounds.federation.networks.eval()
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](data.pick(torch.arange(40)))).double()
    networks.train()
    draws = stream(rounds.federation.setting.seed, "orchestra-memory", 1, 1)
    chosen = torch.randperm(40, generator=draws)[:memory]
    expected = torch.tensor(units(z[chosen]))
    torch.testing.assert_close(rounds.client.context.of(rounds.method.objective).memory, expected)


def test_a_client_that_starts_anew_fills_its_memory_anew():
    """FedEMA resets a client that missed a round."""
    rounds = Rounds(*ORCHESTRA, "method.merge=fedema")
    _, kept = rounds.train(0, 2)
    rounds.start(0, 4, kept)
    again = rounds.client.context.of(rounds.method.objective).memory.clone()
    rounds.start(0, 4)
    assert torch.equal(again, rounds.client.context.of(rounds.method.objective).memory)
    assert not torch.equal(again, slot(kept)["memory"])


def test_the_first_global_centroids_are_directions():
    c = slot(Rounds(*ORCHESTRA).server.state)
    assert c.shape == (6, 32)
    torch.testing.assert_close(c.norm(dim=1), torch.ones(6))


def test_the_memory_is_the_clients_own():
    rounds = Rounds(*ORCHESTRA)
    _, kept = rounds.train(0)
    rounds.start(0, 2, kept)
    scope = rounds.client.context.of(rounds.method.objective)
    assert torch.equal(scope.memory, slot(kept)["memory"])
    assert list(slot(kept)) == ["memory"]
    before = clone(kept)
    _, again = rounds.train(0, 2, kept)
    assert same(kept, before)  # a round that fails is computed again from it
    assert not same(again, before)


def test_a_client_has_at_most_one_centroid_per_embedding():
    update, _ = Rounds(*ORCHESTRA, "options.orchestra.memory=3").train(0)
    assert slot(update).shape == (3, 32)


def test_the_server_keeps_centroids_whatever_becomes_of_the_updates():
    options = Orchestra(server_steps=10)
    c, *local = (normalize(torch.randn(4, 8, generator=torch.Generator().manual_seed(k))) for k in range(3))
    fold, expected = CentroidFold(options, c), fit_centroids(c, torch.cat(local), 0.1, 10)
    for client, piece in enumerate(local):
        fold.add(client, piece)
        piece.zero_()  # its memory is used again
    assert torch.equal(fold.close(), expected)


def test_the_target_starts_anew_or_is_kept():
    rounds = Rounds(*ORCHESTRA)
    _, kept = rounds.train(0, 2)
    online = rounds.start(0, 3, kept)
    assert same(dict(rounds.client.copies["orchestra_target"].state_dict()), online)

    keeping = Rounds(*ORCHESTRA, "options.orchestra.target=kept")
    update, kept = keeping.train(0, 2)
    name = "encoder.conv1.weight"
    assert torch.equal(
        slot(kept)["target"][name], keeping.client.copies["orchestra_target"].state_dict()[name]
    )
    assert not torch.equal(slot(kept)["target"][name], update["weights"][name])
    keeping.start(0, 3, kept)
    target = keeping.client.copies["orchestra_target"].state_dict()
    assert all(torch.equal(target[name], value) for name, value in slot(kept)["target"].items())
    assert "its target network" in keeping.method.keeps


def test_centroids_are_checked_at_the_door():
    rounds = Rounds(*ORCHESTRA)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    for piece, reason in (
        (None, "its slice of 'orchestra' is missing"),
        (torch.ones(5, 32), "its slice of 'orchestra' has shape (5, 32), not (1 to 4, 32)"),
        (torch.ones(0, 32), "its slice of 'orchestra' has shape (0, 32), not (1 to 4, 32)"),
        (torch.ones(2, 32), "its slice of 'orchestra' holds rows that are not normalised"),
    ):
        assert reason == rounds.refused({**update, "parts": {"orchestra": piece}})


def test_a_round_without_steps_does_not_shut_the_door(tmp_path):
    run = run_tiny(tmp_path / "run", *ORCHESTRA, "train.rounds=3")
    lines = run.metrics[1:]
    assert [line["clients"] for line in lines] == [4, 4, 4]
    assert [line["loss"] is None for line in lines] == [True, False, False]
