"""Update checks: every update is checked before it is folded (promise 4 in docs/promises.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import torch

from atoll.aggregation.update_geometry import Reference, UpdateGeometry
from atoll.components.base import Setting
from atoll.components.component import declares_slice
from atoll.components.declaration import (
    LARGEST,
    MOST_IMAGES,
    NumberSpec,
    PerWeight,
    Spec,
    TensorSpec,
    declared_leaves,
    max_bytes,
)
from atoll.components.messages import Message, Models, Slices, Update
from atoll.core.text import short
from atoll.core.tree import Tree, Weights, leaves
from atoll.data.client_data import num_batches
from atoll.engines.history import History
from atoll.engines.slice_norms import slice_norms, tensor_specs
from atoll.methods.conflicts import reports_more
from atoll.methods.least_loss import least_loss
from atoll.methods.method import Method

REASON_BYTES = 2**16  # maximum size of an answer that gives the reason for a missing update
FIRST = 1e6  # bound in the first round for losses and statistics, which differ by thousands between tasks
USUAL_LOSS = 10.0  # a loss of this size, ln 22,000, is not suspicious for any method
COUNTS = 8_000  # most calls of a BatchNorm layer in a step: 8 passes, each of up to 1,000 slices of a volume
ROUNDING = 1e-3  # tolerance for a loss that is at its lower bound
QUIET = 0.01  # share of the received weights' norm that counts as a usual distance, even once most gradients vanish
BY_EARLIER = "train.norm_factor"  # the option of the bounds that follow from earlier rounds
WEIGHTS, BUFFERS, WEIGHING = "weights", "running statistics", "weighing loss"  # names in the history
DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}  # that a client may send; PyTorch cannot compute with all others


@dataclass
class UpdateChecks:
    """Checks updates against the declarations, the request, and the magnitudes of earlier rounds' updates.

    Attributes:
        method: The method, which defines the form of an update.
        setting: The run's setting.
        names: Names of exactly the weights that an update must contain.
        history: Magnitudes of the accepted updates.
    """

    method: Method
    setting: Setting
    names: frozenset[str]
    history: History = field(default_factory=History)
    _references: dict[int, Reference] = field(default_factory=dict)

    def bound(self, name: str = WEIGHTS, floor: float = 0.0) -> tuple[float, str]:
        """Return the bound for a value of the history, and the option or rule that sets it.

        Args:
            name: Name in the history.
            floor: Lower bound of the usual value.
        """
        train = self.setting.train
        usual = self.history.usual(name)
        if name in self._free:
            floor = FIRST / train.norm_factor
        # If the aggregation clips updates, acceptance must not depend on the updates of other clients.
        if usual is not None and not self.method.aggregation.clips:
            return min(train.norm_factor * max(usual, floor), LARGEST), BY_EARLIER
        if name == BUFFERS or name.startswith(_LOSS) or name in self._free:
            return FIRST, "of the first round"
        return min(train.first_norm, LARGEST), "train.first_norm"

    def open_round(self) -> None:
        """Discard values that a failed round may have left."""
        self.history.forget_round()
        self._references = {}

    def examine(self, answer: object, models: Models, message: Message | None = None) -> UpdateGeometry | str:
        """Check an answer; return its update geometry, or the reason for refusal as a sentence.

        Cheap checks come first; a refused answer is read no further.

        Args:
            answer: A client's answer, of any form.
            models: The models that were sent to the client.
            message: The request to the client; None if only the update's form is known.
        """
        asked = self._asked(message)
        reason = self._form(answer, asked)
        if reason:
            return reason
        update = cast(Update, answer)  # its form has been checked; names, shapes and values follow
        try:
            reference = self.method.aggregation.reference(models, update)
        except (KeyError, TypeError, ValueError):
            return "it does not name a model that it was sent"
        reason = self._tensors(update["weights"], reference, asked) or self._slices(update)
        return reason or self._magnitudes(update, reference)

    def weighed(self, update: Update) -> Update:
        """Return an accepted update whose loss gives it at most `norm_factor` times the largest weight so far."""
        if "loss" not in self.method.aggregation.statistics:
            return update
        return {**update, "loss": self._weighing(update["loss"])}

    def _weighing(self, value: float) -> float:
        """Bound a loss L that weights its client by exp(−L), without a refusal: an honest loss may fall as fast."""
        earlier = self.history.least(WEIGHING)
        if earlier is None or self.method.aggregation.clips:
            return value
        return max(value, earlier - math.log(max(self.setting.train.norm_factor, 1.0)))

    def close_round(self) -> None:
        """Add the magnitudes that were accepted in this round to those that bound later rounds."""
        self.history.close_round()
        self.open_round()

    def _asked(self, message: Message | None) -> dict[str, int]:
        """Numbers that follow from a client's images, which the partition or its enrolment counted."""
        if message is None:
            return {}
        asked = {"epochs": message["epochs"]}
        if self.setting.sizes:
            samples, train = self.setting.sizes[message["client"]], self.setting.train
            batches = num_batches(samples, train.batch_size, train.drop_last)
            asked |= {"samples": samples, "batches": batches, "steps": batches * message["epochs"]}
        return asked

    def _form(self, update: object, asked: dict[str, int]) -> str | None:
        if not isinstance(update, dict) or not isinstance(update.get("weights"), dict):
            return "it is not an update"
        if not isinstance(update.get("parts"), dict):
            return "it lacks its components' slices"
        known = {"weights", "losses", "parts", *self.method.aggregation.statistics}
        unknown = update.keys() - known
        if unknown and not reports_more(self.method.aggregation):
            return f"it contains {short(min(unknown, key=str))}, which was not declared ({len(unknown)} such keys)"
        unknown = update["parts"].keys() - {component.name for component in self.method.components}
        if unknown:
            return f"it contains a slice of {short(min(unknown, key=str))}, which is not a component of this method"
        for name in self.method.aggregation.statistics:
            value, place = update.get(name), f"its {name!r}"
            if name == "loss":
                reason = self._loss(name, value, place)
            else:
                reason = _count(asked.get(name)).mismatch(value, place)
            if reason:
                return reason
        return self._losses(update.get("losses"), asked)

    def _losses(self, losses: object, asked: dict[str, int]) -> str | None:
        """Check the mean losses: either none, or those of all components with a loss and of their sum."""
        if not isinstance(losses, dict):
            return "its losses are not a table of numbers"
        names = {"loss", *(component.name for _, component in self.method.losses)}
        if not losses:  # the client took no step, or its site's policy withholds losses
            return None
        expected = names if asked.get("epochs", 1) else set()
        if losses.keys() != expected:
            wrong = min(losses.keys() ^ expected, key=str)
            verb = "contain" if wrong in losses else "lack"
            return f"its losses {verb} {short(wrong)} ({len(losses)} names, expected {len(expected)})"
        ordered = sorted(expected, key=lambda name: (name == "loss", name))  # their sum last: it is no cause
        reasons = (self._loss(name, losses[name], f"its loss {name!r}") for name in ordered)
        return next((reason for reason in reasons if reason), None)

    def _loss(self, name: str, value: Tree, place: str) -> str | None:
        """Check one loss against its possible values and against those of earlier rounds."""
        bound, option = self.bound(_LOSS + name, USUAL_LOSS)
        if isinstance(value, float) and not math.isfinite(value):
            return f"{place} is {value}: training diverged; lower train.lr"
        if reason := NumberSpec(float, least=-bound, most=bound).mismatch(value, place):
            return f"{reason} ({option})"
        least = least_loss(self.method, name)
        return (
            f"{place} is {value:.4g}, and it cannot be below {least:g}" if value < least - ROUNDING else None
        )

    def _tensors(self, weights: Weights, reference: Weights, asked: dict[str, int]) -> str | None:
        missing, extra = self.names - weights.keys(), weights.keys() - self.names
        if missing:
            return f"it lacks {min(missing)!r} ({len(missing)} names missing)"
        if extra:
            return (
                f"it contains {short(min(extra, key=str))}, which was not requested ({len(extra)} such names)"
            )
        for name, tensor in weights.items():
            model = reference[name]
            form = TensorSpec(tuple(model.shape), model.dtype)
            if reason := form.form_mismatch(tensor, f"{name!r}") or self._buffer(name, tensor, model, asked):
                return reason
        return None

    def _buffer(
        self, name: str, tensor: torch.Tensor, model: torch.Tensor, asked: dict[str, int]
    ) -> str | None:
        """Check that no variance is negative, and that a counter grew by no more than the requested steps."""
        if name not in self.setting.running_statistics:
            return None
        if tensor.is_floating_point():
            impossible = name.endswith("running_var") and bool((tensor < 0).any())
            return f"{name!r} contains a negative variance" if impossible else None
        counts = COUNTS * self.setting.train.accumulate
        most = model + counts * asked["steps"] if "steps" in asked else None
        # A merge may retain a client's own counter, which is below the largest of all clients'.
        least = model if self.method.merge.replaces else torch.zeros_like(model)
        if bool((tensor < least).any()) or (most is not None and bool((tensor > most).any())):
            return f"{name!r} counts {short(tensor.tolist())} batches, which the requested steps cannot have made"
        return None

    def _slices(self, update: Update) -> str | None:
        try:
            undeclared = [c.name for c in self.method.components if not declares_slice(type(c))]
            return _bad_tensors(update["parts"], undeclared) or self.method.refuse_update(
                update, self.setting
            )
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"its slices cannot be read ({error!r})"

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return declared_slices(self.method, self.setting)

    @cached_property
    def _free(self) -> set[str]:
        """Names in the history of the slices that follow the scale of the embeddings."""
        specs = self._specs.items()
        return {
            _SLICE + name for name, spec in specs if any(one.follows_embeddings for one in tensor_specs(spec))
        }

    def _magnitudes(self, update: Update, reference: Weights) -> UpdateGeometry | str:
        if id(reference) not in self._references:
            # A reference holds its model, so that the model's id remains unique.
            self._references[id(reference)] = Reference(reference)
        geometry = self._references[id(reference)].measure(update["weights"])
        for name, moved in geometry.moved.items():
            if not math.isfinite(moved):
                return f"{name!r} contains values that are not finite, or that overflow"
        # Running statistics follow the scale of the data, so the first round may change them by thousands.
        statistics = self.setting.running_statistics
        trained = geometry.moved.keys() - statistics
        values = {
            WEIGHTS: geometry.distance(statistics),
            BUFFERS: geometry.distance(trained),
            **{_SLICE + name: norm for name, norm in slice_norms(update["parts"], self._specs).items()},
        }
        floors = {
            WEIGHTS: QUIET * geometry.norm(statistics),
            # A server step may scale the weights, and with them the statistics of the next round.
            BUFFERS: geometry.norm(trained),
        }
        for name, value in values.items():
            bound, option = self.bound(name, floors.get(name, 0.0))
            if not value <= bound:
                what = {
                    WEIGHTS: "its distance from the model that it received is",
                    BUFFERS: "the distance of its running statistics from those that it received is",
                }.get(name, f"the norm of its slice of {name.removeprefix(_SLICE)!r} is")
                return f"{what} {value:.4g}, beyond the bound of {bound:.4g} ({option})"
        losses = {_LOSS + name: value for name, value in update["losses"].items()}
        if "loss" in self.method.aggregation.statistics:
            losses[WEIGHING] = self._weighing(update["loss"])
        self.history.add({**values, **losses})
        return geometry


_SLICE, _LOSS = "slice of ", "loss "  # prefixes of names in the history


def _count(expected: int | None) -> NumberSpec:
    if expected is None:
        return NumberSpec(int, least=1, most=MOST_IMAGES)
    return NumberSpec(int, least=expected, most=expected)


class SizeLimit(NamedTuple):
    """Largest size of an answer in bytes.

    Attributes:
        total: All bytes.
        headers: Bytes that describe tensors and numbers; many small tensors take more time than one large tensor.
    """

    total: int
    headers: int


def declared_slices(method: Method, setting: Setting) -> dict[str, Spec]:
    """Declarations of the slices that a method's components send, by the components' names."""
    declared = {component.name: component.declares(setting) for component in method.components}
    return {name: spec for name, spec in declared.items() if spec is not None}


def update_spec(method: Method, setting: Setting) -> dict[str, Spec]:
    """The declared content of an update (see `declares_all`)."""
    losses = ["loss", *(component.name for _, component in method.losses)]
    return {
        "weights": PerWeight(),
        "losses": dict.fromkeys(losses, NumberSpec()),
        "parts": declared_slices(method, setting),
        **dict.fromkeys(method.aggregation.statistics, NumberSpec()),
    }


def declares_all(method: Method) -> bool:
    """Whether an update contains only declared data."""
    return not reports_more(method.aggregation) and all(declares_slice(type(c)) for c in method.components)


def max_update_size(method: Method, setting: Setting, weights: Weights) -> SizeLimit | None:
    """Largest size of a serialised update; None if it may contain more than is declared.

    Args:
        method: The method.
        setting: The run's setting.
        weights: The weights in an update; their values do not matter.
    """
    if not declares_all(method):
        return None
    spec = update_spec(method, setting)
    total = max_bytes(spec, weights) + REASON_BYTES
    leaves = (leaf for _, leaf in declared_leaves(spec, weights, ""))
    return SizeLimit(total, total - sum(leaf.num_bytes for leaf in leaves if isinstance(leaf, TensorSpec)))


def _bad_tensors(slices: Slices, components: Iterable[str]) -> str | None:
    for component in components:
        for tensor in leaves(slices.get(component)):
            if tensor.dtype not in DTYPES:
                return f"its slice of {component!r} contains {tensor.dtype}, which is not supported"
            if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
                return f"its slice of {component!r} contains values that are not finite"
    return None
