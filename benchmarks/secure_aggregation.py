"""Price of secure aggregation: seconds at a client and at the server, and bytes, for sizes of models and cohorts.

    python benchmarks/secure_aggregation.py [--json FILE]

One round in one process, without training and without messages: each client draws keys, shares its secrets and
masks its step; as many as may drop out do so after the shares; the server adds and opens. Plain is the float32
update. The sum is compared with that of the terms, number by number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atoll.aggregation.secure_sum import MODULUS, SecureSum
from atoll.core.tree import pack
from atoll.engines.flower.masks import make_keys, mask, reveal, share_secrets, to_numbers, unmask
from measured import write

CASES = (
    (270_000, 4),
    (270_000, 10),
    (270_000, 20),
    (11_000_000, 4),
)  # weights (11 million: a ResNet-18), clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(size, clients) for size, clients in CASES]
    for row in rows:
        print(row)
    write(options.json, {"seed": 0, "rows": rows}, ("flwr",))


def measure(size: int, clients: int) -> dict[str, float]:
    draws = torch.Generator().manual_seed(0)
    levels = (MODULUS - 1) // clients
    term = torch.randint(levels, (size,), generator=draws)
    threshold = SecureSum().least(clients)
    everyone, stayed = list(range(clients)), list(range(threshold))
    states, keys, boxes, seconds = {}, {}, {}, dict.fromkeys(everyone, 0.0)
    sent = dict.fromkeys(everyone, 0)
    received = dict.fromkeys(everyone, 0)

    def timed(k: int, function: Callable[..., Any], *arguments: object) -> Any:
        begun = time.perf_counter()
        result = function(*arguments)
        seconds[k] += time.perf_counter() - begun
        return result

    for k in everyone:
        states[k], keys[str(k)] = timed(k, make_keys)
        sent[k] += len(pack(keys[str(k)]))
    for k in everyone:
        received[k] += len(pack(keys))
        states[k], boxes[k], commitments = timed(k, share_secrets, states[k], k, keys, threshold)
        sent[k] += len(pack(boxes[k])) + len(pack(commitments))
    total, adding = torch.zeros(size, dtype=torch.int64), 0.0
    for k in stayed:
        incoming = {str(other): box[str(k)] for other, box in boxes.items() if other != k}
        received[k] += len(pack(incoming))
        states[k], masked = timed(k, mask, states[k], k, incoming, term)
        sent[k] += len(pack(masked))
        begun = time.perf_counter()
        total = (total + to_numbers(masked)) % MODULUS
        adding += time.perf_counter() - begun
    revealed = []
    for k in stayed:
        revealed.append(timed(k, reveal, states[k], k, stayed))
        sent[k] += len(pack(revealed[-1]))
    begun = time.perf_counter()
    opened = unmask(total, keys, stayed, {k: [shares[str(k)] for shares in revealed] for k in everyone})
    opening = time.perf_counter() - begun
    assert torch.equal(opened, threshold * term % MODULUS)
    return {
        "weights": size,
        "clients": clients,
        "dropped": clients - threshold,
        "client_seconds": statistics.median(seconds[k] for k in stayed),
        "server_seconds": adding + opening,
        "client_bytes_up": statistics.median(sent[k] for k in stayed),
        "client_bytes_down_more": statistics.median(received[k] for k in stayed),
        "plain_bytes_up": 4 * size,
    }


if __name__ == "__main__":
    main()
