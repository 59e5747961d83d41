"""The second engine: the same rounds over Flower (https://flower.ai), simulated or between real sites.

One ServerApp (`atoll.commands.flower_server_app`) runs the rounds of `atoll.engines.server`, one ClientApp
(`client_app`) trains a site's client; both live in this package, so that a Flower app is a ``pyproject.toml`` and a
recipe, without code. What travels are trees of tensors and numbers (`codec`), never a pickle.
"""

from __future__ import annotations

from atoll.core.errors import UserError


def require_flower() -> None:
    """Make sure that Flower is there.

    Raises:
        UserError: it is not.
    """
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(
            "Flower is not installed here; install it with: pip install 'atoll[flower]'"
        ) from None
