import html
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import atoll
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.config import describe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.federation import Federation
from atoll.models import load_encoder
from atoll.recipe.recipe import recipe_of
from atoll.report import write_report
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same


def test_a_run_starts_warm_from_another_runs_encoder(tmp_path):
    first = run_tiny(tmp_path / "first", "method.name=fed_simclr")
    trained = load_encoder(first.encoder_path).state_dict()
    for start in (first.folder, first.encoder_path):
        federation = Federation(tiny("method.name=ssd", f"train.start={start}"))
        weights = federation.initial_weights()
        assert all(torch.equal(weights[f"encoder.{name}"], value) for name, value in trained.items())
    warm = run_tiny(tmp_path / "warm", "method.name=ssd", f"train.start={first.folder}", "train.rounds=0")
    assert warm.metrics[0]["evaluation"]["knn/accuracy"] == first.read_json("evaluation.json")["knn/accuracy"]


def test_a_warm_start_from_nothing_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.safetensors"):
        run_tiny(tmp_path / "run", "train.start=nothing.safetensors")


def test_tuning_leaves_the_test_set_alone(tmp_path):
    run = run_tiny(tmp_path / "run", "data.validation_fraction=0.25")
    results = run.read_json("evaluation.json")
    federation = Federation(tiny("data.validation_fraction=0.25"))
    assert results["split"] == "validation"
    assert results["knn/test_images"] == len(federation.splits.validation) == 40
    assert results["knn/train_images"] == len(federation.splits.train) == 120


def test_zero_rounds_give_the_initial_encoder(tmp_path):
    run = run_tiny(tmp_path / "run", "train.rounds=0")
    start = Federation(tiny()).initial_weights()
    assert torch.equal(final_models(run)["global"]["encoder.conv1.weight"], start["encoder.conv1.weight"])


def test_encoder_metadata_says_how_to_read_images_and_nothing_of_this_machine(tmp_path):
    run = run_tiny(tmp_path / "run")
    metadata = load_encoder(run.encoder_path).metadata
    assert metadata == {
        "channels": 1,
        "classes": [str(digit) for digit in range(10)],
        "image_size": 8,
        "mean": [0.0],
        "std": [1.0],
        "decoding": {"image_size": 8, "window": "fixed", "window_low": 0.0, "window_high": 65535.0},
    }
    assert str(tmp_path).encode() not in run.encoder_path.read_bytes()


def test_ssd_without_its_terms_is_align_uniform(tmp_path):
    ssd = run_tiny(tmp_path / "ssd", "method.name=ssd", "options.dsr.weight=0", "options.pd.weight=0")
    plain = run_tiny(tmp_path / "plain", "method.name=fed_align_uniform")
    assert ssd.encoder_path.read_bytes() == plain.encoder_path.read_bytes()
    full = run_tiny(tmp_path / "full", "method.name=ssd")
    assert full.encoder_path.read_bytes() != plain.encoder_path.read_bytes()


def test_streaming_gives_the_same_bytes_as_the_cache(tmp_path):
    cached = run_tiny(tmp_path / "cached")
    streamed = run_tiny(tmp_path / "streamed", "data.memory_gib=0.000001")
    assert streamed.encoder_path.read_bytes() == cached.encoder_path.read_bytes()


def test_a_warm_start_says_what_it_took(tmp_path):
    wide = run_tiny(tmp_path / "wide", "train.rounds=0", "data.channels=3")
    run = run_tiny(tmp_path / "run", "train.rounds=0", f"train.start={wide.encoder_path}")
    said = run.metrics[0]["start"]
    assert (
        f"came from {wide.encoder_path}; missing there or of another shape, so left unchanged: conv1" in said
    )
    page = write_report([run.folder], tmp_path / "report.html").read_text()
    assert html.escape(said.replace(f"{tmp_path}/wide/", "…/")) in page
    assert str(tmp_path) not in page
    assert "start" not in wide.metrics[0]


def test_a_warm_start_that_fits_counters_alone_is_a_mistake(tmp_path):
    other = {"conv1.weight": torch.zeros(3), "bn1.num_batches_tracked": torch.tensor(7)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds no trained tensor that matches"):
        run_tiny(tmp_path / "run", f"train.start={tmp_path / 'other.safetensors'}")


def test_a_recipe_as_a_table_or_objects_and_nothing_else(tmp_path):
    table = {"base": "digits", **describe(tiny("train.rounds=1"))}
    first = atoll.simulate(table, tmp_path / "table")
    second = atoll.simulate(tiny("train.rounds=1"), tmp_path / "objects")
    assert first.encoder_path.read_bytes() == second.encoder_path.read_bytes()
    assert atoll.load_recipe(first.recipe_path) == atoll.load_recipe(second.recipe_path)
    with pytest.raises(UserError, match=r"a table or an atoll\.Recipe, not an object"):
        atoll.simulate(object(), tmp_path / "run")


def test_a_warm_start_warms_every_cluster(tmp_path):
    first = run_tiny(tmp_path / "first", "train.rounds=0", "seed=5")
    warm = run_tiny(tmp_path / "warm", "method.name=featarc", "train.rounds=0", f"train.start={first.folder}")
    expected = load_encoder(first.encoder_path).state_dict()
    one, other = final_models(warm).values()
    for name, tensor in expected.items():
        assert torch.equal(one[f"encoder.{name}"], tensor)
        assert torch.equal(other[f"encoder.{name}"], tensor)
    assert not torch.equal(one["projector.0.weight"], other["projector.0.weight"])


def test_a_name_that_is_a_path_is_refused_in_code_too(tmp_path):
    with pytest.raises(UserError, match="name = 'a/b' cannot name a run's folder"):
        atoll.simulate(replace(tiny(), name="a/b"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_in_the_place_of_a_runs_folder_is_told_of(tmp_path, restart):
    (tmp_path / "run").write_text("a note")
    with pytest.raises(UserError, match=r"run is a file, and a run is a folder; choose another --out$"):
        run_recipe(tiny(), tmp_path / "run", recovery=Recovery(restart=restart))
    assert (tmp_path / "run").read_text() == "a note"


def test_simulates_old_keyword_still_works_with_a_warning(tmp_path):
    rounds = []

    class Counter:
        def begin(self, federation, server):
            pass

        def step(self, images):
            pass

        def round(self, record, line):
            rounds.append(record.round)

    with pytest.warns(DeprecationWarning, match="watcher is now called callback"):
        atoll.simulate(tiny("train.rounds=1"), tmp_path / "old", watcher=Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        atoll.simulate(tiny("train.rounds=1"), tmp_path / "new", callback=Counter())
    assert rounds == [1, 1]


def test_one_callback_and_one_tool_need_no_list(tmp_path):
    rounds = []

    class Counter(atoll.Callback):
        def round(self, record, line):
            rounds.append(record.round)

    atoll.simulate(tiny("train.rounds=1"), tmp_path / "run", callbacks=Counter())
    assert rounds == [1]
    atoll.simulate(tiny("train.rounds=1"), tmp_path / "several", callbacks=(one for one in [Counter()] * 2))
    assert rounds == [1, 1, 1]
    with pytest.raises(UserError, match="--log tensorbord: no such tool"):
        atoll.simulate(tiny("train.rounds=1"), tmp_path / "other", log="tensorbord")


def test_clients_that_are_too_small_are_named(tmp_path):
    for client, size in {"big": 9, "smäll": 1, "one": 1}.items():
        (tmp_path / "clients" / client).mkdir(parents=True)
        for i in range(size):
            Image.new("L", (8, 8), 10 * i).save(tmp_path / "clients" / client / f"{i}.png")
    natural = ("data.source=clients", f"data.path={tmp_path / 'clients'}", "partition.kind=natural")
    said = r"2 clients are too small to train: one \(1 image\), smäll \(1 image\), .* use more images, or let"
    with pytest.raises(UserError, match=said):
        Federation(tiny(*natural, "data.test_fraction=0"))


def test_a_run_and_its_prerequisite_are_gathered_once(tmp_path, monkeypatch):
    gathered = []
    build = Federation.__init__

    def counting(self, recipe, *rest):
        gathered.append(recipe.name)
        build(self, recipe, *rest)

    monkeypatch.setattr(Federation, "__init__", counting)
    public = ("options.fedca_alignment.data={source='digits'}", "options.fedca_alignment.train_epochs=1")
    run = run_tiny(tmp_path / "run", "method.name=fedca", "train.rounds=1", *public)
    assert run.finished
    assert sorted(gathered) == ["digits", "digits-alignment"]


def test_a_runs_recipe_says_what_auto_stood_for(tmp_path):
    auto = "engine.channels_last=auto"
    run = run_tiny(tmp_path / "run", auto, "data.limit=40", "train.rounds=0")
    assert tiny(auto).engine.channels_last == "auto"
    assert recipe_of(run).engine.channels_last is False  # this is a CPU
    assert run_tiny(tmp_path / "run", auto, "data.limit=40", "train.rounds=0", resume=True).finished


def test_a_resumed_run_keeps_the_layout_that_auto_stood_for_where_it_began(tmp_path):
    settings = ("data.limit=40", "train.epochs=1")
    begun = run_tiny(tmp_path / "run", "engine.channels_last=true", *settings, "train.rounds=1")
    resumed = (*settings, "train.rounds=2", "engine.channels_last=auto")
    assert recipe_of(run_tiny(begun.folder, *resumed, resume=True)).engine.channels_last is True
    whole = run_tiny(tmp_path / "whole", *settings, "train.rounds=2", "engine.channels_last=true")
    assert same(final_models(begun), final_models(whole))
    with pytest.raises(UserError, match=r"was started with engine.channels_last = True, and .* says False"):
        run_tiny(begun.folder, *settings, "train.rounds=2", "engine.channels_last=false", resume=True)


@pytest.mark.parametrize("setting", [torch.no_grad, torch.inference_mode])
def test_a_run_trains_where_its_caller_records_no_gradients(tmp_path, setting):
    plain = run_tiny(tmp_path / "plain")
    with setting():
        called = atoll.simulate(tiny(), tmp_path / "called")
        assert not torch.is_grad_enabled()
    assert called.encoder_path.read_bytes() == plain.encoder_path.read_bytes()


def test_a_run_computes_in_32_bits_whatever_its_caller_has_set(tmp_path):
    plain = run_tiny(tmp_path / "plain")
    torch.set_default_dtype(torch.float64)
    try:
        called = atoll.simulate(tiny(), tmp_path / "called")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert called.encoder_path.read_bytes() == plain.encoder_path.read_bytes()


def test_runs_of_threads_wait_for_each_other_and_say_so_once(tmp_path):
    """All seed the random streams of the process, from which the initial weights are drawn."""
    began, ended, order = threading.Event(), threading.Event(), []

    class Slow:
        def begin(self, federation, server):
            began.set()
            ended.wait(1)  # of another run, which would end long before
            order.append("first")

    def other(name):
        began.wait()
        atoll.simulate(tiny(), tmp_path / name)
        order.append("other")
        ended.set()

    def together():
        threads = [threading.Thread(target=other, args=[name]) for name in ("second", "third")]
        for thread in threads:
            thread.start()
        run = atoll.simulate(tiny(), tmp_path / "first", callbacks=[Slow()])
        for thread in threads:
            thread.join()
        return run

    with pytest.warns(UserWarning, match="waits for the run of another thread") as caught:
        first = together()
    assert [one.filename for one in caught if "waits for" in str(one.message)] == [__file__, __file__]
    assert order == ["first", "other", "other"]
    assert same(final_models(first), final_models(Run(tmp_path / "second")))
    assert same(final_models(first), final_models(Run(tmp_path / "third")))
