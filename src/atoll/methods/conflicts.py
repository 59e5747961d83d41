"""Rules of composition: why the parts of a method cannot work together, or not in a run's setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.server_steps import Direct
from atoll.components.axes import STATISTICS
from atoll.components.base import Aggregation, Component, Forward, Setting
from atoll.components.component import declares_slice
from atoll.components.declaration import is_spec
from atoll.components.results import in_words, sentence

if TYPE_CHECKING:
    from atoll.methods.method import Method

T = TypeVar("T")


def conflicts(method: Method, setting: Setting) -> Iterator[str]:
    """Yield a sentence for each rule that a method breaks in this setting.

    Args:
        method: The method.
        setting: Setting of the run.
    """
    for component in method.components:
        yield from _forwards(component)
        yield from _descriptions(component)
    yield from _statistics(method.aggregation)
    yield from _least_updates(method.aggregation)
    yield from _labels(method, setting)
    yield from _server(method)
    yield from _local_models(method, setting)
    yield from _turns(method, setting)
    yield from _idle_rounds(method, setting)
    if method.aggregation.only_weights:
        yield from _more_than_weights(method)
    for component in method.components:
        yield from _kept(component)
    yield from filter(None, (sentence(part, "refuse", part.refuse(setting)) for part in method.components))
    for component in method.components:  # last: a declaration may assume a setting that the component accepts
        yield from _sent(component, setting)


def reports_more(aggregation: Aggregation) -> bool:
    """Whether clients report more than the aggregation's `statistics`; nothing declares what that is."""
    return type(aggregation).report is not Aggregation.report


def _is_sequence_of(declared: object, kind: type[T]) -> TypeGuard[Sequence[T]]:
    """Whether a declaration is a sequence of a kind; a text, which is a sequence of letters, is none."""
    if not isinstance(declared, Sequence) or isinstance(declared, str):
        return False
    return all(isinstance(one, kind) for one in declared)


def _forwards(component: Component) -> Iterator[str]:
    declared: object = component.forwards()
    if not _is_sequence_of(declared, Forward):
        yield f'{component.name!r}.forwards() returns {declared!r}; return a tuple, as in (Forward("view1"),)'


def _descriptions(component: Component) -> Iterator[str]:
    for name in ("egress", "keeps"):
        declared: object = getattr(component, name)
        if not _is_sequence_of(declared, str):
            yield (
                f"{component.name!r}.{name} is {declared!r}; it must be a tuple of texts, such as "
                "('the mean embedding',)"
            )


def _statistics(aggregation: Aggregation) -> Iterator[str]:
    declared: object = aggregation.statistics
    if not _is_sequence_of(declared, str) or not set(declared) <= STATISTICS.keys():
        yield (
            f"{aggregation.name!r}.statistics is {declared!r}; it must be a tuple of "
            f"{', '.join(map(repr, STATISTICS))}, such as ('samples',)"
        )


def _least_updates(aggregation: Aggregation) -> Iterator[str]:
    least: object = aggregation.least_updates
    if not isinstance(least, int):
        yield (
            f"{aggregation.name!r}.least_updates is {in_words(least)} and must be a whole number; write @property "
            "above the method, or set it as a ClassVar"
        )


def _labels(method: Method, setting: Setting) -> Iterator[str]:
    if method.needs_labels and setting.num_classes == 0:
        name = next(component.name for component in method.components if component.needs_labels)
        yield f"{name!r} is supervised and these images have no labels; choose a self-supervised method"


def _server(method: Method) -> Iterator[str]:
    aggregation, server = method.aggregation, method.server
    if method.merge.alone:
        alone = f"with {method.merge.name!r} no weights leave a client, so"
        if type(aggregation) is not FedAvg:
            yield f"{alone} {aggregation.name!r} would have none to fold; set method.aggregation = 'fedavg'"
        if type(server) is not Direct:
            yield f"{alone} {server.name!r} would have no step to take; set method.server = 'direct'"
    if aggregation.serverless and type(server) is not Direct:
        yield (
            f"{aggregation.name!r} works without a server, and {server.name!r} is a server step; set "
            "method.server = 'direct'"
        )


def _local_models(method: Method, setting: Setting) -> Iterator[str]:
    if setting.train.keep_local_models and (hidden := method.hides_updates):
        yield f"train.keep_local_models cannot keep local models: {hidden}; remove it"


def _turns(method: Method, setting: Setting) -> Iterator[str]:
    if (turns := method.aggregation.turns(setting)) == 1:
        return
    for component in method.components:
        if component.consecutive_rounds:
            yield (
                f"{component.name!r} relates a client's round to the one before it, and with "
                f"{method.aggregation.name!r} a client has one of {turns} rounds; set method.aggregation = 'fedavg'"
            )


def _idle_rounds(method: Method, setting: Setting) -> Iterator[str]:
    objective, train = method.objective, setting.train
    if remedy := objective.idle_rounds:
        for component in method.components:
            if component.needs_steps:
                yield (
                    f"{objective.name!r} has rounds in which no client trains, and {component.name!r} would take "
                    f"them for training; set {remedy}"
                )
    clients = range(setting.num_clients if train.rounds == 1 and train.epochs else 0)
    if clients and not any(method.epochs(setting, client, clients, 1) for client in clients):
        yield f"{objective.name!r} trains nothing in round 1, the only one; raise train.rounds"


def _more_than_weights(method: Method) -> Iterator[str]:
    name = method.aggregation.name
    for component in method.components:
        if method.aggregation.splits(component):
            continue
        if component.egress:
            yield (
                f"{name!r} covers weights only, and {component.name!r} sends more than that "
                f"({'; '.join(component.egress)}); choose another method or aggregation"
            )
        elif hook := _undeclared_hook(component):
            yield (
                f"{name!r} covers weights only, and {component.name!r} overrides {hook} without declaring in "
                "egress what it sends; declare it (egress = () if nothing leaves), or choose another method or "
                "aggregation"
            )


def _undeclared_hook(component: Component) -> str | None:
    """The hook by which a component may send data without declaring it in ``egress``."""
    kind = type(component)
    if kind.egress is not Component.egress:
        return None
    if kind.finish is not Component.finish:
        return "finish"
    return "report" if isinstance(component, Aggregation) and reports_more(component) else None


def _kept(component: Component) -> Iterator[str]:
    kind = type(component)
    if kind.keep is not Component.keep and kind.keeps is Component.keeps:
        yield (
            f"{component.name!r} overrides keep without declaring in keeps what a client retains, and nothing "
            "would be retained; declare it (keeps = () if nothing is)"
        )


def _sent(component: Component, setting: Setting) -> Iterator[str]:
    declared: object = None
    if declares_slice(type(component)):  # one written for 0.1 declares nothing
        declared = component.declares(setting)
    if declared is None:
        return
    if not is_spec(declared):
        yield (
            f"{component.name!r}.declares returns {declared!r}; return a spec of atoll.components.declaration, "
            "such as TensorSpec((setting.embedding_dim,)), a tuple of specs, or a dict of them by name"
        )
    elif not component.egress:
        yield (
            f"{component.name!r} declares data that it sends, and its egress does not describe them; add egress, "
            "as in egress: ClassVar[tuple[str, ...]] = ('the mean embedding',)"
        )
