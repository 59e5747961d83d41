"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020), option II.

    y ← y − η (g(y) − c_k + c)                             each local step
    c_k⁺ = c_k − c + (x − y) / (τ η)                       after τ steps from x
    x ← (1/|S|) Σ_{k∈S} y_k                                at the server
    c ← c + (1/K) Σ_{k∈S} (c_k⁺ − c_k)

The correction c − c_k is the gradient of the linear term ⟨c − c_k, y⟩, so SCAFFOLD is a term and works with any
objective. It applies to the parameters that are exchanged. Messages double in size in both directions.

(x − y) / η is the sum of the corrected gradients only for SGD without momentum. With momentum m, the i-th of τ
gradients has the factor (1 − m^(τ−i+1)) / (1 − m), and the sum of the factors, Σ_{j≤τ} (1 − m^j) / (1 − m),
replaces τ, so that c_k⁺ remains a mean of gradients. A velocity retained from the last round would include old
gradients; it is refused. Adam rescales each parameter, so no such factor exists; it is refused too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Batch, ClientContext, Passes, PerWeight, Setting, Spec, Term
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.models.norms import named_weights
from atoll.objectives.simclr import SimCLR


def effective_steps(steps: int, momentum: float) -> float:
    """Compute the effective number of steps with momentum: Σ_{j=1..τ} (1 − m^j) / (1 − m), which is τ for m = 0."""
    return sum((1 - momentum**j) / (1 - momentum) for j in range(1, steps + 1))


@dataclass(frozen=True)
class Scaffold(Term):
    """⟨c − c_k, y⟩.

    Attributes:
        weight: Factor of the correction; 1 is SCAFFOLD, 0 removes the term, and other values are refused.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "scaffold"
    source: ClassVar[str] = "Karimireddy et al. 2020 (SCAFFOLD), Eqs. 3-5, option II"
    egress: ClassVar[tuple[str, ...]] = ("its mean gradient, as the change of its control variate",)
    keeps: ClassVar[tuple[str, ...]] = ("its control variate",)

    def embeds(self) -> bool:
        """Return False: the loss reads only weights."""
        return False

    def refuse(self, setting: Setting) -> str | None:
        """Refuse optimisers and settings under which a client's steps do not determine its gradients."""
        if setting.train.optimizer != "sgd":
            return (
                f"'scaffold' computes gradients from a client's steps, which {setting.train.optimizer!r} rescales; "
                "set train.optimizer = 'sgd'"
            )
        if self.weight != 1:
            return (
                f"options.scaffold.weight is {self.weight}, but 'scaffold' corrects gradients without a factor; "
                "set it to 1"
            )
        if setting.train.momentum >= 1:
            return (
                f"train.momentum is {setting.train.momentum}, but 'scaffold' needs a value below 1; lower it"
            )
        if setting.train.momentum and setting.train.keep_optimizer:
            return (
                "'scaffold' computes a round's gradients from its steps, and a retained velocity would include "
                "those of earlier rounds; set train.momentum = 0 or train.keep_optimizer = false"
            )
        return None

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send c; None before the first fold, when c is zero."""
        return state

    def start(self, context: ClientContext) -> None:
        """Load c and c_k, and copy x."""
        scope = context.of(self)
        weights = named_weights(context.networks).items()
        scope.y = {name: p for name, p in weights if name in context.shared and p.requires_grad}
        scope.x = {name: p.detach().clone() for name, p in scope.y.items()}
        zero = {name: torch.zeros_like(p) for name, p in scope.x.items()}
        c, c_k = scope.message or zero, scope.retained or zero
        scope.c_k = {name: c_k[name].to(context.device) for name in scope.y}
        scope.correction = {name: c[name].to(context.device) - scope.c_k[name] for name in scope.y}

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """The linear term; its gradient is the correction."""
        scope = context.of(self)
        once = {y: name for name, y in scope.y.items()}  # a weight of two layers has two names
        products = [(scope.correction[name] * y).sum() for y, name in once.items()]
        return torch.stack(products).sum() if products else torch.zeros((), device=context.device)

    def finish(self, context: ClientContext) -> Tree:
        """Compute c_k⁺ − c_k = (x − y) / (τ η) − c; zero if the client took no step."""
        scope = context.of(self)
        rate = effective_steps(context.steps, context.setting.train.momentum) * context.lr
        scope.change = {
            name: (scope.x[name] - y.detach()) / rate - (scope.correction[name] + scope.c_k[name])
            if context.steps
            else torch.zeros_like(scope.x[name])
            for name, y in scope.y.items()
        }
        return scope.change

    def keep(self, context: ClientContext) -> Tree:
        """Retain c_k⁺."""
        scope = context.of(self)
        return {name: scope.c_k[name] + change for name, change in scope.change.items()}

    def declares(self, setting: Setting) -> Spec:
        """Declare a change for each trained weight of the update."""
        return PerWeight(without=setting.buffers)

    def fold(self, state: Tree, setting: Setting, round: int) -> ControlFold:
        """Start a round's sum."""
        return ControlFold(state, setting.num_clients)


class ControlFold:
    """c + (1/K) Σ (c_k⁺ − c_k)."""

    def __init__(self, c: Weights | None, clients: int) -> None:
        self._c = {name: tensor.clone() for name, tensor in (c or {}).items()}
        self._clients = clients

    def add(self, client: int, piece: Tree) -> None:
        """Add one client's change."""
        for name, change in piece.items():
            total = self._c.setdefault(name, torch.zeros_like(change))
            total.add_(change, alpha=1 / self._clients)

    def close(self) -> Tree:
        """Return the next c."""
        return self._c


METHOD = Method(
    objective=SimCLR(),
    terms=(Scaffold(),),
    aggregation=FedAvg(weights="uniform"),
    title="SCAFFOLD",
    paper="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, ICML 2020",
    family="Federated self-supervised methods",
)
