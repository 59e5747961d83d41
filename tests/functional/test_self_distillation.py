import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import dino, moving_centre

from . import oracles
from .oracles import rows


def outputs(views, n, k, seed=0):
    return rows(views * n, k, seed).reshape(views, n, k)


@settings(max_examples=20, deadline=None)
@given(
    views=st.integers(2, 5),
    seen=st.integers(1, 2),
    n=st.integers(1, 4),
    k=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_dino_against_loops(views, seen, n, k, seed):
    student, teacher, centre = (
        outputs(views, n, k, seed),
        outputs(seen, n, k, seed + 1),
        rows(1, k, seed + 2)[0],
    )
    expected = oracles.dino(student, teacher, centre, 0.3, 0.2)
    assert float(dino(student, teacher, centre, 0.3, 0.2)) == pytest.approx(expected, rel=1e-9)


def test_a_view_is_not_compared_with_itself():
    """A student that agrees with the teacher on its own view alone gains nothing."""
    sharp = 50 * torch.eye(2, dtype=torch.float64)
    teacher = torch.stack([sharp, sharp.flip(0)])  # each view has the other image's answer
    student = teacher.clone()
    assert float(dino(student, teacher, torch.zeros(2), 1.0, 1.0)) == pytest.approx(50)
    assert float(dino(student.flip(0), teacher, torch.zeros(2), 1.0, 1.0)) == pytest.approx(0, abs=1e-9)


def test_the_centre_hides_what_all_images_share():
    shared = torch.tensor([5.0, 0.0, -3.0], dtype=torch.float64)
    student, teacher = outputs(2, 4, 3), outputs(2, 4, 3, 1)
    expected = dino(student, teacher, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(dino(student, teacher + shared, shared), expected)


def test_the_teacher_is_constant_and_gradients_are_right():
    student, teacher = outputs(3, 2, 4).requires_grad_(), outputs(2, 2, 4, 1).requires_grad_()
    centre = rows(1, 4, 2)[0]
    assert gradcheck(lambda s: dino(s, teacher, centre, 0.5, 0.4), (student,))
    dino(student, teacher, centre).backward()
    assert teacher.grad is None


def test_half_precision_is_computed_in_full():
    student, teacher = outputs(2, 4, 8).float(), outputs(2, 4, 8, 1).float()
    half = dino(student.bfloat16(), teacher.bfloat16(), torch.zeros(8))
    exact = dino(student.bfloat16().float(), teacher.bfloat16().float(), torch.zeros(8))
    assert torch.equal(half, exact)
    assert math.isfinite(float(half))


def test_the_centre_moves_towards_the_mean_of_all_rows():
    teacher, centre = outputs(2, 3, 4), rows(1, 4, 5)[0]
    mean = [sum(float(teacher[v, i, j]) for v in range(2) for i in range(3)) / 6 for j in range(4)]
    expected = [0.9 * float(centre[j]) + 0.1 * mean[j] for j in range(4)]
    assert moving_centre(centre, teacher, 0.9).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("student", "teacher", "centre"),
    [
        ((1, 3, 4), (1, 3, 4), 4),
        ((2, 3, 4), (3, 3, 4), 4),
        ((2, 3, 4), (2, 2, 4), 4),
        ((2, 3, 4), (2, 3, 4), 5),
        ((), (), ()),
    ],
)
def test_bad_shapes_are_named(student, teacher, centre):
    with pytest.raises(ValueError, match="student"):
        dino(torch.zeros(student), torch.zeros(teacher), torch.zeros(centre))


@pytest.mark.parametrize(("centre", "teacher"), [((1,), (4, 3)), ((3,), (3,)), ((1, 3), (4, 3))])
def test_a_centre_of_another_width_is_refused(centre, teacher):
    with pytest.raises(ValueError, match="expected centre"):
        moving_centre(torch.zeros(centre), torch.zeros(teacher))


@pytest.mark.parametrize(("centre", "teacher"), [(torch.float32, torch.int64), (torch.int64, torch.float32)])
def test_a_centre_of_whole_numbers_is_refused(centre, teacher):
    with pytest.raises(ValueError, match=r"of floats, got .*int64"):
        moving_centre(torch.zeros(3, dtype=centre), torch.zeros(4, 3, dtype=teacher))
