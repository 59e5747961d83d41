import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import ImageSet, StoredPixels
from atoll.evaluation.finetune import FineTuneResult, finetune, label_subset
from atoll.evaluation.probe import first_weights
from atoll.evaluation.protocols import FINE_TUNES, FineTuneProtocol


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16)
        ).eval()


def plain(pixels: Tensor) -> Tensor:
    return pixels.float() / 255


def run(
    encoder: nn.Module, digits: tuple[ImageSet, ImageSet], protocol: FineTuneProtocol, seed: int = 0
) -> FineTuneResult:
    def noisy(pixels: Tensor, generator: torch.Generator) -> Tensor:
        return plain(pixels) + 0.05 * torch.randn(pixels.shape, generator=generator)

    return finetune(
        encoder, *digits, protocol, stream(seed, "finetune"), augment=noisy, pixels_to_float=plain
    )


SHORT = replace(FINE_TUNES["finetune-10"], epochs=12, batch_size=32, head_lr=0.05, every=4)


def test_a_subset_has_each_class_in_its_share_and_none_forgotten() -> None:
    labels = torch.tensor([0] * 100 + [2] * 40 + [5] * 3)[torch.randperm(143)]
    rows = label_subset(labels, 0.1, stream(0, "labels"))
    assert labels[rows].bincount().tolist() == [10, 0, 4, 0, 0, 1]
    assert torch.equal(rows, rows.unique())
    assert torch.equal(rows, label_subset(labels, 0.1, stream(0, "labels")))
    assert not torch.equal(rows, label_subset(labels, 0.1, stream(1, "labels")))
    assert len(label_subset(labels, 1.0, stream(0, "labels"))) == 143


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([100, 40, 3], 50, [35, 14, 1]),  # 34.97, 13.99, 1.05
        ([90, 0, 9, 1], 10, [8, 0, 1, 1]),  # 9, 0, 0.9, 0.1: each class that exists has one
        ([2, 98], 100, [2, 98]),
    ],
)
def test_a_number_of_labels_is_divided_in_proportion(
    sizes: list[int], count: int, expected: list[int]
) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rows = label_subset(labels, 1.0, stream(0, "labels"), count)
    assert labels[rows].bincount(minlength=len(sizes)).tolist() == expected
    assert torch.equal(rows, rows.unique())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 80))
def test_a_number_of_labels_is_met_and_near_each_classs_part(sizes: list[int], count: int) -> None:
    present = [size for size in sizes if size]
    assume(sum(sizes) >= count >= len(present) > 0)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    found = labels[label_subset(labels, 1.0, stream(0, "labels"), count)].bincount(minlength=len(sizes))
    assert found.sum() == count
    for size, drawn in zip(sizes, found.tolist(), strict=True):
        assert min(size, 1) <= drawn <= size
        assert drawn < max(1, size * count / sum(sizes) + 1)


def test_with_fewer_labels_than_asked_for_all_count() -> None:
    with pytest.warns(UserWarning, match="500 labels are asked for and there are 7"):
        assert len(label_subset(torch.arange(7) % 2, 1.0, stream(0, "labels"), 500)) == 7


def test_with_more_classes_than_labels_asked_for_one_of_each_counts() -> None:
    labels = torch.tensor([0, 1, 3]).repeat(5)  # no sample of class 2
    with pytest.warns(UserWarning, match="2 labels are asked for and there are 3 classes"):
        rows = label_subset(labels, 1.0, stream(0, "labels"), 2)
    assert labels[rows].bincount().tolist() == [1, 1, 0, 1]


def test_as_many_labels_or_classes_as_labels_asked_for_are_enough(recwarn: pytest.WarningsRecorder) -> None:
    labels = torch.tensor([0, 1, 3]).repeat(5)
    for count in (15, 3):
        assert len(label_subset(labels, 1.0, stream(0, "labels"), count)) == count
    assert not recwarn.list


@pytest.mark.parametrize("count", [50, 100, 500])
def test_a_number_of_labels_of_pure_classes_teaches_all_of_them(count: int) -> None:
    labels = torch.arange(600) % 4
    pixels = torch.zeros(600, 1, 2, 2, dtype=torch.uint8)
    pixels.view(600, 4)[torch.arange(600), labels] = 255  # a pixel for each class
    pure, encoder = (
        ImageSet(StoredPixels(pixels), labels),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4)).eval(),
    )
    with torch.no_grad():
        encoder[1].weight.copy_(torch.eye(4))
        encoder[1].bias.zero_()
    protocol = replace(FINE_TUNES[f"finetune-{count}-labels"], encoder_lr=0.05, head_lr=0.05, epochs=20)
    result = run(encoder, (pure, pure), protocol)
    assert (result.labels, result.accuracy) == (count, 1.0)
    wrong = run(encoder, (pure, replace(pure, labels=labels.roll(1))), protocol)
    assert (wrong.accuracy, wrong.epoch) == (0.0, 20)
    best = run(encoder, (pure, pure), replace(protocol, select="best", every=1))
    assert best.accuracy == 1.0
    # Of equal accuracies, the first is the best.
    sooner = replace(protocol, epochs=best.epoch - 1 or 1)
    assert best.epoch == 1 or run(encoder, (pure, pure), sooner).accuracy < 1.0


def test_learns_from_few_labels_and_leaves_the_encoder_alone(digits: tuple[ImageSet, ImageSet]) -> None:
    encoder = net().requires_grad_(False)
    before = copy.deepcopy(encoder.state_dict())
    result = run(encoder, digits, SHORT)
    assert 50 <= result.labels <= 70
    assert result.accuracy > 0.6
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_the_encoder_is_trained_and_not_the_head_alone(digits: tuple[ImageSet, ImageSet]) -> None:
    encoder = net()
    with torch.no_grad():
        encoder[4].weight.zero_()  # representations that say nothing until they are trained
    frozen = run(encoder, digits, replace(SHORT, encoder_lr=0.0))
    trained = run(encoder, digits, replace(SHORT, encoder_lr=0.05, epochs=20))
    assert frozen.accuracy < 0.25 < 0.5 < trained.accuracy


def test_the_head_may_be_an_mlp_under_adam(digits: tuple[ImageSet, ImageSet]) -> None:
    protocol = replace(SHORT, optimizer="adam", encoder_lr=0.0, head_lr=1e-2, hidden=(24,))
    encoder = net()
    with torch.no_grad():
        encoder[4].weight.zero_()  # one representation for all: whatever is learnt, the encoder learnt it
    assert run(encoder, digits, protocol).accuracy < 0.25
    assert run(encoder, digits, replace(protocol, encoder_lr=1e-2, epochs=20)).accuracy > 0.5


def test_a_hidden_layer_bends(digits: tuple[ImageSet, ImageSet]) -> None:
    train, test = digits
    labels = (train.labels % 2, test.labels % 2)  # odd or even: no line parts the ten digits so well
    parity = (replace(train, labels=labels[0]), replace(test, labels=labels[1]))
    frozen = replace(SHORT, optimizer="adam", encoder_lr=0.0, head_lr=1e-2, epochs=60)
    linear = run(net(), parity, frozen).accuracy
    bent = run(net(), parity, replace(frozen, hidden=(64,))).accuracy
    assert bent > linear + 0.02


def test_repeats_exactly(digits: tuple[ImageSet, ImageSet]) -> None:
    protocol = replace(SHORT, epochs=3)
    results = [run(net(), digits, protocol, seed).accuracy for seed in (0, 0, 1, 2, 3)]
    assert results[0] == results[1]
    assert len(set(results)) > 1


def test_the_best_is_the_best_of_its_looks(digits: tuple[ImageSet, ImageSet]) -> None:
    wild = replace(SHORT, encoder_lr=0.3, head_lr=0.3, every=2)  # up and down from epoch to epoch
    looks = {n: run(net(), digits, replace(wild, epochs=n), seed=7).accuracy for n in (2, 4, 6)}
    best = run(net(), digits, replace(wild, epochs=6, select="best"), seed=7)
    assert best.accuracy == max(looks.values())
    assert looks[best.epoch] == best.accuracy
    assert best.last_accuracy == looks[6]


def test_a_last_batch_of_one_is_left_out(digits: tuple[ImageSet, ImageSet]) -> None:
    train, test = digits
    few = ImageSet(train.subset(torch.arange(9)).images, torch.arange(9))

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    result = run(Flat(), (few, test), replace(SHORT, fraction=1.0, batch_size=8, epochs=1))
    assert result.labels == 9


def test_unlabelled_images_are_refused(digits: tuple[ImageSet, ImageSet]) -> None:
    train, test = digits
    with pytest.raises(ValueError, match="needs labels"):
        run(net(), (ImageSet(train.images), test), SHORT)


def linear_encoder() -> nn.Sequential:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        encoder[1].weight.copy_(torch.randn(16, 64, generator=stream(0, "weights")) / 8)
        encoder[1].bias.zero_()
    return encoder


def linear_digits(
    digits: tuple[ImageSet, ImageSet], protocol: FineTuneProtocol, client_ids: Tensor | None
) -> FineTuneResult:
    encoder = linear_encoder()
    return finetune(
        encoder, *digits, protocol, stream(0, "finetune"), augment=lambda x, _: plain(x),
        pixels_to_float=plain, client_ids=client_ids,
    )  # fmt: skip


FULL = FineTuneProtocol("full", 1.0, encoder_lr=0.3, head_lr=0.3, momentum=0.0, epochs=8, batch_size=600)


def test_one_full_step_a_round_by_fedavg_is_the_step_on_all_labels(digits: tuple[ImageSet, ImageSet]) -> None:
    """The mean of the clients' gradients, weighted by their labels, is the gradient over all labels."""
    train, test = digits
    assert train.labels is not None
    assert test.labels is not None
    clients = torch.tensor([0, 0, 0, 0, 2, 2, 3, 3, 3, 3])[
        train.labels
    ]  # unlike, and a number without images
    generator, encoder = stream(0, "finetune"), linear_encoder()
    for client in (0, 2, 3):
        label_subset(train.labels[clients == client], 1.0, generator)
    head = first_weights(16, 10, generator, torch.device("cpu"))
    optimizer = torch.optim.SGD([*encoder.parameters(), *head], lr=0.3)
    for _ in range(FULL.epochs):
        optimizer.zero_grad()
        logits = nn.functional.linear(encoder(plain(train.images.gather(torch.arange(600)))), *head)
        nn.functional.cross_entropy(logits, train.labels).backward()
        optimizer.step()
    logits = nn.functional.linear(encoder(plain(test.images.gather(torch.arange(200)))), *head)
    expected = float((logits.argmax(1) == test.labels).double().mean())
    federated = linear_digits(digits, replace(FULL, local_epochs=1), clients)
    assert federated.labels == 600
    assert federated.accuracy == pytest.approx(expected, abs=0.0051)  # one image of 200, by rounding
    assert expected > 0.3
    apart = linear_digits(digits, replace(FULL, local_epochs=8), clients)
    assert abs(apart.accuracy - expected) > 0.0051  # with more local steps the clients drift
    assert apart.epoch == 8
    assert 0 < apart.accuracy == apart.last_accuracy


@pytest.mark.parametrize("count", [41, 42, 43])
def test_a_share_of_the_labels_trains_as_plain_pytorch_would(
    digits: tuple[ImageSet, ImageSet], count: int
) -> None:
    """Also on a last batch of two, and not on one of a single image, which BatchNorm could not normalise."""
    train, test = digits
    assert train.labels is not None
    generator, encoder, every = stream(0, "finetune"), linear_encoder(), torch.arange(200)
    rows = label_subset(train.labels, 1.0, generator, count)
    head = first_weights(16, 10, generator, torch.device("cpu"))
    optimizer = torch.optim.SGD(
        [{"params": [*encoder.parameters()], "lr": 0.2}, {"params": head, "lr": 0.4}], momentum=0.9
    )
    book = []
    for _ in range(6):
        for batch in rows[torch.randperm(count, generator=generator)].split(20):
            if len(batch) < 2:
                continue
            pixels = train.images.gather(batch)
            x = plain(pixels) + 0.05 * torch.randn(pixels.shape, generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                nn.functional.linear(encoder(x), *head), train.labels[batch]
            ).backward()
            optimizer.step()
        logits = nn.functional.linear(encoder(plain(test.images.gather(every))), *head)
        book.append(float((logits.argmax(1) == test.labels).double().mean()))
    protocol = replace(
        SHORT, label_count=count, batch_size=20, encoder_lr=0.2, head_lr=0.4, epochs=6, every=1, select="best"
    )
    best = run(linear_encoder(), digits, protocol)
    assert best.accuracy == pytest.approx(max(book), abs=0.0051)  # one image of 200, by rounding
    assert best.last_accuracy == pytest.approx(book[-1], abs=0.0051)


def test_each_client_labels_its_own_share(digits: tuple[ImageSet, ImageSet]) -> None:
    train, _ = digits
    assert train.labels is not None
    ids = torch.where(train.labels < 5, 0, 1)
    ids[:50] = -1
    expected = sum(
        max(1, round(0.1 * int(((ids == client) & (train.labels == label)).sum())))
        for client, classes in ((0, range(5)), (1, range(5, 10)))
        for label in classes
    )
    assert linear_digits(digits, replace(FULL, fraction=0.1, local_epochs=4), ids).labels == expected
    assert linear_digits(digits, replace(FULL, label_count=20, local_epochs=4), ids).labels == 2 * 20
    for none in (None, torch.full((600,), -1)):
        with pytest.raises(ValueError, match="needs the client of each training image"):
            linear_digits(digits, replace(FULL, local_epochs=4), none)


def test_fedcas_federated_fine_tuning_learns_where_no_client_knows_all_classes(
    digits: tuple[ImageSet, ImageSet],
) -> None:
    assert digits[0].labels is not None
    ids = (digits[0].labels >= 5).long()
    protocol = replace(
        FINE_TUNES["finetune-fedca-federated-10"], fraction=1.0, hidden=(32,), epochs=20, local_epochs=1
    )
    assert linear_digits(digits, replace(protocol, head_lr=1e-2), ids).accuracy > 0.6


def test_what_diverges_is_refused(digits: tuple[ImageSet, ImageSet]) -> None:
    with pytest.raises(
        UserError, match="the fine-tuning diverged: after epoch 12, its outputs are not finite"
    ):
        run(net(), digits, replace(SHORT, head_lr=1e20, encoder_lr=1e20))


def test_one_output_that_is_not_finite_is_refused(digits: tuple[ImageSet, ImageSet]) -> None:
    class Contrast(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images / images.amax((1, 2, 3), keepdim=True))

    train, test = digits
    pixels = test.images.gather(torch.arange(200))
    pixels[7] = 0
    with pytest.raises(UserError, match="its outputs are not finite"):
        run(Contrast(*linear_encoder()), (train, replace(test, images=StoredPixels(pixels))), SHORT)


def test_a_class_without_test_images_is_trained(digits: tuple[ImageSet, ImageSet]) -> None:
    train, test = digits
    assert test.labels is not None
    some = test.subset((test.labels < 5).nonzero().squeeze(1))
    assert run(linear_encoder(), (train, some), SHORT).accuracy > 0.5


def test_dropout_repeats_and_leaves_the_default_generator_alone(digits: tuple[ImageSet, ImageSet]) -> None:
    encoder = nn.Sequential(net(), nn.Dropout(0.5)).eval()
    short = replace(SHORT, epochs=3, every=1)
    first = run(encoder, digits, short)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert run(encoder, digits, short) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_clients_with_one_label_are_said_to_take_no_step(digits: tuple[ImageSet, ImageSet]) -> None:
    protocol = replace(FULL, fraction=1e-4, local_epochs=4)
    assert digits[0].labels is not None
    clients = digits[0].labels.clamp(min=1)  # the first has two classes, and a label of each
    with pytest.warns(UserWarning, match="8 of 9 clients have one label and take no step, because BatchNorm"):
        linear_digits(digits, protocol, clients)


def test_whole_numbers_among_an_encoders_weights_are_left_alone(digits: tuple[ImageSet, ImageSet]) -> None:
    encoder = net()
    encoder.register_parameter("offsets", nn.Parameter(torch.arange(3), requires_grad=False))
    run(encoder, digits, SHORT)
    assert torch.equal(encoder.offsets, torch.arange(3))


class Reordered(nn.Module):
    """Reads the pixels by the indices of a buffer, as Swin Transformers read their biases."""

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(64, generator=stream(0, "order")), persistent=saved)
        self.linear = linear_encoder()[1]

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1)[:, self.order])


def test_fedavg_leaves_the_indices_in_an_encoders_buffers_as_they_are(
    digits: tuple[ImageSet, ImageSet],
) -> None:
    """Their mean over three equal clients, 5/3 three times, is 4.99…: the images would be read in another order."""
    protocol, ids = replace(FULL, local_epochs=1), torch.arange(600) % 3
    saved, rebuilt = (
        finetune(
            Reordered(saved), *digits, protocol, stream(0, "finetune"), augment=lambda x, _: plain(x),
            pixels_to_float=plain, client_ids=ids,
        )
        for saved in (True, False)
    )  # fmt: skip
    assert saved == rebuilt
    assert saved.accuracy > 0.3
