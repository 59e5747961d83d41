"""The terminal's table and the page's have the same rows and columns for the same runs."""

import pytest

from atoll.core.run_folder import Run
from atoll.report import write_report
from atoll.report.comparison import comparison_cells, comparison_table
from tests.harness import printed
from tests.report.pages import Page
from tests.report.run_folders import evaluation, make_run

KNN_ALONE = {key: value for key, value in evaluation(0.7).items() if not key.startswith("probe")}
CASES = {
    "seeds": [{"seed": 0}, {"seed": 1, "results": evaluation(0.8)}],
    "workers": [{"seed": 0}, {"seed": 1, "recipe": {"engine": {"workers": 2}}}],
    "names": [{"seed": 0, "recipe": {"name": "a", "title": "A"}}, {"seed": 1, "recipe": {"name": "b"}}],
    "names of one seed": [{"recipe": {"name": "a"}}, {"recipe": {"name": "b"}}],
    "a run and its repetition": [{}, {"results": evaluation(0.8)}],
    "options": [{"recipe": {"options": {"dsr": {"alpha": alpha}}}} for alpha in (0.5, 2.0)],
    "methods": [{}, {"method": "moon"}],
    "protocols": [{"results": KNN_ALONE}, {"method": "moon", "results": KNN_ALONE}],
    "encoders": [{}, {"method": "moon", "recipe": {"model": {"encoder": "vit-tiny"}}}],
    "starts": [{}, {"method": "moon", "recipe": {"train": {"rounds": 3, "lr": 0.05, "start": "first"}}}],
}
ROWS = {  # of methods, below the encoders before the first round
    "seeds": ["ssd"],
    "workers": ["ssd"],
    "names": ["ssd"],
    "names of one seed": ["ssd · name = a", "ssd · name = b"],
    "a run and its repetition": ["ssd · folder = 0", "ssd · folder = 1"],
    "options": ["ssd · dsr.alpha = 0.5", "ssd · dsr.alpha = 2"],
    "methods": ["ssd", "moon"],
    "protocols": ["ssd", "moon"],
    "encoders": ["ssd", "moon"],
    "starts": ["ssd", "moon"],
}


def runs(tmp_path, case):
    return [make_run(tmp_path / str(i), **settings) for i, settings in enumerate(CASES[case])]


@pytest.mark.parametrize("case", CASES)
def test_page_and_terminal_have_the_same_rows_and_columns(tmp_path, case):
    folders = runs(tmp_path, case)
    header, rows, _ = comparison_cells([Run(folder) for folder in folders])
    on_page = Page(write_report(folders, tmp_path / "report.html")).tables["Results by method"]
    # A page's label has smaller lines below it, and its best values are marked.
    shown = [[cell.removesuffix(" highest") for cell in row] for row in on_page]
    labels = [row[0].partition("mean ± std of")[0] for row in shown[1:]]
    assert header == shown[0]
    assert labels == [row[0] for row in rows]
    assert [row[1:] for row in shown[1:]] == [row[1:] for row in rows]
    assert [label for label in labels if "encoder" not in label.partition(" ·")[0]] == ROWS[case]


def test_a_column_that_nothing_has_is_left_out(tmp_path):
    (folder,) = runs(tmp_path, "protocols")[:1]
    (folder / "metrics.jsonl").unlink()
    header, rows, _ = comparison_cells([Run(folder)])
    assert header == ["method", "kNN %", "−uniformity", "effective rank"]
    assert rows[0] == ["Untrained encoder", "–", "–", "–"]


def test_a_label_is_printed_as_it_is(tmp_path):
    """Square brackets in it are no markup."""
    run = make_run(tmp_path / "run", results={**evaluation(0.9), "method": "mine [bold]"})
    assert "mine [bold]" in printed(comparison_table(comparison_cells([Run(run)])))


def test_the_notes_have_the_constants_of_every_protocol(tmp_path):
    tuned = {"accuracy": 0.5, "name": "finetune-10, at most 5 epochs", "optimizer": "sgd", "head_lr": 0.3}
    more = {"clients-knn/accuracy": 0.4, "clients-knn/k": 9, "clients-knn/temperature": 0.1}
    more |= {"mine:clusters/k": 10, "mine:clusters/nmi": 0.4, "mine:clusters/kind": "full"}
    more |= {f"finetune-10/{key}": value for key, value in (tuned | {"epochs": 5, "batch_size": 128}).items()}
    folder = make_run(tmp_path / "run", results=evaluation(0.7) | more)
    protocols = comparison_cells([Run(folder)])[2][0].split("; ")[2:]
    assert protocols[2:] == [
        "clients-kNN k=9, T=0.1, cosine",
        "mine:clusters (k=10, kind=full)",
        "finetune-10 (sgd, lr 0.3, 5 epochs, batch 128)",
    ]
    assert protocols[0].startswith("kNN k=")
    assert protocols[1].startswith("probe ")


def test_early_stopping_is_told_with_the_rounds_that_were_planned(tmp_path):
    early = {**evaluation(0.8), "stopped_early": True}
    planned = {"train": {"rounds": 40, "lr": 0.05}}
    folders = [
        make_run(tmp_path / "0", results=early, rounds=4, asked=4, recipe=planned),
        make_run(tmp_path / "1", seed=1, rounds=40, asked=40),
    ]
    _, _, notes = comparison_cells([Run(folder) for folder in folders])
    assert [note for note in notes if "early" in note] == ["stopped early: ssd, seed 0, after round 4 of 40"]
    page = Page(write_report(folders[:1], tmp_path / "report.html"))
    runs = page.tables["Runs, each with the digest of its recipe.toml (SHA-256)"]
    assert "4 of 40, stopped early" in runs[1]
    assert "rounds are done; this page" not in page.text
