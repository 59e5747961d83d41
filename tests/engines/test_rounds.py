import json

import pytest

from atoll.core.errors import UserError
from atoll.engines.rounds import stalled
from tests.harness import remains, run_tiny, tiny
from tests.trees import same

STOPPING = (
    "method.name=fed_simclr", "train.rounds=12", "evaluation.every=1", "evaluation.patience=2",
    "evaluation.during=['knn']", "evaluation.knn_k=5", "train.lr=1e-9", "model.projector_hidden=[8]",
)  # fmt: skip


def lines(*accuracies):
    return [{"round": r, "evaluation": {"knn/accuracy": a}} for r, a in enumerate(accuracies)]


def test_a_run_waits_for_as_many_evaluations_as_its_patience():
    assert not stalled(lines(0.9, 0.1, 0.2, 0.3), 2)  # round 0 is the untrained encoder
    assert not stalled(lines(0.9, 0.3, 0.2), 2)
    assert stalled(lines(0.9, 0.3, 0.2, 0.3), 2)
    assert not stalled(lines(0.9, 0.3, 0.2, 0.31), 2)
    assert not stalled([*lines(0.9, 0.3), {"round": 2}, {"round": 3}, {"round": 4}], 2)  # not evaluated


def test_rounds_that_only_gather_do_not_use_up_patience(tmp_path):
    """Odd rounds train nothing: their results are those of the rounds before."""
    settings = ("method.name=fedsc", "train.rounds=4", "train.lr=0.01", "evaluation.every=1")
    run = run_tiny(tmp_path / "run", *settings, "evaluation.patience=1", "evaluation.during=['knn']")
    before, *found = [line["evaluation"]["knn/accuracy"] for line in run.metrics]
    assert [line.get("idle", False) for line in run.metrics[1:]] == [True, False, True, False]
    assert (found[0], found[2]) == (before, found[1])
    assert len(found) == 4  # of which two trained: one to compare with, and one to wait for
    assert stalled(lines(0.9, 0.3, 0.2), 1)
    assert not stalled([*lines(0.9, 0.3), {**lines(0, 0, 0.3)[2], "idle": True}], 1)


def test_a_run_that_does_not_improve_ends_early_and_is_complete(tmp_path):
    run = run_tiny(tmp_path / "run", *STOPPING, "engine.checkpoint_every=5")
    found = [line["evaluation"]["knn/accuracy"] for line in run.metrics[1:]]
    rounds = len(found)
    assert 3 <= rounds < 12
    assert max(found[-2:]) <= max(found[:-2])
    assert all(not stalled(run.metrics[:n], 2) for n in range(1, rounds + 1))
    record = json.loads((run.folder / "evaluation.json").read_text())
    assert (record["round"], record["stopped_early"]) == (rounds, True)
    written = (run.folder / "evaluation.json").stat().st_mtime_ns
    run_tiny(tmp_path / "run", *STOPPING, "engine.checkpoint_every=5", resume=True)
    assert (run.folder / "evaluation.json").stat().st_mtime_ns == written  # nothing was left to do

    # Interrupted after its first round, it ends at the same round with the same bytes.
    with pytest.warns(UserWarning, match="cannot end this run early"):
        parts = run_tiny(tmp_path / "parts", *STOPPING, "train.rounds=1", "engine.checkpoint_every=5")
    run_tiny(parts.folder, *STOPPING, "engine.checkpoint_every=5", resume=True)
    assert parts.metrics[-1]["round"] == rounds
    assert same(remains(parts), remains(run))


def test_patience_without_an_evaluation_is_refused():
    with pytest.raises(UserError, match=r"evaluation.patience waits for kNN .* set evaluation.every"):
        tiny("evaluation.patience=2", "evaluation.every=0")
    with pytest.raises(UserError, match=r"'knn' in evaluation\.during"):
        tiny("evaluation.patience=2", "evaluation.every=1", "evaluation.during=['geometry']")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("train.rounds=3",), "it needs 3 evaluations, the last after round 3, and train.rounds = 3; lower"),
        (("train.rounds=4", "evaluation.every=5"), "the last after round 15, and train.rounds = 4"),
        (("data.labels=false",), "because the training and test images have no labels"),
        (("data.test_fraction=0",), "because no images are held out"),
    ],
)
def test_patience_that_cannot_end_a_run_is_told_once(tmp_path, settings, why):
    with pytest.warns(UserWarning, match=f"evaluation.patience .*{why}") as told:
        run = run_tiny(tmp_path / "run", *STOPPING, *settings)
    assert len(told) == 1
    assert not run.results.get("stopped_early")


def test_patience_that_can_end_a_run_just_in_time_is_not(tmp_path):
    run_tiny(tmp_path / "run", *STOPPING, "train.rounds=4")


def test_a_private_round_is_not_repeated_from_an_earlier_checkpoint(tmp_path):
    settings = ("method.aggregation=private_fedavg", "train.bn_buffers=leave", "evaluation.at_end=[]")
    run = run_tiny(tmp_path, *settings)
    newest = run.checkpoints / "round-000002.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"repeating a private round spends privacy that ε would not count"):
        run_tiny(tmp_path, *settings, "train.rounds=3", resume=True)
    newest.write_bytes(whole)
    run_tiny(tmp_path, *settings, "train.rounds=3", resume=True)
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3]
