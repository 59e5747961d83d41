"""A real deployment, its faults, and what is left afterwards: slow, because each request starts a process."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.core.audit_log import AuditLog
from tests.engines.flower.deployment import EXAMPLES, SITES, Deployment, one_folder, write_digits
from tests.engines.flower.test_engine import FEDCA
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same

pytestmark = pytest.mark.slow
DEADLINE = (
    120.0  # seconds of a round: each answer starts a process that imports PyTorch, slowly on a busy machine
)
FOLDERS = (
    "data.source=clients",
    "data.channels=1",
    "partition.kind=natural",
    "evaluation.at_end=['geometry']",
)


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path)
    write_digits(tmp_path / "images")
    try:
        made.start_superlink()
        made.register(*SITES)
        yield made
    finally:
        made.close()


def recipe(*settings):
    return tiny("data.path=nowhere", *FOLDERS, "train.batch_size=20", *settings)


def ours(place: Path, *settings):
    folder = one_folder(place / "together", place / "images")
    return run_tiny(
        place / "ours",
        f"data.path={folder}",
        "data.limit=1000000",
        *FOLDERS,
        "train.batch_size=20",
        *settings,
    )


def test_same_weights_whatever_the_method(deployment, tmp_path):
    for site in SITES:
        deployment.start_node(site)
    folder = one_folder(tmp_path / "together", tmp_path / "images")
    for method in ("fed_align_uniform", "l_dawa", "fedca", "fedema", "featarc"):
        settings = (f"method.name={method}", *(FEDCA if method == "fedca" else ()))
        deployment.run(deployment.app(recipe(*settings), name=method, wait=600.0))
        theirs = deployment.finish(name=method)
        scope = run_tiny(
            tmp_path / f"our-{method}", f"data.path={folder}", "data.limit=1000000", *FOLDERS,
            "train.batch_size=20", *settings,
        )  # fmt: skip
        assert same(final_models(theirs), final_models(scope)), method


def test_same_weights_and_strangers_are_kept_out(deployment, tmp_path):
    method = "ssd"
    deployment.register("twin")
    for site in SITES:
        deployment.start_node(site)
    deployment.start_node("west", key="twin", name="twin")  # a name that is taken
    deployment.start_node("east", key="stranger", name="stranger")  # a key that is not registered
    other = tmp_path / "other"
    subprocess.run([sys.executable, EXAMPLES / "make_keys.py", other], check=True)
    deployment.start_node("east", name="impostor", ca=str(other / "ca.crt"))  # trusts another authority
    deployment.start_node("east", name="plain", credentials=("--insecure",))
    certificate = ("--root-certificates", str(tmp_path / "keys" / "ca.crt"))
    deployment.start_node("east", name="keyless", credentials=certificate)
    refused = ("stranger", "impostor", "plain", "keyless")
    deployment.run(deployment.app(recipe(f"method.name={method}"), wait=600.0))
    run = deployment.finish()
    assert same(final_models(run), final_models(ours(tmp_path, f"method.name={method}")))
    record = json.loads((run.folder / "sites.json").read_text())
    assert [site["name"] for site in record["sites"]] == list(SITES)
    assert len({site["key"] for site in record["sites"]}) == 4
    turned = [one for one in record["turned_away"] if one["name"] == "west"]
    assert turned
    assert {one["node"] for one in turned}.isdisjoint(str(site["node"]) for site in record["sites"])
    reasons = {one["reason"] for one in turned}
    assert reasons <= {
        "another node already takes part as 'west'",
        "the run is for 4 sites, and all have connected",
        "'west' takes part with another key",
    }
    for name in refused:
        assert deployment.processes[name].poll() not in (None, 0), deployment.log(name)[-800:]


def test_a_killed_node_comes_back_with_its_state(deployment, tmp_path):
    for site in SITES:
        deployment.start_node(site)
    settings = ("train.bn_buffers=local", "train.rounds=6", "method.name=fed_align_uniform")
    deployment.run(deployment.app(recipe(*settings), wait=600.0, deadline=DEADLINE))
    deployment.wait_for(lambda: deployment.round() >= 1, 600, "round 1")
    deployment.kill("south")
    deployment.wait_for(lambda: deployment.round() >= 2, 600, "round 2")
    deployment.start_node("south", supervise=True)
    run = deployment.finish()
    lines = {line["round"]: line for line in run.metrics}
    lost = [k for k, line in lines.items() if "2" in line.get("lost", {})]
    assert lost
    assert lines[6]["clients"] == 4
    kept = {int(path.stem) for path in (tmp_path / "state").glob("south/*/south/states/*/*.safetensors")}
    assert 6 in kept


def test_a_killed_server_app_and_superlink_resume_with_the_same_weights(deployment, tmp_path):
    for site in SITES:
        deployment.start_node(site)
    settings = ("train.bn_buffers=local", "train.rounds=4", "method.name=fed_align_uniform")
    app = deployment.app(recipe(*settings), wait=600.0)
    deployment.run(app)
    deployment.wait_for(lambda: deployment.round() >= 1, 600, "round 1")
    deployment.kill_server_app()
    assert deployment.round() < 2
    deployment.run(app)
    deployment.wait_for(lambda: deployment.round() >= 2, 600, "round 2")
    for name in ("superlink", *SITES):
        deployment.kill(name)
    assert deployment.round() < 4
    deployment.start_superlink()
    for site in SITES:
        deployment.start_node(site, supervise=True)
    deployment.run(app)
    run = deployment.finish()
    assert [line["round"] for line in run.metrics] == [0, 1, 2, 3, 4]
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4, 4, 4]
    assert same(final_models(run), final_models(ours(tmp_path, *settings)))


def test_spoiled_and_late_updates_and_a_vanished_folder(deployment, tmp_path):
    hostile = Path(__file__).with_name("hostile.py")
    digest = hashlib.sha256(hostile.read_bytes()).hexdigest()
    (tmp_path / "policy.toml").write_text(f'[modules]\nhostile = "{digest}"\n')
    for site in SITES:
        deployment.start_node(site, policy=str(tmp_path / "policy.toml"))
    app = deployment.app(recipe("train.rounds=6", "train.min_accepted=0.25"), wait=600.0, deadline=DEADLINE)
    shutil.copy(hostile, app)
    (app / "recipe.toml").write_text(
        (app / "recipe.toml")
        .read_text()
        .replace('objective = "align_uniform"', 'objective = "hostile:Hostile"')
        .replace("[options.align_uniform]", "[options.hostile]")
    )
    assert "hostile:Hostile" in (app / "recipe.toml").read_text()
    deployment.run(app)
    deployment.wait_for(lambda: deployment.round() >= 5, 1200, "round 5")
    (tmp_path / "images" / "east").rename(tmp_path / "gone")
    run = deployment.finish()
    lines = {line["round"]: line for line in run.metrics}
    assert (
        "its loss 'dsr' is nan" in lines[2]["refused"]["0"]
    )  # the first of them by name: terms see the NaN, too
    assert re.search(r"its loss 'pd' is \d+.*, not a float from -100 to 100", lines[3]["refused"]["1"])
    assert "has shape (1,)" in lines[4]["refused"]["2"]
    assert f"no answer within {DEADLINE:.0f} s" in lines[5]["lost"]["3"]
    assert set(lines[6]["lost"]) == {"0"}  # who was late is back
    assert lines[6]["clients"] == 3
    assert lines[6]["lost"]["0"].startswith("the site's images do not fit the recipe, or some cannot be read")
    assert all(torch.isfinite(tensor).all() for tensor in final_models(run)["global"].values())


def test_secure_aggregation_gives_the_weights_of_a_simulation_and_survives_a_killed_node(
    deployment, tmp_path
):
    settings = (
        "method.name=fed_align_uniform",
        "method.aggregation=secure_sum",
        "train.bn_buffers=leave",
        "evaluation.at_end=['geometry']",
    )
    for site in SITES:
        deployment.start_node(site)
    deployment.run(deployment.app(recipe(*settings), wait=600.0))
    run = deployment.finish()
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4]
    assert same(final_models(run), final_models(ours(tmp_path, *settings)))
    updates = [
        entry.fields["tensors"].keys()
        for site in SITES
        for entry in AuditLog(tmp_path / "state" / site / f"audit-{site}.jsonl").entries()
        if entry.fields["event"] == "update"
    ]
    assert updates == [{"masked"}] * 8
    app = deployment.app(recipe(*settings), name="one-less", wait=600.0, deadline=DEADLINE)
    deployment.run(app)
    deployment.wait_for(lambda: (tmp_path / "one-less" / "partition.json").is_file(), 600, "the start")
    deployment.kill("south")
    shorter = deployment.finish(name="one-less")
    assert [line["clients"] for line in shorter.metrics[1:]] == [3, 3]
