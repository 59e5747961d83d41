"""Runs of sites with folders of their own: whose images they train on, and what is said of these."""

from __future__ import annotations

import shutil
import unicodedata

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.commands.check import check_run
from atoll.commands.export import provenance
from atoll.core.errors import UserError
from atoll.report.comparison import comparison_cells
from atoll.report.page import write_report
from tests.engines.flower.deployment import one_folder
from tests.engines.flower.site_runs import FOLDERS, play, sites
from tests.harness import final_models, run_tiny
from tests.report.pages import Page
from tests.trees import same


@pytest.mark.parametrize("method", ["ssd", "fed_sl"])
def test_the_weights_are_those_of_our_engine_over_the_same_folders(place, method):
    folder = one_folder(place / "together", place / "images")
    settings = (f"method.name={method}", "evaluation.every=1")
    ours = run_tiny(place / "ours", f"data.path={folder}", "data.limit=1000000", *FOLDERS, *settings)
    theirs = play(sites(place), place, *settings)
    assert same(final_models(ours), final_models(theirs))
    sizes = [client["size"] for client in theirs.read_json("partition.json")["clients"]]
    assert sizes == [40, 40, 40, 40]


def test_a_class_that_only_held_out_images_have_is_a_class_of_the_run(place):
    for name in ("x.png", "y.png"):
        rare = place / "images" / "north" / "test" / "rare" / name
        rare.parent.mkdir(exist_ok=True)
        shutil.copy(next((place / "images" / "north" / "test").glob("[0-9]*/*.png")), rare)
    run = play(sites(place), place)
    assert run.metrics[-1]["clients"] == 4
    assert run.read_json("partition.json")["classes"][-1] == "rare"
    assert run.read_json("evaluation.json")["sites"]["north"]["knn/test_images"] == 22


def test_a_class_that_two_sites_write_in_two_forms_of_unicode_is_told(place, caplog):
    for name, form in (("north", "NFC"), ("south", "NFD")):
        for split in ("train", "test"):
            folder = place / "images" / name / split
            (folder / "0").rename(folder / unicodedata.normalize(form, "Hände"))
    play(sites(place), place, "train.rounds=0")
    (told,) = [
        record.getMessage() for record in caplog.records if "two forms of Unicode" in record.getMessage()
    ]
    assert told.startswith(r"the classes 'Ha\u0308nde' and 'H\xe4nde' count as two")


def test_the_recipes_images_and_partition_are_not_said_to_be_the_sites(place):
    simulated = ("data.source=digits", "data.path=", "partition.kind=dirichlet", "title=")
    run = play(sites(place), place, *simulated, "train.rounds=1")
    (note, _) = comparison_cells([run])[2]
    assert note.startswith("4 sites, their own images; sites' own split; ")
    about = provenance(run)
    assert (about["setting"], about["clients"]) == ("4 sites, their own images", 4)
    page = Page(write_report([run.folder], place / "report.html"))
    _, (_, clients, partition, *_, distance) = page.tables["Partition of the training images"]
    assert (clients, partition, distance) == ("4", "sites' own images", "unknown")
    told = page.text.split("Recipe of")[0]
    assert "digits" not in told
    assert "dirichlet" not in told


def test_the_site_decides_what_it_trains_on(place):
    expected = play(sites(place), place, "train.rounds=1")
    there = play(
        sites(place), place, "train.rounds=1", "data.train_split=test", "data.test_split=train", out="swapped"
    )
    assert same(final_models(expected), final_models(there))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.unlink(), "sites.json is missing; restore it from a copy, or start the run again"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-9]),
            r"sites.json is damaged .*; restore it from a copy",
        ),
    ],
)
def test_a_run_that_lost_its_record_of_the_sites_is_refused_and_goes_on_with_a_copy(place, spoil, sentence):
    run = play(sites(place), place, "train.rounds=1")
    path = run.folder / "sites.json"
    copy = path.read_bytes()
    spoil(path)
    before = {one: one.read_bytes() for one in run.folder.rglob("*") if one.is_file()}
    with pytest.raises(UserError, match=sentence):
        play(sites(place), place, "train.rounds=2", resume=True)
    assert {one: one.read_bytes() for one in run.folder.rglob("*") if one.is_file()} == before
    path.write_bytes(copy)
    assert play(sites(place), place, "train.rounds=2", resume=True).metrics[-1]["clients"] == 4


@pytest.mark.parametrize("count", [3, 5])
def test_a_run_goes_on_with_as_many_sites_as_it_has(place, count):
    play(sites(place), place, "train.rounds=1")
    with pytest.raises(
        UserError, match=f"is a run of 4 sites, and the app says sites = {count}; set sites = 4, or"
    ):
        play(sites(place), place, "train.rounds=2", resume=True, sites=count)


def test_the_check_of_a_run_of_sites_misses_its_records(place):
    run = play(sites(place), place, "train.rounds=1")
    assert not check_run(run).damaged
    for name in ("sites.json", "audit.jsonl"):
        whole = (run.folder / name).read_bytes()
        (run.folder / name).unlink()
        (sentence,) = check_run(run).damaged
        assert sentence.startswith(f"{run.folder / name} is missing; restore it from a copy")
        (run.folder / name).write_bytes(whole)
