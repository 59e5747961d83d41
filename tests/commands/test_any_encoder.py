"""Encoders of other libraries and of the user's own code through whole runs.

Each starts from its own library's weights, is trained by one process and by two workers, killed and resumed,
embedded with, exported, loaded again by its own library with equal outputs, and trained over Flower if a recipe can
name it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image
from torch import nn

import atoll
from atoll.cli.main import main
from atoll.commands.embed import embed_images
from atoll.commands.export import FORMATS
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from tests.harness import final_models, remains
from tests.trees import same

timm = pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")


class Own(nn.Module):
    """Convolution, norm with buffers, pooling."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.BatchNorm2d(width), nn.GELU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).mean((2, 3))


def fixed() -> Own:
    torch.manual_seed(5)
    return Own()


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32)


def convnet() -> nn.Module:
    return timm.create_model("test_resnet")


# The name in a recipe, or the object; and what its own library makes, with its classifier if it has one.
ENCODERS = {
    "a timm ViT": ("timm:vit_tiny_patch16_224", vit),
    "a timm ConvNet": ("timm:test_resnet", convnet),
    "an own class, by name": (f"{__name__}:Own", Own),
    "a torchvision ResNet": ("resnet18", torchvision.models.resnet18),
    "an own module, as an object": (fixed(), fixed),
}
NAMED = [name for name, (encoder, _) in ENCODERS.items() if isinstance(encoder, str)]


def without_classifier(network: nn.Module) -> nn.Module:
    """The network, whose output is then the representation."""
    if hasattr(network, "reset_classifier"):
        network.reset_classifier(0)
    elif hasattr(network, "fc"):
        network.fc = nn.Identity()
    return network.eval()


def table(encoder: object, workers: int = 1) -> dict[str, object]:
    named = {"encoder": encoder} if isinstance(encoder, str) else {}
    stem = {"stem": "standard"} if encoder == "resnet18" else {}
    return {
        "name": "any",
        "data": {"limit": 64, "image_size": 32},
        "partition": {"kind": "iid", "clients": 2},
        "views": {"preset": "simclr", "mean": [0.5], "std": [0.5]},
        "model": {**named, **stem, "projector_hidden": [16], "projector_dim": 16},
        "method": {"name": "fed_simclr"},
        "train": {"rounds": 3, "epochs": 1, "batch_size": 16, "lr": 0.01},
        "evaluation": {"every": 0, "at_end": ["knn"], "map_points": 0, "knn_k": 5},
        "engine": {"workers": workers},
    }


def run(
    encoder: object, folder: Path, workers: int = 1, resume: bool = False, callback: object = None
) -> Run:
    torch.set_num_threads(1)
    given = {} if isinstance(encoder, str) else {"encoder": encoder}
    return atoll.simulate(table(encoder, workers), folder, resume, callback, **given)


class Killed:
    """Kills this process with SIGKILL in the second round."""

    def begin(self, federation: object, server: object) -> None: ...

    def step(self, images: int) -> None:
        if self.rounds == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

    rounds = 0

    def round(self, record: object, line: object) -> None:
        self.rounds += 1


KILLED = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.commands.test_any_encoder import ENCODERS, Killed, run
if __name__ == "__main__":
    run(ENCODERS[sys.argv[1]][0], Path(sys.argv[2]), int(sys.argv[3]), callback=Killed())
"""


@pytest.fixture(scope="module", params=ENCODERS)
def trained(request, tmp_path_factory):
    encoder, original = ENCODERS[request.param]
    return encoder, original, run(encoder, tmp_path_factory.mktemp("trained") / "run"), request.param


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_the_original_library(trained, tmp_path):
    encoder, original, *_ = trained
    torch.manual_seed(6)
    theirs = original()
    settings = {**table(encoder), "train": {"rounds": 0, "epochs": 1, "batch_size": 16}}
    if isinstance(encoder, str):  # a given module has its own
        torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
        settings["model"] |= {"weights": str(tmp_path / "theirs.pth")}
    given = {} if isinstance(encoder, str) else {"encoder": encoder}
    started = atoll.simulate(settings, tmp_path / "run", **given)
    if isinstance(encoder, str):
        assert ", 100 % of the weights" in started.metrics[0]["start"]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = without_classifier(theirs)(images)
        torch.testing.assert_close(started.encoder()(images), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_two_workers_and_a_kill_end_with_the_same_bytes(trained, tmp_path):
    encoder, _, whole, name = trained
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(root=str(Path(__file__).parents[2])))
    for workers in (1, 2):
        folder = tmp_path / f"killed-{workers}"
        killed = subprocess.run(
            [sys.executable, script, name, folder, str(workers)], capture_output=True, text=True
        )
        assert killed.returncode == -9, killed.stderr
        assert Run(folder).completed_rounds() in (0, 1)  # round 1 was saved beside the second one
        assert same(remains(run(encoder, folder, workers, resume=True)), remains(whole))


@pytest.mark.slow
def test_the_export_loads_in_the_original_library_with_equal_outputs(trained, tmp_path):
    encoder, original, trained_run, _ = trained
    given = None if isinstance(encoder, str) else encoder
    ours = atoll.load_encoder(trained_run.encoder_path, given)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    theirs = without_classifier(original())
    files = [trained_run.export(name, tmp_path / f"encoder.{name}") for name in FORMATS]
    if isinstance(encoder, str):
        assert main(["export", str(trained_run.folder), "--format", "safetensors"]) == 0
        written = (trained_run.folder / "encoder-export.safetensors").read_bytes()
        assert written == (tmp_path / "encoder.safetensors").read_bytes()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "encoder.safetensors"))
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    with torch.no_grad():
        expected = ours(images)
        assert not torch.equal(expected, without_classifier(original())(images))  # it was trained
        torch.testing.assert_close(theirs(images), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(program(images), expected, atol=1e-5, rtol=0)
        for file in files:
            again = atoll.load_encoder(file, given)
            torch.testing.assert_close(again(images), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_images_are_embedded_as_the_original_embeds_them(trained, tmp_path):
    encoder, _, trained_run, _ = trained
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    ours = atoll.load_encoder(trained_run.encoder_path, None if isinstance(encoder, str) else encoder)
    _, h = embed_images(ours, tmp_path / "one.png")
    with torch.no_grad():
        expected = ours((torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5)
    torch.testing.assert_close(h, expected, atol=1e-5, rtol=1e-5)
    if isinstance(encoder, str):
        found = tmp_path / "h.npz"
        assert main(["embed", str(trained_run.folder), str(tmp_path / "one.png"), "-o", str(found)]) == 0
        np.testing.assert_allclose(np.load(found)["embeddings"], expected.numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trained", NAMED, indirect=True)
def test_flowers_simulation_trains_the_same_weights(trained, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the extra atoll[flower] is not installed")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from atoll.commands.flower_server_app import run_federation
    from atoll.engines.flower.app_options import FlowerOptions
    from atoll.engines.flower.client_app import app

    ours = trained[2]
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(atoll.load_recipe(ours.folder / "recipe.toml").to_toml())
    server = ServerApp()

    @server.main()
    def main(grid, context):
        run_federation(grid, FlowerOptions(recipe=str(recipe), out=str(tmp_path / "theirs")))

    # "local": Ray would wait for a cluster that was once started on this machine
    ray = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"address": "local"}}
    run_simulation(server, app, num_supernodes=2, backend_config=ray)
    assert same(final_models(ours), final_models(Run(tmp_path / "theirs")))


def test_flower_refuses_an_object_with_a_sentence(tmp_path):
    pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    from atoll.engines.flower.app_options import FlowerOptions
    from atoll.engines.flower.engine import FlowerEngine
    from tests.engines.flower.grid import shares

    mine = fixed()
    small = {**table(mine), "train": {"rounds": 0, "epochs": 1, "batch_size": 16}}
    ours = atoll.simulate(small, tmp_path / "ours", encoder=mine)
    recipe = atoll.load_recipe(ours.folder / "recipe.toml")
    engine = FlowerEngine(shares(2), FlowerOptions(wait=5.0, deadline=60.0), recipe.to_toml())
    with pytest.raises(UserError, match="given to its run as an object"):
        run_recipe(recipe, tmp_path / "theirs", engine=engine)


def test_an_object_is_trained_resumed_and_compared_with_what_is_given_again(tmp_path):
    """The quick part: one process, one encoder."""
    mine = fixed()
    small = {**table(mine), "train": {"rounds": 1, "epochs": 1, "batch_size": 16, "lr": 0.01}}
    first = atoll.simulate(small, tmp_path / "run", encoder=mine)
    assert all(
        torch.equal(one, two) for one, two in zip(mine.parameters(), fixed().parameters(), strict=True)
    )
    assert atoll.simulate(small, tmp_path / "run", True, encoder=fixed()).folder == first.folder
    with pytest.raises(
        UserError,
        match=r"was started with model.encoder = 'object:Own#\w+', .*: give the same encoder=… again, choose",
    ):
        atoll.simulate(small, tmp_path / "run", True, encoder=Own)
    alone = atoll.Run(first.folder)
    with pytest.raises(
        UserError, match=r"pass it again as encoder=… \(.* to simulate with resume=True, which returns"
    ):
        alone.encoder()
    assert atoll.simulate(small, alone.folder, True, encoder=mine).encoder()(
        torch.zeros(1, 3, 32, 32)
    ).shape == (1, 8)
    with pytest.raises(UserError, match=r"given to its run as an object.*pass it again"):
        atoll.simulate(tmp_path / "run/recipe.toml", tmp_path / "other")
    h = atoll.load_encoder(first.encoder_path, mine)(torch.zeros(2, 3, 32, 32))
    assert h.shape == (2, 8)
