import pytest
import torch

from atoll.core.errors import UserError
from tests.functional.oracles import log_softmax
from tests.steps import Steps, federation


@pytest.mark.parametrize(
    ("on", "augment", "image"), [("h", False, "image"), ("h", True, "view1"), ("z", False, "image")]
)
def test_the_local_loss_is_minus_the_log_probability_of_the_label(on, augment, image):
    steps = Steps(
        "method.name=fed_sl",
        f"options.cross_entropy.on={on}",
        f"options.cross_entropy.augment={str(augment).lower()}",
        "model.projector_dim=24",
    )
    batch = steps.batch()
    loss = steps.client.step(batch)
    h, z = steps.encode(batch.images[image])
    with torch.no_grad():
        logits = steps.networks["classifier"](z if on == "z" else h).double().tolist()
    labels = steps.federation.splits.train.labels[
        steps.federation.partition.clients[0][batch.indices]
    ].tolist()
    expected = -sum(log_softmax(row)[label] for row, label in zip(logits, labels, strict=True)) / len(labels)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_only_a_loss_on_the_embedding_has_a_projector():
    assert "projector" not in federation("method.name=fed_sl").networks
    assert "projector" in federation("method.name=fed_sl", "options.cross_entropy.on=z").networks
    # FedProx compares weights; MOON reads z.
    assert "projector" not in federation("method.name=fed_sl", "method.terms=['fedprox']").networks
    assert "projector" in federation("method.name=fed_sl", "method.terms=['moon']").networks


def test_the_first_classifier_is_the_same_in_all_objectives():
    one = federation("method.name=fed_sl").networks["classifier"].weight
    two = federation("method.name=fedquad").networks["classifier"].weight
    assert torch.equal(one, two)
    assert not torch.equal(one, federation("method.name=fed_sl", "seed=1").networks["classifier"].weight)


def test_images_without_labels_are_refused():
    with pytest.raises(UserError, match="'cross_entropy' is supervised"):
        federation("method.name=dec_sl", "data.labels=false")
