"""Optimisers that import no compiler: they take PyTorch's steps, and PyTorch's own stay as they are."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from atoll.core import optimizers
from tests.versions import since

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "weight_decay": 0.01},
    "AdamW": {"lr": 0.1, "weight_decay": 0.01},
}


VIT = ["model.encoder=vit-tiny", "model.width=64", "model.depth=1", "model.stem="]


def steps(kind, options):
    """Three steps, two more after the state was saved and loaded, and what the hooks saw."""
    weights = [nn.Parameter(torch.arange(6.0).reshape(2, 3)), nn.Parameter(torch.ones(3))]
    seen = []
    optimizer = kind(weights[:1], **options)
    optimizer.add_param_group({"params": weights[1:], "lr": 0.5})
    for step in range(5):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = kind([{"params": weight} for weight in weights], **options)
            optimizer.load_state_dict(state)
            optimizer.register_step_post_hook(lambda *_: seen.append(1))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        ((weights[0] * weights[1]).sin().sum() * (step + 1)).backward()
        optimizer.step()
    assert all(weight.requires_grad for weight in weights)
    return [*map(torch.Tensor.detach, weights), torch.tensor(sum(seen))]


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_pytorchs(name):
    expected = steps(getattr(torch.optim, name), KINDS[name])
    for found, value in zip(steps(getattr(optimizers, name), KINDS[name]), expected, strict=True):
        assert torch.equal(found, value)
    assert expected[-1] == 2


@pytest.mark.parametrize("name", KINDS)
def test_pytorchs_own_are_left_alone(name):
    """A user's code may compile them."""
    own, theirs = getattr(optimizers, name), getattr(torch.optim, name)
    for method in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        assert getattr(theirs, method) is not getattr(own, method)
        assert inspect.unwrap(getattr(theirs, method)) is not getattr(theirs, method)


@pytest.mark.parametrize(
    "settings",
    [
        ["method.name=fed_simclr", "model.width=4"],
        ["method.name=fed_simclr", "model.encoder=resnet18", "model.width="],
        ["method.name=fed_simclr", *VIT],
        pytest.param(
            ["method.name=fed_mae", *VIT],
            marks=since(torch, 2, 9, reason="draws truncated normals by its compiler"),
        ),
    ],
    ids=["resnet-narrow", "resnet18", "vit-tiny", "fed_mae"],
)
def test_a_run_imports_no_compiler_and_no_library_that_it_does_not_need(settings, tmp_path):
    """Together they take longer than PyTorch itself, in each process. Maps of embeddings need scikit-learn."""
    small = [
        *("data.limit=160", "train.rounds=1", "train.epochs=1", "evaluation.map_points=0"),
        *("engine.threads=1", "engine.workers=1"),
    ]
    out = str(tmp_path / "run")
    code = f"""
import sys
import atoll

run = atoll.simulate(atoll.load_recipe("digits", {[*small, *settings]}), {out!r})
assert "knn/accuracy" in run.results and "probe/accuracy" in run.results
print([name for name in ("torch._dynamo", "torchvision", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
