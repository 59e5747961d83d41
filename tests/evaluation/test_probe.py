from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.evaluation import probe
from atoll.evaluation.probe import linear_probe, train_linear
from atoll.evaluation.protocols import PROBES, ProbeProtocol

from .sets import Labelled, blobs


def by_the_book(
    sets: Labelled, protocol: ProbeProtocol, generator: torch.Generator
) -> Iterator[tuple[nn.Linear, float]]:
    """The classifier and its accuracy after every epoch, by PyTorch's modules, schedulers and optimisers."""
    train_h, train_y, test_h, test_y = sets
    width, classes = train_h.shape[1], int(train_y.max()) + 1
    linear = nn.Linear(width, classes)
    with torch.no_grad():
        for parameter in (linear.weight, linear.bias):
            parameter.uniform_(-(width**-0.5), width**-0.5, generator=generator)
    decay = {"weight_decay": protocol.weight_decay, "foreach": False}
    optimizer: torch.optim.Optimizer = {
        "adam": lambda: torch.optim.Adam(linear.parameters(), protocol.lr, **decay),
        "adamw": lambda: torch.optim.AdamW(linear.parameters(), protocol.lr, **decay),
        "sgd": lambda: torch.optim.SGD(
            linear.parameters(), protocol.lr, protocol.momentum, nesterov=protocol.nesterov, **decay
        ),
    }[protocol.optimizer]()
    per_epoch = -(-len(train_h) // protocol.batch_size)
    scheduler = {
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "step": lambda: torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [milestone * per_epoch for milestone in protocol.milestones], protocol.decay
        ),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, protocol.epochs * per_epoch),
    }[protocol.schedule]()
    for _ in range(protocol.epochs):
        order = (
            torch.randperm(len(train_h), generator=generator)
            if protocol.shuffle
            else torch.arange(len(train_h))
        )
        for rows in order.split(protocol.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(linear(train_h[rows]), train_y[rows]).backward()
            optimizer.step()
            scheduler.step()
        yield linear, float((linear(test_h).argmax(1) == test_y).double().mean())


@pytest.mark.parametrize("name", sorted(PROBES))
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_protocol_trains_as_plain_pytorch_would(name: str, weight_decay: float) -> None:
    protocol = replace(PROBES[name], epochs=6, batch_size=50, milestones=(2, 4), weight_decay=weight_decay)
    if protocol.lr > 1:  # or rounding alone sets the two apart
        protocol = replace(protocol, lr=0.1)
    sets = blobs(400, 12, 4, spread=2.5)
    book = by_the_book(sets, protocol, stream(0, "probe"))
    ours = train_linear(sets[0], sets[1], 4, protocol, stream(0, "probe"))
    for (linear, _), (weight, bias) in zip(book, ours, strict=True):
        torch.testing.assert_close(weight, linear.weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bias, linear.bias.detach(), rtol=1e-4, atol=1e-5)


def test_a_last_smaller_batch_is_trained_on() -> None:
    protocol = replace(PROBES["ssd"], epochs=2, batch_size=64)
    sets = blobs(150, 12, 4, spread=2.5)
    *_, (linear, _) = by_the_book(sets, protocol, stream(0, "probe"))
    *_, (weight, _) = train_linear(sets[0], sets[1], 4, protocol, stream(0, "probe"))
    torch.testing.assert_close(weight, linear.weight.detach(), rtol=1e-4, atol=1e-5)


def test_finds_what_logistic_regression_finds() -> None:
    train_h, train_y, test_h, test_y = blobs(1000, 16, 5, spread=2.0)
    expected = LogisticRegression(max_iter=2000).fit(train_h.numpy(), train_y.numpy())
    score = expected.score(test_h.numpy(), test_y.numpy())
    assert 0.6 < score < 0.99
    result = linear_probe(train_h, train_y, test_h, test_y, PROBES["ssd"], stream(0, "probe"))
    assert result.accuracy == pytest.approx(score, abs=0.02)


def test_repeats_exactly_whatever_the_global_seed() -> None:
    sets = blobs(300, 64, 10, spread=4.0)
    protocol = replace(PROBES["ssd"], epochs=8, batch_size=64)

    def run(seed: int) -> list[float]:
        torch.rand(1)  # moves the global generator, as anything may
        *_, (weight, _) = train_linear(sets[0], sets[1], 10, protocol, stream(seed, "probe"))
        return [linear_probe(*sets, protocol, stream(seed, "probe")).accuracy, *weight.flatten().tolist()]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_takes_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def spy(*arguments: object) -> float:
        threads.append(torch.get_num_threads())
        return 0.1

    monkeypatch.setattr(probe, "learning_rate", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear_probe(*blobs(20, 4, 2, spread=0.5), PROBES["ssd"], stream(0, "probe"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


def test_the_last_epoch_counts_unless_the_best_is_asked_for() -> None:
    sets = blobs(60, 30, 6, spread=4.0)
    protocol = replace(PROBES["ssd"], epochs=40, batch_size=16, lr=0.05)
    book = [accuracy for _, accuracy in by_the_book(sets, protocol, stream(1, "probe"))]
    assert max(book) > book[-1]  # or this shows nothing
    last = linear_probe(*sets, protocol, stream(1, "probe"))
    best = linear_probe(*sets, replace(protocol, select="best"), stream(1, "probe"))
    assert last.accuracy == last.last_accuracy == best.last_accuracy
    assert last.epoch == 40
    assert best.accuracy > last.accuracy
    assert book[best.epoch - 1] == pytest.approx(best.accuracy, abs=0.05)
    for result in (last, best):
        assert float((result.predictions == sets[3]).double().mean()) == result.accuracy


def test_of_equal_accuracies_the_first_is_the_best_and_none_is_too_low() -> None:
    train_h, train_y, test_h, test_y = sets = blobs(60, 8, 2, spread=0.1)
    protocol = replace(PROBES["ssd"], epochs=30, batch_size=16, lr=0.1, select="best")
    book = [accuracy for _, accuracy in by_the_book(sets, protocol, stream(0, "probe"))]
    assert book[-2:] == [1.0, 1.0]
    found = linear_probe(*sets, protocol, stream(0, "probe"))
    assert (found.accuracy, found.epoch) == (1.0, 1 + book.index(1.0))
    unknown = (train_h, train_y, test_h, torch.full_like(test_y, 2))  # a class without training samples
    found = linear_probe(*unknown, replace(protocol, select="last"), stream(0, "probe"))
    assert (found.accuracy, found.epoch) == (0.0, 30)


def test_standardising_takes_the_training_sets_mean_and_deviation() -> None:
    train_h, train_y, test_h, test_y = blobs(300, 8, 4, spread=2.0)
    train_h, train_y = train_h[:12], train_y[:12]  # so few that the division by N − 1 gives other predictions
    scale = torch.tensor([0.01, 0.1, 1, 10, 100, 3, 7, 0.5])
    train_h, test_h = train_h * scale + 5, (test_h + 0.5) * scale + 5  # a test set that lies elsewhere
    plain = replace(PROBES["ssd"], epochs=100)
    mean, std = train_h.mean(0), train_h.std(0, correction=0)
    by_hand = ((train_h - mean) / std, train_y, (test_h - mean) / std, test_y)
    result = linear_probe(
        train_h, train_y, test_h, test_y, replace(plain, standardise=True), stream(0, "probe")
    )
    assert torch.equal(result.predictions, linear_probe(*by_hand, plain, stream(0, "probe")).predictions)
    own = ((train_h - mean) / std, train_y, (test_h - test_h.mean(0)) / test_h.std(0), test_y)
    assert result.accuracy != linear_probe(*own, plain, stream(0, "probe")).accuracy


def standardised(train_h: Tensor, test_h: Tensor) -> list[Tensor]:
    """Both sets by scikit-learn's scaler of the training set."""
    scaler = StandardScaler().fit(train_h.double().numpy())
    return [torch.from_numpy(scaler.transform(h.double().numpy())).float() for h in (train_h, test_h)]


def accuracy_if_standardised(
    train_h: Tensor, train_y: Tensor, test_h: Tensor, test_y: Tensor, train_s: Tensor, test_s: Tensor
) -> float:
    """The accuracy of a probe that standardises, which is that of a plain one on the standardised sets."""
    plain = replace(PROBES["ssd"], epochs=100)
    ours = linear_probe(
        train_h, train_y, test_h, test_y, replace(plain, standardise=True), stream(0, "probe")
    )
    theirs = linear_probe(train_s, train_y, test_s, test_y, plain, stream(0, "probe"))
    assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.01)
    return ours.accuracy


def test_standardising_leaves_units_that_are_constant_in_training_at_their_scale() -> None:
    train_h, train_y, test_h, test_y = blobs(300, 8, 4, spread=1.0)
    train_h[:, 1], train_h[:, 2] = 0.0, 100.0
    test_h[:, 1], test_h[:, 2] = test_h[:, 1].relu(), 101.0
    train_s, test_s = standardised(train_h, test_h)
    assert accuracy_if_standardised(train_h, train_y, test_h, test_y, train_s, test_s) > 0.5


def test_a_feature_is_constant_in_comparison_with_its_own_size() -> None:
    """Constants vary in their last bit; small numbers, and small differences between large ones, say something."""
    train_h, train_y, test_h, test_y = blobs(300, 4, 4, spread=0.5)
    scale, shift = torch.tensor([1e-2, 1e-8, 0, 0]), torch.tensor([100, 0, 0.3, -0.3])
    train_h, test_h = train_h * scale + shift, test_h * scale + shift
    test_h[:, 2:] += torch.randn(len(test_h), 2, generator=stream(0, "test")) / 10
    train_s, test_s = standardised(train_h, test_h)
    train_h[::2, 2:] = torch.nextafter(shift[2:], torch.ones(2))
    assert accuracy_if_standardised(train_h, train_y, test_h, test_y, train_s, test_s) > 0.7


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_of_another_precision_are_probed_in_float32(dtype: torch.dtype) -> None:
    train_h, train_y, test_h, test_y = blobs(60, 8, 4, spread=2.0)
    sets = (train_h.to(dtype), train_y.int(), test_h.to(dtype), test_y.short())
    result = linear_probe(*sets, PROBES["ssd"], stream(0, "probe"))
    single = (sets[0].float(), train_y, sets[2].float(), test_y)
    expected = linear_probe(*single, PROBES["ssd"], stream(0, "probe"))
    assert torch.equal(result.predictions, expected.predictions)


def test_works_where_gradients_are_off_and_on_features_that_have_one() -> None:
    train_h, train_y, test_h, test_y = blobs(40, 4, 2, spread=0.5)
    with torch.no_grad():
        result = linear_probe(
            train_h.requires_grad_(), train_y, test_h, test_y, PROBES["ssd"], stream(0, "probe")
        )
    assert result.accuracy == 1.0
    assert train_h.grad is None


def test_divergence_is_said() -> None:
    train_h, train_y, test_h, test_y = blobs(100, 8, 4, spread=1.0)
    protocol = replace(PROBES["orchestra"], lr=1e30)
    with pytest.raises(UserError, match="diverged"):
        linear_probe(train_h * 1e6, train_y, test_h, test_y, protocol, stream(0, "probe"))


def test_labels_that_do_not_fit_are_refused() -> None:
    train_h, train_y, test_h, test_y = blobs(10, 4, 2, spread=1.0)
    with pytest.raises(ValueError, match=r"\(10, 4\) and \(7,\)"):
        linear_probe(train_h, train_y[:7], test_h, test_y, PROBES["ssd"], stream(0, "probe"))
