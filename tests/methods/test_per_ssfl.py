import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.tree import load
from atoll.methods.per_ssfl import PREFIX, PersonalNetworks
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.steps import Steps, federation
from tests.trees import same

PER_SSFL = ("method.name=per_ssfl", "model.projector_dim=6")


def away(networks):
    """Move the personal networks away from the global ones, as a round of training does."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in networks["personal"].parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draws)


def outputs(networks, images):
    """Embeddings and predictions of some images, in float64."""
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](images))
        return z.double(), networks["predictor"](z).double()


def distance(q, z):
    """SimSiam's D, row by row."""
    return -sum(float(a @ b / (a.norm() * b.norm())) for a, b in zip(q, z, strict=True)) / len(q)


@pytest.mark.parametrize("consensus", [0.0, 0.7])
@pytest.mark.parametrize("views", ["separate", "joint"])
def test_the_loss_is_simsiams_twice_and_the_distance_to_the_global_embeddings(consensus, views):
    settings = (f"options.per_ssfl.consensus={consensus}", f"train.views_batch={views}")
    steps = Steps(*PER_SSFL, *settings)
    away(steps.networks)
    batch = steps.batch()
    images = [batch.images["view1"], batch.images["view2"]]

    def both(networks):
        if views == "separate":
            return [outputs(networks, one) for one in images]
        z, q = outputs(networks, torch.cat(images))
        return [(z[: len(z) // 2], q[: len(z) // 2]), (z[len(z) // 2 :], q[len(z) // 2 :])]

    (z1, q1), (z2, q2) = both(steps.networks)
    (own_z1, own_q1), (own_z2, own_q2) = both(steps.networks["personal"])
    expected = (distance(own_q1, own_z2) + distance(own_q2, own_z1)) / 2
    expected += consensus * (distance(own_q1, z1) + distance(own_q2, z2)) / 2
    total = steps.client.step(batch).item()
    losses = {name: values[-1].item() for name, values in steps.client._losses.items()}
    assert losses["per_ssfl"] == pytest.approx(expected, rel=1e-4)
    assert losses["simsiam"] == pytest.approx((distance(q1, z2) + distance(q2, z1)) / 2, rel=1e-4)
    assert total == pytest.approx(losses["simsiam"] + losses["per_ssfl"], rel=1e-5)
    assert abs(distance(own_q1, z1) - distance(own_q1, own_z2)) > 1e-3


def test_the_global_networks_train_as_with_fedavg():
    """To the bit: no gradient of the personal loss reaches them."""
    update, _ = Rounds(*PER_SSFL).train(0)
    plain, _ = Rounds("method.name=fed_simsiam", "model.projector_dim=6").train(0)
    assert same(update["weights"], plain["weights"])


def test_the_distance_moves_the_personal_networks_alone():
    near, far = (Rounds(*PER_SSFL, f"options.per_ssfl.consensus={consensus}") for consensus in (5, 0))
    (update, kept), (other, other_kept) = near.train(0), far.train(0)
    assert same(update["weights"], other["weights"])
    moved = [name for name, w in kept["personal"].items() if not torch.equal(w, other_kept["personal"][name])]
    assert {name.split(".")[1] for name in moved} == {"encoder", "projector", "predictor"}


def test_personal_networks_start_as_the_download_and_stay_with_the_client():
    rounds = Rounds(*PER_SSFL)
    first = rounds.start(0)
    personal = {name for name in first if name.startswith(PREFIX)}
    assert {name.removeprefix(PREFIX) for name in personal} == first.keys() - personal
    assert all(torch.equal(first[name], first[name.removeprefix(PREFIX)]) for name in personal)
    updates, kept = {}, {}
    for client in (0, 1):
        updates[client], kept[client] = rounds.train(client)
        assert kept[client]["personal"].keys() == personal
        assert not personal & updates[client]["weights"].keys()
    assert not same(kept[0], kept[1])
    rounds.fold(1, updates)
    message = rounds.message(0, 2)
    assert not personal & message["models"]["global"].keys()
    start = rounds.start(0, 2, kept[0])
    assert same({name: start[name] for name in sorted(personal)}, kept[0]["personal"])
    shared = rounds.server.state["models"]["global"]
    assert all(torch.equal(start[name], shared[name]) for name in shared)
    late = rounds.start(2, 2)  # it takes part for the first time
    assert all(torch.equal(late[name], shared[name.removeprefix(PREFIX)]) for name in personal)


def test_each_client_ends_with_its_personal_networks(tmp_path):
    from safetensors.torch import load_file

    run = run_tiny(tmp_path / "run", *PER_SSFL)
    evaluation = run.read_json("evaluation.json")
    assert evaluation["clients_by_model"] == {f"client-{k}": 1 for k in range(4)}
    kept = load(run.checkpoints / "clients/000002/000002.safetensors")["personal"]
    encoder = load_file(run.folder / "encoder-client-2.safetensors")
    assert same(encoder, {name: kept[f"{PREFIX}encoder.{name}"] for name in encoder})
    assert not any(name.startswith(PREFIX) for name in final_models(run)["global"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("model.freeze=['encoder.conv1.*']",), "without model.freeze"),
        (("method.merge=replace",), "method.merge = 'personal_networks'"),
    ],
)
def test_what_cannot_work_is_refused(settings, reason):
    with pytest.raises(UserError, match=reason):
        federation(*PER_SSFL, *settings)


def test_term_and_merge_go_with_an_objective_without_a_predictor(tmp_path):
    """The personal predictor then has no place in the model that is evaluated."""
    parts = ('method.terms=["per_ssfl"]', "method.merge=personal_networks")
    run = run_tiny(tmp_path / "run", "method.name=fed_simclr", *parts, "train.rounds=2")
    assert not any(name.startswith("predictor.") for name in final_models(run)["global"])
    assert all(0 <= value <= 1 for key, value in run.results.items() if key.endswith("/accuracy"))


@pytest.mark.parametrize("named", [("presonal",), "personal"])
def test_a_local_head_that_no_component_adds_is_refused(monkeypatch, named):
    """It would be sent."""
    monkeypatch.setattr(PersonalNetworks, "local_heads", named)
    with pytest.raises(UserError, match=f"local_heads names '{named[0]}', and no component adds"):
        federation(*PER_SSFL)
