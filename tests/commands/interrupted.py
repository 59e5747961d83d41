"""Runs that are resumed after their folder or their code has changed."""

from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from tests.harness import tiny

# Each client keeps a state: its optimiser's.
SETTINGS = ("train.keep_optimizer=true", "data.limit=40", "partition.clients=2", "method.name=fed_simclr")
LONGER = (*SETTINGS, "train.rounds=3")


def flip(path, byte=-3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def resume(folder, *settings, **recovery):
    return run_recipe(tiny(*LONGER, *settings), folder, resume=True, recovery=Recovery(**recovery))


OWN = """
from dataclasses import dataclass
from atoll.components.base import Forward, Term
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

@dataclass(frozen=True)
class Small(Term):
    name = "small"

    def forwards(self):
        return (Forward("view1"),)

    def loss(self, context, batch, passes):
        return passes[Forward("view1")].z.square().mean() * 0.1

METHOD = Method(objective=SimCLR(), terms=(Small(),))
"""
