"""What the errors for damaged and missing files of a run advise, and that it helps."""

import re
import shutil
from pathlib import Path

import pytest

from atoll.commands.check import check_run
from atoll.commands.neighbours import find_neighbours
from atoll.core.remedies import missing, remedy
from atoll.core.run_folder import Run
from tests.harness import run_tiny

SETTINGS = (
    *("data.limit=40", "partition.clients=2", "train.rounds=1", "evaluation.map_points=20"),
    "method.merge=local_only",  # each client has a model
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = run_tiny(tmp_path_factory.mktemp("finished") / "run", *SETTINGS)
    find_neighbours(run, queries=2, k=2)
    return run.folder


@pytest.mark.parametrize(
    "name",
    [
        *("partition.json", "evaluation.json", "encoder.safetensors", "encoder-client-0.safetensors"),
        *("map.safetensors", "clients.safetensors"),
    ],
)
def test_a_resumed_run_writes_again_what_the_advice_lets_the_user_delete(finished, tmp_path, name):
    path = Path(shutil.copytree(finished, tmp_path / "run")) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    (sentence,) = (one for one in check_run(Run(path.parent)).damaged if name in one)
    assert re.search("resume (it|its run|the run)", sentence)
    path.unlink()
    if "without its evaluation.json" in sentence:
        (path.parent / "evaluation.json").unlink()
    run_tiny(path.parent, *SETTINGS, resume=True)
    if name != "evaluation.json":  # it holds times
        assert path.read_bytes() == whole
    assert not check_run(Run(path.parent)).damaged


def test_each_file_has_its_own_remedy():
    run = Path("runs/x")
    assert remedy(run / "recipe.toml") == "restore it from a copy, or start the run again with --restart"
    restart = "restore it from a copy, or start the run again with --restart"
    assert remedy(run / "sites.json") == restart
    assert missing(run / "sites.json") == f"{run}/sites.json is missing; {restart}"
    assert missing(run / "audit.jsonl").endswith("restore it from a copy, or go on without its lines so far")
    assert remedy(run / "models/round-000001/global.safetensors") == "restore it from a copy"
    assert remedy(run / "detection/voc/results.json") == "delete it and run atoll detect again"
    assert remedy(run / "evaluation-seed7.json") == "delete it and run atoll evaluate again"
    assert remedy(run / "neighbours.safetensors") == "delete it and run atoll neighbours again"
    assert missing(run / "metrics.jsonl") == (
        f"{run}/metrics.jsonl is missing; restore it from a copy, or go on without the curves so far"
    )
    assert missing(run / "partition.json") == (
        f"{run}/partition.json is missing; resume the run, which writes it again"
    )


def test_a_damaged_file_of_neighbours_is_named_with_its_command(finished, tmp_path):
    path = Path(shutil.copytree(finished, tmp_path / "run")) / "neighbours.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    (sentence,) = check_run(Run(path.parent)).damaged
    assert sentence.startswith(f"{path} is damaged")
    assert sentence.endswith("; delete it and run atoll neighbours again")
