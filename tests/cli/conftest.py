"""Images without labels and a finished run, for tests of several commands."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.harness import run_tiny


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 40 real digits with no labels: greyscale, colour and 16-bit."""
    folder = tmp_path_factory.mktemp("images")
    for i, digit in enumerate(load_digits().images[:40]):
        if i % 3 == 2:
            Image.fromarray((digit * 4095).astype(np.uint16)).save(folder / f"{i:02d}.png")
        else:
            Image.fromarray((digit * 15.9).astype(np.uint8)).convert("RGB" if i % 3 else "L").save(
                folder / f"{i:02d}.png"
            )
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("finished") / "run", "method.name=ssd").folder
