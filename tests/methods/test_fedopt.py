import pytest

from atoll.core.errors import UserError
from tests.harness import run_tiny
from tests.rounds import Rounds


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "multi_krum", "fedu2"])
def test_rules_that_need_all_updates_leave_nothing_on_disk(name, tmp_path):
    run = run_tiny(tmp_path / "run", f"method.name={name}", "partition.clients=5")
    scratch = run.folder / "checkpoints" / "scratch"
    assert scratch.is_dir()
    assert list(scratch.iterdir()) == []


def test_multi_krum_wants_enough_clients():
    with pytest.raises(UserError, match="'multi_krum' with byzantine = 1 needs at least 5 updates"):
        Rounds("method.name=multi_krum", "partition.clients=4")
