from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import cache
from io import StringIO
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from rich.console import Console

from atoll.aggregation.private import PrivateFedAvg, uniform_draws
from atoll.commands.progress import Bar
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.tree import clone
from atoll.engines.federation import Federation
from tests.harness import final_models, run_federation, run_tiny, tiny
from tests.rounds import Rounds
from tests.trees import same

pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")

PRIVATE = ("method.aggregation=private_fedavg", "train.bn_buffers=leave", "method.name=fed_align_uniform")


@cache
def setting(**changes):
    made = Federation(tiny("partition.clients=8")).setting
    return replace(made, train=replace(made.train, **changes), local_only=frozenset({"bn.running_mean"}))


def model(value):
    return {
        "a": torch.full((3,), float(value)),
        "bn.running_mean": torch.full((2,), float(value)),
        "n": torch.tensor(int(value)),
    }


def fold(options, updates, of=None):
    opened = options.open({"global": model(0)}, of or setting(), 1, None)
    for client, weights in enumerate(updates):
        opened.add(client, {"weights": weights}, None)
    return opened.close()["global"]


def test_steps_are_clipped_and_divided_by_the_expected_cohort():
    folded = fold(
        PrivateFedAvg(clip=1.0, noise_multiplier=1e-12), [model(5), {"a": torch.tensor([0.1, 0, 0])}]
    )
    cut = torch.full((3,), 1 / math.sqrt(3))  # the first one's step, cut to norm 1
    torch.testing.assert_close(folded["a"], (cut + torch.tensor([0.1, 0, 0])) / 8)


def test_a_round_from_a_model_that_is_not_zero_is_that_of_a_slow_loop():
    """Steps of a norm below, little above and far above the clip; one client does not send the tensor b."""
    draw = torch.Generator().manual_seed(0)
    current = {"a": torch.randn(3, generator=draw), "b": torch.randn(4, generator=draw, dtype=torch.float64)}
    updates, total = [], {name: [0.0] * len(weight) for name, weight in current.items()}
    for norm, names in ((1.5, "ab"), (3.0, "ab"), (40.0, "ab"), (2.5, "a")):
        steps = {name: torch.randn(len(current[name]), generator=draw, dtype=torch.float64) for name in names}
        length = math.sqrt(sum(float(x) ** 2 for step in steps.values() for x in step))
        updates.append(
            {name: (current[name] + step * norm / length).to(current[name]) for name, step in steps.items()}
        )
        for name, step in steps.items():
            for k, x in enumerate(step.tolist()):
                total[name][k] += x / length * min(norm, 2.0)
    opened = PrivateFedAvg(clip=2.0, noise_multiplier=1e-12).open({"global": current}, setting(), 1, None)
    for client, weights in enumerate(updates):
        opened.add(client, {"weights": weights}, None)
    folded = opened.close()["global"]
    for name, before in current.items():
        expected = [w + step / 8 for w, step in zip(before.tolist(), total[name], strict=True)]
        torch.testing.assert_close(
            folded[name], torch.tensor(expected, dtype=before.dtype), rtol=1e-5, atol=1e-6
        )


def test_all_tensors_of_a_step_are_clipped_as_one_vector():
    current = {"a": torch.zeros(2), "b": torch.zeros(2)}
    opened = PrivateFedAvg(clip=1.0, noise_multiplier=1e-12).open({"global": current}, setting(), 1, None)
    opened.add(0, {"weights": {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}}, None)
    folded = opened.close()["global"]
    torch.testing.assert_close(folded["a"], torch.tensor([0.6, 0.0]) / 8)
    torch.testing.assert_close(folded["b"], torch.tensor([0.0, 0.8]) / 8)


def test_a_sample_divides_steps_and_noise_by_its_expected_size():
    sampled = setting(participation=0.25)  # 2 of 8 clients
    folded = fold(
        PrivateFedAvg(clip=1.0, noise_multiplier=1e-12), [{"a": torch.tensor([0.5, 0, 0])}], sampled
    )
    torch.testing.assert_close(folded["a"], torch.tensor([0.25, 0, 0]))
    big = {"a": torch.zeros(200_000)}
    opened = PrivateFedAvg(clip=2.0, noise_multiplier=3.0).open({"global": big}, sampled, 1, None)
    assert float(opened.close()["global"]["a"].std()) == pytest.approx(2.0 * 3.0 / 2, rel=0.02)


def test_buffers_and_counters_take_no_part():
    folded = fold(PrivateFedAvg(), [model(5)])
    assert torch.equal(folded["bn.running_mean"], torch.zeros(2))
    assert folded["n"] == 0


def test_no_noise_gathers_on_what_never_travels():
    rounds = Rounds(*PRIVATE, "method.merge=fedbn")
    before = clone(rounds.server.state["models"]["global"])
    rounds.fold(1, {0: rounds.train(0)[0]})
    after = rounds.server.state["models"]["global"]
    sent = rounds.federation.update_names()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == sent


def test_one_clients_influence_is_bounded_whatever_it_sends():
    options = PrivateFedAvg(clip=0.5, secret=3)
    without, beside = fold(options, [model(1)]), fold(options, [model(1), {"a": torch.full((3,), 1e30)}])
    assert float((without["a"] - beside["a"]).norm()) <= 0.5 / 8 + 1e-6


def test_noise_has_its_scale_and_comes_even_if_nobody_came():
    big = {"a": torch.zeros(200_000)}
    opened = PrivateFedAvg(clip=2.0, noise_multiplier=3.0).open({"global": big}, setting(), 1, None)
    noise = opened.close()["global"]["a"]
    assert float(noise.std()) == pytest.approx(2.0 * 3.0 / 8, rel=0.02)
    assert abs(float(noise.mean())) < 0.01


def test_noise_does_not_follow_from_the_recipe():
    options = PrivateFedAvg()
    assert not torch.equal(fold(options, [])["a"], fold(options, [])["a"])
    options = PrivateFedAvg(secret=1)
    assert torch.equal(fold(options, [])["a"], fold(options, [])["a"])


def test_every_bit_of_a_long_key_counts_for_noise_and_sample(monkeypatch):
    """PyTorch's generator would look at 32 of them, few enough to try all."""
    options, of = PrivateFedAvg(), replace(setting(participation=0.5), num_clients=200)
    noises, samples = set(), set()
    for bit in range(256):
        key = (1 << bit).to_bytes(32, "big")
        monkeypatch.setattr("secrets.token_bytes", lambda size, key=key: key[-size:])
        noises.add(tuple(fold(options, [])["a"].tolist()))
        samples.add(tuple(options.cohort(of, 1)))
    assert len(noises) == len(samples) == 256


def test_noise_is_gaussian_and_each_tensors_own():
    current = {"a": torch.zeros(20_000), "b": torch.zeros(20_000)}
    noise = (
        PrivateFedAvg(noise_multiplier=8.0, secret=1).open({"global": current}, setting(), 1, None).close()
    )
    a, b = noise["global"]["a"], noise["global"]["b"]
    assert scipy.stats.kstest(torch.cat([a, b]).numpy(), "norm").pvalue > 0.01
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.03
    later = PrivateFedAvg(noise_multiplier=8.0, secret=1).open({"global": current}, setting(), 2, None)
    assert abs(float(torch.corrcoef(torch.stack([a, later.close()["global"]["a"]]))[0, 1])) < 0.03


def test_draws_are_midpoints_of_two_to_the_52_intervals():
    words = hashlib.shake_256(b"key").digest(8 * 5)
    numbers = [int.from_bytes(words[8 * k : 8 * k + 8], "little") >> 12 for k in range(5)]
    assert uniform_draws(b"key", 5).tolist() == [(2 * number + 1) / 2**53 for number in numbers]


@pytest.mark.parametrize(("byte", "expected"), [(b"\x00", 2.0**-53), (b"\xff", 1 - 2.0**-53)])
def test_the_outermost_draws_are_inside_the_interval(byte, expected, monkeypatch):
    extreme = SimpleNamespace(digest=lambda length: byte * length)
    monkeypatch.setattr("hashlib.shake_256", lambda key: extreme)
    assert uniform_draws(b"key", 2).tolist() == [expected] * 2


def test_a_sample_may_be_empty_unless_all_clients_take_part():
    assert PrivateFedAvg().fewest_clients(setting(participation=0.99)) == 0
    assert PrivateFedAvg().fewest_clients(setting()) == len(PrivateFedAvg().cohort(setting(), 1)) == 8


def test_the_sample_is_poisson():
    options, of = PrivateFedAvg(), setting(participation=0.25)
    sizes = [len(options.cohort(of, round)) for round in range(2000)]
    mean = sum(sizes) / len(sizes)
    assert mean == pytest.approx(2.0, abs=0.15)
    variance = sum((size - mean) ** 2 for size in sizes) / len(sizes)
    assert variance == pytest.approx(8 * 0.25 * 0.75, rel=0.15)


def test_a_secret_draws_the_same_sample_again_and_another_one_each_round():
    of = replace(setting(participation=0.5), num_clients=200)
    samples = [PrivateFedAvg(secret=secret).cohort(of, round) for secret in (0, 1) for round in (1, 2)]
    assert samples == [
        PrivateFedAvg(secret=secret).cohort(of, round) for secret in (0, 1) for round in (1, 2)
    ]
    assert len({tuple(sample) for sample in samples}) == 4


def test_epsilon_of_one_gaussian_round_is_that_of_the_literature():
    # RDP of the Gaussian mechanism is α/(2z²); ε = min over α of α/(2z²) + the conversion of Canonne et al. 2020.
    z, delta = 2.0, 1e-5
    bound = min(a / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 513))
    spent = PrivateFedAvg(noise_multiplier=z, delta=delta).spent(setting(), 1)
    assert spent == {"epsilon": pytest.approx(bound, rel=1e-6), "delta": delta}


def test_epsilon_of_much_noise_is_close_to_the_least_over_all_orders():
    """The best order is about z √(2 log 1/δ), which is 240 here."""
    z, delta = 50.0, 1e-5
    bound = min(a / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 2000))
    spent = PrivateFedAvg(noise_multiplier=z, delta=delta).spent(setting(), 1)
    assert bound <= spent["epsilon"] < 1.02 * bound


def test_epsilon_of_samples_is_that_of_the_literature():
    # Mironov et al. 2019, for integer α: log Σ_k C(α, k) (1 − q)^(α − k) q^k exp(k (k − 1) / 2z²) / (α − 1).
    q, z, rounds, delta = 0.1, 1.0, 10, 1e-5

    def divergence(order):
        terms = (
            math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp(k * (k - 1) / (2 * z * z))
            for k in range(order + 1)
        )
        return math.log(sum(terms)) / (order - 1)

    bound = min(
        rounds * divergence(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 30)
    )
    spent = PrivateFedAvg(noise_multiplier=z, delta=delta).spent(setting(participation=q), rounds)
    assert spent["epsilon"] == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(("z", "rounds"), [(2.0, 10), (1.0, 40), (0.5, 100), (0.1, 100)])
def test_a_large_epsilon_is_near_the_exact_one(z, rounds):
    spent = PrivateFedAvg(noise_multiplier=z).spent(setting(participation=1.0), rounds)
    distance, log_cdf = math.sqrt(rounds) / z, scipy.stats.norm.logcdf

    def delta(epsilon):  # Balle and Wang 2018, Theorem 5
        a, b = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
        return math.exp(log_cdf(a)) - math.exp(epsilon + log_cdf(b))

    assert delta(spent["epsilon"]) < 1e-5
    assert delta(0.9 * spent["epsilon"]) > 1e-5  # within 10% of the best


def test_epsilon_grows_with_rounds_and_falls_with_sampling_and_noise():
    def epsilon(rounds, rate=1.0, z=1.0):
        return PrivateFedAvg(noise_multiplier=z).spent(setting(participation=rate), rounds)["epsilon"]

    assert epsilon(1) < epsilon(10) < epsilon(100)
    assert epsilon(10, rate=0.1) < epsilon(10) > epsilon(10, z=4.0)


def test_a_run_tells_epsilon_each_round_and_can_be_repeated_only_with_its_secret(tmp_path):
    runs = [run_tiny(tmp_path / str(k), *PRIVATE, "options.private_fedavg.secret=5") for k in range(2)]
    assert same(final_models(runs[0]), final_models(runs[1]))
    told = [line["privacy"]["epsilon"] for line in runs[0].metrics[1:]]
    assert 0 < told[0] < told[1]
    # The cosine of a cohort of one would be one client's.
    assert {line["angular_divergence"] for line in runs[0].metrics[1:]} == {None}
    shown = Console(file=StringIO(), width=160)
    run_recipe(tiny(*PRIVATE), tmp_path / "other", callback=Bar(shown, "run"))
    other = Run(tmp_path / "other")
    said = shown.file.getvalue()
    assert [f"ε {epsilon:.3g}" in line for epsilon, line in zip(told, said.splitlines(), strict=True)] == [
        True
    ] * 2
    assert not same(final_models(runs[0]), final_models(other))


def test_no_round_leaves_twice_with_different_noise(tmp_path):
    """A kill while clients evaluate: they see the same model again, not a second one that ε does not count."""
    federation = Federation(tiny(*PRIVATE, "train.rounds=3", "evaluation.every=1"))
    seen = []

    class Evaluator:
        def during(self, server):
            seen.append((server.round, clone(server.state["models"])))
            if len(seen) == 3:
                raise KeyboardInterrupt
            return {}

        final = during

    with pytest.raises(KeyboardInterrupt):
        run_federation(federation, tmp_path, evaluator=Evaluator())
    run_federation(federation, tmp_path, evaluator=Evaluator())
    assert [round for round, _ in seen] == [0, 1, 2, 2, 3]
    assert same(seen[2], seen[3])
    assert [line["round"] for line in Run(tmp_path).metrics] == [0, 1, 2, 3]


def test_a_round_whose_checkpoint_is_damaged_is_not_played_again(tmp_path):
    run_tiny(tmp_path, *PRIVATE)
    newest = max((tmp_path / "checkpoints").glob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match="spends privacy that ε would not count"):
        run_tiny(tmp_path, *PRIVATE, "train.rounds=3", resume=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_what_cannot_be_covered_is_refused():
    def make(*settings):
        return Federation(tiny(*PRIVATE, *settings))

    with pytest.raises(UserError, match="running statistics"):
        make("train.bn_buffers=average")
    with pytest.raises(UserError, match="covers weights only, and 'scaffold'"):
        make("method.name=scaffold")
    with pytest.raises(UserError, match=r"engine\.checkpoint_every is 2: .* set it to 1"):
        make("engine.checkpoint_every=2")
    with pytest.raises(UserError, match="must be above 0"):
        make("options.private_fedavg.clip=0")


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_delta_is_a_probability_that_says_something(delta):
    with pytest.raises(UserError, match=r"options\.private_fedavg\.delta"):
        PrivateFedAvg(delta=delta)
