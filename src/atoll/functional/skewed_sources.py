"""The linear theory of Dec-SSL: sources with skewed labels, and what each objective learns from them.

The functions follow Section 3.2, Section 4.2 and Appendix E of the paper: data of source k, the minimiser of the
self-supervised objective, and the maximum-margin solution of the supervised one. Definition 3.1 is
`atoll.functional.representability`.

Reference:
    Wang et al., "Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?",
    ICLR 2023.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from atoll.functional._tensors import check_rows, check_width, shapes

TOLERANCE = 1e-5  # of the solver's stopping rule
ITERATIONS = 100_000


def skewed_source(
    dim: int, sources: int, source: int, frequent: int, rare: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the data of one source (Appendix E.1), whose labels are almost only its two own classes.

    With τ = d^(1/5), μ = d^(−1/5), q_i uniform on {0, 1} and ξ ~ N(0, I): the source's own two classes are
    ±e_k − Σ_{i≠k} q_i τ e_i + μξ, with `frequent` samples each; of each other pair of classes, the first is
    e_i + μξ, with `rare` samples, and the second has none.

    Args:
        dim: d, the dimension.
        sources: K, the number of sources; there are 2K classes.
        source: k, counted from 0.
        frequent: Number of samples of each of the two frequent classes.
        rare: Number of samples of each rare class.
        generator: Source of the random draws.

    Returns:
        The samples and their classes; source k's own are 2k and 2k + 1.

    Shape:
        Output: (N, d) float64 and (N,) int64.

    Raises:
        ValueError: The dimension is less than the number of sources, or there is no such source.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, ICLR
        2023, Appendix E.1.

    Example:
        >>> import torch
        >>> from atoll.functional.skewed_sources import skewed_source
        >>> x, y = skewed_source(100, 3, 1, frequent=4, rare=1, generator=torch.Generator().manual_seed(0))
        >>> x.shape, y.tolist()
        (torch.Size([10, 100]), [2, 2, 2, 2, 3, 3, 3, 3, 0, 4])
    """
    if not 0 <= source < sources <= dim:
        raise ValueError(f"no source {source} of {sources} in dimension {dim}")
    shift, noise = dim**0.2, dim**-0.2
    others = [i for i in range(sources) if i != source]
    classes = torch.tensor([2 * source, 2 * source + 1] + [2 * i for i in others])
    y = classes.repeat_interleave(torch.tensor([frequent, frequent] + [rare] * len(others)))
    x = noise * torch.randn(len(y), dim, generator=generator, dtype=torch.float64)
    draws = torch.randint(2, (2 * frequent, len(others)), generator=generator)
    x[:frequent, source] += 1
    x[frequent : 2 * frequent, source] -= 1
    x[: 2 * frequent, others] -= shift * draws
    for place, i in enumerate(others):
        start = 2 * frequent + place * rare
        x[start : start + rare, i] += 1
    return x, y


def self_supervised_map(second_moment: Tensor, rows: int) -> Tensor:
    """Minimiser of the self-supervised objective −E⟨w(x + ξ), w(x + ξ′)⟩ + ½‖wᵀw‖² (Equations 3.1 and E.5).

    The objective is ½‖X − wᵀw‖² and a constant, so the rows of w are the eigenvectors of the m largest eigenvalues
    of X, each scaled by the root of its eigenvalue.

    Args:
        second_moment: X = E[xxᵀ], without the noise ξ of the augmentation, which is independent of x.
        rows: m.

    Shape:
        second_moment: (d, d), symmetric and positive semi-definite. Output: (m, d).

    Raises:
        ValueError: If `second_moment` is not a square float matrix.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, ICLR
        2023, Equations 3.1 and E.5.

    Example:
        >>> import torch
        >>> from atoll.functional.skewed_sources import self_supervised_map
        >>> self_supervised_map(torch.diag(torch.tensor([1.0, 9.0, 4.0])), rows=2).abs()
        tensor([[0., 3., 0.],
                [0., 0., 2.]])
    """
    check_rows(second_moment=second_moment)
    check_width(second_moment.T, second_moment=second_moment)
    values, vectors = torch.linalg.eigh(second_moment)
    top = values.argsort(descending=True)[:rows]
    w: Tensor = vectors[:, top].T * values[top].clamp(min=0).sqrt()[:, None]
    return w


def max_margin(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Linear classifier of the least norm whose margin is 1 (Equation E.19): min ‖w‖² with ⟨w_y − w_c, x⟩ ≥ 1.

    The constraints hold for every sample (x, y) and every other class c, also for classes without samples. This is
    the multi-class support vector machine of Crammer and Singer without an intercept; scikit-learn's `LinearSVC`
    solves it, with a price of slack that excludes slack. A class without samples gets the sample 0, which makes the
    class known and does not change the solution.

    Args:
        x: The samples.
        y: Their classes.
        classes: Number of classes.

    Shape:
        x: (N, d); y: (N,) int64. Output: (classes, d) float64.

    Raises:
        ValueError: The shapes do not match, a label is no class, there are fewer than three classes, or no linear
            classifier that separates them was found.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, ICLR
        2023, Equation E.19.

    Example:
        >>> import torch
        >>> from atoll.functional.skewed_sources import max_margin
        >>> w = max_margin(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]), torch.tensor([0, 1]), classes=3)
        >>> w.round(decimals=3).abs()  # ±1/2 and 0: the third class, too, must be at a margin of 1
        tensor([[0.5000, 0.0000],
                [0.5000, 0.0000],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import (
        LinearSVC,  # imported here, because it takes longer than all other functions together
    )

    if classes < 3:
        raise ValueError(f"the maximum-margin solution is of three classes or more, not {classes}")
    check_rows(x=x)
    if y.shape != x.shape[:1] or y.is_floating_point() or not 0 <= y.min() <= y.max() < classes:
        raise ValueError(f"expected a class from 0 to {classes - 1} for each row, got {shapes(x=x, y=y)}")
    absent = torch.tensor([c for c in range(classes) if not (y == c).any()], dtype=torch.int64)
    padded = torch.cat([x.double(), torch.zeros(len(absent), x.shape[1], dtype=torch.float64)])
    machine = LinearSVC(
        multi_class="crammer_singer",
        C=1e6,
        fit_intercept=False,
        tol=TOLERANCE,
        max_iter=ITERATIONS,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the margin is checked below
        machine.fit(padded.numpy(), torch.cat([y, absent]).numpy())
    w = torch.from_numpy(machine.coef_)
    margin = _margin(w, x.double(), y)
    if not margin > 0.99:
        raise ValueError(f"no classifier with margin 1 was found: the best one has {margin:.3f}")
    return w / margin


def _margin(w: Tensor, x: Tensor, y: Tensor) -> float:
    scores = x @ w.T
    own = scores.gather(1, y[:, None])
    return float((own - scores.scatter(1, y[:, None], -torch.inf)).min())


def feature_correlations(w: Tensor) -> Tensor:
    """Correlations Σ_i ⟨u_i, e_j⟩² of the features of the two-layer network of least norm with each axis.

    A linear classifier w is computed by w = vu in many ways; ‖uᵀu‖² + ‖vᵀv‖² is least for u = S^½ Rᵀ, where
    w = L S Rᵀ is the singular value decomposition. The correlations are then the diagonal of uᵀu = (wᵀw)^½.

    Args:
        w: The linear classifier.

    Shape:
        w: (classes, d). Output: (d,).

    Raises:
        ValueError: If `w` is not a float matrix.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, ICLR
        2023, Proposition 4.1, which bounds these numbers.

    Example:
        >>> import torch
        >>> from atoll.functional.skewed_sources import feature_correlations
        >>> feature_correlations(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
        tensor([3.0000, 0.5000])
    """
    check_rows(w=w)
    _, scales, axes = torch.linalg.svd(w, full_matrices=False)
    correlations: Tensor = (axes.square() * scales[:, None]).sum(0)
    return correlations
