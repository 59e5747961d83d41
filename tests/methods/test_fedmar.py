import math

import pytest
import torch

from atoll.aggregation.update_geometry import UpdateGeometry
from atoll.core.errors import UserError
from atoll.methods.fedmar import MAR as Objective
from atoll.methods.fedmar import RowMeans
from atoll.models.vit import patchify, random_masking
from tests.functional import oracles
from tests.harness import final_models, run_tiny
from tests.rounds import Fixed, Rounds
from tests.steps import federation
from tests.trees import same

VIT = (
    "model.encoder=vit-tiny",
    "model.stem=cifar",
    "model.width=64",
    "model.depth=1",
    "model.decoder_depth=1",
)
MAR = ("method.name=fed_mar", *VIT, "train.optimizer=sgd", "train.momentum=0", "train.lr=1e-3")
WIDTH = (1 + 4) * 64  # 8×8 digits have 16 patches, of which 4 are visible


def slot(tree):
    return tree["parts"].get("mar")


def embeddings(rounds, client, round, weights=None):
    """Tokens of each batch's visible patches and the error of the reconstruction, with the weights of the start."""
    rounds.start(client, round)
    masks = rounds.client.context.stream("mae-masks")
    encoder, decoder = (rounds.federation.networks[name] for name in ("encoder", "mae_decoder"))
    found = []
    for batch in rounds.federation.client_data(client).batches(round, 1, ("image",)):
        images = batch.images["image"]
        keep, mask = random_masking(len(images), 16, masks)
        with torch.no_grad():
            tokens = encoder.forward_masked(images, keep)
            error = (decoder(tokens, keep) - patchify(images, 2)).square().mean(dim=2)
        found.append((tokens.reshape(len(tokens), -1), float((error * mask).sum() / mask.sum())))
    return found


def test_row_means_are_means_of_the_matrices_that_have_the_row():
    means = RowMeans()
    assert means.mean() is None
    for matrix in ([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [[5.0, 0.0]]):
        means.add(torch.tensor(matrix))
    assert means.mean().tolist() == [[3.0, 2.0], [5.0, 6.0]]


def test_the_first_round_is_fed_mae():
    aligned, plain = Rounds(*MAR), Rounds(*MAR, "method.name=fed_mae")
    plain.server.state["models"] = aligned.server.state["models"]  # decoders draw their weights by objective
    assert same(aligned.train(0)[0]["weights"], plain.train(0)[0]["weights"])


def test_a_client_sends_the_mean_of_its_batches_row_by_row():
    rounds = Rounds(*MAR, "train.lr=1e-12", "train.batch_size=15")
    update, _ = rounds.train(0)
    first, second, third = (tokens for tokens, _ in embeddings(rounds, 0, 1))  # 15, 15 and 10 of 40 images
    sent = slot(update)
    assert sent.shape == (15, WIDTH)
    torch.testing.assert_close(sent[:10], (first[:10] + second[:10] + third) / 3)
    torch.testing.assert_close(sent[10:], (first[10:] + second[10:]) / 2)


def test_the_loss_is_aligned_with_the_mean_over_clients():
    """Round 2, of γ_max − (γ_max − γ_min)/4 with Ω = 2·2, against slow loops."""
    rounds = Rounds(
        *MAR, "train.lr=1e-12", "train.batch_size=40", "options.mar.first_weight=5", "train.rounds=4"
    )
    updates = {client: rounds.train(client)[0] for client in (0, 1, 3)}
    rounds.fold(1, updates)
    mean = sum(slot(update).double() for update in updates.values()) / 3
    for client, gamma in ((0, 0.001 + 4.999 * 0.5 * (1 + math.cos(math.pi / 4))), (2, 5.0)):
        ((tokens, error),) = embeddings(rounds, client, 2)
        tokens = tokens.double()
        aligned = oracles.mmd(tokens, mean, oracles.mean_distance(tokens))
        update, _ = rounds.train(client, 2)
        assert update["losses"]["mar"] == pytest.approx(error + gamma * aligned, rel=1e-4)


@pytest.mark.parametrize(("images", "others"), [(40, 2), (40, 30), (40, 1), (1, 30)])
def test_a_batch_is_aligned_with_all_rows_of_the_mean_if_both_have_two(images, others):
    """40 images are batches of 19, 19 and 2; a batch of one image is that of a client with no other."""
    rounds = Rounds(*MAR, "train.lr=1e-12", "train.batch_size=19", "options.mar.first_weight=5")
    rounds.federation.partition.clients[0] = rounds.federation.partition.clients[0][:images]
    draws = torch.Generator().manual_seed(0)
    mean = torch.randn(others, WIDTH, generator=draws)
    rounds.server.state["parts"]["mar"] = {"embeddings": mean, "taken": {}}
    expected = []
    for tokens, error in embeddings(rounds, 0, 2):
        z = tokens.double()
        if min(len(z), others) >= 2:
            error += 5 * oracles.mmd(z, mean.double(), oracles.mean_distance(z))
        expected.append(error)
    rounds.start(0, 2)
    batches = rounds.federation.client_data(0).batches(2, 1, ("image",))
    losses = [rounds.client.step(batch).item() for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_gamma_depends_on_the_rounds_of_the_run_unless_a_horizon_or_a_constant_is_given():
    assert Objective().follows_rounds
    assert not Objective(horizon=5).follows_rounds
    assert not Objective(first_weight=0.1, last_weight=0.1).follows_rounds


def test_gamma_falls_with_the_rounds_of_a_client():
    made = federation(*MAR, "train.rounds=10", "train.participation=0.5")
    objective = made.recipe.composed.objective
    falls = [objective.gamma(taken, made.setting) for taken in range(7)]  # Ω = 10 · 2/4
    expected = [0.001 + 0.099 * 0.5 * (1 + math.cos(math.pi * w / 5)) for w in range(6)]
    assert falls == pytest.approx([*expected, 0.001])
    short = federation(*MAR, "options.mar.horizon=1")
    assert short.recipe.composed.objective.gamma(1, short.setting) == pytest.approx(0.001)


def test_the_alignment_moves_the_encoder():
    def step(*settings):
        rounds = Rounds(*MAR, "train.batch_size=40", *settings)
        rounds.fold(1, {client: rounds.train(client)[0] for client in range(4)})
        return rounds.train(0, 2)[0]["weights"]["encoder.embed.weight"]

    none = step("options.mar.first_weight=0", "options.mar.last_weight=0")
    assert not torch.equal(step("options.mar.first_weight=5"), none)


def test_only_clients_whose_update_counts_come_nearer_to_the_end():
    rounds = Rounds(*MAR)
    update, _ = rounds.train(0)
    rounds.fold(1, {0: update})
    rounds.fold(2, {0: update, 1: update})
    assert [slot(rounds.message(client, 3))["taken"] for client in range(3)] == [2, 1, 0]
    before = slot(rounds.message(0, 3))["embeddings"]
    rounds.fold(3, {})
    assert torch.equal(slot(rounds.message(0, 4))["embeddings"], before)


def test_embeddings_of_another_form_are_refused():
    rounds = Rounds(*MAR)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    for wrong, words in (
        (torch.ones(21, WIDTH), "has shape"),
        (torch.ones(20, WIDTH - 1), "has shape"),
        (torch.full((20, WIDTH), math.inf), "not finite"),
    ):
        assert words in rounds.refused({**update, "parts": {"mar": wrong}})


def test_embeddings_far_beyond_those_of_earlier_rounds_are_refused():
    """One slice of 1e20 would stay in z̄, and no client could train with it again; fewer rows are no way round."""
    rounds = Rounds(*MAR)
    updates = {client: rounds.train(client)[0] for client in range(4)}

    def with_rows(rows):
        checks = rounds.server.checks
        return checks.examine({**updates[0], "parts": {"mar": rows}}, rounds.server.state["models"])

    assert "the norm of its slice of 'mar' is" in with_rows(1e20 * torch.randn(20, WIDTH))
    rounds.server.checks.open_round()
    assert rounds.server.run_round(Fixed(updates)).clients == 4
    assert isinstance(with_rows(slot(updates[1])[:1]), UpdateGeometry)
    assert "(train.norm_factor)" in with_rows(20 * slot(updates[0])[:1])


def test_peers_hear_their_neighbours_alone():
    """On a ring of four, client 0 hears 3, 0 and 1, but not 2."""
    rounds = Rounds(*MAR, "method.name=dec_mar")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    assert slot(rounds.message(0, 1)) is None
    rounds.fold(1, updates)
    for client in range(4):
        near = [slot(updates[k]) for k in range(4) if (k - client) % 4 != 2]
        torch.testing.assert_close(slot(rounds.message(client, 2))["embeddings"], sum(near) / 3)
        assert slot(rounds.message(client, 2))["taken"] == 1
    rounds.fold(2, {2: updates[2]})  # nothing new reaches client 0
    before = sum(slot(updates[k]) for k in (0, 1, 3)) / 3
    torch.testing.assert_close(slot(rounds.message(0, 3))["embeddings"], before)
    assert torch.equal(slot(rounds.message(1, 3))["embeddings"], slot(updates[2]))
    assert [slot(rounds.message(client, 3))["taken"] for client in range(4)] == [1, 1, 2, 1]


def test_on_a_complete_graph_peers_hear_what_a_server_would_send():
    peers = Rounds(*MAR, "method.name=dec_mar", "options.gossip.topology=complete")
    served = Rounds(*MAR)
    updates = {client: served.train(client)[0] for client in range(4)}
    for rounds in (peers, served):
        rounds.fold(1, updates)
    assert torch.equal(slot(peers.message(2, 2))["embeddings"], slot(served.message(2, 2))["embeddings"])


def test_peers_resume_to_the_same_bytes(tmp_path):
    settings = (*MAR, "method.name=dec_mar", "train.rounds=3", "options.mar.horizon=3")
    whole = final_models(run_tiny(tmp_path / "whole", *settings))
    run_tiny(tmp_path / "parts", *settings, "train.rounds=2")
    assert same(final_models(run_tiny(tmp_path / "parts", *settings, resume=True)), whole)


def test_embeddings_are_refused_where_only_weights_leave_and_there_is_a_server():
    with pytest.raises(UserError, match="'secure_sum' covers weights only, and 'mar' sends more than that"):
        federation(*MAR, "method.aggregation=secure_sum", "train.bn_buffers=leave")
    with pytest.raises(UserError, match=r"'mar' masks patches .* set model\.encoder = 'vit-tiny'"):
        federation("method.name=fed_mar", "model.encoder=resnet-narrow")
