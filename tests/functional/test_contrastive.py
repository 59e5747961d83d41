import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import (
    dictionary_contrast,
    model_contrast,
    nt_xent,
    one_sided_nt_xent,
    queue_contrast,
    relational,
    supcon,
)

from . import oracles
from .oracles import rows

A = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
B = torch.tensor([[0.6, 0.8], [0.8, 0.6]], dtype=torch.float64)
EXACT = {"rel": 1e-9, "abs": 1e-12}
few = settings(max_examples=15, deadline=None)
sizes = given(
    n=st.integers(1, 6),
    d=st.integers(1, 5),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.07, 0.5, 2.0]),
)


@pytest.mark.parametrize(("temperature", "value"), [(0.5, 1.2707138), (0.07, 4.0789988)])
def test_nt_xent_known(temperature, value):
    assert float(nt_xent(A, B, temperature)) == pytest.approx(value, abs=5e-8)
    assert float(nt_xent(B, A, temperature)) == pytest.approx(value, abs=5e-8)


@pytest.mark.parametrize(("temperature", "value"), [(0.5, 1.6131430), (0.07, 5.7732447)])
def test_one_sided_nt_xent_known(temperature, value):
    assert float(one_sided_nt_xent(A, B, temperature)) == pytest.approx(value, abs=5e-8)


def test_defaults():
    assert float(nt_xent(A, B)) == pytest.approx(1.2707138, abs=5e-8)
    assert float(one_sided_nt_xent(A, B)) == pytest.approx(5.7732447, abs=5e-8)


def test_queue_contrast_known():
    q, k = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.8, 0.6]]).double()
    queue = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double()
    assert float(queue_contrast(q, k, queue, 0.2)) == pytest.approx(0.01827111, abs=5e-9)


@pytest.mark.parametrize(("temperature", "value"), [(0.5, 1.04161190), (1.0, 1.08927245)])
def test_dictionary_contrast_known(temperature, value):
    dictionary = torch.tensor([[0.0, -1.0], [-1.0, 0.0]]).double()
    assert float(dictionary_contrast(A, B, dictionary, temperature)) == pytest.approx(value, abs=5e-9)


def test_temporal_ensemble_row_is_what_a_dictionary_holds():
    """FedCA's ensemble of (1, 0) then (0, 1) at α = 0.5, as a dictionary of one row."""
    row = torch.tensor([[0.44721360, 0.89442719]]).double()
    expected = oracles.dictionary_contrast(A, B, row, 0.5)
    assert float(dictionary_contrast(A, B, row)) == pytest.approx(expected, **EXACT)


def test_model_contrast_known():
    z, z_global, z_previous = torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]], [[0.0, 1.0]]], dtype=torch.float64)
    assert float(model_contrast(z, z_global, z_previous)) == pytest.approx(0.26328247, abs=5e-9)
    assert float(model_contrast(z, z_global, z_global)) == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize(("labels", "value"), [((0, 1, 0, 1), 1.2707138), ((3, 3, 3, 3), 1.21738042)])
def test_supcon_known(labels, value):
    z = torch.cat([A, B])
    loss = supcon(z, torch.tensor(labels), temperature=0.5, base_temperature=0.5)
    assert loss.item() == pytest.approx(value, abs=5e-8)


@pytest.mark.parametrize(("temperature", "value"), [(0.1, 0.60690584), (1.0, 0.03952337)])
def test_relational_known(temperature, value):
    references = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.2]]).double()
    loss = relational(A, B, references, temperature, temperature)
    assert loss.item() == pytest.approx(value, abs=5e-9)


@few
@sizes
def test_against_loops(n, d, seed, temperature):
    z1, z2, z3, extra = rows(n, d, seed), rows(n, d, seed + 1), rows(n, d, seed + 2), rows(seed % 4, d, 7)
    extra = extra / extra.norm(dim=1, keepdim=True)
    labels = torch.arange(n) % 2
    assert float(nt_xent(z1, z2, temperature)) == pytest.approx(oracles.nt_xent(z1, z2, temperature), **EXACT)
    expected = oracles.nt_xent(z1, z2, temperature, zero_self=True)
    assert float(nt_xent(z1, z2, temperature, zero_self=True)) == pytest.approx(expected, **EXACT)
    expected = oracles.one_sided_nt_xent(z1, z2, temperature)
    assert float(one_sided_nt_xent(z1, z2, temperature)) == pytest.approx(expected, **EXACT)
    expected = oracles.queue_contrast(z1, z2, extra, temperature)
    assert float(queue_contrast(z1, z2, extra, temperature)) == pytest.approx(expected, **EXACT)
    expected = oracles.dictionary_contrast(z1, z2, extra, temperature)
    assert float(dictionary_contrast(z1, z2, extra, temperature)) == pytest.approx(expected, **EXACT)
    expected = oracles.model_contrast(z1, z2, z3, temperature)
    assert float(model_contrast(z1, z2, z3, temperature)) == pytest.approx(expected, **EXACT)
    expected = oracles.supcon(z1, labels, temperature, 0.3)
    assert float(supcon(z1, labels, temperature, 0.3)) == pytest.approx(expected, **EXACT)
    expected = oracles.relational(z1, z2, z3, temperature, 0.4)
    assert float(relational(z1, z2, z3, temperature, 0.4)) == pytest.approx(expected, **EXACT)


def test_nt_xent_invariances():
    z1, z2 = rows(5, 4), rows(5, 4, 1)
    value = nt_xent(z1, z2)
    lengths = torch.linspace(0.1, 9.0, 5, dtype=torch.float64)[:, None]
    torch.testing.assert_close(nt_xent(z1 * lengths, z2 / lengths), value)
    rotation = torch.linalg.qr(rows(4, 4, 2)).Q
    torch.testing.assert_close(nt_xent(z1 @ rotation, z2 @ rotation), value)
    same = torch.ones(5, 4, dtype=torch.float64)
    assert float(nt_xent(same, same)) == pytest.approx(math.log(9), rel=1e-12)


def test_relational_is_zero_for_equal_views_and_never_negative():
    z, references = rows(5, 4), rows(3, 4, 1)
    assert float(relational(z, z, references)) == pytest.approx(0.0, abs=1e-12)
    assert float(relational(z, rows(5, 4, 2), references)) > 0.01


def test_empty_dictionary_and_queue():
    z1, z2, empty = rows(4, 3), rows(4, 3, 1), torch.empty(0, 3, dtype=torch.float64)
    u1, u2 = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
    expected = torch.nn.functional.cross_entropy(u1 @ u2.T / 0.5, torch.arange(4))
    torch.testing.assert_close(dictionary_contrast(z1, z2, empty), expected)
    assert float(queue_contrast(z1, z2, empty, 0.2)) == 0.0


def test_gradients():
    z1, z2, z3 = (rows(4, 3, s).requires_grad_() for s in range(3))
    fixed, labels = rows(5, 3, 9), torch.tensor([0, 1, 1, 2])
    assert gradcheck(nt_xent, (z1, z2))
    assert gradcheck(lambda a, b: nt_xent(a, b, zero_self=True), (z1, z2))
    assert gradcheck(one_sided_nt_xent, (z1, z2))
    assert gradcheck(lambda q: queue_contrast(q, z2.detach(), fixed, 0.2), (z1,))
    assert gradcheck(lambda a, b: dictionary_contrast(a, b, fixed), (z1, z2))
    assert gradcheck(lambda a: model_contrast(a, z2.detach(), z3.detach()), (z1,))
    assert gradcheck(lambda a: supcon(a, labels, 0.3), (z1,))
    assert gradcheck(lambda a, b, r: relational(a, b, r, 0.3, 0.5), (z1, z2, z3))


def test_constants_receive_no_gradient():
    q, k, queue = (rows(4, 3, s).requires_grad_() for s in range(3))
    loss = queue_contrast(q, k, queue, 0.2) + model_contrast(q, k, queue) + dictionary_contrast(q, q, queue)
    loss.backward()
    assert q.grad is not None
    assert k.grad is None
    assert queue.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("z", [torch.zeros(3, 4), torch.ones(3, 4), torch.zeros(1, 4), torch.ones(1, 4)])
def test_degenerate_rows_are_finite(z, dtype):
    extra = torch.ones(2, 4, dtype=dtype) / 2
    losses = [
        lambda a, b: nt_xent(a, b, 0.07),
        lambda a, b: nt_xent(a, b, 0.07, zero_self=True),
        lambda a, b: one_sided_nt_xent(a, b),
        lambda a, b: queue_contrast(a, b, extra, 0.07),
        lambda a, b: dictionary_contrast(a, b, extra),
        lambda a, b: model_contrast(a, b, b),
        lambda a, b: supcon(torch.cat([a, b]), torch.zeros(2 * len(a), dtype=torch.long)),
        lambda a, b: supcon(a, torch.arange(len(a))),
        lambda a, b: relational(a, b, extra),
    ]
    for loss in losses:
        a, b = (z.to(dtype).clone().requires_grad_() for _ in range(2))
        value = loss(a, b)
        assert value.dtype == dtype
        assert value.isfinite()
        value.backward()
        for grad in (a.grad, b.grad):
            assert grad is None or (grad.isfinite().all() and grad.abs().max() < 1e3)


def test_supcon_without_any_positive_is_zero():
    z = rows(3, 4).requires_grad_()
    loss = supcon(z, torch.arange(3))
    loss.backward()
    assert loss.item() == 0.0
    assert float(z.grad.abs().max()) == 0.0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_supcon_of_one_row_meets_no_nan_on_its_way():
    z = rows(1, 4).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        supcon(z, torch.zeros(1, dtype=torch.long)).backward()
    assert float(z.grad.abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    z1, z2 = rows(6, 8).to(dtype), rows(6, 8, 1).to(dtype)
    expected = nt_xent(z1.float(), z2.float(), 0.07)
    assert torch.equal(nt_xent(z1, z2, 0.07), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nt_xent(z1.float(), z2.float(), 0.07), expected)
        assert torch.equal(nt_xent(z1, z2, temperature=0.07), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nt_xent(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: one_sided_nt_xent(torch.ones(2, 3), torch.ones(5, 3)),
        lambda: nt_xent(torch.ones(3), torch.ones(3)),
        lambda: nt_xent(torch.ones(0, 3), torch.ones(0, 3)),
        lambda: nt_xent(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)),
        lambda: queue_contrast(torch.ones(2, 3), torch.ones(2, 3), torch.ones(5, 4), 0.2),
        lambda: dictionary_contrast(torch.ones(2, 3), torch.ones(2, 3), torch.ones(0)),
        lambda: model_contrast(torch.ones(2, 3), torch.ones(2, 3), torch.ones(1, 3)),
        lambda: model_contrast(torch.ones(2, 3), torch.ones(1, 3), torch.ones(2, 3)),
        lambda: relational(torch.ones(2, 3), torch.ones(1, 3), torch.ones(4, 3)),
        lambda: supcon(torch.ones(2, 3), torch.zeros(3, dtype=torch.long)),
        lambda: supcon(torch.ones(2, 3), torch.zeros(2)),
        lambda: relational(torch.ones(2, 3), torch.ones(2, 3), torch.ones(0, 3)),
    ],
)
def test_bad_shapes_are_named(call):
    with pytest.raises(ValueError, match=r"expected .* got .*\("):
        call()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
@pytest.mark.parametrize(
    "call",
    [
        lambda t: nt_xent(A, B, t),
        lambda t: one_sided_nt_xent(A, B, t),
        lambda t: queue_contrast(A, B, B, t),
        lambda t: dictionary_contrast(A, B, B, t),
        lambda t: model_contrast(A, B, B, t),
        lambda t: supcon(A, torch.zeros(len(A), dtype=torch.long), t),
        lambda t: supcon(A, torch.zeros(len(A), dtype=torch.long), base_temperature=t),
        lambda t: relational(A, B, B, t),
        lambda t: relational(A, B, B, target_temperature=t),
    ],
)
def test_bad_temperature(call, temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        call(temperature)
