"""EmInspector against a loop as in the released code; the paper's attack is in `tests/test_hostile.py`."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from atoll.aggregation.em_inspector import EmInspector, InspectingFold, inspection_images, suspicion
from atoll.aggregation.update_geometry import Reference
from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.core.tree import clone
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from tests.harness import run_tiny
from tests.rounds import Rounds
from tests.trees import same


def slow_scores(embeddings):
    """One client, one image, one other client at a time."""
    clients, images, _ = embeddings.shape
    scores = [0] * clients
    for image in range(images):
        sums = []
        for one in range(clients):
            total = 0.0
            for other in range(clients):
                a, b = embeddings[one, image].tolist(), embeddings[other, image].tolist()
                total += sum(x * y for x, y in zip(a, b, strict=True))
            sums.append(total)
        mean = np.mean(sums)
        for one in range(clients):
            scores[one] += 1 if sums[one] >= mean else -1
    return scores


@pytest.mark.parametrize("seed", range(10))
def test_the_scores_are_those_of_a_slow_loop(seed):
    draw = torch.Generator().manual_seed(seed)
    embeddings = normalize(torch.randn(6, 5, 4, generator=draw, dtype=torch.float64), dim=-1)
    assert suspicion(embeddings).tolist() == slow_scores(embeddings.numpy())


def test_the_model_is_the_mean_of_those_that_are_not_suspected():
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    images = inspection_images("", 10, rounds.federation.setting.image_shape, rounds.federation.setting.seed)
    encoder, h = rounds.federation.encoder, []
    for update in updates.values():
        encoder.load_state_dict(
            {n.removeprefix("encoder."): w for n, w in update["weights"].items() if "encoder." in n}
        )
        with torch.no_grad():
            h.append(normalize(encoder.eval()(images).double(), dim=1))
    kept = [client for client, score in enumerate(slow_scores(torch.stack(h).numpy())) if score <= 0]
    assert 0 < len(kept) < 4
    rounds.fold(1, clone(updates))
    for name, weight in rounds.server.state["models"]["global"].items():
        rows = torch.stack([updates[client]["weights"][name].double() for client in kept])
        if weight.is_floating_point():
            torch.testing.assert_close(weight, rows.mean(0).to(weight.dtype))


def test_a_client_whose_embeddings_are_not_finite_is_left_out():
    """Zero variances divide by zero, in a model of finite weights; the others are judged as without it."""
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    broken = clone(updates[3])
    for name, weight in broken["weights"].items():
        if name.endswith("running_var"):
            weight.zero_()
        elif name == "encoder.conv1.weight":
            weight.fill_(1e30)
    honest = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector")
    honest.fold(1, {client: clone(updates[client]) for client in range(3)})
    rounds.fold(1, {**{client: clone(updates[client]) for client in range(3)}, 3: broken})
    assert same(rounds.server.state, honest.server.state)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_single_embedding_that_is_not_finite_leaves_its_client_out(place):
    """One of two images overflows in one model; the others' mean is exact, where float32 would lose its ones."""
    images = torch.tensor([[1.0, 0.0], [0.0, 1e38]])
    models = [torch.randn(2, 2, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    scores = slow_scores(normalize(torch.stack([(images @ w.T).double() for w in models]), dim=-1).numpy())
    scores.insert(place, 1)
    models.insert(place, torch.eye(2) * 10)
    kept = [client for client, score in enumerate(scores) if score <= 0]
    assert len(kept) >= 3
    heads = torch.full((7,), 100.0)
    heads[kept] = 1.0
    heads[kept[0]] = 2.0**24
    assert float(inspected(images, models, heads)["head"]) == np.float32(heads[kept].double().mean())


def test_a_single_client_that_passes_gives_the_model():
    """Two of three clients embed the image alike."""
    models = [torch.eye(2), torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])]
    found = inspected(torch.tensor([[1.0, 0.0]]), models, torch.tensor([1.0, 2.0, 5.0]))
    assert torch.equal(found["encoder.weight"], models[2])
    assert float(found["head"]) == 5.0


def inspected(images, models, heads):
    """The global model after a round of clients whose encoder is a matrix and whose head is a number."""
    current = {"encoder.weight": torch.zeros(2, 2), "head": torch.zeros(1)}
    fold = InspectingFold(current, torch.nn.Linear(2, 2, bias=False), images, None)
    for client, weight in enumerate(models):
        update = {"weights": {"encoder.weight": weight, "head": heads[[client]]}}
        fold.add(client, update, Reference(current).measure(update["weights"]))
    return fold.close()["global"]


def test_statistics_that_clients_do_not_send_are_those_that_they_received():
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector", "train.bn_buffers=leave")
    updates = {client: rounds.train(client)[0] for client in range(3)}
    assert not any("running" in name for name in updates[0]["weights"])
    before = clone(rounds.server.state["models"]["global"])
    rounds.fold(1, updates)
    after = rounds.server.state["models"]["global"]
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name)
    assert not torch.equal(after["encoder.conv1.weight"], before["encoder.conv1.weight"])


def test_without_a_client_that_passes_the_model_is_unchanged():
    """Two equal clients: each is as similar as the mean, and so suspected."""
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector")
    before = clone(rounds.server.state["models"]["global"])
    update = rounds.train(0)[0]
    fold = EmInspector().open(rounds.server.state["models"], rounds.federation.setting, 1, None)
    for client in range(2):
        fold.add(client, clone(update), Reference(before).measure(update["weights"]))
    after = fold.close()["global"]
    floats = {name: weight for name, weight in before.items() if weight.is_floating_point()}
    assert same({name: after[name] for name in floats}, floats)


def test_inspection_images_are_those_of_the_table_or_noise():
    noise = inspection_images("", 3, (1, 8, 8), 0)
    assert noise.shape == (3, 1, 8, 8)
    digits = inspection_images("source = 'digits'", 3, (1, 8, 8), 0)
    assert digits.shape == (3, 1, 8, 8)
    assert 0 <= float(digits.min()) < float(digits.max()) <= 1
    assert not torch.equal(noise, digits)


@pytest.mark.parametrize("seed", [0, 3])
def test_inspection_images_are_a_draw_of_the_runs_seed(seed):
    """Of the training images of the table, in [0, 1] and not normalised; noise without a table."""
    draws = stream(seed, "inspection")
    assert torch.equal(inspection_images("", 4, (1, 8, 8), seed), torch.rand(4, 1, 8, 8, generator=draws))
    setting = Rounds("method.name=fed_simclr", f"seed={seed}").federation.setting
    found = EmInspector(data={"source": "digits", "limit": 40}, size=12)._images(setting)
    options = DataOptions(source="digits", limit=40, image_size=8, channels=1)
    pixels = load_data(options, seed).train.images
    chosen = torch.randperm(len(pixels), generator=stream(seed, "inspection"))[:12]
    torch.testing.assert_close(found, pixels.gather(chosen).float() / 255, rtol=0, atol=1e-7)
    other = inspection_images("source = 'digits'\nlimit = 40", 12, (1, 8, 8), seed + 1)
    assert not torch.equal(found, other)


@pytest.mark.parametrize("partial", ["model.freeze=['encoder.conv1.*']", "method.share=['encoder.layer1.*']"])
def test_parts_of_encoders_are_refused(partial):
    with pytest.raises(UserError, match="'em_inspector' embeds images with the clients' encoders, of which"):
        Rounds("method.name=fed_simclr", "method.aggregation=em_inspector", partial)


def test_two_clients_are_too_few_to_tell_one_from_the_others():
    settings = ("method.name=fed_simclr", "method.aggregation=em_inspector")
    with pytest.raises(
        UserError, match="'em_inspector' needs at least 3 updates in a round, and there are 2"
    ):
        Rounds(*settings, "train.participation=0.5")
    assert EmInspector().least_updates == 3


def test_a_frozen_or_personal_head_is_no_part_of_the_encoder():
    head = ("model.freeze=['projector.0.*']", "method.share=['encoder.*']")
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector", *head)
    rounds.fold(1, {client: rounds.train(client)[0] for client in range(2)})


def test_a_mistake_in_the_inspection_data_shows_before_the_first_round(tmp_path):
    data = "options.em_inspector.data={source='folder', path='/no/such/folder'}"
    with pytest.raises(UserError, match="/no/such/folder"):
        run_tiny(tmp_path, "method.name=fed_simclr", "method.aggregation=em_inspector", data)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_global_random_state_does_not_change():
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=em_inspector")
    torch.manual_seed(5)
    EmInspector().open(rounds.server.state["models"], rounds.federation.setting, 1, None)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
