"""Clients' own states survive a stop, and worker processes share them: every method that keeps any."""

import pytest

from tests.harness import remains, run_tiny
from tests.trees import same

COMMON = ("model.predictor_hidden=[16]", "train.participation=0.75")
STATEFUL = {
    "fed_byol": (),
    "fed_moco": ("options.moco.queue=64",),
    "fedu": ("options.fedu.threshold=0.01",),
    "fedema": (),
    "fedbn": (),
    "local_only": (),
    "scaffold": (),
    "fedca": ("method.terms=[]", "options.fedca_dictionary.size=32"),
    "featarc": (),
    "orchestra": ("options.orchestra.global_clusters=8", "options.orchestra.server_steps=20"),
    "moon": (),
}
SLOW = [pytest.param(name, id=name, marks=[] if name == "fedema" else pytest.mark.slow) for name in STATEFUL]


def settings(name, rounds, workers=1):
    return (
        f"method.name={name}", *COMMON, *STATEFUL[name], f"train.rounds={rounds}", f"engine.workers={workers}",
    )  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_a_resumed_run_gives_the_same_bytes(name, tmp_path):
    straight = run_tiny(tmp_path / "straight", *settings(name, 4))
    run_tiny(tmp_path / "resumed", *settings(name, 2))
    resumed = run_tiny(tmp_path / "resumed", *settings(name, 4), resume=True)
    assert same(remains(resumed), remains(straight))


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_two_workers_give_the_same_bytes(name, tmp_path):
    one = run_tiny(tmp_path / "one", *settings(name, 3))
    two = run_tiny(tmp_path / "two", *settings(name, 3, workers=2))
    assert same(remains(one), remains(two))
