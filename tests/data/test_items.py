"""Single items of datasets that Python code gives."""

from __future__ import annotations

import torch

from atoll.data.items import to_image


def test_brain_floats_are_read_as_other_floats_are() -> None:
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert to_image(image).tobytes() == to_image(image.float()).tobytes()
