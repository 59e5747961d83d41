"""Components that were written for 0.1, and what runs of 0.1 left on disk."""

import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import ClientContext, Setting, Term, UpdateGeometry
from atoll.core.errors import OldCodeWarning
from atoll.core.tree import load, save
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.trees import same

OLD_METHOD = """
from dataclasses import dataclass
from typing import ClassVar

from atoll.aggregation.fedavg import FedAvg, MeanFold
from atoll.functional import simsiam
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from atoll.parts import Batch, Forward, Local, Part, Passes, Term


@dataclass(frozen=True)
class Anchor(Term):
    name: ClassVar[str] = "anchor"
    keeps: ClassVar[tuple[str, ...]] = ("its rounds",)
    egress: ClassVar[tuple[str, ...]] = ("its rounds",)
    weight: float = 0.5

    def forwards(self) -> tuple[Forward, ...]:
        return Forward("view1"), Forward("view1", network="downloaded")

    def start(self, local: Local) -> None:
        mine = local.of(self)
        mine.rounds = 1 + (0 if local.fresh else mine.own)
        local.frozen("downloaded", local.received)

    def loss(self, local: Local, batch: Batch, passes: Passes):
        mine, theirs = (passes[forward].z for forward in self.forwards())
        return simsiam(mine, theirs)

    def finish(self, local):
        return {"rounds": local.of(self).rounds}

    def keep(self, local):
        return local.of(self).rounds

    def refuse_slice(self, piece, setting, weights):
        return None if piece["rounds"] >= 1 else "it counts no rounds"


class OldFold:
    def __init__(self, mean):
        self.mean = mean

    def add(self, client, update):
        assert update["measure"].cosine() <= 1
        assert update["parts"]["anchor"]["rounds"] >= 1
        self.mean.add(client, update)

    def close(self):
        return self.mean.close()


@dataclass(frozen=True)
class OldMean(FedAvg):
    name: ClassVar[str] = "old_mean"

    def open(self, models, setting, round, scratch):
        return OldFold(MeanFold(models["global"], self.weights))


assert issubclass(Term, Part)
METHOD = Method(objective=SimCLR(), terms=(Anchor(),), title="Anchored SimCLR")
"""


def test_a_method_written_for_0_1_runs_and_says_what_to_change(tmp_path, monkeypatch):
    (tmp_path / "old_method.py").write_text(OLD_METHOD)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("atoll.parts", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = run_tiny(
            tmp_path / "run", "method.name=old_method:METHOD", "method.aggregation=old_method:OldMean"
        )
    plain = run_tiny(tmp_path / "plain", "method.name=old_method:METHOD")
    assert same(final_models(run), final_models(plain))
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4]
    said = " ".join(str(one.message) for one in caught if one.category is OldCodeWarning)
    for change in (
        "atoll.parts is now atoll.components.base",
        "context.of(self).own is now context.of(self).retained",
        "ClientContext.fresh is now ClientContext.reset",
        "Anchor overrides finish and does not declare what it sends; add declares(setting)",
        "OldFold.add(client, update) lacks its third argument, geometry",
    ):
        assert change in said


def test_the_command_says_what_to_change_in_a_method_written_for_0_1(tmp_path):
    """Python itself hides such warnings, but for those of the program's first file."""
    (tmp_path / "old_method.py").write_text(OLD_METHOD)
    command = [sys.executable, "-m", "atoll", "egress", "digits", "--run-code", "--set"]
    done = subprocess.run(
        [*command, "method.name=old_method:METHOD"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    said = done.stderr.splitlines()
    assert any(line.startswith("atoll: Anchor overrides finish and does not declare") for line in said)
    assert all(line.startswith("atoll: ") for line in said)


def test_the_example_as_it_was_goes_on_working():
    """Its imports and hooks are those of the file above; it is loaded in an interpreter of its own."""
    program = (
        "import warnings; warnings.simplefilter('error', UserWarning)\n"
        "from atoll.parts import Batch, Forward, Local, Part, Passes, Term, Merge, Objective, Aggregation\n"
        "from atoll.parts import Fold, SliceFold, ServerStep, Setting, Deployment, Prerequisite, Trained\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Old(Term):
    """Sends a slice that it does not declare."""

    name: ClassVar[str] = "old"

    def declares(self, setting):
        raise AssertionError("the declaration of a parent is not about this")

    def refuse_slice(self, piece, setting, weights):
        return None if piece == [3] else "it is not three"


def test_an_undeclared_slice_is_checked_as_before():
    with pytest.warns(DeprecationWarning, match="Older overrides finish and does not declare"):

        @dataclass(frozen=True)
        class Older(Old):
            def finish(self, context):
                return [3]

    method = Method(objective=SimCLR(), terms=(Older(),))
    update = {"weights": model(0), "losses": {}, "parts": {"old": [3]}}
    assert method.refuse_update(update, setting()) is None
    assert method.refuse_update({**update, "parts": {"old": [4]}}, setting()) == "it is not three"


def test_old_names_are_deprecated_aliases():
    context: ClientContext = Rounds("method.name=ssd").client_context()
    with pytest.warns(DeprecationWarning, match=r"ClientContext\.fresh is now ClientContext\.reset"):
        assert context.fresh is context.reset is True
    with pytest.warns(DeprecationWarning, match=r"ClientContext\.fresh is now"):
        context.fresh = False
    assert context.reset is False
    with pytest.warns(DeprecationWarning, match=r"Setting\.stays is now Setting\.local_only"):
        assert context.setting.stays == context.setting.local_only
    with pytest.warns(DeprecationWarning, match=r"Setting\.fresh is now Setting\.further_models"):
        assert context.setting.fresh == context.setting.further_models
    made: Setting = setting()
    assert made.local_only == frozenset()


def test_a_fold_with_a_geometry_is_called_as_it_is():
    class New:
        def add(self, client, update, geometry):
            self.got = geometry

        def close(self):
            return {"global": model(0)}

    @dataclass(frozen=True)
    class Mine(FedAvg):
        def open(self, models, setting, round, scratch):
            return opened

    opened = New()
    fold = Method(objective=SimCLR(), aggregation=Mine()).open(
        {"models": {"global": model(0)}, "parts": {}}, setting(), 1
    )
    measured = UpdateGeometry({}, {}, {}, {})
    fold.add(0, {"weights": model(1), "losses": {}, "parts": {}}, measured)
    assert opened.got is measured


def shape_of(tree):
    """The names in a tree, without the values."""
    return {key: shape_of(value) for key, value in tree.items()} if isinstance(tree, dict) else type(tree)


def test_a_checkpoint_of_0_1_resumes(tmp_path):
    """The keys are those that 0.1 wrote; a run goes on from one built by hand."""
    recipe = ("method.name=scaffold", "train.bn_buffers=local")
    whole = run_tiny(tmp_path / "whole", *recipe, "train.rounds=3")
    run = run_tiny(tmp_path / "run", *recipe, "train.rounds=2")
    newest = max((run.folder / "checkpoints").glob("round-*.safetensors"))
    made = load(newest)
    old = {
        "round": 2,
        "state": {"models": {"global": made["state"]["models"]["global"]}, "parts": made["state"]["parts"]},
        "valid": dict.fromkeys(["0", "1", "2", "3"], 2),
        "norms": made["norms"],
        "constants_sent": [0, 1, 2, 3],
        "line": made["line"],
    }
    later = ("accepted", "seed")  # keys that 0.1 did not write
    assert shape_of(old) == {key: form for key, form in shape_of(made).items() if key not in later}
    assert set(made["state"]["parts"]) == {"scaffold"}
    kept = load(next((run.folder / "checkpoints" / "clients" / "000000").glob("000002.safetensors")))
    assert set(kept) == {"parts", "buffers"}
    assert set(kept["parts"]) == {"scaffold"}
    save(newest, old)
    resumed = run_tiny(tmp_path / "run", *recipe, "train.rounds=3", resume=True)
    assert same(final_models(resumed), final_models(whole))


def test_the_keys_of_messages_and_updates_are_those_of_0_1():
    rounds = Rounds("method.name=scaffold", "method.aggregation=l_dawa", "options.l_dawa.weights=loss")
    message = rounds.message(0, 1)
    assert list(message) == ["round", "client", "epochs", "kept", "models", "parts"]
    update, _ = rounds.train(0, message=message)
    assert list(update) == ["weights", "losses", "parts", "loss"]
    assert isinstance(update["weights"]["encoder.conv1.weight"], torch.Tensor)
