import json

import pytest
import torch
from torch.nn.functional import normalize

import atoll.commands.run as launching
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.components.base import Trained
from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.core.run_folder import Run
from atoll.core.tree import clone
from atoll.data.images import StoredPixels
from atoll.methods.fedca import Alignment, DictionaryContrast, DictionaryFold
from atoll.recipe.prerequisites import prerequisite_recipes
from tests.functional import oracles
from tests.harness import run_tiny, tiny
from tests.rounds import Rounds
from tests.steps import check_gradient, federation

DICTIONARY = ("method.name=fedca", "method.terms=[]", "options.fedca_dictionary.size=10")
PUBLIC = (
    "options.fedca_alignment.data.source=digits",
    "options.fedca_alignment.size=50",
    "options.fedca_alignment.train_epochs=2",
)


def slot(tree):
    return tree["parts"]["fedca_dictionary"]


def plain_embeddings(rounds, client):
    """z of a client's samples as they are, by the networks as they stand, in evaluation mode."""
    data, networks = rounds.federation.client_data(client), rounds.federation.networks.eval()
    with torch.no_grad():
        z = networks["projector"](networks["encoder"](data.pick(torch.arange(data.num_samples))))
    networks.train()
    return z


# The dictionary.


def test_projections_are_ensembled_over_a_clients_rounds():
    rounds = Rounds(*DICTIONARY)
    _, kept = rounds.train(0)
    first = plain_embeddings(rounds, 0)
    torch.testing.assert_close(slot(kept), 0.5 * first)
    _, again = rounds.train(0, 2, kept)
    torch.testing.assert_close(slot(again), 0.25 * first + 0.5 * plain_embeddings(rounds, 0))


def test_the_numbers_of_two_ensembled_rounds():
    """α = 0.5, z = (1, 0) and then (0, 1): Z = (0.25, 0.5), Ẑ = (0.4472136, 0.8944272)."""
    rounds = Rounds(*DICTIONARY, "options.fedca_dictionary.sampling=server")
    message = {**rounds.message(0, 1), "epochs": 0}
    kept = None
    for round, z in ((1, (1.0, 0.0)), (2, (0.0, 1.0))):
        projector = rounds.federation.networks["projector"]
        given = torch.tensor(z)
        hook = projector.register_forward_hook(lambda _, __, out, given=given: given.expand(len(out), 2))
        update, kept = rounds.train(0, round, kept, message={**message, "round": round})
        hook.remove()
    torch.testing.assert_close(slot(kept), torch.tensor([[0.25, 0.5]]).expand(40, 2))
    torch.testing.assert_close(slot(update), torch.tensor([[0.44721360, 0.89442719]]).expand(40, 2))


def test_temporal_ensembling_can_be_off_and_then_nothing_is_kept():
    rounds = Rounds(
        *DICTIONARY, "options.fedca_dictionary.momentum=0.0", "options.fedca_dictionary.sampling=server"
    )
    update, kept = rounds.train(0)
    torch.testing.assert_close(slot(update), normalize(plain_embeddings(rounds, 0)))
    assert kept is None
    assert rounds.method.keeps == ()


def test_a_client_sends_its_share_at_random():
    rounds = Rounds(*DICTIONARY)
    update, kept = rounds.train(0)
    rows, all_rows = slot(update), normalize(slot(kept))
    assert rows.shape == (3, 32)  # ⌈10 / 4⌉
    places = [int((all_rows - row).norm(dim=1).argmin()) for row in rows]
    torch.testing.assert_close(rows, all_rows[places])
    assert len(set(places)) == 3
    other, _ = rounds.train(0, 2, kept)
    assert slot(other).shape == rows.shape


def test_the_dictionary_holds_m_rows_in_client_order():
    rounds = Rounds(*DICTIONARY)
    updates = {client: rounds.train(client)[0] for client in range(4)}
    rounds.fold(1, updates)
    state = rounds.server.state["parts"]["fedca_dictionary"]
    assert state["rows"].shape == (10, 32)
    assert state["owners"].tolist() == sorted(state["owners"].tolist())
    assert set(state["owners"].tolist()) == {0, 1, 2, 3}
    for row, owner in zip(state["rows"], state["owners"], strict=True):
        assert (slot(updates[int(owner)]) == row).all(dim=1).any()
    assert torch.equal(slot(rounds.message(1, 2))["rows"], state["rows"])


def test_the_server_may_draw_from_all():
    draws = torch.Generator().manual_seed(0)
    fold = DictionaryFold(5, draws)
    for client in (0, 1):
        fold.add(client, torch.arange(6.0).reshape(6, 1) + 10 * client)
    drawn = fold.close()
    assert drawn["rows"].shape == (5, 1)
    assert drawn["rows"].flatten().tolist() == sorted(drawn["rows"].flatten().tolist())
    assert (drawn["rows"].flatten() // 10).tolist() == drawn["owners"].tolist()


@pytest.mark.parametrize("size", [4, 5, 6])
def test_the_dictionary_has_at_most_m_rows_whatever_becomes_of_the_updates(size):
    fold = DictionaryFold(size, torch.Generator().manual_seed(0))
    for client in (0, 1):
        piece = torch.tensor([[1.0], [2.0], [3.0]])[client:] + 10 * client
        fold.add(client, piece)
        piece.zero_()  # its memory is used again
    rows = fold.close()["rows"].flatten().tolist()
    assert len(rows) == min(size, 5)
    assert set(rows) <= {1.0, 2.0, 3.0, 12.0, 13.0}


def test_a_client_that_starts_anew_ensembles_anew():
    """FedEMA resets a client that missed a round."""
    rounds = Rounds(*DICTIONARY, "method.merge=fedema")
    _, kept = rounds.train(0)
    _, again = rounds.train(0, 3, kept)
    torch.testing.assert_close(slot(again), 0.5 * plain_embeddings(rounds, 0))


def test_the_largest_client_may_send_all_its_projections():
    rounds = Rounds(*DICTIONARY, *SERVER, "partition.kind=dirichlet")
    sizes = rounds.federation.setting.sizes
    assert min(sizes) < max(sizes)
    for client, size in enumerate(sizes):
        update, _ = rounds.train(client)
        assert slot(update).shape == (size, 32)
        assert rounds.refused(update) is None


def test_a_client_may_leave_out_its_own_rows():
    rounds = Rounds(*DICTIONARY, "options.fedca_dictionary.exclude_own=true")
    rounds.fold(1, {client: rounds.train(client)[0] for client in range(4)})
    state = rounds.server.state["parts"]["fedca_dictionary"]
    assert torch.equal(slot(rounds.message(2, 2))["rows"], state["rows"][state["owners"] != 2])


def places(rows, all_rows):
    """Where each row stands among others."""
    return [int((all_rows - row).norm(dim=1).argmin()) for row in rows]


def test_the_rows_that_a_client_sends_are_a_draw_of_its_seed_round_and_id():
    """The draw as documented: (seed, purpose, round, client), and another one if any of these differs."""
    sent = {}
    for seed in (0, 5):
        rounds = Rounds(*DICTIONARY, f"seed={seed}")
        for client, round in ((0, 1), (1, 1), (0, 2)):
            message = {**rounds.message(client, 1), "round": round, "epochs": 0}
            update, kept = rounds.train(client, round, message=message)
            draws = stream(seed, "fedca-rows", round, client)
            expected = torch.randperm(40, generator=draws)[:3].tolist()
            sent[seed, client, round] = places(slot(update), normalize(slot(kept)))
            assert sent[seed, client, round] == expected
    assert len({tuple(chosen) for chosen in sent.values()}) == len(sent)


def test_the_servers_rows_are_a_draw_of_its_seed_and_round():
    drawn = {}
    for seed in (0, 5):
        rounds = Rounds(*DICTIONARY, *SERVER, f"seed={seed}")
        updates = {client: rounds.train(client)[0] for client in range(4)}
        everything = torch.cat([slot(update) for update in updates.values()])
        for round in (1, 2):
            rounds.fold(round, updates)
            draws = stream(seed, "fedca-dictionary", round)
            expected = sorted(torch.randperm(160, generator=draws)[:10].tolist())
            state = rounds.server.state["parts"]["fedca_dictionary"]
            torch.testing.assert_close(state["rows"], everything[expected])
            assert state["owners"].tolist() == [place // 40 for place in expected]
            drawn[seed, round] = tuple(expected)
    assert len(set(drawn.values())) == 4


SERVER = ("options.fedca_dictionary.momentum=0.0", "options.fedca_dictionary.sampling=server")


@pytest.mark.parametrize(("images", "passes"), [("view", 1), ("views", 2)])
def test_rows_may_be_of_views(images, passes):
    rounds = Rounds(*DICTIONARY, *SERVER, f"options.fedca_dictionary.row_images={images}")
    update, _ = rounds.train(0)
    data, networks = rounds.federation.client_data(0), rounds.federation.networks.eval()
    draws = stream(rounds.federation.setting.seed, "fedca-row-views", 1, 0)
    z = torch.zeros(data.num_samples, 32)
    with torch.no_grad():
        for _ in range(passes):
            for rows in torch.arange(data.num_samples).split(20):  # the training's batches
                z[rows] += networks["projector"](networks["encoder"](data.pick(rows, draws))) / passes
    networks.train()
    torch.testing.assert_close(slot(update), normalize(z))
    assert not torch.allclose(slot(update), normalize(plain_embeddings(rounds, 0)), atol=1e-2)


def test_rows_may_be_of_the_downloaded_model():
    rounds = Rounds(*DICTIONARY, *SERVER, "options.fedca_dictionary.row_model=downloaded")
    downloaded = plain_embeddings(rounds, 0)
    update, _ = rounds.train(0)
    torch.testing.assert_close(slot(update), normalize(downloaded))
    assert not torch.allclose(slot(update), normalize(plain_embeddings(rounds, 0)), atol=1e-2)


@pytest.mark.parametrize(("round", "temperature"), [(1, 0.5), (2, 0.5), (2, 0.2)])
def test_the_local_loss_contrasts_with_the_dictionary_which_is_empty_in_round_1(round, temperature):
    rounds = Rounds(*DICTIONARY, f"options.fedca_dictionary.temperature={temperature}")
    rows = torch.zeros(0, 32)
    if round == 2:
        rounds.fold(1, {client: rounds.train(client)[0] for client in range(4)})
        rows = rounds.server.state["parts"]["fedca_dictionary"]["rows"]
    rounds.start(0, round)
    batch = next(rounds.federation.client_data(0).batches(round, 1, rounds.method.images))
    loss = rounds.client.step(batch)
    networks = rounds.federation.networks
    with torch.no_grad():
        z1, z2 = (networks["projector"](networks["encoder"](batch.images[v])) for v in ("view1", "view2"))
    expected = oracles.dictionary_contrast(z1.double(), z2.double(), rows.double(), temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_without_a_dictionary_no_projection_leaves():
    rounds = Rounds(*DICTIONARY[:2], "options.fedca_dictionary.size=0")
    update, kept = rounds.train(0)
    assert update["parts"] == {}
    assert kept is None
    assert "projections" not in " ".join(rounds.method.egress)
    assert "projections" in " ".join(Rounds(*DICTIONARY).method.egress)


def test_projections_are_checked_at_the_door():
    rounds = Rounds(*DICTIONARY)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    long, wide, none = clone(update), clone(update), clone(update)
    long["parts"]["fedca_dictionary"] *= 2
    wide["parts"]["fedca_dictionary"] = torch.ones(3, 5)
    del none["parts"]["fedca_dictionary"]
    assert rounds.refused(long) == "its slice of 'fedca_dictionary' holds rows that are not normalised"
    assert rounds.refused(wide) == "its slice of 'fedca_dictionary' has shape (3, 5), not (1 to 10, 32)"
    assert rounds.refused(none) == "its slice of 'fedca_dictionary' is missing"


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"size": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=r"options\.fedca_dictionary\.(momentum|size) is"):
        DictionaryContrast(**options)


# The alignment.


def aligned(*options, freeze=()):
    """A client after a step with an alignment model, its batch, and the frozen model's networks."""
    settings = ("method.name=fedca", *PUBLIC, *(f"options.fedca_alignment.{option}" for option in options))
    settings = (*settings, f"model.freeze={list(freeze)}")
    base = federation("method.name=fed_simclr", "seed=7")
    pixels = base.splits.train.images.gather(torch.arange(30))
    trained = Trained(base.initial_weights(), StoredPixels(pixels))
    rounds = Rounds(*settings, prerequisites={"alignment": trained})
    rounds.start(0)
    batch = next(rounds.federation.client_data(0).batches(1, 1, rounds.method.images))
    rounds.client.step(batch)
    known = rounds.federation.views.plain(pixels)
    assert all((known == image).flatten(1).all(dim=1).any() for image in batch.images["public"])
    return rounds, batch, base.networks.eval()


def test_public_images_are_drawn_anew_in_each_step_by_seed_round_and_client():
    base = federation("method.name=fed_simclr")
    pixels = base.splits.train.images.gather(torch.arange(60))
    trained = Trained(base.initial_weights(), StoredPixels(pixels))
    seen = {}
    for seed in (0, 5):
        rounds = Rounds("method.name=fedca", *PUBLIC, f"seed={seed}", prerequisites={"alignment": trained})
        public = rounds.server.constants["fedca_alignment"]["images"]
        chosen = torch.randperm(60, generator=stream(seed, "fedca-public"))[:50]
        assert torch.equal(public, pixels[chosen])  # at most `size` of them
        images = rounds.federation.views.plain(public)
        for client, round in ((0, 1), (1, 1), (0, 2)):
            rounds.start(client, round, message={**rounds.message(client, 1), "round": round})
            draws = stream(seed, "fedca-public", round, client)
            for step, batch in enumerate(rounds.federation.client_data(client).batches(round, 1, ())):
                (alignment,) = rounds.method.terms
                drawn = alignment.inputs(rounds.client.context, batch)["public"]
                expected = torch.randperm(50, generator=draws)[:20]
                assert torch.equal(drawn, images[expected])
                seen[seed, client, round, step] = chosen[expected].sort().values
    assert len({tuple(rows.tolist()) for rows in seen.values()}) == 2 * 3 * 2


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("mode", "reduction"), [("train", "sum"), ("train", "mean"), ("batch", "sum"), ("running", "mean")]
)
def test_the_alignment_loss_is_the_squared_distance_on_public_images(mode, reduction, normalised):
    rounds, batch, frozen = aligned(
        f"reduction={reduction}", f"batch_norm={mode}", f"normalise={str(normalised).lower()}"
    )
    loss = rounds.client._losses["fedca_alignment"][0].item()
    public = batch.images["public"]
    assert public.shape == batch.images["view1"].shape
    networks = rounds.federation.networks
    assert all(module.training for module in networks.modules())
    networks.train(mode != "running")
    expected = 0.0
    with torch.no_grad():
        ours, theirs = networks["encoder"](public), frozen["encoder"](public)
        pairs = ((ours, theirs), (networks["projector"](ours), frozen["projector"](theirs)))
        for one, other in pairs:
            for a, b in zip(one.double(), other.double(), strict=True):
                if normalised:
                    a, b = a / (a @ a) ** 0.5, b / (b @ b) ** 0.5
                expected += float((a - b) @ (a - b))
    networks.train()
    frozen.train()
    assert loss == pytest.approx(expected / (1 if reduction == "sum" else len(public)), rel=1e-4)


def test_the_alignment_moves_the_local_networks():
    rounds, batch, frozen = aligned()

    def outputs(networks, images):
        h = networks["encoder"](images.double())
        return h, networks["projector"](h)

    @torch.no_grad()
    def loss(moved):
        (_, z1), (_, z2) = (outputs(moved, batch.images[view]) for view in ("view1", "view2"))
        total = oracles.dictionary_contrast(z1, z2, torch.zeros(0, 32), 0.5)
        pairs = zip(
            *(outputs(each, batch.images["public"]) for each in (moved, frozen.double())), strict=True
        )
        return total + 0.01 * sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)

    check_gradient(rounds.federation.networks, rounds.client.step(batch), loss)
    frozen.float().train()


def test_distances_are_in_float32_for_outputs_of_less_precision():
    a, b = (torch.randn(3, 50, generator=torch.Generator().manual_seed(k)).bfloat16() for k in (0, 1))
    found = Alignment(data={"source": "digits"})._distance(a, b)
    expected = [oracles.squared(x, y) for x, y in zip(a.double().tolist(), b.double().tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(("mode", "passes"), [("train", 3), ("batch", 2), ("running", 2)])
def test_public_images_enter_the_running_statistics_only_in_training_mode(mode, passes):
    rounds, batch, frozen = aligned(f"batch_norm={mode}")
    frozen.train()
    for steps in (1, 2):
        state = rounds.federation.networks.state_dict()
        counts = {int(value) for name, value in state.items() if "num_batches" in name}
        assert counts == {steps * passes}
        rounds.client.step(batch)


@pytest.mark.parametrize("mode", ["train", "batch", "running"])
def test_public_images_do_not_enter_the_statistics_of_frozen_norms(mode):
    rounds, _, _ = aligned(f"batch_norm={mode}", freeze=("encoder.bn1.*",))
    norm = rounds.federation.networks["encoder"].bn1
    assert not norm.training
    assert int(norm.num_batches_tracked) == 0


def test_public_images_must_be_named():
    with pytest.raises(UserError, match=r"on public images; name them in one place"):
        federation("method.name=fedca")
    with pytest.raises(UserError, match=r"name them in one place"):
        federation("method.name=fedca", *PUBLIC, "options.fedca_alignment.recipe=digits")


def test_the_alignment_model_has_statistics_of_its_own_whatever_the_clients_do_with_theirs():
    recipe = tiny("method.name=fedca", *PUBLIC, "train.bn_buffers=local", "train.lr=0.03")
    train = prerequisite_recipes(recipe)["alignment"].train
    assert (train.bn_buffers, train.lr) == ("average", 0.03)


def test_the_alignment_model_trains_on_all_images_that_it_may():
    data = prerequisite_recipes(tiny("method.name=fedca", *PUBLIC))["alignment"].data
    assert (data.limit, data.test_fraction) == (50, 0.0)


def test_mistakes_about_the_alignment_run_show_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"alignment run that this method needs first: unknown.*'data\.pth'"):
        run_tiny(tmp_path / "run", "method.name=fedca", "options.fedca_alignment.data.pth=x")
    with pytest.raises(UserError, match=r"must have this run's networks, and its \[model\] section differs"):
        run_tiny(tmp_path / "run", "method.name=fedca", "options.fedca_alignment.recipe=digits")
    partly = tmp_path / "partly.toml"
    partly.write_text(tiny("method.name=fed_simclr", "method.merge=fedbn").to_toml())
    with pytest.raises(
        UserError,
        match=r"one complete model, including BatchNorm's statistics.*train\.bn_buffers = 'average'",
    ):
        run_tiny(tmp_path / "run", "method.name=fedca", f"options.fedca_alignment.recipe={partly}")
    with pytest.raises(UserError, match="no file or folder"):
        run_tiny(
            tmp_path / "run", "method.name=fedca",
            "options.fedca_alignment.data.source=folder", "options.fedca_alignment.data.path=nowhere",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("fedca") / "run", "method.name=fedca", *PUBLIC)


def test_the_alignment_model_is_an_ordinary_run_in_the_runs_folder(straight):
    folder = straight.folder / "prerequisites/alignment"
    names = {path.name for path in folder.iterdir()}
    assert {"recipe.toml", "metrics.jsonl", "encoder.safetensors", "evaluation.json"} <= names
    assert 'kind = "centralised"' in (folder / "recipe.toml").read_text()
    bytes_down = [line["bytes_down"] for line in straight.metrics[1:]]
    assert bytes_down[0] > bytes_down[1] + 4 * 50 * 64  # model and images went to 4 clients, once


def test_an_interrupted_alignment_run_is_resumed_and_a_finished_one_is_not_played_again(
    straight, tmp_path, monkeypatch
):
    finish = launching._finish

    def killed(prepared, *rest):
        if prepared.run.name == "alignment":
            raise KeyboardInterrupt
        finish(prepared, *rest)

    monkeypatch.setattr(launching, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path / "run", "method.name=fedca", *PUBLIC)
    monkeypatch.undo()
    run = run_tiny(tmp_path / "run", "method.name=fedca", *PUBLIC, resume=True)
    assert run.encoder_path.read_bytes() == straight.encoder_path.read_bytes()
    alignment = run.folder / "prerequisites/alignment/encoder.safetensors"
    before = alignment.stat().st_mtime_ns
    run_tiny(tmp_path / "run", "method.name=fedca", *PUBLIC, "train.rounds=3", resume=True)
    assert alignment.stat().st_mtime_ns == before


@pytest.mark.parametrize(("change", "kept"), [("train.lr=0.03", False), ("partition.clients=3", True)])
def test_a_run_that_failed_before_its_first_round_keeps_the_alignment_model_that_fits(
    change, kept, tmp_path, monkeypatch
):
    recipe = ("method.name=fedca", *PUBLIC)
    finish = launching._run_prerequisite

    def prepared_and_killed(*asked):
        finish(*asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "_run_prerequisite", prepared_and_killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path / "run", *recipe)
    monkeypatch.undo()
    alignment = tmp_path / "run/prerequisites/alignment/encoder.safetensors"
    before = alignment.stat().st_mtime_ns
    run_tiny(tmp_path / "run", *recipe, change)
    assert (alignment.stat().st_mtime_ns == before) is kept


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """The folder of a run that was killed when its alignment run had trained, and that alignment run."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path / "run", "method.name=fedca", *PUBLIC)
    monkeypatch.undo()
    return tmp_path / "run", Run(tmp_path / "run/prerequisites/alignment")


def test_an_alignment_run_of_another_environment_is_not_deleted(unfinished):
    folder, alignment = unfinished
    record = alignment.read_json("environment.json")
    record["environments"][0]["environment"]["torch"] = "1.0"
    alignment.write("environment.json", json.dumps(record))
    recipe, metrics = tiny("method.name=fedca", *PUBLIC), alignment.metrics
    with pytest.raises(UserError, match=r"torch = 1\.0, and here it is .*--other-environment"):
        run_recipe(recipe, folder)
    run_recipe(recipe, folder, recovery=Recovery(other_environment=True))
    assert alignment.finished
    assert alignment.metrics == metrics  # its rounds were not computed again


def test_a_damaged_alignment_run_is_named_and_not_deleted(unfinished):
    folder, alignment = unfinished
    path = alignment.folder / "recipe.toml"
    path.write_text(path.read_text().replace("lr = ", "lr = 1", 1))
    with pytest.raises(UserError, match=r"alignment/recipe\.toml is damaged"):
        run_recipe(tiny("method.name=fedca", *PUBLIC), folder)
    assert alignment.completed_rounds()


@pytest.mark.slow
def test_two_workers_give_the_same_bytes(straight, tmp_path):
    run = run_tiny(tmp_path / "run", "method.name=fedca", *PUBLIC, "engine.workers=2")
    assert run.encoder_path.read_bytes() == straight.encoder_path.read_bytes()
