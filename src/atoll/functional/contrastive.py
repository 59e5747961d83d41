"""Contrastive losses: a softmax over cosine similarities separates positives from negatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.functional._tensors import (
    check_positive,
    check_rows,
    check_width,
    cosine,
    full_precision,
    shapes,
    unit,
)


@full_precision
def nt_xent(z1: Tensor, z2: Tensor, temperature: float = 0.5, zero_self: bool = False) -> Tensor:
    """Normalised temperature-scaled cross entropy over both views.

    With u the 2N normalised embeddings and π(a) the other view of a,
    L = (1/2N) Σ_a [−u_a·u_π(a)/τ + log Σ_{b≠a} exp(u_a·u_b/τ)]. It is log(2N − 1) when all rows are equal.

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view of the same images, in the same order.
        temperature: τ.
        zero_self: Keep the row itself in the denominator, with similarity 0 and therefore exp(0) = 1, as FedU²'s
            released code does.

    Shape:
        z1, z2: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ or the temperature is not positive.

    Reference:
        Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, 2020, Eq. 1.

    Example:
        >>> import torch
        >>> from atoll.functional import nt_xent
        >>> round(nt_xent(torch.ones(2, 3), torch.ones(2, 3)).item(), 4)  # collapsed: log 3
        1.0986
    """
    check_rows(z1=z1, z2=z2)
    check_positive(temperature=temperature)
    u = unit(torch.cat([z1, z2]))
    logits = (u @ u.T / temperature).fill_diagonal_(0.0 if zero_self else -torch.inf)
    partner = torch.arange(len(u), device=u.device).roll(len(z1))
    return F.cross_entropy(logits, partner)


@full_precision
def one_sided_nt_xent(z1: Tensor, z2: Tensor, temperature: float = 0.07) -> Tensor:
    """NT-Xent with queries of the first view only and the self-similarity kept in the denominator.

    L = −(1/N) Σ_i [ẑ1_i·ẑ2_i/τ − log Σ_{v ∈ [ẑ1; ẑ2]} exp(ẑ1_i·v/τ)]. L-DAWA's released code trains with this
    loss; the term exp(1/τ) of a row with itself weakens every negative.

    Args:
        z1: Embeddings of the first view, the queries.
        z2: Embeddings of the second view.
        temperature: τ.

    Shape:
        z1, z2: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ or the temperature is not positive.

    Reference:
        Rehman et al., L-DAWA, 2023 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import one_sided_nt_xent
        >>> round(one_sided_nt_xent(torch.ones(2, 3), torch.ones(2, 3)).item(), 4)  # collapsed: log 4
        1.3863
    """
    check_rows(z1=z1, z2=z2)
    check_positive(temperature=temperature)
    u1, u2 = unit(z1), unit(z2)
    logits = u1 @ torch.cat([u2, u1]).T / temperature
    return F.cross_entropy(logits, torch.arange(len(u1), device=u1.device))


@full_precision
def queue_contrast(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """MoCo's loss: contrast a query and its key with a queue of earlier keys.

    L = CE([q̂·k̂, q̂Qᵀ]/τ, 0). Keys and queue are constants.

    Args:
        q: Queries of the trained encoder.
        k: Keys of the momentum encoder for the same images, in the same order; no gradient flows to them.
        queue: Earlier keys, whose rows are already normalised. With an empty queue the loss is 0.
        temperature: τ.

    Shape:
        q, k: (N, d). queue: (M, d), M >= 0. Output: scalar.

    Raises:
        ValueError: If the shapes do not match or the temperature is not positive.

    Reference:
        He et al., Momentum Contrast for Unsupervised Visual Representation Learning, 2020, Eq. 1.

    Example:
        >>> import torch
        >>> from atoll.functional import queue_contrast
        >>> q, queue = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(queue_contrast(q, q, queue, temperature=1.0).item(), 4)  # log(1 + 1/e)
        0.3133
    """
    check_rows(q=q, k=k)
    check_width(q, queue=queue)
    check_positive(temperature=temperature)
    query = unit(q)
    positive = (query * unit(k.detach())).sum(dim=1, keepdim=True)
    logits = torch.cat([positive, query @ queue.detach().T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


@full_precision
def dictionary_contrast(z1: Tensor, z2: Tensor, dictionary: Tensor, temperature: float = 0.5) -> Tensor:
    """FedCA's loss: contrast the first view with the second view's batch and the clients' shared dictionary.

    L = CE([ẑ1ẑ2ᵀ, ẑ1Dᵀ]/τ, (0, …, N−1)). The keys come from the second view, so no self-similarity appears.
    The dictionary is a constant.

    Args:
        z1: Embeddings of the first view, the queries.
        z2: Embeddings of the second view; gradient flows to them too.
        dictionary: Projections whose rows are already normalised; empty in the first round.
        temperature: τ; the paper does not give its value.

    Shape:
        z1, z2: (N, d). dictionary: (M, d), M >= 0. Output: scalar.

    Raises:
        ValueError: If the shapes do not match or the temperature is not positive.

    Reference:
        Zhang et al., Federated Unsupervised Representation Learning, 2023, Eq. 4 to 8.

    Example:
        >>> import torch
        >>> from atoll.functional import dictionary_contrast
        >>> z, dictionary = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, -1.0]])
        >>> round(dictionary_contrast(z, z, dictionary, temperature=1.0).item(), 4)  # log(1 + 2/e)
        0.5514
    """
    check_rows(z1=z1, z2=z2)
    check_width(z1, dictionary=dictionary)
    check_positive(temperature=temperature)
    logits = unit(z1) @ torch.cat([unit(z2), dictionary.detach()]).T / temperature
    return F.cross_entropy(logits, torch.arange(len(z1), device=z1.device))


@full_precision
def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5) -> Tensor:
    """MOON's term: pull embeddings towards the global model and away from the client's previous model.

    L = −log e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_p)/τ}); ln 2 if the two similarities are equal.

    Args:
        z: Projections of the trained model.
        z_global: Projections of the downloaded global model; a constant.
        z_previous: Projections of the client's model from its last round; a constant.
        temperature: τ.

    Shape:
        z, z_global, z_previous: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ or the temperature is not positive.

    Reference:
        Li et al., Model-Contrastive Federated Learning, 2021, Eq. 3.

    Example:
        >>> import torch
        >>> from atoll.functional import model_contrast
        >>> z, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(model_contrast(z, z, far, temperature=1.0).item(), 4)  # log(1 + 1/e)
        0.3133
    """
    check_rows(z=z, z_global=z_global, z_previous=z_previous)
    check_positive(temperature=temperature)
    nearer = cosine(z, z_global.detach()) - cosine(z, z_previous.detach())
    return F.softplus(-nearer / temperature).mean()


@full_precision
def supcon(z: Tensor, labels: Tensor, temperature: float = 0.07, base_temperature: float = 0.07) -> Tensor:
    """Supervised contrastive loss: all other rows of the anchor's class are positives.

    L = −(τ/τ_b) · mean_a (1/|P(a)|) Σ_{p∈P(a)} log softmax_{b≠a}(ẑ_a·ẑ_b/τ)_p, where P(a) is the set of the other
    rows with a's label. An anchor without positives contributes 0 to the mean, so a single row gives 0.

    Args:
        z: Embeddings; for two views, stack them and repeat the labels.
        labels: The class of every row.
        temperature: τ.
        base_temperature: τ_b, a fixed scale of the loss.

    Shape:
        z: (N, d). labels: (N,) of integers. Output: scalar.

    Raises:
        ValueError: If the shapes do not match, labels are not integers, or a temperature is not positive.

    Reference:
        Khosla et al., Supervised Contrastive Learning, 2020, Eq. 2.

    Example:
        >>> import torch
        >>> from atoll.functional import supcon
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = supcon(z, torch.tensor([0, 0, 1]), temperature=1.0, base_temperature=1.0)
        >>> round(loss.item(), 4)  # (log(1 + 1/e) + log(1 + 1/e) + 0) / 3
        0.2088
    """
    check_rows(z=z)
    check_positive(temperature=temperature, base_temperature=base_temperature)
    if labels.shape != z.shape[:1] or labels.is_floating_point():
        raise ValueError(f"expected an integer label for each row, got {shapes(z=z, labels=labels)}")
    u = unit(z)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    # The lowest finite number instead of −∞: a single row has no other entry, and −∞ would give NaN instead of 0.
    logits = (u @ u.T / temperature).masked_fill(itself, torch.finfo(z.dtype).min)
    log_p = logits.log_softmax(dim=1)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    anchors = log_p.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1).clamp_min(1)
    return -(temperature / base_temperature) * anchors.mean()


@full_precision
def relational(
    a: Tensor, b: Tensor, references: Tensor, temperature: float = 0.1, target_temperature: float = 0.1
) -> Tensor:
    """FedX's relational loss: two views should have the same similarities to a set of other images.

    With s_x = softmax(x̂r̂ᵀ/τ) and m = ½[softmax(âr̂ᵀ/τ') + softmax(b̂r̂ᵀ/τ')], J = ½[KL(m‖s_a) + KL(m‖s_b)],
    averaged over the batch. Gradient flows through m as well. The paper calls J the Jensen-Shannon divergence; it
    is that divergence if τ = τ' and the arguments are swapped.

    Args:
        a: Embeddings of the first view.
        b: Embeddings of the second view.
        references: Embeddings of other images.
        temperature: τ.
        target_temperature: τ', the temperature of the mixture m.

    Shape:
        a, b: (N, d). references: (M, d), M >= 1. Output: scalar, >= 0.

    Raises:
        ValueError: If the shapes do not match, there is no reference, or a temperature is not positive.

    Reference:
        Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, 2022.

    Example:
        >>> import torch
        >>> from atoll.functional import relational
        >>> a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(relational(a, b, torch.eye(2), temperature=1.0, target_temperature=1.0).item(), 4)
        0.1201
    """
    check_rows(a=a, b=b)
    check_width(a, least=1, references=references)
    check_positive(temperature=temperature, target_temperature=target_temperature)
    reference = unit(references).T
    similar_a, similar_b = unit(a) @ reference, unit(b) @ reference
    log_a = (similar_a / temperature).log_softmax(dim=1)
    log_b = (similar_b / temperature).log_softmax(dim=1)
    target_a = (similar_a / target_temperature).log_softmax(dim=1)
    target_b = (similar_b / target_temperature).log_softmax(dim=1)
    log_m = torch.logaddexp(target_a, target_b) - math.log(2.0)
    return (log_m.exp() * (log_m - (log_a + log_b) / 2)).sum(dim=1).mean()
