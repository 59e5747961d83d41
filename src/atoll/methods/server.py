"""The plain server step: the folded model is the next model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atoll.parts import ServerStep


@dataclass(frozen=True)
class Direct(ServerStep):
    """w ← the fold of the updates."""

    name: ClassVar[str] = "direct"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
