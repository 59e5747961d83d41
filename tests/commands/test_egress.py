import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from atoll.cli.main import main
from atoll.cli.tables import egress_tables
from atoll.commands.egress import egress
from atoll.commands.run import run_recipe
from atoll.components.base import TensorSpec, Term
from atoll.components.declaration import declared_leaves
from atoll.core.errors import UserError
from atoll.core.version import VERSION
from atoll.engines.federation import Federation
from tests.engines.flower.deployment import write_digits
from tests.harness import printed, tiny


def test_what_leaves_is_the_model_and_its_sample_count_and_losses():
    recipe = tiny("method.name=ssd")
    found = egress(recipe, images=100)
    weights = {item.name: item for item in found.up if item.name.startswith("weights.")}
    model = Federation(recipe).initial_weights()
    assert {f"weights.{name}" for name in model} == set(weights)
    for name, tensor in model.items():
        item = weights[f"weights.{name}"]
        assert item.shape == tuple(tensor.shape)
        assert item.bytes == tensor.numel() * tensor.element_size()
    rest = {item.name for item in found.up} - set(weights)
    assert rest == {"samples", "losses.loss", "losses.align_uniform", "losses.dsr", "losses.pd"}
    assert found.kept == []


def test_what_grows_with_the_images_is_told_for_all_of_them():
    found = egress(tiny("method.name=orchestra", "options.orchestra.local_clusters=4"), images=500)
    (centroids,) = [item for item in found.up if item.name.startswith("parts.orchestra")]
    assert centroids.shape[0] == 4
    (assigned,) = found.kept
    assert 500 in assigned.shape
    assert "centroids" in centroids.why


@pytest.mark.parametrize("name", ["fedbn", "moon"])
def test_state_that_stays_is_listed(name):
    found = egress(tiny(f"method.name={name}"), images=50)
    assert found.kept
    assert not {item.name for item in found.kept} & {item.name for item in found.up}


def test_what_is_there_in_a_later_round_only_is_listed_too():
    found = egress(tiny("method.name=orchestra", "options.orchestra.local_clusters=4"), images=50)
    losses = [item for item in found.up if item.name.startswith("losses.")]
    assert [item.rounds for item in losses] == [(2,)] * 3  # the first round only makes centroids
    variates = [
        item for item in egress(tiny("method.name=scaffold"), images=50).down if "scaffold" in item.name
    ]
    assert variates
    assert {item.rounds for item in variates} == {(2,)}


def test_names_and_sizes_are_shown_whole_at_any_width():
    recipe = tiny("method.name=ssd")
    found = egress(recipe, images=5000)
    for width in (80, 160):
        shown = printed(*egress_tables(found, recipe.composed, width), width=width)
        assert "…" not in shown
        for item in found.up:
            assert width < 160 or item.name in shown
            assert f" {item.bytes:,} " in shown
            assert item.shape is None or str(list(item.shape)) in shown


def test_a_narrow_terminal_shows_every_name_shape_and_size_over_several_lines():
    recipe = tiny("method.name=ssd")
    found = egress(recipe, images=5000)
    shown = printed(*egress_tables(found, recipe.composed, 40), width=40)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 40
    rows = [line.split("│") for line in shown.splitlines() if line.count("│") == 3]
    what, shape, sizes, _ = ("".join(cell.strip() for cell in column) for column in zip(*rows, strict=True))
    for item in (*found.up, *found.down, *found.once, *found.kept):
        assert item.name in what
        assert f"{item.bytes:,}" in sizes
        assert item.shape is None or str(list(item.shape)).replace(" ", "") in shape.replace(" ", "")


@pytest.mark.parametrize("images", [-5, 0])
def test_a_site_has_images(images):
    with pytest.raises(UserError, match=rf"--images is {images}; it must be .* at least 1"):
        egress(tiny(), images)
    assert egress(tiny(), 1).images == 1


@pytest.mark.parametrize("devices", ["'auto'", "['cpu', 'cpu']"])
def test_devices_of_a_run_do_not_matter(devices):
    assert egress(tiny(f"engine.devices={devices}")).up == egress(tiny()).up


SENDERS = {
    "scaffold": ("method.name=scaffold",),
    "orchestra": ("method.name=orchestra", "options.orchestra.server_steps=2"),
    "fedca_dictionary": (
        "method.name=fed_simclr",
        "method.objective=fedca_dictionary",
        "options.fedca_dictionary.size=200",
    ),
    "all_projections": (
        "method.name=fed_simclr",
        "method.objective=fedca_dictionary",
        "options.fedca_dictionary.sampling=server",
    ),
    "featarc": ("method.name=featarc",),
    "fedsc": ("method.name=fedsc",),
    "dcco": ("method.name=dcco",),
    "calibre": ("method.name=calibre",),
    "fed_mar": ("method.name=fed_mar", "model.encoder=vit-tiny", "model.stem=cifar", "model.width=64"),
    "dec_mar": ("method.name=dec_mar", "model.encoder=vit-tiny", "model.stem=cifar", "model.width=64"),
}


@pytest.mark.parametrize("name", SENDERS)
def test_what_is_measured_agrees_with_what_components_declare(name):
    """Every slice that was seen was declared, with its dtype, and is listed no larger than that."""
    recipe = tiny(*SENDERS[name])
    federation = Federation(recipe)
    weights = {n: federation.networks.state_dict()[n] for n in federation.update_names()}
    declared = {
        place: leaf
        for component in recipe.composed.components
        if (spec := component.declares(federation.setting)) is not None
        for place, leaf in declared_leaves(spec, weights, f"parts.{component.name}")
    }
    listed = {item.name: item for item in egress(recipe, images=1000).up if item.name.startswith("parts.")}
    assert listed.keys() == declared.keys()
    for place, leaf in declared.items():
        item = listed[place]
        assert item.rounds
        if isinstance(leaf, TensorSpec):
            assert item.dtype == str(leaf.dtype).removeprefix("torch.")
            assert len(item.shape) == len(leaf.shape)
            if name != "all_projections":  # whose bound is this federation's largest client
                assert all(size <= most for size, most in zip(item.shape, leaf.largest, strict=True))
    if name == "all_projections":
        assert listed["parts.fedca_dictionary"].shape == (1000, federation.setting.embedding_dim)


@pytest.mark.parametrize("name", ["featarc", "scaffold"])
def test_what_is_listed_is_what_a_run_counts(name, tmp_path):
    recipe = tiny(*SENDERS[name], "train.rounds=2")
    run_recipe(recipe, tmp_path / "run")
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    listed = egress(recipe)
    for count, items in ((last["bytes_up"], listed.up), (last["bytes_down"], listed.down)):
        assert count == sum(item.bytes for item in items if 2 in item.rounds) * last["clients"]


def test_what_is_declared_and_comes_in_later_rounds_is_listed():
    recipe = tiny("method.name=euc")
    listed = {item.name: item for item in egress(recipe, images=50).up if item.name.startswith("parts.euc")}
    layers = [n for n, w in Federation(recipe).networks.named_parameters() if w.ndim >= 2]
    assert listed.keys() == {f"parts.euc.{name}.{k}" for name in layers for k in (0, 1)}
    assert {item.dtype for item in listed.values()} == {"float", "int"}
    assert {item.rounds for item in listed.values()} == {()}


def test_secure_aggregation_says_what_goes_with_the_masked_sum(capsys):
    settings = ["method.aggregation=secure_sum", "train.bn_buffers=leave"]
    assert main(["egress", "digits-ssd", "--set", *settings]) == 0
    assert "leaves: all of these only masked, over Flower: as one" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["egress", "digits-ssd"]) == 0
    assert "masked" not in capsys.readouterr().out


def test_all_that_a_site_tells_of_itself_is_listed(capsys, tmp_path):
    pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    from atoll.engines.flower.enrolment import FORMAT
    from atoll.engines.flower.site import SiteSide
    from atoll.engines.flower.site_options import SiteOptions

    write_digits(tmp_path)
    side = SiteSide(SiteOptions(site="east", data=str(tmp_path / "east"), source="folder"))
    recipe = tiny("data.channels=1").to_toml()
    told = side.hello({"format": FORMAT, "version": VERSION, "recipe": recipe, "sites": 1})
    assert main(["egress", "digits-ssd"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    (line,) = re.findall("leaves when the node enrols: (.*?) leaves at", printed)
    words = {"train": "its training", "test": "held-out", "classes": "class names"}
    for key in told:
        assert words.get(key, key) in line


@dataclass(frozen=True)
class Older(Term):
    """A component as written for 0.1: it neither declares nor describes what it sends."""

    name: ClassVar[str] = "older"

    def loss(self, context, batch, passes):
        return torch.zeros(())

    def finish(self, context):
        return 3


def test_data_that_nothing_describes_are_listed_with_their_component_alone():
    """The purpose was "for older ()", which holds no source."""
    found = egress(tiny("method.name=ssd", f"method.terms=['{__name__}:Older']"), images=50)
    assert {item.name: item.why for item in found.up}["parts.older"] == "for older"
