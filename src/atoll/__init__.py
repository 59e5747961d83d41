"""Atoll: federated self-supervised representation learning for PyTorch."""

__version__ = "0.1.0"
