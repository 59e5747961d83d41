import pytest
import torch

from atoll.methods.ldawa import LDAWA
from atoll.methods.registry import METHODS
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.trees import same


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        ("l_dawa", ()),
        ("m_dawa", ()),
        ("l_dawa_fedavg", ("samples",)),
        ("l_dawa_fedu", ("samples",)),
        ("l_dawa_loss", ("loss",)),
        ("fed_loss", ("loss",)),
    ],
)
def test_presets_send_what_the_paper_says(name, statistics):
    assert METHODS[name].aggregation.statistics == statistics
    assert METHODS[name].merge.name == ("fedu" if name == "l_dawa_fedu" else "replace")


def test_a_round_is_the_equation_over_the_updates():
    rounds = Rounds("method.name=l_dawa")
    g = rounds.server.state["models"]["global"]
    updates = {client: rounds.train(client)[0] for client in (0, 2, 3)}
    rounds.fold(1, updates)
    result = rounds.server.state["models"]["global"]
    for name in ("encoder.conv1.weight", "encoder.bn1.weight", "encoder.bn1.running_var", "encoder.bn1.bias"):
        expected = 0.0
        for update in updates.values():
            w, before = update["weights"][name].double().flatten(), g[name].double().flatten()
            lengths = float(w.norm() * before.norm())
            expected = expected + (float(w @ before) / lengths if lengths else 1.0) * w / 3
        assert torch.allclose(result[name].double().flatten(), expected, atol=1e-6)


def test_l_dawa_over_fedu_keeps_the_projector_of_clients_that_drifted():
    """SimCLR has no predictor: the projector stands in."""
    name = ("method.name=l_dawa_fedu", "options.fedu.threshold=0.0")
    rounds = Rounds(*name)
    update, retained = rounds.train(0)
    rounds.fold(1, {0: update, 1: rounds.train(1)[0]})
    start = rounds.start(0, 2, retained)
    head = [weight for weight in start if weight.startswith("projector.")]
    assert all(torch.equal(start[weight], update["weights"][weight]) for weight in head)
    downloaded = rounds.server.state["models"]["global"]["encoder.conv1.weight"]
    assert torch.equal(start["encoder.conv1.weight"], downloaded)


def test_workers_and_resume_change_no_bit(tmp_path):
    """Cosines are sums, and a worker's tensors lie elsewhere in memory and not as channels-last."""
    recipe = ("method.name=l_dawa", "engine.channels_last=true", "train.rounds=3")
    straight = run_tiny(tmp_path / "straight", *recipe)
    workers = run_tiny(tmp_path / "workers", *recipe, "engine.workers=2")
    run_tiny(tmp_path / "cut", *recipe, "train.rounds=1")
    resumed = run_tiny(tmp_path / "cut", *recipe, resume=True)
    for run in (workers, resumed):
        assert same(final_models(run), final_models(straight))
        divergence = [line["angular_divergence"] for line in run.metrics[1:]]
        assert divergence == [line["angular_divergence"] for line in straight.metrics[1:]]


def test_warm_up_is_an_option_of_the_preset():
    assert METHODS["l_dawa"].aggregation == LDAWA(warmup_rounds=0, include_buffers=True, renormalise=False)
