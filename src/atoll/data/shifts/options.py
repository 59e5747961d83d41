"""The recipe's ``[shift]`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from atoll.core.config import Options
from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import AtLeast, AtMost
from atoll.data.shifts.corruptions import CORRUPTIONS

Kind = Literal["rotation", "style", "corruption"]


@dataclass(frozen=True)
class ShiftOptions(Options, section="shift"):
    """The recipe's ``[shift]`` section: how a client's images differ from those of other clients.

    Attributes:
        kinds: Shifts of the training images, in the order in which they are applied: ``"rotation"`` (client k of K
            by 360·k/K degrees), ``"style"`` (client k has style k modulo 5), ``"corruption"`` (client k has
            corruption k modulo their number).
        corruptions: Corruptions that are assigned to the clients in turn.
        severity: Severity of the corruptions, 1 to 5 as in CIFAR-10-C.
        evaluation: Images of the evaluation. ``"source"`` leaves them unchanged. ``"clients"`` shifts each training
            image like the images of its client, and each held-out image like those of a client that is drawn for
            it.
    """

    kinds: tuple[Kind, ...] = ()
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severity: Annotated[int, AtLeast(1), AtMost(5)] = 3
    evaluation: Literal["source", "clients"] = "source"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.kinds)) < len(self.kinds):
            raise UserError(f"shift.kinds = {list(self.kinds)} names a shift twice; name each once")
        if not self.corruptions:
            raise UserError(f"shift.corruptions is empty; name one or several of {', '.join(CORRUPTIONS)}")
        for name in self.corruptions:
            if name not in CORRUPTIONS:
                known = did_you_mean(name, CORRUPTIONS)
                raise UserError(f"shift.corruptions names {name!r}, which is unknown; {known}")
