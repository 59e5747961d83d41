"""The federation in one process: images, their partition, networks, and the method."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atoll.components.base import Setting, init_seed, seeded
from atoll.components.messages import Slices
from atoll.components.results import returned
from atoll.core.allocator import keep_freed_memory
from atoll.core.errors import UserError, warn
from atoll.core.tree import Weights
from atoll.data.client_data import FederatedClient
from atoll.data.decode_workers import DecodeWorkers, is_streamed
from atoll.data.images import DevicePixels, ImageSet
from atoll.data.partition.partition import Partition
from atoll.data.source_warnings import warn_of_classes
from atoll.data.sources import Splits, load_data, settled
from atoll.data.views.views import Views, is_local, make_views, try_transform
from atoll.engines.client import Client
from atoll.engines.observer import refuse_measures
from atoll.engines.partitioning import (
    client_images,
    described,
    evaluation_splits,
    initial_encoder,
    partition_clients,
    why_too_small,
)
from atoll.engines.update_checks import SizeLimit, max_update_size
from atoll.engines.weight_names import buffer_names, travelling_names, update_names
from atoll.evaluation.embed import feature_maps
from atoll.models import Encoder, build_encoder, build_projector, load_pretrained, load_weights
from atoll.models.adapters import add_adapters, freeze, has_adapters, without_adapters
from atoll.models.encoder import refuse_crops
from atoll.models.files import encoder_file
from atoll.models.layout import memory_layout
from atoll.models.norms import named_weights
from atoll.recipe.recipe import Recipe

RESIDENT_BYTES = 2**31  # of images that a process may keep on its GPU: CIFAR-10 takes a fourteenth


class Federation:
    """The loaded images, their partition, and the networks.

    `images` are the clients' training images, and `splits` the images of the evaluation; they differ if the recipe
    shifts the clients' images.

    Args:
        recipe: The run's recipe.
        splits: Images already loaded; None to load them.
        partition: The images of each client; None to partition them as the recipe says. If clients hold images that
            are not in ``splits``, it contains their number and their classes.

    Raises:
        UserError: The data, the partition, the model and the method are not compatible.
    """

    def __init__(
        self, recipe: Recipe, splits: Splits | None = None, partition: Partition | None = None
    ) -> None:
        self.recipe = recipe
        if splits is None:
            recipe = self.recipe = replace(recipe, data=settled(recipe.data))
            splits = load_data(recipe.data, recipe.seed)
            warn_of_classes(splits.train, splits.test, recipe.data.limit)
        self.partition = described(partition or _partition(splits.train, recipe), recipe)
        self.images = client_images(splits.train, self.partition, recipe)
        self.splits = evaluation_splits(splits, self.partition, recipe)
        channels, size = recipe.data.channels, recipe.data.image_size
        self.views: Views = make_views(recipe.views, size, channels)
        try_transform(self.views)
        encoder, projector = _encoder_and_projector(recipe)
        this = weakref.proxy(self)  # a cycle would keep memory, also on a GPU, until Python's collector runs
        self.setting = _setting(
            recipe, self.partition, encoder, projector, lambda draw: this.further_initial_weights(draw)
        )
        if reason := recipe.composed.refuse(self.setting) or refuse_measures(recipe, self.splits):
            raise UserError(reason)
        maps = recipe.evaluation.reading_maps()
        if maps and feature_maps(encoder) is None:
            raise UserError(
                f"the protocol {maps[0]!r} reads feature maps before the global pooling, and model.encoder = "
                f"{recipe.model.encoder!r} has none; remove it from the recipe's evaluation, or choose a ResNet"
            )
        if any(is_local(name) for name in recipe.composed.images):
            refuse_crops(encoder, channels, self.views.local.size)
        self.warm_start = ""
        self._base: Weights = {}
        self.device = recipe.engine.use_device()
        self.networks = _assemble(recipe, self.setting, encoder, projector).to(self.device)
        freeze(self.networks, recipe.model)
        self.setting = self._with_names(self.setting)
        method = recipe.composed  # `refuse` again, because the setting now names the weights
        if reason := method.refuse(self.setting) or method.refuse_networks(self.networks):
            raise UserError(reason)
        self.layout = memory_layout(self.networks, recipe.engine.uses_channels_last())
        self.networks.to(memory_format=self.layout)

    def _with_names(self, setting: Setting) -> Setting:
        """Add the names of the weights to a setting."""
        method, model = self.recipe.composed, self.recipe.model
        trained = {name for name, weight in named_weights(self.networks).items() if weight.requires_grad}
        names = self.networks.state_dict().keys()
        some_stay = model.freeze or model.lora_rank or method.splits_weights
        return replace(
            setting,
            buffers=frozenset(names - trained),
            running_statistics=frozenset(buffer_names(self.networks)),
            local_only=frozenset(names - self.update_names()),
            base_names=frozenset(names - travelling_names(method, self.networks) if some_stay else ()),
        )

    @property
    def encoder(self) -> Encoder:
        """The encoder."""
        encoder = self.networks["encoder"]
        assert isinstance(encoder, Encoder)  # noqa: S101
        return encoder

    def initial_weights(self) -> Weights:
        """Return the initial model that server and clients share; call this before training.

        Afterwards ``warm_start`` describes which weights ``model.weights`` or a warm start loaded, and which it
        could not use.

        Raises:
            UserError: The recipe's ``model.weights`` or ``train.start`` cannot be loaded.
        """
        self._load_start(self.encoder)
        start = {name: value.detach().cpu().clone() for name, value in self.networks.state_dict().items()}
        self._base = {name: start[name] for name in self.setting.base_names}
        return start

    def load(self, weights: Weights) -> Encoder:
        """Load a model into the networks and return the encoder; weights that no model contains are initial."""
        self.networks.load_state_dict({**self.networks.state_dict(), **self._base, **weights})
        return self.encoder

    def further_initial_weights(self, draw: int) -> Weights:
        """Draw a further initial model, independent of the shared one; ``draw`` counts from 1.

        A warm start also applies to its encoder; then only the other networks are independent.
        """
        encoder, projector = _encoder_and_projector(self.recipe, draw)
        self._load_start(encoder)
        networks = _assemble(self.recipe, replace(self.setting, draw=draw), encoder, projector)
        base = self.setting.base_names
        return {name: value.detach() for name, value in networks.state_dict().items() if name not in base}

    def _load_start(self, encoder: Encoder) -> None:
        model = self.recipe.model
        if has_adapters(encoder) and (model.weights or self.recipe.train.start):  # files contain no adapters
            plain = build_encoder(model, *self.recipe.image_shape[:2])
            self._load_start(plain)
            inner, known = without_adapters(encoder.state_dict()), plain.state_dict()
            with torch.no_grad():
                for name, weight in inner.items():
                    weight.copy_(known[name])
            return
        if model.weights:
            self.warm_start = str(load_pretrained(encoder, model.weights, model.weights_least))
        if self.recipe.train.start:
            path = Path(self.recipe.train.start)
            if path.is_file():
                warn(
                    "a file in train.start is now model.weights; train.start will take a run's folder alone in 0.3",
                    DeprecationWarning,
                )
            self.warm_start = load_weights(encoder, encoder_file(path))

    def update_names(self) -> set[str]:
        """Names of the weights that an update must contain."""
        return update_names(self.recipe.composed, self.recipe.train, self.networks)

    def max_update_size(self) -> SizeLimit | None:
        """Largest size of a serialised update; None if it may contain more than is declared."""
        return max_update_size(self.recipe.composed, self.setting, self.sent_weights())

    def sent_weights(self) -> Weights:
        """The networks' weights that an update must contain."""
        names = self.update_names()
        return {name: weight for name, weight in self.networks.state_dict().items() if name in names}

    def client_side(self, constants: Slices, networks: nn.ModuleDict | None = None) -> Client:
        """Create the client side of the method, by default to train the networks of this process."""
        keep_freed_memory()
        return Client(self.recipe.composed, self.setting, networks or self.networks, constants)

    def client_data(self, client: int) -> FederatedClient:
        """Samples of a client."""
        train = self.recipe.train
        return FederatedClient(
            self.placed_images, self.partition.clients[client], client, self.views, self.recipe.seed,
            train.batch_size, train.drop_last, self.device, self.layout, self._decoders,
        )  # fmt: skip

    @cached_property
    def placed_images(self) -> ImageSet:
        """The clients' images, on the training GPU if they take little of its memory.

        They have labels only if the method declares that it trains on labels.
        """
        pixels, labels = self.images.images, self.images.labels if self.recipe.composed.needs_labels else None
        here = self.device.type == "cpu" or is_streamed(pixels) or math.prod(pixels.shape) > RESIDENT_BYTES
        placed = pixels if here else DevicePixels(pixels, self.device)
        return replace(self.images, images=placed, labels=labels)

    @cached_property
    def _decoders(self) -> DecodeWorkers:
        pixels = self.placed_images.images
        return DecodeWorkers(pixels, self.recipe.engine.decoders if is_streamed(pixels) else 0)

    def client_ids(self) -> Tensor:
        """Client of each training sample, of shape (N,); −1 for samples that no client holds."""
        return self.partition.client_ids(self.splits.train)


def _partition(images: ImageSet, recipe: Recipe) -> Partition:
    partition = partition_clients(images, recipe)
    if words := why_too_small(partition):
        raise UserError(words)
    return partition


def _encoder_and_projector(recipe: Recipe, draw: int = 0) -> tuple[Encoder, nn.Module]:
    encoder = initial_encoder(recipe, draw)
    model = recipe.model
    if model.lora_rank:
        rank, alpha = model.lora_rank, model.lora_alpha or model.lora_rank
        seeded(
            init_seed(recipe.seed, "lora", draw),
            lambda: add_adapters(encoder, rank, alpha, model.lora_targets),
        )
    projector = seeded(
        init_seed(recipe.seed, "projector", draw), lambda: build_projector(recipe.model, encoder.dim)
    )
    return encoder, projector


def _setting(
    recipe: Recipe,
    partition: Partition,
    encoder: Encoder,
    projector: nn.Module,
    further_models: Callable[[int], Weights],
) -> Setting:
    """The setting before the networks exist; the names of their weights are added later."""
    projector.eval()
    with torch.no_grad():
        embedding_dim = projector(torch.zeros(1, encoder.dim)).shape[1]
    projector.train()
    setting = Setting(
        seed=recipe.seed,
        num_clients=len(partition.clients),
        image_shape=recipe.image_shape,
        num_classes=len(partition.classes),
        encoder_dim=encoder.dim,
        embedding_dim=embedding_dim,
        train=recipe.train,
        model=recipe.model,
        sizes=tuple(partition.sizes),
        personal=recipe.composed.personalises(recipe.train),
        checkpoint_every=recipe.engine.checkpoint_every,
        further_models=further_models,
    )
    return replace(setting, cohort_size=recipe.composed.aggregation.cohort_size(setting))


def _shapes(network: nn.Module) -> list[torch.Size]:
    return [tensor.shape for tensor in network.parameters()]


def _assemble(recipe: Recipe, setting: Setting, encoder: nn.Module, projector: nn.Module) -> nn.ModuleDict:
    networks = nn.ModuleDict({"encoder": encoder})
    if recipe.composed.embeds:
        networks["projector"] = projector
    for component in recipe.composed.components:
        heads = seeded(
            init_seed(recipe.seed, component.name, setting.draw),
            partial(component.heads, setting),
        )
        heads = returned(component, "heads", heads, Mapping, "a dict of modules by name")
        for name, head in heads.items():
            if name not in networks:
                try:
                    networks[name] = head
                except (KeyError, TypeError) as error:  # a name such as "items", an attribute of a ModuleDict
                    raise UserError(
                        f"the head {name!r} of {component.name!r} cannot be added ({error.args[0]}); heads() "
                        "returns modules by name, without dots"
                    ) from None
                if any(map(is_lazy, head.parameters())):
                    raise UserError(
                        f"the head {name!r} of {component.name!r} has weights without a size, as of LazyLinear; "
                        "give its layers their sizes, such as setting.embedding_dim"
                    )
            elif _shapes(networks[name]) != _shapes(head):
                raise UserError(
                    f"the head {name!r} of {component.name!r} has other sizes than the network of this name that "
                    "the method already has; leave one of them out, or give it another name"
                )
    return networks
