"""Every method of the catalogue, on real digits: it learns, resumes, and runs in any number of workers."""

import pytest
import torch

from atoll.commands.run import run_recipe
from atoll.core.tree import leaves, load
from atoll.methods.registry import METHODS
from atoll.recipe.recipe import load_recipe
from tests.harness import remains, run_tiny, tiny
from tests.trees import same

ONLY_REPORT = {
    "fed_pr",
    "fed_ae",
    "fed_mae",
    "fed_mar",
    "dec_mar",
}  # weak on digits by nature: their kNN is shown, not judged
LEARN = (
    "partition.kind=dirichlet",
    "partition.clients=4",
    "partition.alpha=1.0",
    "train.rounds=8",
    "train.epochs=5",
    "train.batch_size=32",
    "train.lr=0.001",
    "train.optimizer=adam",
    "evaluation.every=0",
    "evaluation.at_end=['knn']",
    "evaluation.map_points=0",
    "engine.workers=2",
)
CALL_LAYERS = {"fed_mae", "fed_mar", "dec_mar"}  # of the encoder, by themselves
VIT = ("model.encoder=vit-tiny", "model.width=64", "model.depth=2", "model.stem=cifar")
# What a method cannot do without, over the settings that all share.
NEEDS = {
    "fed_mae": VIT,
    "fed_mar": (
        *VIT,
        "options.mar.horizon=3",
    ),  # by default it follows the number of rounds, which changes here
    "dec_mar": (*VIT, "options.mar.horizon=3"),
    "fedca": ("options.fedca_alignment.data={source='digits'}", "options.fedca_alignment.train_epochs=10"),
    "dcco": (
        "train.epochs=1",
        "train.rounds=16",
    ),  # its statistics are those of a step; every other round gathers
    "fed_dino": (
        "options.dino.prototypes=256",
        "options.dino.local_crops=2",
        "options.dino.momentum=0.99",
        "options.dino.horizon=8",
        "options.dino.warmup_rounds=0",
        "options.dino.teacher_temperature=0.04",
        "model.projector_final_norm=plain",
    ),  # the paper's head and schedules are for hundreds of epochs
    "fed_swav": (
        "options.swav.prototypes=32",
        "options.swav.queue=64",
        "options.swav.local_crops=2",
    ),  # the paper's queue and prototypes are for hundreds of epochs
    "orchestra": ("options.orchestra.server_steps=20",),  # its 500 take longer than the clients
    "multi_krum": ("options.multi_krum.byzantine=0",),  # with 1, four clients are one too few
    "scaffold": ("train.optimizer=sgd", "train.momentum=0", "train.lr=0.05"),
}


class Stop:
    """Interrupts a run after its second round."""

    def round(self, record, line):
        if record.round == 2:
            raise KeyboardInterrupt


def knn(results):
    return results["knn/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_it_beats_the_untrained_encoder(name, tmp_path):
    settings = [*LEARN, f"method.name={name}", *NEEDS.get(name, ())]
    run = run_recipe(load_recipe("digits", settings), tmp_path / "run")
    newest = max((run.folder / "checkpoints").glob("round-*.safetensors"))
    assert all(torch.isfinite(t).all() for t in leaves(load(newest)["state"]) if t.is_floating_point())
    before, after = run.metrics[0]["evaluation"], run.read_json("evaluation.json")
    print(f"{name}: kNN {100 * knn(before):.1f} -> {100 * knn(after):.1f}")
    assert name in ONLY_REPORT or knn(after) > knn(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_it_resumes_and_spreads_over_workers_to_the_same_bytes(name, tmp_path):
    settings = [f"method.name={name}", "train.rounds=3", "train.lr=0.01", *NEEDS.get(name, ())]
    whole = remains(run_tiny(tmp_path / "whole", *settings))
    assert whole["encoders"]
    assert bool(whole["clients"]) == bool(METHODS[name].keeps)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tiny(*settings), tmp_path / "parts", callback=Stop())
    assert same(remains(run_tiny(tmp_path / "parts", *settings, resume=True)), whole)
    assert same(remains(run_tiny(tmp_path / "two", *settings, "engine.workers=2")), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_its_encoders_can_be_compiled(name, tmp_path, graphs):
    """Without code generation, so that the operations are those of the encoders, and the bytes too."""
    settings = [f"method.name={name}", "train.rounds=3", "train.lr=0.01", *NEEDS.get(name, ())]
    compiled = run_tiny(tmp_path / "compiled", *settings, "train.compile=true")
    assert same(remains(compiled), remains(run_tiny(tmp_path / "plain", *settings)))
    assert bool(graphs) == (name not in CALL_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_it_needs_no_memory_of_a_steps_graphs_in_the_next(name, tmp_path, memory_is_used_again):
    settings = [f"method.name={name}", "train.rounds=3", "train.lr=0.01", *NEEDS.get(name, ())]
    compiled = ("train.compile=true", "train.cuda_graphs=true")
    graphs = run_tiny(tmp_path / "graphs", *settings, *compiled)
    assert same(remains(graphs), remains(run_tiny(tmp_path / "plain", *settings)))
    assert any(memory_is_used_again) == (name not in CALL_LAYERS)


@pytest.mark.slow
def test_compiled_code_resumes_and_spreads_over_workers_to_the_same_bytes(tmp_path):
    settings = ("method.name=fed_byol", "train.rounds=3", "train.lr=0.001")
    whole = remains(run_tiny(tmp_path / "whole", *settings, "train.compile=true"))
    run_tiny(tmp_path / "parts", *settings, "train.compile=true", "train.rounds=2")
    assert same(remains(run_tiny(tmp_path / "parts", *settings, "train.compile=true", resume=True)), whole)
    assert same(
        remains(run_tiny(tmp_path / "two", *settings, "train.compile=true", "engine.workers=2")), whole
    )
    plain = remains(run_tiny(tmp_path / "plain", *settings))
    assert not same(plain, whole)
    pairs = list(zip(leaves(whole["server"]), leaves(plain["server"]), strict=True))
    assert pairs
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_its_words_are_complete(name):
    method = METHODS[name]
    assert method.title
    assert method.paper
    assert method.family
    assert all(component.name and component.source for component in method.components)
    settings = [f"method.name={name}", *NEEDS.get(name, ())]
    assert tiny(*settings).completed().composed == tiny(*settings).composed
