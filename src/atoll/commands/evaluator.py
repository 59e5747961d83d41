"""Evaluation of a run's models during the run and at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from atoll.core.errors import warn
from atoll.core.rng import stream
from atoll.core.run_folder import SITES_OWN
from atoll.core.tree import Weights
from atoll.data.images import ImageSet
from atoll.data.partition.partition import Partition
from atoll.data.shifts.shift import SHIFTED
from atoll.engines.client_states import States
from atoll.engines.federation import Federation
from atoll.engines.rounds import Engine
from atoll.engines.server import Server
from atoll.evaluation import (
    Results,
    classifier_correct,
    client_accuracies,
    evaluate,
    mean_over_clients,
    split_test,
)
from atoll.evaluation.client_tests import PREFIX
from atoll.models.adapters import merged


class Evaluator:
    """Evaluates the models of a run, during the run and at its end.

    Args:
        federation: The federation, with the images for the evaluation.
        states: The client states, for personal models.
        engine: The engine, which collects results from the clients.
    """

    def __init__(self, federation: Federation, states: States, engine: Engine) -> None:
        self.federation = federation
        self._states = states
        self._engine = engine

    def during(self, server: Server) -> dict[str, Any]:
        """Evaluate under the fast protocols, between two rounds."""
        return self._measure(server, final=False)

    def final(self, server: Server) -> dict[str, Any]:
        """Evaluate the untrained or the finished models under all protocols."""
        return self._measure(server, final=True)

    def models(self, server: Server) -> dict[str, tuple[Callable[[], Weights], list[int]]]:
        """Return the deployed models by name: a function that loads it, and the clients that use it.

        Personal models are read from the client states one by one, because all of them may not fit in memory.
        A client that has not taken part has no personal model. Where no client's state is here, because no client
        has taken part or the states are at the sites, the models are those that clients share.
        """
        recipe, clients = self.federation.recipe, range(self.federation.setting.num_clients)
        deployment = server.deploy()
        if recipe.composed.personalises(recipe.train):

            def personal(client: int, round: int) -> Weights:
                return recipe.composed.personal(deployment, client, self._states.load(client, round))

            models: dict[str, tuple[Callable[[], Weights], list[int]]] = {
                f"client-{client}": (partial(personal, client, round), [client])
                for client, round in sorted(server.valid.items())
                if self._states.load(client, round) is not None
            }
            if models or not deployment.models:
                return models
            if recipe.composed.merge.alone and server.valid:
                warn(
                    "the trained models are at the clients; the encoder and results here are the untrained model's"
                )
        return {
            name: (
                partial(deployment.models.__getitem__, name),
                [client for client in clients if deployment.name_of(client) == name],
            )
            for name in deployment.models
        }

    def _measure(self, server: Server, final: bool) -> dict[str, Any]:
        here = self._measure_here(server, final)
        at_clients = self._engine.measure(server, final)
        if not here and "sites_mean" in at_clients:  # only the clients have results
            here = {"split": SITES_OWN, **at_clients["sites_mean"]}
        return {**here, **at_clients}

    def _measure_here(self, server: Server, final: bool) -> dict[str, Any]:
        """Evaluate the deployed models here; for several models, return the mean over clients, and each result."""
        federation, recipe = self.federation, self.federation.recipe
        split, images = federation.splits.held_out
        models = self.models(server)
        if not len(images) or not models:
            return {}
        chain = recipe.composed.objective.classifier()
        protocols = recipe.evaluation.at_end if final else recipe.evaluation.during
        shares = client_shares(federation.partition, federation.splits.train, images, protocols)
        by_model: dict[str, Results] = {}
        for name, (load, users) in models.items():
            tests = of_users(shares, users)
            by_model[name] = evaluate(
                merged(federation.load(load())),
                federation.splits.train,
                images,
                federation.views,
                recipe.evaluation,
                seed=recipe.seed,
                protocols=protocols,
                client_ids=federation.client_ids(),
                client_tests=tests,
            )
            if chain and images.labels is not None:
                networks = nn.Sequential(*(federation.networks[network] for network in chain))
                correct = classifier_correct(networks, federation.views.plain, images)
                by_model[name]["classifier/accuracy"] = float(correct.double().mean())
                if tests is not None:
                    of_clients = client_accuracies(correct, tests)
                    by_model[name] |= {f"{PREFIX}classifier/{key}": of_clients[key] for key in of_clients}
        clients = {name: len(users) for name, (_, users) in models.items()}
        return {"split": split, **mean_over_clients(by_model, clients)}


def client_shares(
    partition: Partition | None, train: ImageSet, test: ImageSet, protocols: Sequence[str]
) -> dict[int, Tensor] | None:
    """Split the test images among a partition's clients; None if no protocol needs that, or it is impossible."""
    if partition is None or not any(name.startswith(PREFIX) for name in protocols):
        return None
    natural = partition.options.client_column(train.columns, train.unread)
    column = SHIFTED if SHIFTED in test.columns else natural
    ids, draws = partition.client_ids(train), stream(partition.seed, "client-tests")
    return split_test(train, test, ids, column, draws) or None


def of_users(shares: dict[int, Tensor] | None, users: Sequence[int] | None) -> dict[int, Tensor] | None:
    """The shares of the clients that use a model; None if there are none, or the clients are unknown."""
    if shares is None or users is None:
        return None
    return {user: shares[user] for user in users if user in shares}
