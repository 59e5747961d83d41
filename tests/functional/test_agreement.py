import pytest
import torch
from torch.autograd import gradcheck

from atoll.functional import alignment, byol, masked_reconstruction, simsiam

from . import oracles
from .oracles import rows

A = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
B = torch.tensor([[0.6, 0.8], [0.8, 0.6]], dtype=torch.float64)


def test_alignment_known_and_loop():
    assert float(alignment(A, B)) == pytest.approx(0.8, abs=1e-12)
    z1, z2 = rows(5, 3), rows(5, 3, 1)
    assert float(alignment(z1, z2)) == pytest.approx(oracles.alignment(z1, z2), rel=1e-12)
    assert float(alignment(z1, 7 * z1)) == pytest.approx(0.0, abs=1e-12)
    assert float(alignment(z1, -z1)) == pytest.approx(4.0, rel=1e-12)


def test_byol_known_and_loop():
    q, y = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[4.0, 3.0]]).double()
    assert float(byol(q, y)) == pytest.approx(0.08, abs=1e-12)
    z1, z2 = rows(5, 3), rows(5, 3, 1)
    assert float(byol(z1, z2)) == pytest.approx(oracles.alignment(z1, z2), rel=1e-12)


def test_simsiam_range_and_relation_to_byol():
    z1, z2 = rows(5, 3), rows(5, 3, 1)
    assert float(simsiam(z1, 2 * z1)) == pytest.approx(-1.0, rel=1e-12)
    assert float(simsiam(z1, -z1)) == pytest.approx(1.0, rel=1e-12)
    torch.testing.assert_close(2 + 2 * simsiam(z1, z2), byol(z1, z2))
    cosines = [oracles.dot(a, b) for a, b in zip(oracles.units(z1), oracles.units(z2), strict=True)]
    assert float(simsiam(z1, z2)) == pytest.approx(-sum(cosines) / 5, rel=1e-12)


@pytest.mark.parametrize("loss", [byol, simsiam])
def test_target_gradient_is_stopped(loss):
    q, z = rows(4, 3).requires_grad_(), rows(4, 3, 1).requires_grad_()
    loss(q, z).backward()
    assert z.grad is None
    assert float(q.grad.abs().max()) > 0


def test_gradients():
    z1, z2 = rows(4, 3).requires_grad_(), rows(4, 3, 1).requires_grad_()
    mask = torch.tensor([[1.0, 0.0, 1.0]] * 4, dtype=torch.float64)
    assert gradcheck(alignment, (z1, z2))
    assert gradcheck(lambda q: byol(q, z2.detach()), (z1,))
    assert gradcheck(lambda q: simsiam(q, z2.detach()), (z1,))
    assert gradcheck(lambda x, y: masked_reconstruction(x, y, mask), (z1, z2))


@pytest.mark.parametrize("loss", [alignment, byol, simsiam])
@pytest.mark.parametrize("z", [torch.zeros(3, 4), torch.ones(3, 4), torch.zeros(1, 4)])
def test_degenerate_rows_are_finite(loss, z):
    a = z.clone().requires_grad_()
    value = loss(a, z)
    value.backward()
    assert value.isfinite()
    assert a.grad.isfinite().all()
    assert a.grad.abs().max() < 10


def test_masked_reconstruction_is_the_mean_over_masked_entries():
    prediction, target = rows(2, 12).reshape(2, 4, 3), rows(2, 12, 1).reshape(2, 4, 3)
    patches = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
    errors = [
        float((prediction[i, j, k] - target[i, j, k]) ** 2)
        for i in range(2)
        for j in range(4)
        for k in range(3)
        if patches[i, j]
    ]
    expected = sum(errors) / len(errors)
    full = patches[:, :, None].expand(2, 4, 3)
    for mask in (patches, patches.bool(), patches[:, :, None], full, full.double()):
        assert float(masked_reconstruction(prediction, target, mask)) == pytest.approx(expected, rel=1e-12)


def test_masked_reconstruction_ignores_what_is_visible():
    prediction, target = rows(3, 8), rows(3, 8, 1)
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[:, ::2] = True
    value = masked_reconstruction(prediction, target, mask)
    assert torch.equal(masked_reconstruction(prediction.where(mask, 1e3), target, mask), value)
    assert float(masked_reconstruction(target.where(mask, 5.0), target, mask)) == 0.0
    assert value.item() > 0


def test_masked_reconstruction_with_nothing_masked():
    prediction = rows(3, 8).requires_grad_()
    loss = masked_reconstruction(prediction, rows(3, 8, 1), torch.zeros(3, 8))
    loss.backward()
    assert loss.item() == 0.0
    assert float(prediction.grad.abs().max()) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: alignment(torch.ones(2, 3), torch.ones(3, 3)),
        lambda: byol(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: byol(torch.ones(1, 3), torch.ones(2, 3)),
        lambda: simsiam(torch.ones(2), torch.ones(2)),
        lambda: simsiam(torch.ones(2, 3), torch.ones(1, 3)),  # PyTorch would repeat the row
        lambda: simsiam(torch.ones(1, 3), torch.ones(2, 3)),
        lambda: masked_reconstruction(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 3)),
        lambda: masked_reconstruction(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)),
        lambda: masked_reconstruction(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3, 1)),
    ],
)
def test_bad_shapes_are_named(call):
    with pytest.raises(ValueError, match=r"expected .* got .*\("):
        call()


def test_a_reconstruction_may_be_a_scalar():
    assert masked_reconstruction(torch.tensor(3.0), torch.tensor(1.0), torch.tensor(True)).item() == 4.0
