"""The command `atoll check`."""

from atoll.cli.main import main
from tests.harness import run_tiny


def test_the_check_names_what_is_damaged(tmp_path, capsys):
    folder = run_tiny(tmp_path / "run", "data.limit=40", "partition.clients=2", "train.rounds=1").folder
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("files read, 0 damaged or missing\n")
    (folder / "partition.json").write_text("{}")
    (folder / "encoder.safetensors").unlink()
    assert main(["check", str(folder)]) == 2
    errors = capsys.readouterr().err
    assert "partition" in errors
    assert "encoder.safetensors is missing; resume the run" in errors
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
