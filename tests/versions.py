"""Versions of libraries that a test needs."""

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def since_torch(major, minor, reason):
    """Skip a test with an older PyTorch, for this reason."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"PyTorch before {major}.{minor} {reason}")
