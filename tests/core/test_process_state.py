"""What the user's code draws from the process's random streams follows from the recipe's seed."""

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from atoll.components.base import VIEWS, Term
from atoll.core.process_state import (
    equal_streams,
    process_for_training,
    random_streams,
    seeded_streams,
    settings_kept,
    streams_kept,
)
from atoll.models.external import give_encoder
from tests.harness import remains, run_tiny


def draws():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_streams_are_seeded_within_a_block_and_go_on_after_it():
    with seeded_streams(2**62):
        first = draws()
        with streams_kept():
            expected = draws()
        assert draws() == expected
    with seeded_streams(2**62):
        assert draws() == first
    with seeded_streams(2**62 + 1):
        assert all(one != other for one, other in zip(draws(), first, strict=True))


@settings_kept()
def meddle():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.mkldnn.enabled = False
    raise KeyError


def test_settings_are_restored_after_an_error():
    count = torch.get_num_threads()
    with pytest.raises(KeyError):
        meddle()
    found = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    assert found == (True, torch.float32, count)
    assert torch.backends.mkldnn.enabled


def test_a_run_multiplies_in_float32_whatever_its_caller_has_set():
    """As its workers do: with AVX-512 and bfloat16, and on GPUs, other precisions give other weights."""
    torch.set_float32_matmul_precision("medium")
    try:
        with process_for_training():
            assert torch.get_float32_matmul_precision() == "highest"
            torch.set_float32_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="an older PyTorch")
def test_a_precision_for_each_backend_stays_as_it_is():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        with process_for_training():
            assert matmul.fp32_precision == "bf16"
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


class DrawnFold:
    def add(self, client, piece):
        """Take no slice."""

    def close(self):
        return torch.tensor(draws())


@dataclass(frozen=True)
class Drawn(Term):
    """Draws as a user's code might: at the server, in the networks' initial weights, and in each step."""

    name: ClassVar[str] = "drawn"

    def heads(self, setting):
        head = nn.Linear(setting.embedding_dim, 1)
        nn.init.constant_(head.weight, np.random.rand())
        return {"drawn": head}

    def init(self, setting):
        return torch.tensor(draws())

    def send(self, state, client, cohort, round):
        return state

    def fold(self, state, setting, round):
        return DrawnFold()

    def forwards(self):
        return VIEWS

    def loss(self, context, batch, passes):
        share = np.random.beta(1, 1) + random.random()
        z = share * passes[VIEWS[0]].z + (1 - share) * passes[VIEWS[1]].z
        return 0.01 * (
            passes[VIEWS[0]].head("drawn", of="projector") * context.of(self).message.sum()
        ).mean() + (z.square().mean())


def test_a_users_draws_are_those_of_the_recipe(tmp_path):
    settings = ("method.name=fed_simclr", f"method.terms=['{__name__}:Drawn']")
    run = run_tiny(tmp_path / "run", *settings)
    torch.manual_seed(5)
    draws()  # another state of the process
    again = run_tiny(tmp_path / "again", *settings)
    assert remains(again)["encoders"] == remains(run)["encoders"]
    spread = run_tiny(tmp_path / "spread", *settings, "engine.workers=2")
    assert remains(spread)["encoders"] == remains(run)["encoders"]


def test_an_encoder_whose_weights_numpy_draws_is_the_same_each_time():
    def own():
        layer = nn.Linear(64, 8)
        nn.init.constant_(layer.weight, np.random.rand())
        return nn.Sequential(nn.Flatten(), layer)

    assert give_encoder(own, 1, 8) == give_encoder(own, 1, 8)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random])
def test_a_draw_from_any_stream_is_noticed(draw):
    with streams_kept(), np.printoptions(threshold=5):  # however few numbers of an array are shown
        before = random_streams()
        assert equal_streams(before, random_streams())
        for _ in range(1300):  # at some counts, numpy's position in its block is as before
            draw()
            assert not equal_streams(before, random_streams())
