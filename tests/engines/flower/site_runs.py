"""Runs of sites with folders of their own, on the fake grid."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.commands.run import run_recipe
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.engine import FlowerEngine
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid, node
from tests.harness import tiny

FOLDERS = ("data.source=clients", "data.channels=1", "partition.kind=natural", "evaluation.during=['knn']")


def site(number, name, place, spoil=None, **config):
    given = {"site": name, "data": str(place / "images" / name), "source": "folder", **config}
    return node(number, given, spoil)


def sites(place, **spoil):
    return FakeGrid({10 + k: site(10 + k, name, place, spoil.get(name)) for k, name in enumerate(SITES)})


def play(grid, place, *settings, resume=False, out="run", **options):
    recipe = tiny("data.path=nowhere", *FOLDERS, *settings)
    options = {"sites": 4, "wait": 3.0, "deadline": 10.0, **options}
    return run_recipe(
        recipe, place / out, resume, None, FlowerEngine(grid, FlowerOptions(**options), recipe.to_toml())
    )


def public_key():
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return line, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keyed(place):
    """Four sites with keys, and the file that binds them."""
    pairs = {name: public_key() for name in SITES}
    grid = sites(place)
    grid.keys = {10 + k: pairs[name][1] for k, name in enumerate(SITES)}
    path = place / "sites.toml"
    path.write_text("[keys]\n" + "".join(f'{name} = "{line}"\n' for name, (line, _) in pairs.items()))
    return grid, path
