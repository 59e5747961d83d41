import pytest
import torch
from sklearn.metrics import accuracy_score

from atoll.core.errors import UserError
from atoll.core.tree import load
from atoll.data.images import ImageSet, StoredPixels
from atoll.engines.federation import Federation
from atoll.evaluation import classifier_accuracy
from tests.harness import run_tiny, tiny


def test_it_counts_what_the_largest_logit_gets_right():
    pixels = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.tensor([0, 1, 2, 0, 1, 2])
    images = ImageSet(StoredPixels(pixels), labels=torch.tensor([0, 1, 2, 1, 1, 0]), classes=["a", "b", "c"])

    batches = []

    class OneHot(torch.nn.Module):
        def forward(self, x):
            batches.append(len(x))
            return torch.nn.functional.one_hot(x[:, 0, 0, 0].long(), 3).float()

    assert classifier_accuracy(OneHot(), lambda x: x.float(), images, batch_size=4) == 4 / 6
    assert batches == [4, 2]
    with pytest.raises(UserError, match="no labels"):
        classifier_accuracy(OneHot(), lambda x: x.float(), ImageSet(StoredPixels(pixels)))


@pytest.mark.parametrize("method", ["fed_sl", "moon"])
def test_a_supervised_run_reports_its_own_classifier(tmp_path, method):
    run = run_tiny(tmp_path / "run", f"method.name={method}", "train.epochs=3")
    reported = run.read_json("evaluation.json")["classifier/accuracy"]
    federation = Federation(tiny(f"method.name={method}"))
    newest = max((run.folder / "checkpoints").glob("round-*.safetensors"))
    federation.load(load(newest)["state"]["models"]["global"])
    networks, test = federation.networks.eval(), federation.splits.test
    with torch.no_grad():
        h = networks["encoder"](federation.views.plain(test.images.gather(torch.arange(len(test)))))
        logits = networks["classifier"](networks["projector"](h) if method == "moon" else h)
    assert reported == pytest.approx(accuracy_score(test.labels, logits.argmax(1)))
