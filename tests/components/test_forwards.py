"""Forward passes: two views in separate batches or in one, against BatchNorm written out in float64."""

import pytest
import torch
from torch import nn

from atoll.components.forwards import VIEWS, Forward, run_forwards
from tests.functional import oracles
from tests.steps import Steps

N, WIDTH = 5, 4


def networks(norm=True, seed=0):
    """A linear encoder and a linear projector, each with BatchNorm in front of its output, in float64."""
    draws = torch.Generator().manual_seed(seed)

    def layer(inputs):
        linear = nn.Linear(inputs, WIDTH, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=draws))
        return nn.Sequential(linear, nn.BatchNorm1d(WIDTH) if norm else nn.Identity())

    return nn.ModuleDict({"encoder": layer(3), "projector": layer(WIDTH)}).double().train()


def views(seed=3):
    """Two views whose distributions differ, so that their common statistics are those of neither."""
    draws = torch.Generator().manual_seed(seed)
    first = torch.randn(N, 3, generator=draws, dtype=torch.float64)
    return {"view1": first, "view2": 4 * torch.randn(N, 3, generator=draws, dtype=torch.float64) + 2}


def linear(x, weight):
    return [[oracles.dot(row, w) for w in weight.tolist()] for row in x]


def standardised(x):
    """Each column less its mean, over the root of its variance plus BatchNorm's ε."""
    result = []
    for column in zip(*x, strict=True):
        mean = sum(column) / len(column)
        variance = sum((v - mean) ** 2 for v in column) / len(column)
        result.append([(v - mean) / (variance + 1e-5) ** 0.5 for v in column])
    return [list(row) for row in zip(*result, strict=True)]


def by_hand(x, network):
    h = standardised(linear(x.tolist(), network["encoder"][0].weight))
    return h, standardised(linear(h, network["projector"][0].weight))


def exact(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("copy", ["local", "target"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_joint_batch_is_normalised_by_the_statistics_of_both_views(joint, copy):
    network, images = networks(), views()
    pair = (Forward("view1", copy), Forward("view2", copy))
    passes = run_forwards(pair, {copy: network}, images, joint, {})
    if joint:
        h, z = by_hand(torch.cat([images["view1"], images["view2"]]), network)
        expected = [(h[:N], z[:N]), (h[N:], z[N:])]
    else:
        expected = [by_hand(images[name], network) for name in ("view1", "view2")]
    for forward, (h, z) in zip(pair, expected, strict=True):
        torch.testing.assert_close(passes[forward].h, exact(h), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(passes[forward].z, exact(z), rtol=1e-9, atol=1e-9)
        assert passes[forward].h.requires_grad == (copy == "local")


@pytest.mark.parametrize(("joint", "batches"), [(False, 2), (True, 1)])
def test_running_statistics_move_once_for_each_batch(joint, batches):
    """By a tenth towards the mean and the unbiased variance of the batch, or of each view in turn."""
    network, images = networks(), views()
    passes = run_forwards(VIEWS, {"local": network}, images, joint, {})
    assert passes[VIEWS[0]].z.shape == (N, WIDTH)
    norm, weight = network["encoder"][1], network["encoder"][0].weight.detach()
    mean, variance = torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()
    inputs = [images["view1"], images["view2"]]
    for x in [torch.cat(inputs)] if joint else inputs:
        h = x @ weight.T
        mean = 0.9 * mean + 0.1 * h.sum(dim=0) / len(h)
        centred = h - h.sum(dim=0) / len(h)
        variance = 0.9 * variance + 0.1 * (centred**2).sum(dim=0) / (len(h) - 1)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    assert int(norm.num_batches_tracked) == batches


def test_without_batchnorm_joint_and_separate_batches_agree():
    network, images = networks(norm=False), views()
    joint, separate = (run_forwards(VIEWS, {"local": network}, images, joint, {}) for joint in (True, False))
    for view in VIEWS:
        for head in ("h", "z"):
            both, one = getattr(joint[view], head), getattr(separate[view], head)
            torch.testing.assert_close(both, one, rtol=1e-12, atol=1e-12)


def test_a_view_without_its_partner_and_other_images_are_batches_of_their_own():
    network, images = networks(), {**views(), "image": views(seed=8)["view1"]}
    for forwards in (
        [VIEWS[0]],
        [VIEWS[1], Forward("image")],
        [Forward("view1"), Forward("view2", "target")],
    ):
        passes = run_forwards(forwards, {"local": network, "target": networks(seed=1)}, images, True, {})
        for forward in forwards:
            used = network if forward.network == "local" else networks(seed=1)
            h, _ = by_hand(images[forward.images], used)
            torch.testing.assert_close(passes[forward].h, exact(h), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", ["joint", "separate"])
def test_a_clients_loss_is_of_the_batches_that_the_recipe_names(batch):
    steps = Steps("method.name=fed_simclr", f"train.views_batch={batch}", "options.simclr.temperature=0.3")
    images = steps.batch()
    pair = [images.images[view] for view in ("view1", "view2")]
    joint = steps.encode(torch.cat(pair))[1].double().chunk(2)
    separate = [steps.encode(view)[1].double() for view in pair]
    losses = {name: oracles.nt_xent(*z, 0.3) for name, z in (("joint", joint), ("separate", separate))}
    assert steps.client.step(images).item() == pytest.approx(losses[batch], rel=1e-5)
    assert losses["joint"] != pytest.approx(losses["separate"], rel=1e-3)


@pytest.mark.parametrize("joint", [False, True])
def test_a_head_that_no_component_adds_is_named(joint):
    own = networks()
    passes = run_forwards(VIEWS, {"local": own}, views(), joint, {})
    with pytest.raises(
        KeyError, match=r"no component of this method adds the head 'predictor'; return it from heads"
    ):
        _ = passes[VIEWS[1]].q


def test_a_pass_that_no_component_declares_is_named():
    passes = run_forwards(VIEWS, {"local": networks()}, views(), False, {})
    with pytest.raises(KeyError, match=r"declares the pass Forward\(images='view3'.*return it from forwards"):
        _ = passes[Forward("view3")]
    assert set(passes) == set(VIEWS)  # asking declares nothing
