"""Self-distillation without labels: a student matches a teacher's centred and sharpened outputs (DINO)."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_positive, full_precision, shapes
from atoll.functional._views import check_views, entropy_between_views


@full_precision
def dino(
    student: Tensor,
    teacher: Tensor,
    centre: Tensor,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
) -> Tensor:
    """DINO's loss: cross-entropy between the teacher's output for one view and the student's for another.

    L = mean over the pairs (u, v), u ≠ v, of −(1/N) Σ_i ⟨softmax((t_ui − c) / τ_t), log softmax(s_vi / τ_s)⟩. The
    teacher sees the first views of the student, the global crops. Its outputs are constants.

    Args:
        student: s, the student's outputs for all views; the first are the views that the teacher sees.
        teacher: t, the teacher's outputs.
        centre: c.
        student_temperature: τ_s.
        teacher_temperature: τ_t; a low one sharpens the targets.

    Shape:
        student: (V, N, K), V >= 2. teacher: (G, N, K), 1 <= G <= V. centre: (K,). Output: scalar.

    Raises:
        ValueError: If the shapes do not match or a temperature is not positive.

    Reference:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, Eqs. 1-3.

    Example:
        >>> import torch
        >>> from atoll.functional import dino
        >>> flat = torch.zeros(2, 4, 8)  # two views of four images, eight equal outputs: ln 8
        >>> round(dino(flat, flat, centre=torch.zeros(8)).item(), 4)
        2.0794
    """
    check_views("student (V, N, K) and teacher (G, N, K)", student=student, teacher=teacher)
    if centre.shape != student.shape[2:]:
        raise ValueError(f"expected centre (K,), got {shapes(student=student, centre=centre)}")
    check_positive(student_temperature=student_temperature, teacher_temperature=teacher_temperature)
    targets = ((teacher.detach() - centre) / teacher_temperature).softmax(dim=2)
    return entropy_between_views(targets, student / student_temperature)


@full_precision
@torch.no_grad()
def moving_centre(centre: Tensor, teacher: Tensor, momentum: float = 0.9) -> Tensor:
    """Centre of the teacher's outputs: c ← m c + (1 − m) · mean of the rows.

    Args:
        centre: c.
        teacher: The teacher's outputs of a step, of all its views.
        momentum: m.

    Shape:
        centre: (K,). teacher: (..., K). Output: (K,).

    Raises:
        ValueError: If the shapes do not match or a tensor is not floating.

    Reference:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, Eq. 4.

    Example:
        >>> import torch
        >>> from atoll.functional import moving_centre
        >>> moving_centre(torch.zeros(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), momentum=0.5)
        tensor([1.0000, 1.5000])
    """
    fits = centre.ndim == 1 and teacher.ndim >= 2 and teacher.shape[-1:] == centre.shape
    if not fits or not (centre.is_floating_point() and teacher.is_floating_point()):
        got = shapes(centre=centre, teacher=teacher)
        raise ValueError(f"expected centre (K,) and teacher (..., K) of floats, got {got}")
    return torch.lerp(teacher.flatten(0, -2).mean(dim=0), centre, momentum)
