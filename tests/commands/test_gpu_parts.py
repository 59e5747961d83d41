"""Parts of ``atoll bench gpu``, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from atoll.commands.gpu_parts import SCALES, Bench, correctness
from atoll.methods.registry import METHODS


def test_every_method_is_checked_at_full_scale():
    """With fewer images; the list of methods and the settings that some need are the full scale's."""
    full = SCALES["full"]
    scale = replace(full, digits=(*full.digits, "data.limit=160", "train.batch_size=32"))
    found = dict(correctness(Bench(torch.device("cpu"), scale)))
    assert found.keys() == METHODS.keys()
    assert {name: value.get("error") for name, value in found.items() if not value["ok"]} == {}
