"""Where commands may write: not in the place of a run's files."""

from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.outputs import check_output
from atoll.core.run_folder import Run


@pytest.mark.parametrize(
    "name",
    [
        *("recipe.toml", "RECIPE.toml", "metrics.jsonl", "encoder.safetensors", "encoder-a.safetensors"),
        *("checkpoints/h.npz", "detection/cells/h.npz", "audit.jsonl", "wandb/h.npz"),
    ],
)
def test_a_runs_files_are_no_place_for_other_output(tmp_path, monkeypatch, name):
    run = Run(tmp_path / "run")
    check_output(run.folder / name)
    run.folder.mkdir()
    run.write("recipe.toml", "seed = 0\n")
    monkeypatch.chdir(run.folder)
    for path in (run.folder / name, Path(name), Path("..") / "run" / name):
        with pytest.raises(UserError, match=r"belongs to the run .*choose another --output"):
            check_output(path)


def test_what_a_run_does_not_need_may_be_written_into_its_folder(tmp_path):
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.write("recipe.toml", "seed = 0\n")
    for name in ("report.html", "encoder-export.safetensors", "h.npz", "encoder-export-timm"):
        check_output(run.folder / name)
    check_output(run.folder / "encoder-a-export.onnx")
    (tmp_path / "recipe.toml").write_text("seed = 0\n")  # a person's, beside their models
    check_output(tmp_path / "models" / "encoder.pt2")
