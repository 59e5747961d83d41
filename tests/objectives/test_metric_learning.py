import math

import pytest
import torch

from atoll.core.errors import UserError
from tests.functional.oracles import log_softmax
from tests.harness import tiny
from tests.rounds import Rounds
from tests.steps import Steps

PARTS = {"triplet": 3, "quadruplet": 4, "fedquad": 4}


def distance(a, b, power):
    d = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    return d**power


def hinge(x):
    return max(0.0, x)


def triplet(a, p, n1, classes):
    return hinge(distance(a, p, 1) - distance(a, n1, 1) + 1.0)


def quadruplet(a, p, n1, n2, classes, power=2):
    first = hinge(distance(a, p, power) - distance(a, n1, power) + 1.0)
    second = hinge(distance(a, p, power) - distance(n2, n1, power) + 0.5)
    return first + (second if classes > 2 else 0.0)


def fedquad(a, p, n1, n2, classes, power=1):
    first = hinge(distance(a, p, power) - distance(a, n1, power) + 1.0)
    return first + hinge(distance(a, p, power) - distance(a, n2, power) + 0.5)


def outputs(steps, batch):
    """The members' representations, all of them in one batch, recomputed from the drawn tuples."""
    objective = steps.client.method.objective
    scope = steps.client.context.of(objective)
    rows = scope.tuples[: objective.members, batch.indices]
    assert torch.equal(rows[0], batch.indices)
    images = steps.data.pick(rows.flatten())
    h, _ = steps.encode(images)
    return h, [component.double().tolist() for component in h.split(len(batch.indices))]


@pytest.mark.parametrize("classes", [range(10), (3, 8)], ids=["ten classes", "two classes"])
def test_fedquads_version_of_the_quadruplet_keeps_both_negatives_from_the_anchor(classes):
    steps = Steps(
        "method.name=quadruplet",
        "options.quadruplet.second=anchor",
        "options.quadruplet.power=1",
        classes=classes,
    )
    batch = steps.batch()
    loss = steps.client.step(batch)
    _, members = outputs(steps, batch)
    expected = [fedquad(*row, len(classes)) for row in zip(*members, strict=True)]
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("classes", [range(10), (3, 8)], ids=["ten classes", "two classes"])
@pytest.mark.parametrize("cross_entropy", ["true", "false"])
@pytest.mark.parametrize("loop", [triplet, quadruplet, fedquad])
def test_the_local_loss_is_the_equation_over_one_batch(loop, cross_entropy, classes):
    name = loop.__name__
    steps = Steps(
        f"method.name={name}",
        f"options.{name}.beta=0.7",
        f"options.{name}.cross_entropy={cross_entropy}",
        classes=classes,
    )
    for _ in range(2):
        batch = steps.batch()
        loss = steps.client.step(batch)
        h, members = outputs(steps, batch)
        tuples = list(zip(*members, strict=True))
        expected = 0.7 * sum(loop(*tuple_, classes=len(classes)) for tuple_ in tuples) / len(tuples)
        if cross_entropy == "true":
            with torch.no_grad():
                logits = steps.networks["classifier"](h[: len(batch.indices)]).double().tolist()
            pairs = list(zip(logits, batch.labels.tolist(), strict=True))
            expected -= sum(log_softmax(row)[label] for row, label in pairs) / len(pairs)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
        steps.update(loss)
        assert all(torch.isfinite(p).all() for p in steps.networks.parameters())


@pytest.mark.parametrize("loop", [quadruplet, fedquad])
def test_distances_may_be_squared_or_not(loop):
    power = 1 if loop is quadruplet else 2
    steps = Steps(
        f"method.name={loop.__name__}",
        f"options.{loop.__name__}.power={power}",
        f"options.{loop.__name__}.beta=1.0",
        f"options.{loop.__name__}.cross_entropy=false",
    )
    batch = steps.batch()
    loss = steps.client.step(batch).item()
    tuples = list(zip(*outputs(steps, batch)[1], strict=True))
    assert loss == pytest.approx(
        sum(loop(*t, classes=10, power=power) for t in tuples) / len(tuples), rel=1e-4
    )


@pytest.mark.parametrize("name", PARTS)
def test_a_client_of_one_class_learns_from_cross_entropy_alone(name):
    steps = Steps(f"method.name={name}", f"options.{name}.cross_entropy=true", classes=[4])
    plain = Steps("method.name=fed_sl", classes=[4])
    assert torch.equal(steps.client.step(steps.batch()), plain.client.step(plain.batch()))
    without = Steps(f"method.name={name}", f"options.{name}.cross_entropy=false", classes=[4])
    loss = without.client.step(without.batch())
    assert loss.item() == 0
    assert not loss.requires_grad


def drawn(steps, epochs=2):
    """The partners of each epoch, as they stand at every one of its batches."""
    scope = steps.client.context.of(steps.client.method.objective)
    found = {}
    while len(found) < epochs:
        batch = steps.batch()
        steps.client.step(batch)
        assert torch.equal(found.setdefault(batch.epoch, scope.tuples), scope.tuples)
        _, *partners = torch.split(batch.images["fedquad"], len(batch.indices))
        for row, images in zip(scope.tuples[1:, batch.indices], partners, strict=True):
            assert torch.equal(images, steps.data.pick(row))
    return list(found.values())


def test_partners_are_drawn_once_for_a_client():
    first, second = drawn(Steps("method.name=fedquad"))
    assert torch.equal(first, second)
    assert torch.equal(drawn(Steps("method.name=fedquad", round=7), 1)[0], first)
    assert not torch.equal(drawn(Steps("method.name=fedquad", "seed=1", classes=range(10)), 1)[0],
                           drawn(Steps("method.name=fedquad", classes=range(10)), 1)[0])  # fmt: skip


def test_clients_with_the_same_labels_draw_their_own_partners():
    rounds = Rounds("method.name=fedquad")
    clients = rounds.federation.partition.clients
    clients[1] = clients[0]
    tuples = []
    for client in (0, 1):
        rounds.start(client)
        tuples.append(rounds.client.context.of(rounds.method.objective).tuples)
    assert not torch.equal(*tuples)


def test_partners_may_be_drawn_anew_in_each_epoch():
    redraw = ("method.name=fedquad", "options.fedquad.redraw=true")
    first, second = drawn(Steps(*redraw))
    assert not torch.equal(first, second)
    assert not torch.equal(drawn(Steps(*redraw, round=7), 1)[0], first)


def test_augmented_partners_are_views_and_anchors_the_batch_s_own():
    steps = Steps("method.name=fedquad", "options.fedquad.augment=true")
    batch = steps.batch()
    steps.client.step(batch)
    members = batch.images["fedquad"]
    n = len(batch.indices)
    assert len(members) == 4 * n
    assert torch.equal(members[:n], batch.images["view1"])
    plain = steps.data.pick(
        steps.client.context.of(steps.client.method.objective).tuples[1:, batch.indices].flatten()
    )
    assert not torch.equal(members[n:], plain)


def test_no_loss_at_all_is_refused():
    with pytest.raises(UserError, match=r"triplet\.beta is 0 and triplet\.cross_entropy is off"):
        tiny("method.name=triplet", "options.triplet.beta=0.0")


def test_an_unknown_power_is_refused():
    with pytest.raises(UserError, match=r"options.fedquad.power is 3"):
        tiny("method.name=fedquad", "options.fedquad.power=3")


@pytest.mark.parametrize("name", PARTS)
def test_a_client_without_any_loss_takes_no_step(name):
    """Gradients of zero would still let Adam turn a small weight decay into whole steps towards 0."""
    rounds = Rounds(
        f"method.name={name}", f"options.{name}.cross_entropy=false", "train.optimizer=adam", "train.lr=0.01"
    )
    labels = rounds.federation.splits.train.labels
    rounds.federation.partition.clients[0] = (labels == 4).nonzero()[:, 0]
    before = rounds.start(0)
    update, _ = rounds.train(0)
    assert update["losses"]["loss"] == 0
    trained = dict(rounds.federation.networks.named_parameters())
    assert all(torch.equal(update["weights"][weight], before[weight]) for weight in trained)
