from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.core.errors import RunError
from atoll.core.tree import pack, unpack
from atoll.data.detection.load import load_detection
from atoll.evaluation.detection.average_precision import average_precision, detect_objects
from atoll.evaluation.detection.network import make_detector
from atoll.evaluation.detection.options import DetectionOptions
from atoll.evaluation.detection.training import DetectorTraining, flipped
from atoll.models import ModelOptions, build_encoder
from tests.shapes import write_coco
from tests.trees import same

SMALL = DetectionOptions(
    size=48, max_size=48, fpn_width=8, head_width=16, rois=16, epochs=2, batch_size=3, masks=True
)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., DetectorTraining]:
    torch.set_num_threads(1)
    write_coco(tmp_path, train=4)

    def made(options: DetectionOptions = SMALL) -> DetectorTraining:
        train, _ = load_detection(str(tmp_path))
        torch.manual_seed(5)
        encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4, stem="strided"), 3, 32)
        return DetectorTraining(make_detector(encoder, 2, options), train, 3, options)

    return made


def test_a_training_from_any_step_ends_with_the_same_bytes(make: Callable[..., DetectorTraining]) -> None:
    whole = make()
    states: list[bytes] = [pack(whole.state())]
    whole.run(lambda training: states.append(pack(training.state())))
    assert whole.steps == len(states) - 1 == 4
    for step in (0, 1, 3):
        torch.rand(7)  # the state of the default generator is no part of the result
        later = make()
        later.load(unpack(states[step]))
        assert later.step == step
        later.run(lambda training: None)
        assert pack(later.state()) == states[-1]
    assert len(whole.losses) == 2
    assert {"loss", "loss_mask", "loss_classifier", "loss_objectness"} <= whole.losses[0].keys()


def test_the_seed_decides_the_training(make: Callable[..., DetectorTraining]) -> None:
    ends = []
    for seed in (0, 0, 1):
        training = make(replace(SMALL, seed=seed, epochs=1))
        training.run(lambda training: None)
        ends.append(training.state())
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])


def test_a_step_is_sgd_on_the_sum_of_the_losses(make: Callable[..., DetectorTraining]) -> None:
    options = replace(SMALL, epochs=1, batch_size=4, warmup=0.0, flip=False, weight_decay=0.01)
    training = make(options)
    before = {name: value.detach().clone() for name, value in training.detector.named_parameters()}
    training.run(lambda training: None)
    assert training.losses[0]["loss"] == pytest.approx(
        sum(value for name, value in training.losses[0].items() if name != "loss"), rel=1e-6
    )
    for name, parameter in training.detector.named_parameters():
        if parameter.grad is not None:
            moved = before[name] - options.lr * (parameter.grad + options.weight_decay * before[name])
            # the optimiser adds the decay to a copy of the gradient
            torch.testing.assert_close(parameter.detach(), moved)


def test_an_epoch_has_each_image_once_in_a_new_order(make: Callable[..., DetectorTraining]) -> None:
    training = make(replace(SMALL, epochs=6))
    orders = []
    for epoch in range(6):
        rows: list[int] = []
        for place in range(training.steps_per_epoch):
            training.step = epoch * training.steps_per_epoch + place
            rows += [row for row, _ in training._batch()]
        orders.append(tuple(rows))
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 2


def test_a_fraction_of_the_images_is_drawn(make: Callable[..., DetectorTraining]) -> None:
    chosen = {tuple(make(replace(SMALL, fraction=0.5, seed=seed))._rows.tolist()) for seed in range(6)}
    assert all(len(rows) == 2 for rows in chosen)
    assert len(chosen) > 1
    assert make(replace(SMALL, fraction=0.01)).images == 1


def test_boxes_and_masks_flip_with_their_image() -> None:
    image = torch.arange(12.0).reshape(1, 2, 6)
    mask = torch.zeros(1, 2, 6, dtype=torch.uint8)
    mask[0, :, 1:3] = 1
    target = {"boxes": torch.tensor([[1.0, 0.0, 3.0, 2.0]]), "labels": torch.tensor([1]), "masks": mask}
    mirrored, other = flipped(image, target)
    assert mirrored[0, 0].tolist() == [5, 4, 3, 2, 1, 0]
    assert other["boxes"].tolist() == [[3.0, 0.0, 5.0, 2.0]]
    assert other["masks"][0, 0].tolist() == [0, 0, 0, 1, 1, 0]
    assert target["boxes"].tolist() == [[1.0, 0.0, 3.0, 2.0]]


def test_a_training_that_diverges_says_so(make: Callable[..., DetectorTraining]) -> None:
    training = make()
    with torch.no_grad():
        training.detector.roi_heads.box_predictor.bbox_pred.weight.fill_(float("nan"))
    with pytest.raises(RunError, match=r"not finite in step 1: .* lower lr"):
        training.run(lambda training: None)


def test_no_state_is_saved_after_a_step_that_diverged(make: Callable[..., DetectorTraining]) -> None:
    training = make(replace(SMALL, batch_size=1))

    def poison(training: DetectorTraining) -> None:
        saved.append(training.state()["step"])
        if training.step == 2:
            with torch.no_grad():
                training.detector.roi_heads.box_predictor.bbox_pred.weight.fill_(float("nan"))

    saved: list[int] = []
    with pytest.raises(RunError, match="not finite in step 3"):
        training.run(poison)
    assert saved == [1, 2]


def test_the_losses_of_a_step_are_read_in_the_next_one(make: Callable[..., DetectorTraining]) -> None:
    """So that a GPU computes while the next images are decoded; their means are those of all steps."""
    training = make(replace(SMALL, batch_size=1, epochs=2))
    told: list[dict[str, float]] = []
    training.detector.register_forward_hook(
        lambda layer, given, out: told.append({name: float(loss) for name, loss in out.items()})
    )
    read: list[int] = []
    training.run(lambda training: read.append(len(training.losses)))
    assert read == [0, 1, 1, 1, 1, 2, 2, 2]
    for epoch, means in enumerate(training.losses):
        steps = told[4 * epoch : 4 * epoch + 4]
        expected = {name: sum(step[name] for step in steps) / 4 for name in told[0]}
        assert means == pytest.approx({"loss": sum(expected.values()), **expected}, rel=1e-5)


@pytest.mark.slow
def test_mask_rcnn_learns_coloured_shapes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_coco(tmp_path, train=16, test=4)
    train, test = load_detection(str(tmp_path))
    options = DetectionOptions(
        size=96,
        max_size=96,
        fpn_width=32,
        rois=32,
        epochs=30,
        batch_size=4,
        masks=True,
        lr=0.02,
        schedule="cosine",
        warmup=0.1,
    )
    torch.manual_seed(0)
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=16, stem="strided"), 3, 32)
    detector = make_detector(encoder, 2, options)
    before = average_precision(test, detect_objects(detector, test, 3, 4), masks=True)
    training = DetectorTraining(detector, train, 3, options)
    training.run(lambda training: None)
    after = average_precision(test, detect_objects(detector, test, 3, 4), masks=True)
    assert before["bbox"]["AP50"] < 0.1
    assert after["bbox"]["AP50"] > 0.8
    assert after["segm"]["AP50"] > 0.8
