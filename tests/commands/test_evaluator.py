import weakref

from torch import Tensor

from atoll.commands import evaluator
from atoll.engines.client_states import ClientStates
from atoll.models import load_encoder
from tests.harness import run_tiny


def tensors(tree):
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    return [tree] if isinstance(tree, Tensor) else []


def test_one_personal_model_at_a_time_is_in_memory(tmp_path, monkeypatch):
    loaded, alive = [], []
    load, evaluate = ClientStates.load, evaluator.evaluate

    def loading(states, client, round):
        state = load(states, client, round)
        loaded.extend((client, weakref.ref(tensor)) for tensor in tensors(state))
        return state

    def evaluating(*args, **options):
        alive.append({client for client, tensor in loaded if tensor() is not None})
        return evaluate(*args, **options)

    monkeypatch.setattr(ClientStates, "load", loading)
    monkeypatch.setattr(evaluator, "evaluate", evaluating)
    run = run_tiny(tmp_path / "run", "method.name=local_only", "train.rounds=1")
    assert {client for client, _ in loaded} == {0, 1, 2, 3}
    assert len(alive) == 5  # the untrained model, and one for each client
    assert all(len(clients) <= 1 for clients in alive)
    first = [next(load_encoder(path).parameters()) for path in sorted(run.folder.glob("encoder-client-*"))]
    assert len({tuple(weights.flatten().tolist()) for weights in first}) == 4
