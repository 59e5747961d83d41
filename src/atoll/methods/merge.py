"""The plain merge: a client begins with what it downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atoll.parts import Merge


@dataclass(frozen=True)
class Replace(Merge):
    """w_k ← w: the client's networks are replaced by the downloaded ones (FedAvg)."""

    name: ClassVar[str] = "replace"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
