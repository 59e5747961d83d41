import json
import statistics
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from atoll.cli.main import main
from atoll.commands.compare import (
    by_method,
    compare,
    counterparts,
    load_recipes,
    of_methods,
    write_comparison,
)
from atoll.commands.progress import Bar
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.provenance import version
from atoll.core.run_folder import Run
from atoll.recipe.recipe import load_recipe
from atoll.report.comparison import comparison_cells, comparison_markdown, comparison_table
from tests.harness import TINY, printed, tiny


def test_recipes_by_method_and_their_lines():
    recipes = by_method(tiny("name=base"), ["ssd", "fed_simclr", "fed_align_uniform"])
    assert [recipe.name for recipe in recipes] == ["base-ssd", "base-fed_simclr", "base-fed_align_uniform"]
    lines = counterparts(recipes)
    assert [line.name for line in lines] == [
        "base-fed_align_uniform-centralised",
        "base-fed_align_uniform-alone",
        "base-fed_simclr-centralised",
        "base-fed_simclr-alone",
    ]
    whole, alone = lines[0], lines[1]
    assert whole.partition.kind == "centralised"
    assert whole.train.keep_optimizer
    assert whole.composed.terms == ()
    assert whole.label == "FedAlignUniform, centralised"
    assert alone.composed.merge.name == "local_only"
    assert alone.label == "FedAlignUniform, each client alone"
    with pytest.raises(UserError, match="unknown method"):
        by_method(tiny(), ["sdd"])


def test_each_objective_with_its_options_has_its_own_lines():
    """FedX's contrast has another temperature than FedSimCLR's, which L-DAWA shares."""
    recipes = by_method(tiny("name=base"), ["fed_simclr", "l_dawa", "fedx"])
    lines = counterparts(recipes)
    assert [line.name for line in lines[::2]] == ["base-fed_simclr-centralised", "base-fedx-centralised"]
    assert [line.composed.objective.temperature for line in lines[::2]] == [0.5, 0.1]
    elsewhere = by_method(tiny("name=other", "data.limit=80"), ["fed_simclr"])
    assert len(counterparts([*recipes, *elsewhere])) == 6
    warmer = [
        tiny(f"name={name}", f"method.name={name}", "options.simclr.temperature=0.2")
        for name in ("fed_simclr", "l_dawa")
    ]
    assert len(counterparts(warmer)) == 2


def test_a_table_is_mean_and_std_over_seeds_and_a_comparison_resumes(tmp_path):
    recipe = tiny("name=tiny", "method.name=fed_simclr")
    runs = compare([recipe], 2, tmp_path).runs
    accuracies = [100 * run.read_json("evaluation.json")["knn/accuracy"] for run in runs]
    untrained = [100 * run.metrics[0]["evaluation"]["knn/accuracy"] for run in runs]
    shown = printed(comparison_table(comparison_cells(runs)))
    for values in (accuracies, untrained):
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in shown
    stamps = [run.encoder_path.stat().st_mtime_ns for run in runs]
    again = compare([recipe], 3, tmp_path).runs
    assert f"| FedSimCLR | {statistics.mean(accuracies):.2f} ± " in comparison_markdown(
        comparison_cells(runs)
    )
    assert [run.encoder_path.stat().st_mtime_ns for run in again[:2]] == stamps
    assert len(again) == 3
    # Two methods begin with the same weights: the untrained encoder still counts once a seed.
    both = [*runs, *compare([tiny("name=other", "method.name=ssd")], 2, tmp_path).runs]
    assert comparison_cells(both)[1][0] == comparison_cells(runs)[1][0]


def test_a_run_that_fails_takes_none_of_the_others_with_it(tmp_path, monkeypatch, capsys):
    """Of two seeds one has every update refused: the other's number stands, and says that it is alone."""

    def run_or_fail(recipe, folder, **rest):
        fails = recipe.label == "SSD" and recipe.seed == 1
        return run_recipe(
            replace(recipe, train=replace(recipe.train, first_norm=1e-9)) if fails else recipe, folder, **rest
        )

    monkeypatch.setattr("atoll.commands.compare.run_recipe", run_or_fail)
    settings = [word for setting in (*TINY, "seed=0") for word in ("--set", setting)]
    asked = f"compare digits --methods fed_align_uniform ssd --seeds 2 --out {tmp_path}".split()
    assert main([*asked, *settings]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("atoll: SSD, seed 1: round 1 failed: ")
    assert said.err.count("\n") == 1
    assert "SSD (1 of 2 runs)" in said.out
    assert "FedAlignUniform (" not in said.out
    assert (
        f"{100 * Run(tmp_path / 'digits-ssd-seed0').read_json('evaluation.json')['knn/accuracy']:.2f}"
        in said.out
    )
    assert (tmp_path / "report.html").is_file()
    assert "| SSD (1 of 2 runs) |" in (tmp_path / "table.md").read_text()


def test_a_comparison_that_cannot_be_made_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="at least 1 seed per recipe, not 0"):
        compare([tiny()], 0, tmp_path)
    with pytest.raises(UserError, match="two recipes are called 'digits'"):
        compare([tiny(), tiny("train.lr=0.3")], 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_recipes_whose_seeds_begin_differently_are_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.commands.compare.run_recipe", lambda recipe, folder, **rest: Run(folder))
    recipes = [tiny("name=a", "seed=0"), tiny("name=b", "seed=1")]
    with pytest.warns(UserWarning, match=r"seeds begin differently \(a from 0, b from 1\)"):
        compare(recipes, 2, tmp_path)


def test_a_tool_that_is_missing_is_one_mistake_and_not_one_of_each_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("atoll.commands.logs.missing", lambda *words: "it is missing")
    recipes = ["digits-ssd", "digits-simclr", "--seeds", "2"]
    assert main(["compare", *recipes, "--out", str(tmp_path / "runs"), "--log", "wandb"]) == 2
    assert capsys.readouterr().err == "atoll: it is missing\n"
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_mistake_and_not_one_of_each_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "runs"
    assert main(["compare", "digits", "--seeds", "2", "--out", str(out), "--set", *TINY]) == 2
    assert capsys.readouterr().err == f"atoll: cannot write {out}: Not a directory\n"


def test_recipes_of_one_method_keep_rows_of_their_own(tmp_path):
    """Else the mean of two settings would pass for one over seeds, and one's untrained encoder for the other's."""
    made = compare([tiny("name=small"), tiny("name=large", "data.image_size=12")], 1, tmp_path)
    _, rows, _ = comparison_cells(made.runs)
    results = [run.read_json("evaluation.json") for run in made.runs]
    first = [run.metrics[0]["evaluation"] for run in made.runs]
    assert [row[0].partition(" · ")[2].partition(",")[0] for row in rows] == [
        "data.image_size = 8",
        "data.image_size = 12",
    ] * 2
    assert [row[1] for row in rows] == [f"{100 * one['knn/accuracy']:.2f}" for one in (*first, *results)]


def test_settings_of_methods_are_laid_over_each_that_has_the_part():
    settings = ["method.aggregation=l_dawa", "options.simclr.temperature=0.2"]
    recipe = tiny("name=base")
    simclr, byol = by_method(recipe, ["fed_simclr", "fed_byol"], settings)
    assert [one.composed.aggregation.name for one in (simclr, byol)] == ["l_dawa", "l_dawa"]
    assert simclr.composed.objective.temperature == 0.2
    assert byol.options == {}
    for one in (simclr, byol):
        assert replace(one, name=recipe.name, method=recipe.method, options=recipe.options) == recipe
    tables = ["method={aggregation='l_dawa'}", "options={simclr={temperature=0.2}}"]
    assert by_method(recipe, ["fed_simclr", "fed_byol"], tables) == [simclr, byol]
    assert [of_methods(text) for text in (*settings, *tables, "train.lr=1", "optionsx.y=1")] == [True] * 4 + [
        False
    ] * 2
    with pytest.raises(UserError, match="options = 3 is not a table; set single keys of it"):
        by_method(recipe, ["fed_byol"], ["options=3"])
    with pytest.raises(UserError, match=r"options\.dsr belongs to no component of these methods"):
        by_method(recipe, ["fed_byol"], ["options.dsr.scale=2.0"])
    with pytest.raises(UserError, match=r"--methods names the method; leave out method.name"):
        by_method(recipe, ["fed_byol"], ["method.name=ssd"])


def test_the_command_lays_settings_over_its_methods(tmp_path):
    settings = [
        *TINY, "train.rounds=0", "method.aggregation=m_dawa", "options.simclr.temperature=0.2"
    ]  # fmt: skip
    asked = f"compare digits-ssd --methods fed_simclr fed_byol --out {tmp_path} --set".split()
    assert main([*asked, *settings]) == 0
    first = load_recipe(tmp_path / "digits-ssd-fed_simclr-seed0" / "recipe.toml")
    assert first.composed.aggregation.name == "m_dawa"
    assert first.composed.objective.temperature == 0.2
    assert "FedSimCLR with aggregation m_dawa" in (tmp_path / "table.md").read_text()


def test_two_methods_of_ones_own_that_are_called_alike_have_folders_of_their_own(tmp_path, monkeypatch):
    for name in ("first_file", "second_file"):
        (tmp_path / f"{name}.py").write_text(
            "from atoll.methods.method import Method\n"
            "from atoll.objectives.simclr import SimCLR\n"
            f"METHOD = Method(objective=SimCLR(), title={name!r})\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipes = by_method(tiny("name=base"), ["first_file:METHOD", "second_file:METHOD"])
    assert [one.name for one in recipes] == ["base-first_file-METHOD", "base-second_file-METHOD"]
    assert [one.label for one in recipes] == ["first_file", "second_file"]


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("partition.clients=170", "170"),
        ("train.start=nothing.safetensors", r"nothing\.safetensors"),
    ],
)
def test_a_mistake_in_the_last_recipe_is_found_before_the_first_is_run(mistake, sentence, tmp_path):
    with pytest.raises(UserError, match=f"^bad: .*{sentence}"):
        compare([tiny("name=good"), tiny("name=bad", mistake)], 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_recipe_is_found_before_the_first_is_run(tmp_path):
    compare([tiny("name=second")], 1, tmp_path)
    changed = [tiny("name=first", "train.lr=0.02"), tiny("name=second", "train.lr=0.02")]
    with pytest.raises(UserError, match=r"^second: .* was started with train\.lr = 0\.05"):
        compare(changed, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["second-seed0"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "the memory does not suffice; choose smaller sizes, "),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "the memory does not suffice; ",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB"),
            "the memory does not suffice; ",
        ),
        (KeyError("lost"), "KeyError: 'lost'"),
    ],
)
def test_a_run_out_of_memory_takes_none_of_the_others_with_it(error, said, tmp_path, monkeypatch, capsys):
    """Nor does a fault in the code, which alone shows where it happened."""

    def run_or_fail(recipe, folder, **rest):
        if recipe.name == "first":
            raise error
        return run_recipe(recipe, folder, **rest)

    monkeypatch.setattr("atoll.commands.compare.run_recipe", run_or_fail)
    compared = compare([tiny("name=first"), tiny("name=second")], 1, tmp_path)
    assert [run.name for run in compared.runs] == ["second-seed0"]
    assert compared.failures["first-seed0"].startswith(f"SSD (first): {said}")
    assert ("run_or_fail" in capsys.readouterr().err) is isinstance(error, KeyError)


def test_a_table_says_what_made_it(tmp_path):
    made = compare([tiny("name=a", "data.limit=100", "partition.alpha=0.3")], 2, tmp_path)
    text = comparison_markdown(comparison_cells(made.runs), ["SSD, seed 9: it broke"])
    assert "- digits, at most 100 images, 4 clients, iid; test split; kNN k=" in text
    assert f"- seeds 0, 1; Atoll {version()}\n" in text
    assert text.endswith("- Failed: SSD, seed 9: it broke\n")


def test_a_warm_start_is_not_called_untrained(tmp_path):
    first = compare([tiny("name=first")], 1, tmp_path).runs[0]
    warm = compare([tiny("name=warm", f"train.start={first.folder}", "train.rounds=0")], 1, tmp_path)
    assert [row[0] for row in comparison_cells(warm.runs)[1]] == ["Start encoder", "SSD"]
    both = [row[0] for row in comparison_cells([first, *warm.runs])[1]]
    assert both[:2] == ["Untrained encoder", f"Start encoder (…/{first.folder.name})"]


def test_a_sweep_is_every_combination_of_its_values():
    made = load_recipes(["digits-ssd"], sweeps=["partition.alpha=0.1,1,100", "train.epochs=1,2"])
    assert [one.name for one in made][:3] == [
        "digits-ssd-alpha0.1-epochs1",
        "digits-ssd-alpha0.1-epochs2",
        "digits-ssd-alpha1-epochs1",
    ]
    assert [(one.partition.alpha, one.train.epochs) for one in made] == [
        (alpha, epochs) for alpha in (0.1, 1, 100) for epochs in (1, 2)
    ]
    (first, second) = load_recipes(["digits-ssd"], sweeps=["model.projector_hidden=[16],[32, 32]"])
    assert (first.model.projector_hidden, second.model.projector_hidden) == ((16,), (32, 32))


def test_a_key_that_is_set_and_swept_is_refused():
    with pytest.raises(UserError, match=r"--set train\.lr=0\.2 and --sweep name the same key"):
        load_recipes(["digits-ssd"], ["train.lr=0.2"], sweeps=["train.lr=0.1"])


def test_a_sweep_of_an_option_repeats_no_method_without_it():
    made = load_recipes(["digits"], methods=["ssd", "fed_simclr"], sweeps=["options.dsr.scale=2,4"])
    assert [one.name for one in made] == [
        "digits-ssd-scale2",
        "digits-fed_simclr-scale2",
        "digits-ssd-scale4",
    ]


def test_a_sweep_of_the_partition_repeats_no_line_that_has_all_images():
    made = load_recipes(["digits"], lines=True, sweeps=["partition.alpha=0.1,1"])
    kinds = [(one.partition.kind, one.partition.alpha) for one in made]
    assert sum(kind == "centralised" for kind, _ in kinds) == 1
    assert sum(kind == "dirichlet" for kind, _ in kinds) == 4  # the recipe and its clients alone


@pytest.mark.parametrize("text", ["partition.alpha", "partition.alpha=", "=1,2", "partition.alpha=1,,2"])
def test_a_sweep_without_values_is_a_mistake(text):
    with pytest.raises(UserError, match="is no KEY=VALUE,VALUE"):
        load_recipes(["digits-ssd"], sweeps=[text])


def test_a_swept_comparison_groups_seeds_by_value(tmp_path):
    small = [text for text in TINY if not text.startswith("train.lr=")]
    made = load_recipes(["digits-ssd"], [*small, "train.rounds=1"], sweeps=["train.lr=0.01,0.1"])
    compared = compare(made, 2, tmp_path)
    table, _ = write_comparison(compared, tmp_path)
    rows = [line for line in table.read_text().splitlines() if line.startswith("| SSD")]
    assert len(rows) == 2
    assert [next(word for word in ("0.01", "0.1") if f" {word} " in row) for row in rows] == ["0.01", "0.1"]


def test_runs_of_one_label_are_announced_by_their_names(tmp_path):
    recipes = [tiny("name=wide", "data.limit=40"), tiny("name=narrow", "data.limit=40", "train.lr=0.02")]
    titles = []
    compare(recipes, 1, tmp_path, lambda title: titles.append(title) or Bar(Console(), title))
    assert titles == ["1/2 SSD (wide)", "2/2 SSD (narrow)"]


def test_sweeps_of_lists_with_the_same_digits_have_names_of_their_own():
    recipes = load_recipes(["digits"], sweeps=["model.projector_hidden=[1,28],[128]"])
    assert [recipe.name for recipe in recipes] == [
        "digits-projector_hidden1-28",
        "digits-projector_hidden128",
    ]


def test_a_comparison_goes_on_in_another_environment_if_it_may(tmp_path):
    """As after an update of PyTorch: one run had finished, the other has completed one round of two."""
    recipes = [tiny("name=first"), tiny("name=second", "train.rounds=1")]
    finished, interrupted = compare(recipes, 1, tmp_path).runs
    longer = [recipes[0], tiny("name=second")]
    for run in (finished, interrupted):
        record = run.read_json("environment.json")
        record["environments"][0]["environment"]["torch"] = "1.0"
        run.write("environment.json", json.dumps(record))
    with pytest.raises(UserError, match=r"^second: .*torch = 1\.0, and here .*--other-environment"):
        compare(longer, 1, tmp_path)
    kept = finished.encoder_path.read_bytes()
    for restart in (True, False):  # nothing is restarted that may be continued
        compared = compare(longer, 1, tmp_path, restart=restart, other_environment=True)
        assert not compared.failures
        assert [one["after_round"] for one in interrupted.results["environments"]] == [0, 1]
        assert finished.encoder_path.read_bytes() == kept


@pytest.mark.parametrize("command", ["compare digits", "reproduce ssd-3"])
def test_the_commands_pass_the_permission_on(command, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "atoll.commands.compare.check_folder", lambda run, recipe, resume, other: asked.append(other)
    )
    monkeypatch.setattr("atoll.commands.compare.prepare", lambda *rest: (_ for _ in ()).throw(UserError("x")))
    monkeypatch.setattr("atoll.commands.reproduce._require_images", lambda job: None)
    for more in ([], ["--other-environment"]):
        assert main([*command.split(), "--out", str(tmp_path), *more]) == 2
    assert set(asked[: len(asked) // 2]) == {False}
    assert set(asked[len(asked) // 2 :]) == {True}
