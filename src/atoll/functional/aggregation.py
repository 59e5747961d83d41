"""Weights and cosines for mixing models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.functional._tensors import shapes

# Number of entries converted to float64 at a time (64 MiB); 100 ResNet-18 as a whole would not fit in memory.
BLOCK = 2**23


@torch.no_grad()
def angular_divergence(
    global_weights: Mapping[str, Tensor], client_weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Cosine similarity between the global model and a client's model, for each tensor (1: no divergence).

    δ^(l) = ⟨w_g, w_k⟩ / (‖w_g‖‖w_k‖), with each tensor flattened to a vector; 1 if either is all zero, because
    the angle is then undefined (BatchNorm's β and running mean start as zeros). Equal tensors give exactly 1. A
    floating tensor without dimensions is a vector of length one, so its cosine is the product of the signs.
    Integer tensors are counters without a direction and are left out. For a single δ over the whole model, pass
    the model as one concatenated vector. A run computes the same δ by
    `atoll.components.messages.UpdateGeometry.cosine`, which reads each update once for all purposes.

    Args:
        global_weights: The global model's tensors by name.
        client_weights: The client's tensors, with the same names and shapes.

    Shape:
        Output: a scalar in [−1, 1] for the name of every floating tensor.

    Raises:
        ValueError: If names or shapes differ.

    Reference:
        Rehman et al., L-DAWA, 2023, Eq. 2 and 4.

    Example:
        >>> import torch
        >>> from atoll.functional import angular_divergence
        >>> cosines = angular_divergence({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 1.0])})
        >>> round(cosines["w"].item(), 4)
        0.7071
    """
    if global_weights.keys() != client_weights.keys():
        unmatched = sorted(global_weights.keys() ^ client_weights.keys())
        raise ValueError(f"the models differ in these tensors: {unmatched}")
    cosines = {}
    for name, w in global_weights.items():
        other = client_weights[name]
        if w.shape != other.shape:
            raise ValueError(f"the shapes of {name!r} differ: {shapes(**{'global': w, 'client': other})}")
        if w.is_floating_point():
            cosines[name] = _cosine(w, other)
    return cosines


def _cosine(w: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(w.dtype, torch.float32)
    x, y = w.double().flatten(), other.double().flatten()  # the square of 1e25 overflows float32
    # All three products use the same operation, and the root of a square is exact, so x = y gives exactly 1.
    xy, scale = x.dot(y), (x.dot(x) * y.dot(y)).sqrt()
    ratio = xy / torch.where(scale > 0, scale, 1.0)
    return torch.where(scale == 0, 1.0, ratio.clamp(-1.0, 1.0)).to(dtype)


@torch.no_grad()
def min_norm_weights(directions: Tensor) -> Tensor:
    """Weights of the shortest vector in the convex hull: argmin over the simplex of ‖Σ_k α_k u_k‖².

    An active-set method on the Gram matrix solves the problem exactly, in float64 and always in the same order. It
    solves min_{x ≥ 0} ‖Σ x_k u_k‖² + (1 − Σ x_k)² and returns α = x / Σ x_k. For x = sα, the minimum over s is
    v/(1 + v) with v = ‖Σ α_k u_k‖², which increases with v, so both problems have the same minimiser. If uniform
    weights are already optimal (equal or orthogonal clients, all zero), they are returned; other ties are broken in
    favour of few clients. The directions are not normalised here: FedU² normalises them before the call.

    Args:
        directions: One flattened update per row.

    Shape:
        directions: (K, D). Output: (K,), non-negative, of sum 1.

    Raises:
        ValueError: If `directions` is not a float (K, D), or not finite.

    Reference:
        Désidéri, Multiple-Gradient Descent Algorithm, 2012; Lawson and Hanson, Solving Least Squares
        Problems, 1974, Chapter 23.

    Example:
        >>> import torch
        >>> from atoll.functional import min_norm_weights
        >>> min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).round(decimals=3)
        tensor([0.8000, 0.2000])
    """
    if directions.ndim != 2 or 0 in directions.shape or not directions.is_floating_point():
        raise ValueError(f"expected float directions (K, D), got {shapes(directions=directions)}")
    k = len(directions)
    gram = torch.zeros(k, k, dtype=torch.float64, device=directions.device)
    step = max(1, BLOCK // k)
    for start in range(0, directions.shape[1], step):
        block = directions[:, start : start + step].double()
        gram += block @ block.T
    gram = gram.cpu()
    if not gram.isfinite().all():
        raise ValueError(f"directions must be finite, got {shapes(directions=directions)} with other values")
    return shortest_in_hull(gram).to(directions.device, torch.promote_types(directions.dtype, torch.float32))


def shortest_in_hull(gram: Tensor) -> Tensor:
    """`min_norm_weights` of directions of which only the inner products ⟨u_i, u_j⟩ are available.

    Args:
        gram: The matrix of inner products ⟨u_i, u_j⟩.

    Shape:
        gram: (K, K), float64, on the CPU. Output: (K,).

    Raises:
        ValueError: If `gram` is not square.

    Reference:
        Désidéri, Multiple-Gradient Descent Algorithm, 2012; Lawson and Hanson, Solving Least Squares
        Problems, 1974, Chapter 23.
    """
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"expected inner products of shape (K, K), got {shapes(gram=gram)}")
    k = len(gram)
    lengths = gram.diagonal().sqrt()
    if bool((lengths == 0).any()):  # the zero vector is in the hull and is the shortest
        zero = (lengths == 0).double()
        return zero / zero.sum()
    # With unit directions and y_k = x_k·length_k / shortest, all numbers are close to one for any lengths.
    gram = gram / lengths[:, None] / lengths[None, :]
    share = lengths.min() / lengths
    rounding = 1e-12

    uniform = 1.0 / (k * share)
    slope = gram @ uniform
    square = uniform @ slope
    if bool((square * share - slope <= rounding * square.clamp_min(1.0).sqrt()).all()):
        return torch.full_like(uniform, 1.0 / k)

    h = gram + share[:, None] * share[None, :]
    y = torch.zeros_like(share)
    active = torch.zeros(k, dtype=torch.bool)
    # Far more steps than needed: a bound in case rounding adds and removes an index without end.
    for _ in range(10 * k):
        gain = (share - h @ y).masked_fill(active, -torch.inf)
        if float(gain.max()) <= rounding:
            break
        active[gain.argmax()] = True
        while True:
            trial = torch.zeros_like(y)
            system, goal = h[active][:, active], share[active][:, None]
            trial[active] = torch.linalg.lstsq(system, goal, driver="gelsd").solution[:, 0]
            blocked = active & (trial <= 0)
            if not bool(blocked.any()):
                break
            # Move towards the unconstrained optimum until the first weight reaches zero, and drop that weight.
            steps = torch.where(blocked, y / (y - trial).clamp_min(torch.finfo(y.dtype).tiny), torch.inf)
            first = int(steps.argmin())
            y = y + steps[first] * (trial - y)
            active[first] = False
            active &= y > 0
            y = y * active
        y = trial
    x = y * share
    return x / x.sum()


@torch.no_grad()
def metropolis_weights(adjacency: Tensor) -> Tensor:
    """Metropolis-Hastings mixing weights of an undirected graph.

    W_ij = 1/(1 + max(deg_i, deg_j)) on edges, W_ii = 1 − Σ_j W_ij. The matrix is symmetric and doubly stochastic,
    so gossip with W preserves the mean of the models.

    Args:
        adjacency: Non-zero if two clients exchange models; the diagonal is ignored.

    Shape:
        adjacency: (K, K), symmetric, of any dtype. Output: (K, K), in the adjacency's dtype if that is floating,
        otherwise in the default dtype.

    Raises:
        ValueError: If the adjacency is not square or not symmetric.

    Reference:
        Xiao, Boyd and Lall, A Scheme for Robust Distributed Sensor Fusion Based on Average Consensus, 2005.

    Example:
        >>> import torch
        >>> from atoll.functional import metropolis_weights
        >>> line = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
        >>> metropolis_weights(line).round(decimals=3)
        tensor([[0.6670, 0.3330, 0.0000],
                [0.3330, 0.3330, 0.3330],
                [0.0000, 0.3330, 0.6670]])
    """
    square = adjacency.ndim == 2 and adjacency.shape[0] == adjacency.shape[1] > 0
    edges = adjacency != 0
    if not square or not torch.equal(edges, edges.T):
        raise ValueError(f"expected a symmetric adjacency (K, K), got {shapes(adjacency=adjacency)}")
    edges = edges.clone().fill_diagonal_(False)
    dtype = adjacency.dtype if adjacency.is_floating_point() else torch.get_default_dtype()
    degree = edges.sum(dim=1)
    weights = edges.to(dtype) / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return weights + torch.diag(1.0 - weights.sum(dim=1))
