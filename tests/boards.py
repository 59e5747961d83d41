"""A small board, as board.toml describes one."""

from typing import Any

TABLE: dict[str, Any] = {
    "objectives": ["plain", "warm"],
    "tuning": {
        "recipe": "digits",
        "seed": 17,
        "settings": ["train.rounds=1"],
        "rates": [0.1, 0.3],
        "temperatures": [0.2, 0.5],
    },
    "protocols": {
        "short": {"recipe": "digits", "seeds": [0, 1]},
        "long": {"recipe": "digits", "seeds": [0]},
    },
    "rows": [
        {"name": "plain", "title": "Plain", "method": "fed_align_uniform"},
        {
            "name": "warm",
            "title": "Warm",
            "method": "fed_simclr",
            "base": "plain",
            "temperature": ["options.simclr.temperature"],
        },
        {
            "name": "over",
            "title": "Over",
            "settings": ["method.server=fedavgm"],
            "tuning": ["train.rounds=3"],
        },
        {
            "name": "line",
            "title": "Line",
            "settings": ["partition.kind=centralised"],
            "choice_of": "over",
            "line": True,
            "short": ["train.rounds=2"],
        },
    ],
}
