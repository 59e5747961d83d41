import math

import pytest
import torch
from torch.autograd import gradcheck

from atoll.functional import dimension_scaling, projector_distillation

from . import oracles
from .oracles import rows

Z = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.0, 0.6, 0.8, 0.0]], dtype=torch.float64)
SCALES = torch.tensor([10.0, 1.0, 1.0, 1.0], dtype=torch.float64)
H1 = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
Z1 = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)


def test_dimension_scaling_known():
    assert float(dimension_scaling(Z, SCALES)) == pytest.approx(0.42399055, abs=5e-9)
    assert float(dimension_scaling(Z, SCALES, reduction="mean_sq")) == pytest.approx(0.35953597, abs=5e-9)
    literal = dimension_scaling(Z, SCALES, reduction="mean_sq", renormalise=False)
    assert float(literal) == pytest.approx(10.125, rel=1e-12)


def test_dimension_scaling_at_the_papers_size():
    """E‖ẑ − t‖² is 0.8452 for isotropic embeddings, and the code's value about 0.0813 for 128 rows.

    By quadrature in float64, with s = ‖ẑ on S‖², which is Beta(51/2, 461/2), of 2 − 2 (1 + 9s) / √(1 + 99s). 0.849
    and 0.0814, as first noted, are slightly off.
    """
    scales = torch.ones(512)
    scales[:51] = 10.0
    z = rows(4096, 512).float()
    assert float(dimension_scaling(z, scales, reduction="mean_sq")) == pytest.approx(0.845, abs=4e-3)
    assert float(dimension_scaling(z[:128], scales)) == pytest.approx(0.0813, abs=1e-3)


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
def test_dimension_scaling_against_loop(reduction):
    z, basis = rows(5, 4), torch.linalg.qr(rows(4, 4, 1)).Q
    scales = torch.tensor([10.0, 1.0, 0.0, 3.0]).double()
    for q in (torch.eye(4, dtype=torch.float64), basis):
        expected = oracles.dimension_scaling(z, scales, q, reduction)
        assert float(dimension_scaling(z, scales, q, reduction)) == pytest.approx(expected, rel=1e-10)
        scaled = dimension_scaling(3 * z, scales, q, reduction)
        assert float(scaled) == pytest.approx(expected, rel=1e-10)
    expected = oracles.dimension_scaling(z, scales, torch.eye(4).double(), reduction)
    assert float(dimension_scaling(z, scales, reduction=reduction)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
def test_the_literal_reading_against_loop(reduction):
    z, basis = 3 * rows(5, 4), torch.linalg.qr(rows(4, 4, 1)).Q
    scales = torch.tensor([10.0, 1.0, 0.0, 3.0]).double()
    for q in (None, basis):
        axes = torch.eye(4).double() if q is None else q
        expected = oracles.dimension_scaling(z, scales, axes, reduction, renormalise=False)
        value = dimension_scaling(z, scales, q, reduction, renormalise=False)
        assert float(value) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
def test_dimension_scaling_gradient_leaves_the_target_fixed(reduction):
    z, basis = rows(5, 4).requires_grad_(), torch.linalg.qr(rows(4, 4, 1)).Q
    with torch.no_grad():
        target = torch.nn.functional.normalize(
            torch.nn.functional.normalize(z) @ basis @ torch.diag(SCALES) @ basis.T
        )

    def fixed(x):
        difference = torch.nn.functional.normalize(x) - target
        return difference.norm() / 5 if reduction == "fro_over_n" else difference.square().sum() / 5

    assert gradcheck(fixed, (z,))
    (ours,) = torch.autograd.grad(dimension_scaling(z, SCALES, basis, reduction), z)
    (theirs,) = torch.autograd.grad(fixed(z), z)
    torch.testing.assert_close(ours, theirs)
    (ours,) = torch.autograd.grad(dimension_scaling(z @ basis, SCALES, None, reduction), z)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
@pytest.mark.parametrize("alpha", [1.0, 10.0])
def test_equal_scales_are_exactly_zero_with_zero_gradient(reduction, alpha):
    """In float32 with a basis, rounding alone would give the Frobenius norm a gradient of full strength."""
    z = rows(64, 32).float().requires_grad_()
    basis = torch.linalg.qr(rows(32, 32, 1)).Q.float()
    loss = dimension_scaling(z, torch.full((32,), alpha), basis, reduction)
    loss.backward()
    assert loss.item() == 0.0
    assert float(z.grad.abs().max()) == 0.0


def test_literal_reading_scales_with_equal_scales():
    loss = dimension_scaling(Z, torch.full((4,), 2.0), reduction="mean_sq", renormalise=False)
    assert loss.item() == pytest.approx(1.0, rel=1e-12)
    assert float(dimension_scaling(Z, torch.ones(4), renormalise=False)) == 0.0


def test_hard_separation_projects():
    loss = dimension_scaling(Z, torch.tensor([0, 1, 1, 0]), reduction="mean_sq")
    root = math.sqrt(0.5)
    expected = (2 * 0.25 + 2 * (0.5 - root) ** 2 + 0.0) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["fro_over_n", "mean_sq"])
@pytest.mark.parametrize("z", [torch.zeros(3, 4), torch.ones(3, 4), torch.eye(1, 4), torch.zeros(1, 4)])
@pytest.mark.parametrize("scales", [(10.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)])
def test_dimension_scaling_degenerate_rows_are_finite(z, scales, reduction):
    z = z.clone().requires_grad_()
    loss = dimension_scaling(z, torch.tensor(scales), reduction=reduction)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()
    assert z.grad.abs().max() < 10


@pytest.mark.parametrize(
    ("direction", "temperature", "value"),
    [("hz", 1.0, 0.91769224), ("zh", 1.0, 0.74203328), ("hz", 0.5, 3.12567714), ("zh", 0.5, 1.96560795)],
)
def test_projector_distillation_known(direction, temperature, value):
    loss = projector_distillation(H1, Z1, direction=direction, temperature=temperature)
    assert loss.item() == pytest.approx(value, abs=5e-9)


def test_projector_distillation_defaults_and_mse():
    assert float(projector_distillation(H1, Z1)) == pytest.approx(1.96560795, abs=5e-9)
    assert float(projector_distillation(H1, Z1, kind="mse")) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("direction", ["zh", "hz"])
def test_projector_distillation_loop_gradient_and_zero(direction):
    h, z = rows(5, 4).requires_grad_(), rows(5, 4, 1).requires_grad_()
    expected = oracles.projector_distillation(h.detach(), z.detach(), direction, 0.7)
    value = projector_distillation(h, z, direction=direction, temperature=0.7)
    assert value.item() == pytest.approx(expected, rel=1e-10)
    assert gradcheck(lambda a, b: projector_distillation(a, b, direction=direction), (h, z))
    assert gradcheck(lambda a, b: projector_distillation(a, b, kind="mse"), (h, z))
    squares = projector_distillation(h, z, "mse", direction, 0.7)
    assert squares.item() == pytest.approx(oracles.squared_error(h, z), rel=1e-10)
    shift = torch.arange(5.0).double()[:, None]
    assert projector_distillation(h, h + shift, direction=direction).item() == pytest.approx(0.0, abs=1e-12)


def test_projector_distillation_of_extreme_logits_is_finite():
    h = torch.tensor([[0.0, 1e4, -1e4]], requires_grad=True)
    z = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = projector_distillation(h, z)
    loss.backward()
    assert loss.isfinite()
    assert h.grad.isfinite().all()
    assert z.grad.isfinite().all()
    assert float(projector_distillation(torch.zeros(1, 3), torch.zeros(1, 3))) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: dimension_scaling(torch.ones(2, 3), torch.ones(4)),
        lambda: dimension_scaling(torch.ones(2, 3), torch.ones(3), torch.ones(3, 2)),
        lambda: dimension_scaling(torch.ones(3), torch.ones(3)),
        lambda: dimension_scaling(torch.ones(2, 3), torch.ones(3), reduction="sum"),
        lambda: projector_distillation(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: projector_distillation(torch.ones(2, 3), torch.ones(2, 3), kind="js"),
        lambda: projector_distillation(torch.ones(2, 3), torch.ones(2, 3), direction="hh"),
    ],
)
def test_bad_arguments_are_named(call):
    with pytest.raises(ValueError, match="got "):
        call()
