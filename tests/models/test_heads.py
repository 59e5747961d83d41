import pytest
import torch
from torch import nn

from atoll.models import ModelOptions, build_predictor, build_projector, embedding_dim, mlp


def linear(before, after, bias=True):
    return before * after + after * bias


# Each paper's head over a 512-d encoder: options, width of z, number of parameters.
HEADS = {
    "SSD": ({}, 512, linear(512, 2048) + 2 * 2048 + linear(2048, 512)),
    "Dec-SSL SimCLR": (
        {"projector_hidden": (512,), "projector_dim": 512},
        512,
        2 * linear(512, 512) + 2 * 512,
    ),
    "L-DAWA": ({"projector_hidden": (), "projector_dim": 128}, 128, linear(512, 128)),
    "Barlow Twins": (
        {"projector_hidden": (8192, 8192), "projector_dim": 8192, "projector_bias": False},
        8192,
        512 * 8192 + 2 * 8192**2 + 4 * 8192,
    ),
    "EasyFL": (
        {"projector_hidden": (4096,), "projector_dim": 2048},
        2048,
        linear(512, 4096) + 2 * 4096 + linear(4096, 2048),
    ),
    "FedX": (
        {"projector_hidden": (256,), "projector_dim": 256, "projector_norm": False},
        256,
        linear(512, 256) + linear(256, 256),
    ),
    "Orchestra": (
        {"projector_hidden": (512,), "projector_bias": False, "projector_final_norm": "plain"},
        512,
        2 * 512 * 512 + 2 * 512,
    ),
    "MoCo v1": ({"projector_hidden": (), "projector_dim": 128}, 128, linear(512, 128)),
    "SSD Table 4": ({"projector": "none"}, 512, 0),
}


@pytest.mark.parametrize("paper", HEADS)
def test_the_papers_projectors(paper):
    options, dim, parameters = HEADS[paper]
    with torch.device("meta"):  # shapes and counts need no memory
        projector = build_projector(ModelOptions(**options), 512)
        assert projector(torch.rand(4, 512)).shape == (4, dim)
    assert embedding_dim(ModelOptions(**options), 512) == dim
    assert sum(p.numel() for p in projector.parameters()) == parameters


def test_mlp_is_its_equation():
    torch.manual_seed(0)
    head = mlp([3, 5, 2], final_norm="affine")
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    assert [type(layer) for layer in head] == kinds
    x = torch.randn(7, 3)

    def standardise(a):
        return (a - a.mean(0)) / (a.var(0, unbiased=False) + 1e-5).sqrt()

    hidden = standardise(x @ head[0].weight.T + head[0].bias).clamp(min=0)
    torch.testing.assert_close(head(x), standardise(hidden @ head[3].weight.T + head[3].bias))


def test_norm_final_norm_and_bias_are_options():
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in mlp([3, 4, 4, 2], norm=False))
    assert mlp([3, 2], final_norm="affine")[-1].affine
    assert not mlp([3, 2], final_norm="plain")[-1].affine
    assert isinstance(mlp([3, 2])[-1], nn.Linear)
    assert all(layer.bias is None for layer in mlp([3, 4, 2], bias=False) if isinstance(layer, nn.Linear))


def test_without_a_projector_the_embedding_is_the_representation():
    h = torch.randn(2, 16)
    projector = build_projector(ModelOptions(projector="none"), 16)
    assert torch.equal(projector(h), h)
    assert not list(projector.parameters())


def test_projector_defaults_to_the_encoders_width():
    assert build_projector(ModelOptions(projector_hidden=(8,)), 24)(torch.randn(3, 24)).shape == (3, 24)


def test_predictor_ends_as_wide_as_it_starts():
    predictor = build_predictor(ModelOptions(predictor_hidden=(6,), predictor_norm=False), 10)
    assert predictor(torch.randn(3, 10)).shape == (3, 10)
    assert [type(layer) for layer in predictor] == [nn.Linear, nn.ReLU, nn.Linear]
    byol = build_predictor(ModelOptions(predictor_hidden=(4096,)), 2048)
    assert sum(p.numel() for p in byol.parameters()) == linear(2048, 4096) + 2 * 4096 + linear(4096, 2048)
