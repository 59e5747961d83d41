"""The table of detectors: the page is what the records say."""

from __future__ import annotations

import json

from scipy import stats

import detection as tool


def test_the_page_is_what_the_records_say():
    text = tool.PAGE.read_text("utf-8")
    records = json.loads(tool.RESULTS.read_text("utf-8"))
    assert tool.filled(text, tool.made(records), tool.BEGIN, tool.END) == text


def test_a_start_is_compared_with_scratch_of_the_same_seed():
    def record(seed, precision):
        return {"seed": seed, "bbox": dict.fromkeys(tool.MEASURES, precision)}

    records = {
        "scratch-seed1": record(1, 0.40),
        "scratch-seed2": record(2, 0.50),
        "fed_simclr-seed1": record(1, 0.43),
        "fed_simclr-seed2": record(2, 0.54),
    }
    half = stats.ttest_rel([3.0, 4.0], [0, 0]).confidence_interval(0.95).high - 3.5
    first, second = tool.made(records).splitlines()[2:]
    assert first.startswith("| FedSimCLR | 48.5 ± 7.8 | ")
    assert f"[−{half - 3.5:.2f}, +{half + 3.5:.2f}] | 2 |" in first
    assert second.endswith("| – | 2 |")


def test_starts_without_a_common_seed_have_no_difference():
    def record(seed):
        return {"seed": seed, "bbox": dict.fromkeys(tool.MEASURES, 0.5)}

    for records in (
        {"fed_simclr-seed1": record(1), "scratch-seed2": record(2)},
        {"fed_simclr-seed1": record(1)},
    ):
        first = tool.made(records).splitlines()[2]
        assert first == "| FedSimCLR | 50.0 | 50.0 | 50.0 | – | 1 |"


def test_measurements_are_collected_by_start_and_seed(tmp_path):
    for run, start in (
        ("fed_simclr-seed3", "pretrained"),
        ("fed_simclr-seed3", "scratch"),
        ("dec_sl-seed3", "pretrained"),
    ):
        folder = tmp_path / run / "detection" / "bccd"
        folder.mkdir(parents=True, exist_ok=True)
        keys = ("options", "images", "steps", "bbox", "cpu_seconds", "version")
        (folder / f"{start}-seed3.json").write_text(
            json.dumps({"start": start, "seed": 3, **dict.fromkeys(keys)})
        )
    assert set(tool.collect(tmp_path)) == {"fed_simclr-seed3", "scratch-seed3", "dec_sl-seed3"}
