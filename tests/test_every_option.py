"""Every option of every component, off its default: the run ends well, and with another model."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atoll.core.config import describe
from atoll.core.errors import UserError
from atoll.core.schema import Schema, schema_of
from atoll.core.schema_check import check
from atoll.core.tree import Tree
from atoll.data.sources import Splits, load_data
from atoll.methods.registry import AGGREGATIONS, COMPONENTS, MERGES, OBJECTIVES, SERVER_STEPS, TERMS
from tests.harness import tiny
from tests.test_matrix import PLAIN, SMALL, play, set_up, settings_of
from tests.trees import same

# Clients of unequal sizes, and enough rounds for what begins late.
UNEQUAL = (
    *SMALL, "train.rounds=3", "data.limit=80", "partition.clients=5", "partition.kind=dirichlet",
    "partition.alpha=0.5",
)  # fmt: skip
AXES = {
    "objective": OBJECTIVES, "terms": TERMS, "merge": MERGES, "aggregation": AGGREGATIONS, "server": SERVER_STEPS,
}  # fmt: skip
# What a component or an option needs to act at this size.
BESIDE: dict[str, tuple[str, ...]] = {
    "dcco": ("train.lr=1e-6",),  # at 0.001 its first step on so few images makes the networks useless
    "dino": ("options.dino.prototypes=64", "options.dino.local_crops=2"),
    "swav": ("options.swav.prototypes=64", "options.swav.queue=8", "options.swav.queue_epochs=1"),
    "dino.local_crops": ("data.image_size=16",),
    "dino.warmup_rounds": ("options.dino.warmup_rounds=1",),
    "dino.warmup_temperature": ("options.dino.warmup_rounds=2",),
    "dsr.draw": ("options.dsr.basis=random",),
    "dsr.index_by": ("train.participation=0.5",),
    "featarc_alignment": ("method.aggregation=featarc",),
    "fedca_alignment": ("options.fedca_alignment.train_epochs=4",),
    "fedema": ("method.objective=byol",),
    "fedsc": ("options.fedsc.passes=2",),
    "fedsc.last_share": ("options.fedsc.gather=updates",),
    "fedu": ("method.objective=byol",),
    "fedu.skip": ("options.fedu.threshold=1e-9",),
    "fedx.temperature": (
        "train.lr=1e-4",
    ),  # 0.001 is at the edge of divergence, which last bits of views decide
    "gossip.edge_probability": ("options.gossip.topology=random",),
    "gossip.redraw": ("options.gossip.topology=random",),
    "hsd.draw": ("options.hsd.basis=random",),
    "hsd.index_by": ("train.participation=0.5",),
    "orchestra": ("options.orchestra.server_steps=20",),
    "per_ssfl": ("method.merge=personal_networks",),
    "private_fedavg": ("options.private_fedavg.secret=1",),  # a run without it is not repeatable
    "prototype_divergence.iterations": ("options.prototype_divergence.clusters=3",),
    "prototypes.iterations": ("options.prototypes.clusters=3",),
    "relay": ("options.relay.groups=2",),
    "secure_sum.least_loss": ("options.secure_sum.weights=loss",),
    "vicreg.variance": ("train.lr=1e-4",),  # as for FedX's temperature
}
# Values in TOML that act, where none that acts can be told from the option's type.
VALUES = {
    "em_inspector.data": "{source = 'digits'}",
    "fedca_alignment.size": "10",
    "fedca_dictionary.size": "8",
    "feddecorr.images_of": "['view1']",
    "fedema.skip": "['conv']",
    "fedu.skip": "['']",
    "fedu.threshold": "0.0",
    "multi_krum.byzantine": "1",
    "orchestra.memory": "8",
    "private_fedavg.secret": "2",
    "prototype_divergence.iterations": "1",
    "prototypes.iterations": "1",
    "secure_sum.clip": "0.01",
    "trimmed_mean.trim": "0.3",
}
# Options that leave the model as it is, and why.
SILENT = {
    "gossip.deploys": "it chooses what is evaluated",
    "per_ssfl.consensus": "it moves the personal networks alone; tests/methods/test_per_ssfl.py",
    "per_ssfl.weight": "as above",
    "private_fedavg.delta": "it enters the report of ε alone",
    "secure_sum.threshold": "no client is lost",
}
LEFT_OUT = {
    "featarc.features": "both choose alike at this size; tests/methods/test_featarc.py",
    "fedca_alignment.data": "the alignment model is given here; tests/methods/test_fedca.py",
    "fedca_alignment.recipe": "as above",
    "fedca_alignment.train_epochs": "as above",
    "scaffold.weight": "1 alone is accepted",
}


def options() -> Iterator[tuple[str, str]]:
    """Yield (component, key) of all options."""
    for name, component in COMPONENTS.items():
        for key in schema_of(component)["properties"]:
            if f"{name}.{key}" not in LEFT_OUT:
                yield name, key


def other_values(schema: Schema, default: Any) -> list[Any]:
    """Find values beside the default: all other words, or one number within the bounds."""
    if "enum" in schema:
        return [value for value in schema["enum"] if value != default]
    if schema["type"] == "boolean":
        return [not default]
    if schema["type"] == "array":
        return [[2 * number for number in default]]
    near = (default // 2, default + 1) if schema["type"] == "integer" else (default / 2, default + 0.1)
    return [value for value in near if value != default and fits(schema, value)][:1]


def fits(schema: Schema, value: Any) -> bool:
    try:
        check(schema, value, "")
    except UserError:
        return False
    return True


@pytest.fixture(scope="module")
def images() -> Splits:
    """The same few digits for all."""
    return load_data(tiny(*UNEQUAL).data, 0)


class Runs:
    """Runs of components beside plain ones; none is repeated."""

    def __init__(self, images: Splits, folder: Path) -> None:
        self.images = images
        self.folders = (folder / str(number) for number in count())
        self.states: dict[tuple[str, ...], Tree] = {}

    def state(self, component: str, *settings: str) -> Tree:
        """Return the server's state after the last round."""
        axis = next(axis for axis, known in AXES.items() if component in known)
        plain = settings_of(*{**PLAIN, axis: component}.values())
        all_settings = (*UNEQUAL, "method.name=fed_simclr", *plain, *BESIDE.get(component, ()), *settings)
        if all_settings not in self.states:
            prepared = set_up(tiny(*all_settings), self.images)
            self.states[all_settings] = play(*prepared, next(self.folders)).state
        return self.states[all_settings]


@pytest.fixture(scope="module")
def runs(images: Splits, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(images, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize(("component", "key"), list(options()), ids=str)
def test_every_option_changes_the_run(component: str, key: str, runs: Runs) -> None:
    name = f"{component}.{key}"
    if name in VALUES:
        values = [VALUES[name]]
    else:
        default = describe(COMPONENTS[component]())[key]
        values = [
            json.dumps(v) for v in other_values(schema_of(COMPONENTS[component])["properties"][key], default)
        ]
    assert values
    beside = BESIDE.get(name, ())
    before = runs.state(component, *beside)
    for value in values:
        after = runs.state(component, *beside, f"options.{name}={value}")
        alike = same(after, before)
        assert alike == (name in SILENT), value
