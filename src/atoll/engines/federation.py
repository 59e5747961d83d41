"""A federation in one process's eyes: images, who holds which, networks, and the method that runs over them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.data.client import FederatedClient
from atoll.data.images import ImageSet
from atoll.data.options import DataOptions
from atoll.data.partitions import Partition, PartitionOptions, partition_images
from atoll.data.sources import Splits, load_data, settled
from atoll.data.view_options import ViewOptions
from atoll.data.views import Views, make_views
from atoll.engines.options import EngineOptions
from atoll.errors import UserError
from atoll.evaluation import EvaluationOptions
from atoll.methods.client import Client, buffer_names, update_names
from atoll.methods.method import Method
from atoll.models import Encoder, ModelOptions, build_encoder, build_projector, load_weights
from atoll.parts import Setting, init_seed, seeded
from atoll.training import TrainOptions
from atoll.tree import Tree, Weights


@dataclass(frozen=True)
class Plan:
    """A run as objects: what an engine needs, and all that a worker process is given.

    Attributes:
        method: to run.
        seed: every random stream comes from it.
        data: where the images come from.
        partition: which client holds which.
        views: augmentation.
        model: encoder and heads.
        train: how clients train.
        evaluation: what is measured, and when.
        engine: where it runs.
    """

    method: Method
    seed: int = 0
    data: DataOptions = field(default_factory=DataOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    views: ViewOptions = field(default_factory=ViewOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)


class Federation:
    """The loaded images, their partition, and what is built on them.

    Args:
        plan: of the run.
        splits: images already loaded; None: load them.
        partition: which client holds which of them; None: as the plan says. Where clients hold images that are not
            among ``splits``, it tells how many and of which classes.

    Raises:
        UserError: data, partition, model and method do not fit together.
    """

    def __init__(self, plan: Plan, splits: Splits | None = None, partition: Partition | None = None) -> None:
        self.plan = plan
        if splits is None:
            plan = self.plan = replace(plan, data=settled(plan.data))
        self.splits = splits or load_data(plan.data, plan.seed)
        self.partition = partition or _deal(self.splits.train, plan)
        channels, size = plan.data.channels, plan.data.image_size
        self.views: Views = make_views(plan.views, size, channels)
        encoder, projector = _bodies(plan)
        self.setting = replace(
            _dimensions(plan, encoder, projector),
            num_clients=len(self.partition.clients),
            num_classes=len(self.partition.classes),
            sizes=tuple(self.partition.sizes),
            personal=plan.method.personalises(plan.train),
            fresh=self.fresh_weights,
        )
        if reason := plan.method.refuse(self.setting):
            raise UserError(reason)
        self.warmed = ""
        self.device = plan.engine.find_device()
        self.networks = _assemble(plan, self.setting, encoder, projector).to(self.device)
        trained = {name for name, weight in self.networks.named_parameters() if weight.requires_grad}
        names = self.networks.state_dict().keys()
        self.setting = replace(
            self.setting,
            buffers=frozenset(names - trained),
            stays=frozenset(names - self.update_names()),
        )
        if reason := plan.method.refuse_networks(self.networks):
            raise UserError(reason)
        if plan.engine.channels_last:
            self.networks.to(memory_format=torch.channels_last)

    @property
    def encoder(self) -> Encoder:
        """The encoder among the networks."""
        encoder = self.networks["encoder"]
        assert isinstance(encoder, Encoder)  # noqa: S101
        return encoder

    def initial_weights(self) -> Weights:
        """The one initial model that server and clients share; call before anything trains.

        What a warm start took, and what it could not use, is then in ``warmed``.

        Raises:
            UserError: the recipe's ``train.start`` cannot be loaded.
        """
        self._warm(self.encoder)
        return {name: value.detach().cpu().clone() for name, value in self.networks.state_dict().items()}

    def fresh_weights(self, draw: int) -> Weights:
        """A further initial model, independent of the one that all share; ``draw`` counts from 1.

        A warm start warms its encoder, too: what is independent then is the rest.
        """
        encoder, projector = _bodies(self.plan, draw)
        self._warm(encoder)
        networks = _assemble(self.plan, replace(self.setting, draw=draw), encoder, projector)
        return {name: value.detach() for name, value in networks.state_dict().items()}

    def _warm(self, encoder: Encoder) -> None:
        if self.plan.train.start:
            path = Path(self.plan.train.start)
            self.warmed = load_weights(encoder, path / "encoder.safetensors" if path.is_dir() else path)

    def update_names(self) -> set[str]:
        """Names of the weights that an update must hold."""
        return update_names(self.plan.method, self.plan.train, self.networks)

    def buffer_names(self) -> set[str]:
        """Names of BatchNorm's running statistics."""
        return buffer_names(self.networks)

    def client_side(self, constants: Tree) -> Client:
        """The client's side of the method, on this process's networks."""
        return Client(self.plan.method, self.setting, self.networks, constants)

    def client_data(self, client: int) -> FederatedClient:
        """A client's samples."""
        train = self.plan.train
        return FederatedClient(
            self.splits.train, self.partition.clients[client], client, self.views, self.plan.seed,
            train.batch_size, train.drop_last, self.device, self.plan.engine.channels_last,
        )  # fmt: skip

    def client_ids(self) -> Tensor:
        """(N,) the client of each training sample; −1 for samples that no client holds."""
        return self.partition.client_ids(self.splits.train)


def _deal(images: ImageSet, plan: Plan) -> Partition:
    partition = partition_images(images, plan.partition, plan.seed)
    small = [k for k, size in enumerate(partition.sizes) if size < 2]
    if small:
        raise UserError(
            f"client {small[0]} has {partition.sizes[small[0]]} sample(s), and training needs at least 2 in a "
            "batch; use fewer clients, more samples or a larger partition.min_size"
        )
    return partition


def _image_shape(plan: Plan) -> tuple[int, int, int]:
    size = plan.views.size or plan.data.image_size
    return plan.data.channels, size, size


def _bodies(plan: Plan, draw: int = 0) -> tuple[Encoder, nn.Module]:
    channels, size, _ = _image_shape(plan)
    encoder = seeded(init_seed(plan.seed, "encoder", draw), lambda: build_encoder(plan.model, channels, size))
    projector = seeded(
        init_seed(plan.seed, "projector", draw), lambda: build_projector(plan.model, encoder.dim)
    )
    return encoder, projector


def _dimensions(plan: Plan, encoder: Encoder, projector: nn.Module) -> Setting:
    projector.eval()
    with torch.no_grad():
        embedding_dim = projector(torch.zeros(1, encoder.dim)).shape[1]
    projector.train()
    return Setting(
        seed=plan.seed,
        num_clients=0,
        image_shape=_image_shape(plan),
        num_classes=0,
        encoder_dim=encoder.dim,
        embedding_dim=embedding_dim,
        train=plan.train,
        model=plan.model,
        checkpoint_every=plan.engine.checkpoint_every,
    )


def _assemble(plan: Plan, setting: Setting, encoder: nn.Module, projector: nn.Module) -> nn.ModuleDict:
    networks = nn.ModuleDict({"encoder": encoder})
    if any(part.embeds() for part in plan.method.parts):
        networks["projector"] = projector
    for part in plan.method.parts:
        heads = seeded(init_seed(plan.seed, part.name, setting.draw), lambda part=part: part.heads(setting))
        for name, head in heads.items():
            if name not in networks:
                networks[name] = head
    return networks
