"""Random recipes: each is refused with a sentence, or its run does not depend on how it is made."""

import json
import tempfile
import warnings
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import atoll
from atoll.commands.run import run_recipe
from atoll.core.errors import RunError, UserError
from atoll.methods.registry import METHODS
from atoll.recipe.generate import recipe_schema
from tests.harness import remains, tiny
from tests.trees import same

SECTIONS = ("data", "partition", "views", "model", "train", "evaluation", "options")
# What names files, needs a library, makes a run long, or is drawn by itself.
LEFT_OUT = {
    *("data.source", "data.path", "data.limit", "data.image_size", "data.memory_gib", "data.hub_config"),
    *("data.train_split", "data.test_split", "data.image_column", "data.label_column", "data.natural_column"),
    *("partition.column", "partition.features", "partition.feature_clusters", "partition.retries"),
    *("views.size", "views.local_size", "views.transform", "model.init", "model.weights", "model.encoder"),
    *(
        "model.lora_rank",
        "model.lora_alpha",
        "model.lora_targets",
        "train.rounds",
        "train.start",
        "train.compile",
        "train.cuda_graphs",
    ),
    *("evaluation.probe_epochs", "evaluation.max_epochs", "evaluation.map_points", "train.epochs"),
    "options.private_fedavg.secret",
}


def leaves(schema, place=""):
    for name, inner in schema["properties"].items():
        if "properties" in inner:
            yield from leaves(inner, f"{place}{name}.")
        else:
            yield f"{place}{name}", inner


SCHEMAS = dict(leaves(recipe_schema()))
OPTIONS = {key: schema for key, schema in SCHEMAS.items() if key.split(".")[0] in SECTIONS}


def values(schema):
    """Values of an option, few of them out of its bounds."""
    if "anyOf" in schema:
        return st.one_of([values(each) for each in schema["anyOf"] if each.get("type") != "null"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    most = schema.get("maximum", schema.get("exclusiveMaximum", least + 10))
    if schema["type"] == "integer":
        return st.integers(least, min(most, least + 10))
    if schema["type"] == "number":
        return st.floats(least, min(most, least + 10)).map(lambda x: round(x, 3))
    if schema["type"] == "boolean":
        return st.booleans()
    if "prefixItems" in schema:
        both = st.tuples(*map(values, schema["prefixItems"]))
        return both.map(sorted) if schema.get("x-rising") else both
    if schema["type"] == "array" and "enum" in schema["items"]:
        return st.lists(values(schema["items"]), max_size=2, unique=True)
    return st.nothing()


@st.composite
def recipes(draw):
    """Settings of a run: a method, perhaps other parts of it, and some options, also of its parts."""
    found = {
        "method.name": draw(st.sampled_from(sorted(METHODS))),
        "model.encoder": draw(st.sampled_from(["resnet-narrow", "fedquad-cnn", "vit-tiny"])),
        "train.rounds": 3,
    }
    if found["model.encoder"] != "resnet-narrow":
        found |= {"model.width": 64 if found["model.encoder"] == "vit-tiny" else None, "model.stem": None}
    for name in ("method.aggregation", "method.merge", "method.server"):
        if draw(st.integers(0, 3)) == 0:
            found[name] = draw(st.sampled_from(SCHEMAS[name]["anyOf"][0]["enum"]))
    try:
        method = tiny(*written(found)).composed
    except UserError:
        assume(False)
    parts = {part.name for part in (*method.components, method.server)}
    own = [key for key in OPTIONS if key.startswith("options.") and key.split(".")[1] in parts]
    others = [key for key in OPTIONS if not key.startswith("options.")]
    for keys in own, others:
        for key in draw(st.lists(st.sampled_from(sorted({*keys} - LEFT_OUT)), max_size=3, unique=True)):
            found[key] = draw(values(OPTIONS[key]))
    if "private_fedavg" in parts:
        found["options.private_fedavg.secret"] = 1  # its noise repeats with a secret that is known
    return written(found)


def written(found):
    return [f"{key}={'' if value is None else json.dumps(value)}" for key, value in found.items()]


class Interrupt(atoll.Callback):
    """Interrupts a run at a step."""

    def __init__(self, step):
        self.steps = count(1 - step)

    def step(self, images):
        if next(self.steps) == 0:
            raise KeyboardInterrupt


def run(folder, how, recipe):
    if how == "at once":
        return run_recipe(tiny(*recipe, "engine.streams=3"), folder)
    if how == "at a stretch":
        return run_recipe(tiny(*recipe), folder)
    try:
        return run_recipe(tiny(*recipe), folder, callback=Interrupt(how))
    except KeyboardInterrupt:
        return run_recipe(tiny(*recipe), folder, resume=True)


def without_times(metrics):
    return [{key: value for key, value in line.items() if "second" not in key} for line in metrics]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes(), st.one_of(st.just("at once"), st.integers(1, 40)))
def test_a_run_does_not_depend_on_how_it_is_made(recipe, how):
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(Path(name, "expected"), "at a stretch", recipe)
        except (UserError, RunError):  # a sentence
            event("refused")
            return
        event("ran")
        made = run(Path(name, "made"), how, recipe)
        assert same(remains(made), remains(expected))
        assert without_times(made.metrics) == without_times(expected.metrics)
