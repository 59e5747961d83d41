"""The base class of all components: their class attributes, and the hooks that every kind of them may have."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

from torch import Tensor, nn

from atoll.components.context import ClientContext
from atoll.components.declaration import Spec
from atoll.components.folds import SliceFold
from atoll.components.forwards import Forward
from atoll.components.prerequisites import Prerequisite, Trained
from atoll.components.setting import Setting
from atoll.core.config import Options
from atoll.core.errors import UserError
from atoll.core.tree import Tree, Weights
from atoll.data.batch import Batch


@dataclass(frozen=True)
class Component(Options):
    """A piece of a method; its dataclass fields are its options in a recipe.

    Class attributes:
        name: in recipes, states and messages.
        source: paper and equation.
        needs_labels: the component reads ``batch.labels``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Refuse an option that would replace a hook or a class attribute unnoticed; ask for a missing declaration.

        Raises:
            UserError: a field is named like something that components have already and that is no option.
        """
        super().__init_subclass__()
        inherited = {option.name for base in cls.__bases__ if is_dataclass(base) for option in fields(base)}
        for name, hint in inspect.get_annotations(cls).items():
            if "ClassVar" not in str(hint) and name not in inherited and hasattr(super(cls, cls), name):
                raise UserError(
                    f"{cls.__qualname__}.{name} is an option named like a part's own {name!r}, which it would "
                    "replace; give it another name"
                )
        if "finish" in vars(cls) and not declares_slice(cls):
            warnings.warn(
                f"{cls.__qualname__} overrides finish and does not declare what it sends; add declares(setting) "
                "with the names, shapes and dtypes (see atoll.components.declaration), or None if it sends "
                "nothing; 0.3 will refuse slices that are not declared",
                DeprecationWarning,
                stacklevel=2,
            )

    @classmethod
    def _place(cls) -> str:
        return f"options.{cls.name}"

    # What depends on no option may be a class variable in a component, as most are.

    @property
    def egress(self) -> tuple[str, ...]:
        """What leaves a client because of this component, beyond weights, in words."""
        return ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """What a client keeps for this component from round to round, in words."""
        return ()

    def refuse(self, setting: Setting) -> str | None:
        """A sentence that says why this component cannot work in this setting, or None."""
        return None

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """A sentence that says why this component cannot work with these networks, or None."""
        return None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Networks that this component adds; they train and travel like the encoder."""
        return {}

    def embeds(self) -> bool:
        """Whether this component reads embeddings; where no component does, there is no projector."""
        return False

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Runs that this component needs first, by name."""
        return {}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """What each client gets once and for all."""
        return None

    def init(self, setting: Setting) -> Tree:
        """The component's slice of server state."""
        return None

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """The component's slice of the message to a client; ``cohort`` in the order in which it was drawn."""
        return None

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Local epochs of a client in a round, where the component decides on them; 0: no training."""
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold | None:
        """A fold of the slices that clients return into the next slice of server state."""
        return None

    def declares(self, setting: Setting) -> Spec | None:
        """The form of what `finish` returns (see `atoll.components.declaration`); None: nothing is sent."""
        return None

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """What else is wrong with a client's slice, as "it …", where the declaration cannot say it.

        ``weights`` of the same update are in order, the slice is as declared, and its tensors are finite.
        """
        return None

    # The client's side.

    def forwards(self) -> Sequence[Forward]:
        """The passes that `loss` reads, in order."""
        return ()

    def start(self, context: ClientContext) -> None:
        """Before the first step."""

    def images(self) -> Sequence[str]:
        """Images of a batch that `inputs` or `loss` reads without a declared pass, by name."""
        return ()

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Further images of a batch, by name."""
        return {}

    def after_step(self, context: ClientContext) -> None:
        """After each optimiser step: momentum targets, queues."""

    def finish(self, context: ClientContext) -> Tree:
        """The component's slice of the update."""
        return None

    def keep(self, context: ClientContext) -> Tree:
        """What the client keeps for this component until its next round."""
        return None


def declares_slice(kind: type[Component]) -> bool:
    """Whether a component's declaration is about its `finish`: no class overrides one and leaves out the other."""
    owner = next(base for base in kind.__mro__ if {"finish", "declares"} & vars(base).keys())
    return "declares" in vars(owner)
