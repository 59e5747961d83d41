import csv
import io
import json
import re
from urllib.parse import unquote

import numpy as np
import pytest

from atoll.commands.report import report_runs
from atoll.core.errors import UserError
from atoll.core.run_folder import fingerprint_of_sites
from atoll.report import write_report
from atoll.report.reproduction import section
from tests.harness import run_tiny
from tests.report.pages import RESULTS, Page, report, row
from tests.report.run_folders import CLASSES, evaluation, make_run


def test_the_page_of_a_real_run_is_whole_and_loads_nothing(tmp_path):
    run = run_tiny(tmp_path / "run", "evaluation.every=1", "evaluation.at_end=['knn', 'probe', 'geometry']")
    path = write_report([run.folder], run.folder / "report.html")
    page = Page(path)
    results, metrics = run.read_json("evaluation.json"), run.metrics
    assert page.loads == []
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?\s*(?:https?:)?//", path.read_text())
    assert set(page.anchors) <= page.ids
    head, untrained, trained = page.tables[RESULTS]
    assert head == ["method", "kNN %", "probe %", "−uniformity", "effective rank"]
    for cells, found in ((untrained, metrics[0]["evaluation"]), (trained, results)):
        printed = [cell.removesuffix(" highest") for cell in cells[1:]]
        assert printed == [
            f"{100 * found['knn/accuracy']:.2f}",
            f"{100 * found['probe/accuracy']:.2f}",
            f"{-found['geometry/uniformity']:.3f}".replace("-", "−"),
            f"{found['geometry/effective_rank']:.1f}",
        ]
    (traffic,) = [rows for caption, rows in page.tables.items() if "Traffic of all clients" in caption]
    total = sum(line.get("bytes_up", 0) for line in metrics)
    assert traffic[1][2] == (f"{total / 1e6:.2f} MB" if total >= 1e6 else f"{total / 1e3:.1f} kB")
    assert "Parts of this page are missing" not in page.text


def test_runs_that_differ_by_their_seed_are_one_row_of_mean_and_std(tmp_path):
    knn = [0.8125, 0.845, 0.9]
    folders = [
        make_run(tmp_path / f"s{seed}", seed=seed, results=evaluation(value, uniformity=-1 - seed))
        for seed, value in enumerate(knn)
    ]
    page = report(tmp_path, *folders)
    cells = row(page, "ssd")
    assert cells[1] == f"{100 * np.mean(knn):.2f} ± {100 * np.std(knn, ddof=1):.2f} highest"
    assert cells[3] == f"{2:.3f} ± {np.std([1, 2, 3], ddof=1):.3f}"
    untrained = [50.0, 50.1, 50.2]
    assert row(page, "Untrained")[1] == f"{np.mean(untrained):.2f} ± {np.std(untrained, ddof=1):.2f}"
    assert "3 seeds" in cells[0]


def test_the_time_of_several_runs_is_a_range(tmp_path):
    folders = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    for folder, seconds in zip(folders, (13.2, 1800.0, 17.0), strict=True):
        path = folder / "evaluation.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": seconds}))
    assert "Time of all rounds13 to 1,800 s a run" in report(tmp_path, *folders).text
    (tmp_path / "report.html").unlink()
    assert "Time of all rounds13 s" in report(tmp_path, folders[0]).text


def test_text_from_data_stays_text(tmp_path):
    run = make_run(tmp_path / "run", recipe={"title": "</script><script>boom</script> <i>$data</i>"})
    page = report(tmp_path, run)
    assert page.tags.count("script") == 2
    assert "i" not in page.tags[: page.tags.index("main")]
    assert "</script><script>boom</script> <i>$data</i>" in page.text
    assert page.data["maps"][0]["classes"] == CLASSES
    assert "a <b>count</b>" in page.text
    assert CLASSES[2] in page.tables["Images by client and class: ssd, seed 0"][0]


def test_without_labels_geometry_stands_alone_and_the_page_says_why(tmp_path):
    found = {key: value for key, value in evaluation(0.9).items() if not key.startswith(("knn", "probe"))}
    note = "knn, probe: not measured, because the training and test images have no labels"
    run = make_run(tmp_path / "run", labels=False, results={**found, "note": note})
    lines = [{"round": 0, "evaluation": {**found, "note": note}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(tmp_path, run)
    assert page.tables[RESULTS][0] == ["method", "−uniformity", "effective rank"]
    assert page.text.count(note) == 1
    assert "no labels" in page.tables["Partition of the training images"][1]
    assert page.data["maps"][0]["labels"] is None


def test_several_models_are_listed_and_their_mean_is_called_one(tmp_path):
    models = {"cluster-0": evaluation(0.9), "cluster-1": evaluation(0.7)}
    results = {**evaluation(0.85), "by_model": models, "clients_by_model": {"cluster-0": 3, "cluster-1": 1}}
    page = report(tmp_path, make_run(tmp_path / "run", results=results))
    assert "mean of 2 models, weighted by their clients" in row(page, "ssd")[0]
    rows = page.tables["Results of each model, for runs that end with several models"]
    assert [cells[1:4] for cells in rows[1:]] == [["cluster-0", "3", "90.00"], ["cluster-1", "1", "70.00"]]


def test_each_site_of_a_real_federation_is_listed_and_its_images_are_not_asked_for(tmp_path):
    sites = {
        "east": {**evaluation(0.9), "geometry/of_test_images": 1200},
        "west": {"geometry/effective_rank": 7.0},  # has no labels
    }
    run = make_run(tmp_path / "run", results={**evaluation(0.9), "split": "sites' own", "sites": sites})
    (run / "map.safetensors").unlink()
    page = report(tmp_path, run)
    head, east, west = page.tables["Results of each site on its local held-out images"]
    assert east[1:4] == ["east", "1,200", "90.00"]
    assert west[1:4] == ["west", "–", "–"]
    assert west[head.index("effective rank")] == "7.0"
    assert "sites' local folders" in page.text
    assert "digits" not in page.text.split("Recipe of")[0]
    assert "map.safetensors" not in page.text


def test_the_title_of_a_run_of_real_sites_does_not_name_the_recipes_images(tmp_path):
    """They are in no client's hands; the recipe's preset may name some."""
    run = make_run(tmp_path / "run", recipe={"title": "", "data": {"source": "parquet", "path": "pacs"}})
    assert report(tmp_path, run).text.count("pacs (parquet)") == 2  # the title and the heading
    partition = json.loads((run / "partition.json").read_text())
    partition["fingerprint"] = fingerprint_of_sites("a-federation")
    (run / "partition.json").write_text(json.dumps(partition))
    text = report(tmp_path, run).text
    assert text.count(f"Images of {len(partition['clients'])} sites") == 2
    assert "pacs (parquet)" not in text


def test_a_private_runs_epsilon_is_told(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "privacy": {"epsilon": 5.5113, "delta": 1e-5}}) + "\n")
    assert "ε 5.51 at δ 1e-05" in report(tmp_path, run).text
    assert "Privacy" not in report(tmp_path, make_run(tmp_path / "open")).text


def test_refused_and_lost_updates_are_named(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        line = {
            "round": 4,
            "bytes_up": 1,
            "bytes_down": 1,
            "refused": {"2": "not finite"},
            "lost": {"3": "a crash"},
        }
        file.write(json.dumps(line) + "\n")
    page = report(tmp_path, run)
    assert "ssd, seed 0, round 4: client 2’s update was refused (not finite)" in page.text
    assert "round 4: client 3’s update was lost (a crash)" in page.text
    assert "No update was refused or lost." in report(tmp_path, make_run(tmp_path / "calm")).text


def test_a_lost_site_is_named(tmp_path):
    run = make_run(tmp_path / "run")
    partition = json.loads((run / "partition.json").read_text())
    partition["clients"][1]["name"] = "north"
    (run / "partition.json").write_text(json.dumps(partition))
    with (run / "metrics.jsonl").open("a") as file:
        line = {"round": 4, "bytes_up": 1, "bytes_down": 1, "lost": {"1": "a crash", "9": "no such client"}}
        file.write(json.dumps(line) + "\n")
    text = report(tmp_path, run).text
    assert "round 4: client 1 (north)’s update was lost (a crash)" in text
    assert "round 4: client 9’s update was lost (no such client)" in text


def test_a_report_is_a_page_and_replaces_no_file_of_a_run(tmp_path):
    run, other = (make_run(tmp_path / name) for name in ("run", "other"))
    for name in ("recipe.toml", "metrics.jsonl", "page"):
        with pytest.raises(UserError, match=r"does not end in \.html"):
            report_runs([run], other / name)
    with pytest.raises(UserError, match="belongs to the run"):
        report_runs([run], other / "checkpoints" / "page.html")
    assert report_runs([run], other / "report.html").is_file()
    assert report_runs([run], other / "mine.html").is_file()


def test_a_note_names_its_run_among_several(tmp_path):
    plain = make_run(tmp_path / "plain", seed=1, results=evaluation(0.8))
    noted = make_run(tmp_path / "noted", results=evaluation(0.8) | {"note": "knn: not measured"})
    assert "noted: knn: not measured" in report(tmp_path, plain, noted).text
    assert "noted: knn: not measured" not in report(tmp_path, noted).text


def test_what_the_figures_lack_is_said(tmp_path):
    recipe = {"evaluation": {"map_points": 0}}
    run = make_run(tmp_path / "run", recipe=recipe)
    (run / "map.safetensors").unlink()
    text = report(tmp_path, run).text
    assert "The recipes ask for no map (evaluation.map_points = 0)." in text
    assert "Round 0 is the encoder before training." in text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        del line["evaluation"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert "Round 0 is the encoder before training." not in report(tmp_path, run).text


def test_the_same_runs_give_the_same_bytes(tmp_path):
    run = make_run(tmp_path / "run")
    first = write_report([run], tmp_path / "a.html").read_bytes()
    assert write_report([run, run], tmp_path / "b.html").read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_the_page_says_which_images_and_setting_it_shows(tmp_path):
    setting = {
        "title": "",
        "data": {"source": "parquet", "path": "cifar10", "limit": 500},
        "partition": {"kind": "dirichlet", "clients": 7, "alpha": 0.3, "variant": "moon"},
    }
    tuned = {**evaluation(0.5), "split": "validation"}
    page = report(tmp_path, make_run(tmp_path / "run", recipe=setting, results=tuned))
    assert "cifar10 (parquet), at most 500 images, 7 clients" in page.text
    assert "Each mark is one of the validation images" in page.text
    assert "Singular values of the validation images’" in page.text


def test_runs_that_came_to_nothing_are_named(tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "page.html", ["SSD, seed 3: round 1 failed"])
    text = (tmp_path / "page.html").read_text()
    assert "SSD, seed 3: round 1 failed" in text


def test_a_warm_start_is_no_untrained_encoder(tmp_path):
    warm = {"train": {"rounds": 3, "lr": 0.05, "start": "runs/first"}}
    rows = report(tmp_path, make_run(tmp_path / "run", recipe=warm)).tables[RESULTS]
    assert rows[1][0].startswith("Start encoder")


def test_the_table_of_results_is_saved_as_csv_and_latex(tmp_path):
    folder = make_run(tmp_path / "a")
    text = write_report([folder], tmp_path / "report.html").read_text()
    found = re.findall(r'href="data:[\w/-]+;charset=utf-8,([^"]*)" download="(results\.\w+)"', text)
    files = {name: unquote(written) for written, name in found}
    table = Page(tmp_path / "report.html").tables[RESULTS]
    first, *rest = csv.reader(io.StringIO(files["results.csv"]))
    assert first == table[0]
    assert [row[0] for row in rest] == [re.sub(r"mean .*", "", cells[0]) for cells in table[1:]]
    assert [float(cell) for cell in rest[-1][1:] if cell]
    assert files["results.tex"].count(r" \\") == len(table)


def test_the_page_shows_no_path_of_the_machine_and_says_what_to_cite(tmp_path):
    folder = make_run(tmp_path / "a")
    recipe = folder / "recipe.toml"
    data = '[data]\npath = "/home/someone/secret/cifar10"\n'
    recipe.write_text(recipe.read_text().replace("[data]\n", data))
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "someone" not in page
    assert "…/cifar10" in page
    assert "Fang et al., Soft Separation and Distillation, ICCV 2025." in page


def test_titles_and_labels_show_no_path_either(tmp_path):
    for name in "ab":
        path = {"source": "folder", "path": f"/home/some one/secret {name}/cifar10-{name}/"}
        make_run(tmp_path / name, recipe={"data": path, "title": ""})
    for folders in ([tmp_path / "a"], [tmp_path / "a", tmp_path / "b"]):
        page = write_report(folders, tmp_path / "report.html").read_text()
        assert "one/" not in page
        assert "secret" not in page
        assert "…/cifar10-a" in page


def test_the_page_says_whether_sites_took_part(tmp_path):
    folder = make_run(tmp_path / "a")
    assert "<dt>Federation</dt><dd>simulation</dd>" in write_report([folder], tmp_path / "r.html").read_text()
    (folder / "sites.json").write_text("{}")  # Flower's simulation has one as well
    assert "<dt>Federation</dt><dd>simulation</dd>" in write_report([folder], tmp_path / "r.html").read_text()
    partition = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps({**partition, "fingerprint": "sites-12ab"}))
    assert "<dt>Federation</dt><dd>real sites</dd>" in write_report([folder], tmp_path / "r.html").read_text()


def test_what_failed_is_said_without_the_folders_of_this_machine(tmp_path):
    why = {"ssd-seed1": "SSD, seed 1: cannot write /home/me/runs/metrics.jsonl: no space left"}
    record = {"title": "Mine", "rows": [{"label": "row", "values": {}}], "changed": {}, "published": False}
    table = section({**record, "failures": why, "notes": []})
    path = write_report([make_run(tmp_path / "run")], tmp_path / "report.html", why.values(), table)
    assert path.read_text().count("SSD, seed 1: cannot write …/metrics.jsonl: no space left") == 2
    assert "/home/me" not in path.read_text()
