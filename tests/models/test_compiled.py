"""Compiled encoders: which batches run compiled code, and that the results are those of the encoder as it is."""

import copy
import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

from atoll.core.errors import UserError
from atoll.models import ModelOptions, build_encoder
from atoll.models.compiled import CompiledEncoders
from atoll.recipe.recipe import load_recipe
from tests.rounds import Rounds
from tests.trees import same

CPU = torch.device("cpu")


def encoder_and_twin():
    torch.manual_seed(0)
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), channels=1, image_size=8)
    return encoder.double(), copy.deepcopy(encoder.double())


def images(n):
    return torch.randn(n, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def passes(encoder, encode, sizes):
    """Two passes before the backward pass, as two views have, for each size."""
    for size in sizes:
        h = encode(encoder, images(size)), encode(encoder, -images(size))
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
    found = passes(encoder, CompiledEncoders({4}, CPU), (4, 8, 3, 4))
    check_equal(found, passes(twin, nn.Module.__call__, (4, 8, 3, 4)))


@pytest.mark.slow
def test_generated_code_computes_what_the_encoder_does():
    """Also where the first layers are narrow, for whose layout oneDNN has a rule (see `atoll.models.layout`)."""
    encoder, twin = encoder_and_twin()
    found = passes(encoder, CompiledEncoders({16}, CPU), (16, 32, 3, 16))
    check_equal(found, passes(twin, nn.Module.__call__, (16, 32, 3, 16)))


@pytest.mark.slow
def test_generated_code_does_not_damage_memory():
    """oneDNN does in narrow strided convolutions in the channels-last layout (see `atoll.models.layout`)."""
    program = """
        import torch
        from atoll.models import ModelOptions, build_encoder
        from atoll.models.compiled import CompiledEncoders

        encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), channels=3, image_size=32)
        encode, images = CompiledEncoders({8}, torch.device("cpu")), torch.randn(8, 3, 32, 32)
        for _ in range(300):
            encode(encoder, images).square().mean().backward()
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", dedent(program)], env=environment, check=True)


@pytest.mark.slow
def test_dropout_draws_what_it_draws_without_compiled_code():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5))
    x = torch.randn(8, 1, 8, 8)
    results = []
    for encode in (nn.Module.__call__, CompiledEncoders({8}, CPU)):
        torch.manual_seed(0)
        results.append((encode(layers, x), torch.rand(3)))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def test_only_full_batches_run_compiled_code(graphs):
    encoder, _ = encoder_and_twin()
    encode, counts = CompiledEncoders({4, 5}, CPU), []
    for size in (3, 4, 7, 8, 4, 5, 2):
        encode(encoder, images(size))
        counts.append(len(graphs))
    assert counts == [0, 1, 1, 2, 2, 3, 3]


def test_encoders_of_equal_structure_share_code(graphs):
    encoder, twin = encoder_and_twin()
    encode = CompiledEncoders({4}, CPU)
    found = [encode(each, images(4)) for each in (encoder, twin)]
    assert torch.equal(*found)
    assert len(graphs) == 1
    with torch.no_grad():
        twin.conv1.weight.mul_(2)
        assert not torch.equal(encode(twin, images(4)), encode(encoder, images(4)))


def test_all_declared_passes_of_a_step_are_compiled(graphs):
    """BYOL's: of the trained encoder, and of its copy without gradients."""
    Rounds("method.name=fed_byol", "train.compile=true").train(0)
    assert len(graphs) == 2


def test_parts_of_a_full_batch_are_compiled(graphs):
    settings = ("method.name=fed_simclr", "train.batch_size=20", "train.epochs=1", "train.drop_last=true")
    Rounds(*settings, "train.compile=true", "train.accumulate=3").train(0)
    assert len(graphs) == 2  # for 7 and 6 images


@pytest.mark.usefixtures("graphs")
def test_beyond_the_limit_it_does_not_silently_go_on(monkeypatch):
    monkeypatch.setattr("atoll.models.compiled.MOST", 2)
    encoder, _ = encoder_and_twin()
    encode = CompiledEncoders({1}, CPU)
    encode(encoder, images(2))
    encode(encoder, images(3))
    with pytest.raises(UserError, match=r"train\.compile: .* \(it needs more than 2 versions of its code"):
        encode(encoder, images(4))


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    encoder, _ = encoder_and_twin()
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(UserError, match=r"cannot compile this encoder .* leave out train\.compile"):
        CompiledEncoders({4}, CPU)(encoder, images(4))


def test_it_is_refused_with_gradient_checkpointing():
    with pytest.raises(UserError, match=r"train\.compile cannot be used with train\.checkpoint_gradients"):
        load_recipe("digits-simclr", ["train.compile=true", "train.checkpoint_gradients=true"])


def test_outputs_outlive_the_graphs_memory(memory_is_used_again):
    encoder, twin = encoder_and_twin()
    encode = CompiledEncoders({4}, CPU, cuda_graphs=True)
    h = encode(encoder, images(4))
    encode.begin_step()
    assert torch.equal(h, twin(images(4)))
    assert memory_is_used_again == [1]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_step_of_a_graph_is_a_step_of_the_optimiser(parts, memory_is_used_again):
    """All passes of a batch, in all its parts: gradients stay in the graphs' memory until the step."""
    settings = (
        "method.name=fed_byol",
        "train.batch_size=12",
        "train.drop_last=true",
        f"train.accumulate={parts}",
    )
    rounds = Rounds(*settings, "train.compile=true", "train.cuda_graphs=true")
    trained, _ = rounds.train(0)
    steps = rounds.federation.client_data(0).num_batches() * rounds.federation.setting.train.epochs
    assert memory_is_used_again == [0] + (steps - 1) * [4 * parts]  # of two views, by two encoders
    expected, _ = Rounds(*settings).train(0)
    assert same(trained["weights"], expected["weights"])


@pytest.mark.parametrize("asked", [True, False])
def test_graphs_are_asked_for_where_they_are_chosen(asked, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic, options: given.append(options))
    CompiledEncoders({4}, CPU, cuda_graphs=asked)
    assert given[0]["triton.cudagraphs"] == asked


@pytest.mark.usefixtures("graphs")
def test_without_graphs_no_step_is_marked(monkeypatch):
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", pytest.fail)
    Rounds("method.name=fed_byol", "train.compile=true").train(0)
