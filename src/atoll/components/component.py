"""The base class of all components: class attributes, and the hooks that all kinds of components share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MemberDescriptorType
from typing import ClassVar

from torch import Tensor, nn

from atoll.components.context import ClientContext
from atoll.components.declaration import Spec
from atoll.components.folds import SliceFold
from atoll.components.forwards import Forward
from atoll.components.prerequisites import Prerequisite, Trained
from atoll.components.setting import Setting
from atoll.core.config import Options
from atoll.core.errors import OldCodeWarning, UserError, warn
from atoll.core.schema import default_of
from atoll.core.tree import Tree, Weights
from atoll.data.batch import Batch


@dataclass(frozen=True)
class Component(Options):
    """One component of a method; its dataclass fields are its options in a recipe.

    Class attributes:
        name: Name of the component in recipes, states and messages.
        source: Paper and equation.
        needs_labels: The component reads ``batch.labels``, which are None unless some component sets this.
        between_neighbours: If there is no server, neighbours may exchange the component's slices. Each client then
            has its own slice of the state, folded from the slices of its neighbourhood.
        replays: On a GPU, a step may be recorded once a round and replayed (``train.cuda_graphs``). A class that
            overrides ``loss``, ``after_heads`` or ``after_step`` must state this itself. These hooks then read only
            the passes, images and labels of the batch, and tensors and numbers that are the same objects in all
            steps after `start`. They change tensors in place. Random draws, uploads and values that depend on the
            batch's indices are made by `ClientContext.from_host`.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False
    between_neighbours: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Refuse options that would silently replace a hook or be ignored; warn of a missing declaration.

        Raises:
            UserError: A field has the name of an inherited attribute that is not an option, or the class gives an
                inherited option a new default without an annotation.
        """
        super().__init_subclass__()
        inherited = {option.name for base in cls.__bases__ if is_dataclass(base) for option in fields(base)}
        own = _annotated(cls)
        for name in own:
            if name not in inherited and hasattr(super(cls, cls), name):
                raise UserError(
                    f"{cls.__qualname__}.{name} is an option with the name of the inherited attribute {name!r}, "
                    "which it would replace; give it another name"
                )
        for name in inherited.intersection(vars(cls)).difference(own):
            if isinstance(vars(cls)[name], MemberDescriptorType):
                raise UserError(
                    f"{cls.__qualname__} has slots, which components cannot have; leave out slots=True"
                )
            raise UserError(
                f"{cls.__qualname__}.{name} has no annotation, so the option would keep its inherited default; "
                f"write {name}: TYPE = {vars(cls)[name]!r}"
            )
        if "finish" in vars(cls) and not declares_slice(cls):
            warn(
                f"{cls.__qualname__} overrides finish and does not declare what it sends; add declares(setting) "
                "with the names, shapes and dtypes (see atoll.components.declaration), or None if it sends "
                "nothing; 0.3 will refuse slices that are not declared",
                OldCodeWarning,
            )

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            UserError: A value has the wrong type, is out of range or cannot be written in a recipe, the name holds
                a dot, or the class is not a dataclass, so that its options would be ignored.
        """
        super().__post_init__()
        if {".", "="}.intersection(self.name):
            raise UserError(
                f"the name of the component {type(self).__qualname__} is {self.name!r}; write it without . and =, "
                "which --set reads as more than a name"
            )
        for option in (field for field in fields(self) if field.init):
            value, default = getattr(self, option.name), default_of(option)
            if value is None and default is not None and default is not MISSING:
                raise UserError(
                    f"{self._place()}.{option.name} is None, which cannot be written in a recipe, and its default "
                    f"is {default!r}; let None be the default, or use a value of the type"
                )
            if value is not None and not _writable(value):
                raise UserError(
                    f"{self._place()}.{option.name} = {value!r} cannot be written in a recipe; an option is a "
                    "text, a number, true or false, or a list or table of these"
                )
        known = {option.name for option in fields(self)}
        for kind in type(self).__mro__:
            if lost := next((name for name in _annotated(kind) if name not in known), None):
                raise UserError(
                    f"{kind.__qualname__}.{lost} is no option yet; write @dataclass(frozen=True) above the class, "
                    "or annotate what is no option as ClassVar"
                )

    @classmethod
    def _place(cls) -> str:
        return f"options.{cls.name}"

    # A component may define the following properties as class variables if they do not depend on its options.

    @property
    def egress(self) -> tuple[str, ...]:
        """Description of the data, in addition to weights, that leaves a client because of this component."""
        return ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """Description of the client state that this component retains between rounds."""
        return ()

    @property
    def consecutive_rounds(self) -> bool:
        """Whether the component relates each round to the previous one, so the same clients must take part in both.

        Clients may miss single rounds, but must not take turns.
        """
        return False

    @property
    def needs_steps(self) -> bool:
        """Whether a round without training would mislead the component, which assumes training in every round."""
        return False

    @property
    def follows_rounds(self) -> bool:
        """Whether what it computes depends on the run's number of rounds; such a run cannot be extended."""
        return False

    def refuse(self, setting: Setting) -> str | None:
        """Return a sentence that says why this component cannot work in this setting, or None."""
        return None

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Return a sentence that says why this component cannot work with these networks, or None."""
        return None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the networks that this component adds; they are trained and exchanged like the encoder."""
        return {}

    def embeds(self) -> bool:
        """Whether this component reads embeddings; if no component does, there is no projector."""
        return False

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Name the runs that must finish before this component can be used."""
        return {}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """Return the data that each client receives once per run."""
        return None

    def init(self, setting: Setting) -> Tree:
        """Return the component's initial slice of the server state."""
        return None

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Return the component's slice of the message to a client; ``cohort`` is in the order of the draw."""
        return None

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Return a client's local epochs in a round, 0 for no training; None if the component sets none."""
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold | None:
        """Open a fold of the clients' slices into the next slice of the server state."""
        return None

    def declares(self, setting: Setting) -> Spec | None:
        """Declare the form of what `finish` returns (see `atoll.components.declaration`); None for nothing."""
        return None

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """Describe an error in a client's slice that the declaration cannot express, as "it …"; None if correct.

        The ``weights`` of the same update are already checked, the slice matches its declaration, and its tensors
        are finite.
        """
        return None

    # The client's side.

    def forwards(self) -> Sequence[Forward]:
        """List the forward passes that `loss` reads, in order."""
        return ()

    def after_heads(self, context: ClientContext) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return functions that change heads' outputs, by the head's name, before any component reads them."""
        return {}

    def start(self, context: ClientContext) -> None:
        """Prepare the round, before the first step."""

    def images(self) -> Sequence[str]:
        """Name the images of a batch that `inputs` or `loss` reads without a declared pass."""
        return ()

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Compute further images of a batch, by name."""
        return {}

    def after_step(self, context: ClientContext) -> None:
        """Update momentum targets or queues after each optimiser step."""

    def finish(self, context: ClientContext) -> Tree:
        """Return the component's slice of the update."""
        return None

    def keep(self, context: ClientContext) -> Tree:
        """Return the client state that is retained for this component until the client's next round."""
        return None


def _writable(value: object) -> bool:
    """Whether a recipe, a TOML file, can hold the value of an option."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _writable(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_writable, value))
    return is_dataclass(value) or isinstance(value, str | int | float)


def _annotated(kind: type) -> list[str]:
    """Names that the class itself, without its bases, annotates as options."""
    return [name for name, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)]


def declares_slice(kind: type[Component]) -> bool:
    """Whether a component declares what its `finish` sends."""
    return declared(kind, "declares", "finish")


def replays(kind: type[Component]) -> bool:
    """Whether a component's steps can be replayed: its class says so, and overrides no hook of a step since."""
    return kind.replays and all(
        declared(kind, "replays", hook) for hook in ("loss", "after_heads", "after_step")
    )


def declared(kind: type[Component], declaration: str, hook: str) -> bool:
    """Whether a component's declaration describes the hook that the component uses.

    False if, of the classes that define either, the most derived one defines only the hook.
    """
    owner = next(base for base in kind.__mro__ if {declaration, hook} & vars(base).keys())
    return declaration in vars(owner)
