"""Flower's FedAvg on a ResNet-18, without training: the reference of `benchmarks/flower.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from atoll.models import ModelOptions, build_encoder

client = ClientApp()
server = ServerApp()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_encoder(ModelOptions(encoder="resnet18"), 3, 32)


@client.train()
def train(message: Message, context: Context) -> Message:
    network = model()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    content = RecordDict()
    content["arrays"] = ArrayRecord(network.state_dict())
    content["metrics"] = MetricRecord({"num-examples": 10})
    return Message(content, reply_to=message)


class Timed(FedAvg):
    """Records the duration of each round."""

    seconds: list[float]
    # ruff: noqa: D102

    def configure_train(self, *arguments: Any, **options: Any) -> Any:
        self.started = time.perf_counter()
        return super().configure_train(*arguments, **options)

    def aggregate_train(self, *arguments: Any, **options: Any) -> Any:
        folded = super().aggregate_train(*arguments, **options)
        self.seconds.append(time.perf_counter() - self.started)
        return folded


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)
    strategy.seconds = []
    rounds, out = int(context.run_config["rounds"]), Path(str(context.run_config["out"]))
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=rounds)
    out.write_text(json.dumps(strategy.seconds))
