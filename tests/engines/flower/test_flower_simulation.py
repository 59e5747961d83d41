"""Flower's own simulation, with its processes: slow."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="the extra atoll[flower] is not installed")

from tests.engines.flower.test_engine import FEDCA
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:model.* does not apply")
@pytest.mark.parametrize(
    "method", ["fed_align_uniform", "ssd", "l_dawa", "fedca", "fedema", "featarc", "of a timm encoder"]
)
def test_the_weights_are_those_of_our_engine(tmp_path, monkeypatch, method):
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from atoll.commands.flower_server_app import run_federation
    from atoll.engines.flower.app_options import FlowerOptions
    from atoll.engines.flower.client_app import app

    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    recipe = tmp_path / "recipe.toml"
    settings = (f"method.name={method}", *(FEDCA if method == "fedca" else ()))
    if method == "of a timm encoder":
        settings = ("method.name=fed_simclr", "model.encoder=timm:test_resnet", "data.image_size=32")
    recipe.write_text(tiny(*settings).to_toml())
    server = ServerApp()
    done = []

    @server.main()
    def main(grid, context):
        done.append(run_federation(grid, FlowerOptions(recipe=str(recipe), out=str(tmp_path / "theirs"))))

    # "local": Ray would wait for a cluster that was once started on this machine
    ray = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"address": "local"}}
    run_simulation(server, app, num_supernodes=4, backend_config=ray)
    assert done == [tmp_path / "theirs"]
    from atoll.core.run_folder import Run

    ours = run_tiny(tmp_path / "ours", *settings)
    assert same(final_models(ours), final_models(Run(tmp_path / "theirs")))
