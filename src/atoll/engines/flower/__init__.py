"""The Flower engine: the same rounds over Flower (https://flower.ai), simulated or between real sites.

A ServerApp (`atoll.commands.flower_server_app`) runs the rounds of `atoll.engines.server`, and a ClientApp
(`client_app`) trains a site's client. Both are part of Atoll, so a Flower app consists of a ``pyproject.toml``
and a recipe, without code. Messages contain trees of tensors and numbers (`codec`), never a pickle.
"""

from __future__ import annotations

from atoll.core.extras import require


def require_flower() -> None:
    """Check that Flower is installed.

    Raises:
        UserError: Flower is not installed.
    """
    require("flwr", "flower", "the Flower engine")


def require_simulation() -> None:
    """Check that Flower's simulation is installed; ``pip install flwr`` leaves out Ray, which it runs on.

    Raises:
        UserError: Flower or Ray is not installed.
    """
    require_flower()
    require("ray", "flower", "Flower's simulation")
