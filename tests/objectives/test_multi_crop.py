import pytest

from tests.steps import Steps


@pytest.mark.parametrize("name", ["dino", "swav"])
def test_the_prototypes_rest_in_the_first_epochs_of_the_run_and_then_train(name):
    options = [f"method.name=fed_{name}", "train.epochs=2", "model.projector_dim=6"]
    options += [
        f"options.{name}.{setting}" for setting in ("prototypes=12", "local_crops=2", "fixed_epochs=3")
    ]
    for round, epoch, trains in ((1, 0, False), (1, 1, False), (2, 0, False), (2, 1, True), (3, 0, True)):
        steps = Steps(*options, round=round)
        batch = steps.batch()
        batch.epoch = epoch
        steps.client.step(batch).backward()
        assert (steps.networks["prototypes"].weight.grad is not None) == trains
        assert all(p.grad is not None for p in steps.networks["encoder"].parameters())
        assert list(steps.client.copies) == (["dino_teacher"] if name == "dino" else [])
        assert all(p.grad is None for copy in steps.client.copies.values() for p in copy.parameters())
