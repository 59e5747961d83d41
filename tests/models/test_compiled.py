"""Compiled encoders: which batches run compiled code, and that the results are those of the encoder as it is."""

import copy

import pytest
import torch

from atoll.core.errors import UserError
from atoll.models import ModelOptions, build_encoder
from atoll.models.compiled import compiled, forget_compiled
from atoll.recipe.recipe import load_recipe


@pytest.fixture
def graphs(monkeypatch):
    """PyTorch's front end without code generation, which takes half a minute; the graphs that it would compile."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, backend=backend, **options)
    )
    forget_compiled()
    yield found
    forget_compiled()


def encoder_and_twin():
    torch.manual_seed(0)
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), channels=1, image_size=8).double()
    return encoder, copy.deepcopy(encoder)


def images(n):
    return torch.randn(n, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def passes(encoder, sizes):
    """Two passes before the backward pass, as two views have, for each size."""
    for size in sizes:
        h = encoder(images(size)), encoder(-images(size))
        (h[0] * h[1]).sum().backward()
    grads = {name: weight.grad for name, weight in encoder.named_parameters()}
    return {**grads, **dict(encoder.named_buffers())}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.usefixtures("graphs")
def test_gradients_and_statistics_are_those_of_the_encoder():
    encoder, twin = encoder_and_twin()
    with compiled([encoder], 4):
        found = passes(encoder, (4, 8, 3, 4))
    check_equal(found, passes(twin, (4, 8, 3, 4)))
    assert "forward" not in vars(encoder)


def test_only_full_batches_run_compiled_code(graphs):
    encoder, _ = encoder_and_twin()
    counts = []
    with compiled([encoder], 4):
        for size in (3, 5, 4, 8, 4, 2):
            encoder(images(size))
            counts.append(len(graphs))
    assert counts == [0, 0, 1, 2, 2, 2]


def test_encoders_of_equal_structure_share_code(graphs):
    encoder, twin = encoder_and_twin()
    for each in (encoder, twin, encoder):  # a client after the other
        with compiled([each], 4):
            each(images(4))
    assert len(graphs) == 1


@pytest.mark.usefixtures("graphs")
def test_beyond_the_limit_it_does_not_silently_go_on(monkeypatch):
    monkeypatch.setattr("atoll.models.compiled.MOST", 2)
    encoder, _ = encoder_and_twin()
    with compiled([encoder], 1):
        encoder(images(2))
        encoder(images(3))
        with pytest.raises(UserError, match=r"train\.compile: PyTorch cannot compile"):
            encoder(images(4))


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    encoder, _ = encoder_and_twin()
    forget_compiled()
    with (
        compiled([encoder], 4),
        pytest.raises(UserError, match=r"cannot compile this encoder .* leave it out"),
    ):
        encoder(images(4))


def test_the_encoder_is_as_before_after_an_error():
    encoder, _ = encoder_and_twin()
    with pytest.raises(KeyError), compiled([encoder], 4):
        raise KeyError
    assert "forward" not in vars(encoder)


def test_it_is_refused_with_gradient_checkpointing():
    with pytest.raises(UserError, match=r"train\.compile cannot be used with train\.checkpoint_gradients"):
        load_recipe("digits-simclr", ["train.compile=true", "train.checkpoint_gradients=true"])
