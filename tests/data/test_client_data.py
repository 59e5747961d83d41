import pytest
import torch

from atoll.core.rng import stream
from atoll.data import client_data
from tests.steps import federation

SETTINGS = ("method.name=fed_sl", "views.pad_crop=1")


def test_chosen_samples_come_as_they_are_or_as_views():
    made = federation(*SETTINGS)
    data = made.client_data(1)
    rows = torch.tensor([5, 0, 5])
    stored = made.splits.train.images.gather(made.partition.clients[1][rows])
    plain = data.pick(rows)
    assert torch.equal(plain, stored.float() / 255)
    views = data.pick(rows, torch.Generator().manual_seed(0))
    assert views.shape == plain.shape
    assert not torch.equal(views[0], views[2])  # each its own draw
    assert torch.equal(views, data.pick(rows, torch.Generator().manual_seed(0)))


def test_labels_are_the_client_s_own_in_its_order():
    made = federation(*SETTINGS)
    data = made.client_data(2)
    assert data.labels.tolist() == made.splits.train.labels[made.partition.clients[2]].tolist()
    (first, *_) = data.ordered()
    assert first.labels.tolist() == data.labels[: len(first.indices)].tolist()
    assert federation(*SETTINGS, "method.name=fed_simclr", "data.labels=false").client_data(2).labels is None


def test_only_the_images_that_are_asked_for_are_made():
    data = federation(*SETTINGS).client_data(0)
    for names in (("image",), ("view2", "other"), ("view1", "view3", "a part's own")):
        batch = next(data.batches(1, 1, names))
        assert batch.images.keys() == set(names) - {"a part's own"}
    # One more kind of image does not change the others.
    everything = ("view1", "view2", "view3", "other")
    alone, beside = (next(data.batches(1, 1, names)).images for names in (("view1",), everything))
    assert torch.equal(alone["view1"], beside["view1"])
    # Every view is drawn by itself.
    assert not torch.equal(beside["view1"], beside["view3"])
    assert not torch.equal(beside["view2"], beside["view3"])


def test_local_crops_have_their_own_draws_and_leave_the_views_as_they_are():
    data = federation(*SETTINGS, "views.local_size=5", "views.local_scale=[0.2,0.3]").client_data(0)
    beside = next(data.batches(1, 1, ("view1", "local1", "local2"))).images
    assert beside["local1"].shape[2:] == beside["local2"].shape[2:] == (5, 5)
    assert not torch.equal(beside["local1"], beside["local2"])
    assert torch.equal(beside["view1"], next(data.batches(1, 1, ("view1",))).images["view1"])


def test_a_batch_is_cut_into_parts_of_two_samples_at_least():
    batch = next(federation(*SETTINGS).client_data(0).batches(1, 1, ("view1",)))
    n = len(batch.indices)
    parts = batch.parts(3)
    assert [len(part.indices) for part, _ in parts] == [7, 7, 6]
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert [share * n for _, share in parts] == pytest.approx([7, 7, 6])
    assert torch.equal(torch.cat([part.images["view1"] for part, _ in parts]), batch.images["view1"])
    assert torch.equal(torch.cat([part.indices for part, _ in parts]), batch.indices)
    assert torch.equal(torch.cat([part.labels for part, _ in parts]), batch.labels)
    assert [len(part.indices) for part, _ in batch.parts(100)] == [2] * (n // 2)
    assert batch.parts(1) == [(batch, 1.0)]


def rows_of(data, round, epochs):
    """The rows of each batch, by epoch."""
    found = [[] for _ in range(epochs)]
    for batch in data.batches(round, epochs, ("image",)):
        found[batch.epoch].append(batch.indices.tolist())
    return found


def test_every_epoch_is_another_order_of_all_samples():
    data = federation(*SETTINGS, "train.batch_size=7").client_data(0)
    orders = [
        [row for rows in epoch for row in rows] for round in (1, 2) for epoch in rows_of(data, round, 2)
    ]
    assert all(sorted(order) == list(range(data.num_samples)) for order in orders)
    assert len({tuple(order) for order in (*orders, range(data.num_samples))}) == 5
    assert rows_of(data, 2, 2) == rows_of(data, 2, 2)


@pytest.mark.parametrize("over", [0, 1, 2, 3])
def test_a_single_sample_is_left_out_and_a_short_batch_if_the_recipe_says_so(over):
    samples = federation(*SETTINGS).client_data(0).num_samples
    size = (samples - over) // 2
    rest = samples - 2 * size
    for drop_last, kept in (("false", rest > 1), ("true", False)):
        data = federation(*SETTINGS, f"train.batch_size={size}", f"train.drop_last={drop_last}").client_data(
            0
        )
        assert [len(rows) for rows in rows_of(data, 1, 1)[0]] == [size, size, *[rest] * kept]
        assert data.num_batches() == 2 + kept


def test_the_only_batch_stays_however_short():
    data = federation(*SETTINGS, "train.batch_size=500", "train.drop_last=true").client_data(0)
    assert [len(rows) for rows in rows_of(data, 1, 1)[0]] == [data.num_samples]


EVERYTHING = ("view1", "view2", "image", "other", "local1")
SMALL = ("train.batch_size=7", "views.preset=ssd", "views.local_size=5", "views.local_scale=[0.2,0.6]")


@pytest.mark.parametrize("layout", ["false", "true"])
@pytest.mark.parametrize("method", ["fed_sl", "fed_simclr"])
def test_images_do_not_depend_on_how_many_batches_are_made_in_a_pass(method, layout, monkeypatch):
    settings = (*SMALL, f"method.name={method}", f"engine.channels_last={layout}")
    made = {}
    for most in (1, 3, 16):
        monkeypatch.setattr(client_data, "MOST_BATCHES", most)
        data = federation(*settings).client_data(0)
        assert data.batches_in_a_pass(EVERYTHING) == most
        made[most] = list(data.batches(2, 3, EVERYTHING))
    assert len({len(batch.indices) for batch in made[1]}) == 2  # with a short one at the end of each epoch
    for alone, *others in zip(*made.values(), strict=True):
        for other in others:
            assert (alone.epoch, alone.images.keys()) == (other.epoch, other.images.keys())
            assert torch.equal(alone.indices, other.indices)
            assert alone.labels is other.labels is None or torch.equal(alone.labels, other.labels)
            for name, image in alone.images.items():
                assert torch.equal(image, other.images[name])
                assert image.stride() == other.images[name].stride()


def test_other_images_are_those_of_randomly_chosen_rows():
    data = federation("method.name=fed_sl", "views.preset=none", "train.batch_size=7").client_data(1)
    draws = stream(data._seed, "others", 2, 1)
    for batch in data.batches(2, 2, ("image", "other")):
        rows = torch.randint(data.num_samples, batch.indices.shape, generator=draws)
        torch.testing.assert_close(batch.images["other"], data.pick(rows), atol=1e-6, rtol=0)
        assert torch.equal(batch.images["image"], data.pick(batch.indices))


def test_a_pass_has_as_many_batches_as_fit():
    def batches(*settings, images=("view1", "view2")):
        return federation(*SETTINGS, *settings).client_data(0).batches_in_a_pass(images)

    size = 2 * 20 * 8 * 8  # values of two views of a batch of digits
    assert batches("train.batch_size=20") == client_data.MOST_BATCHES
    large = "train.batch_size=20", "views.size=192"
    assert batches(*large) == client_data.MOST_VALUES // (size * 24**2) > 1
    assert batches(*large, images=("view1",)) == client_data.MOST_VALUES // (size * 24**2 // 2)
    assert batches("train.batch_size=20", "views.size=1024") == 1
    assert batches(images=()) == client_data.MOST_BATCHES


def test_a_transform_and_streamed_images_are_taken_batch_by_batch(monkeypatch):
    data = federation(*SETTINGS).client_data(0)
    monkeypatch.setattr(client_data, "is_streamed", lambda pixels: True)
    assert data.batches_in_a_pass(("view1",)) == 1
    monkeypatch.undo()
    assert data.batches_in_a_pass(("view1",)) > 1
    data._views.transform = torch.clone
    assert data.batches_in_a_pass(("view1",)) == 1
