import pytest
import torch
from torch import nn

from atoll.core.errors import UserError
from atoll.models.vit import patchify
from tests.steps import Steps, federation

VIT = (
    "method.name=fed_mae",
    "model.encoder=vit-tiny",
    "model.width=64",
    "model.depth=1",
    "model.decoder_depth=1",
    "model.stem=cifar",
)


class Spy(nn.Module):
    """Stands in for the decoder: remembers what it was given, and answers as it is told."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, tokens, keep):
        self.tokens, self.keep = tokens, keep
        return self.answer(keep)


def step_with(answer, *settings):
    steps = Steps(*VIT, *settings)
    batch = steps.batch()
    spy = Spy(lambda keep: answer(patchify(batch.images["image"], 2), keep))
    steps.networks["mae_decoder"] = spy
    return steps.client.step(batch).item(), spy, batch


def hidden(target, keep):
    return torch.ones(target.shape[:2]).scatter_(1, keep, 0.0).bool()


def test_three_quarters_of_the_patches_are_hidden():
    _, spy, batch = step_with(lambda target, keep: target, "data.image_size=32")
    assert patchify(batch.images["image"], 2).shape[1] == 256
    assert spy.keep.shape == (20, 64)
    assert spy.tokens.shape == (20, 65, 64)
    assert all(len(set(row)) == 64 for row in spy.keep.tolist())
    assert len({tuple(row) for row in spy.keep.tolist()}) == 20  # each image has a mask of its own


def test_the_loss_is_the_mean_over_hidden_pixels_alone():
    loss, spy, batch = step_with(lambda target, keep: torch.zeros_like(target))
    target = patchify(batch.images["image"], 2).double()
    total, count = 0.0, 0
    for i, visible in enumerate(spy.keep.tolist()):
        for j in range(target.shape[1]):
            if j not in visible:
                total += sum(v * v for v in target[i, j].tolist())
                count += target.shape[2]
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_the_loss_is_zero_exactly_where_hidden_pixels_are_exact():
    def garbage_where_visible(target, keep):
        return torch.where(hidden(target, keep)[..., None], target, torch.full_like(target, 7.0))

    def one_hidden_pixel_off(target, keep):
        wrong = target.clone()
        wrong[0, hidden(target, keep)[0].nonzero()[0, 0], 0] += 1
        return wrong

    assert step_with(garbage_where_visible)[0] == 0
    off, spy, batch = step_with(one_hidden_pixel_off)
    assert off == pytest.approx(1 / (hidden(patchify(batch.images["image"], 2), spy.keep).sum().item() * 4))


def test_the_encoder_never_sees_what_is_hidden():
    _, spy, batch = step_with(lambda target, keep: target)
    steps = Steps(*VIT)
    again = steps.batch()
    patches = patchify(again.images["image"], 2)
    patches[hidden(patches, spy.keep)] = 9.0
    again.images["image"] = nn.functional.fold(patches.transpose(1, 2), 8, 2, stride=2)
    assert not torch.equal(again.images["image"], batch.images["image"])
    other = Spy(lambda keep: torch.zeros(len(keep), 16, 4))
    steps.networks["mae_decoder"] = other
    steps.client.step(again)
    assert torch.equal(other.tokens, spy.tokens)


def test_masks_change_from_step_to_step_and_training_moves_both_networks():
    steps = Steps(*VIT)
    before = {name: p.clone() for name, p in steps.networks.named_parameters()}
    steps.update(steps.client.step(steps.batch()))
    moved = {name for name, p in steps.networks.named_parameters() if not torch.equal(p, before[name])}
    assert {"encoder.embed.weight", "mae_decoder.head.weight", "mae_decoder.mask_token"} <= moved
    masks = steps.client.context.of(steps.client.method.objective).masks
    state = masks.get_state()
    steps.client.step(steps.batch())
    assert not torch.equal(state, masks.get_state())


def test_other_encoders_and_ratios_are_refused():
    with pytest.raises(UserError, match=r"set model\.encoder = 'vit-tiny'"):
        federation("method.name=fed_mae")
    with pytest.raises(UserError, match=r"options\.mae\.mask_ratio is 1\.0; it must be above 0 and below 1"):
        federation(*VIT, "options.mae.mask_ratio=1.0")


@pytest.mark.parametrize(("method", "ratio", "visible"), [("mae", 0.01, 16), ("mar", 0.99, 0)])
def test_a_ratio_that_masks_no_patch_or_all_is_refused_before_the_run(method, ratio, visible):
    sentence = rf"options\.{method}\.mask_ratio = {ratio} leaves {visible} of the 16 patches .* change it"
    with pytest.raises(UserError, match=sentence):
        federation(*VIT, f"method.name=fed_{method}", f"options.{method}.mask_ratio={ratio}")
