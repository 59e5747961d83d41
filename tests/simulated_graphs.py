"""CUDA graphs on a CPU: the operations of a step are recorded, undone, and replayed on the same memory.

A replay calls the recorded operations with the tensors and numbers of the recording, as a GPU does. So what a step
takes from Python, such as a counter or a random draw, stays what it was when the step was recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from atoll.components.base import ClientContext
from atoll.engines.step_graphs import StepGraph, can_replay


class Tape(TorchDispatchMode):
    """Records operations."""

    def __init__(self):
        super().__init__()
        self.operations, self._before, self._made = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        if "batch_norm" in func.name():  # writes running statistics, which its schema does not say
            written += args
        for tensor in tensors(written):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self._made | self._before.keys():
                self._before[memory.data_ptr()] = (memory, memory.clone())
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        self._made |= {t.untyped_storage().data_ptr() for t in tensors(out)} - known
        self.operations.append((func, args, kwargs, out))
        return out

    def undo(self):
        """A GPU computes nothing while it records."""
        for memory, before in self._before.values():
            memory.copy_(before)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class Recorder:
    """Counts what was recorded, and how often it was replayed."""

    def __init__(self):
        self.recorded, self.replayed = 0, 0

    def record(self, work):
        tape = Tape()
        with tape:
            work()
        tape.undo()
        self.recorded += 1
        return Counted(self, tape)


class Counted:
    def __init__(self, recorder, tape):
        self._recorder, self._tape = recorder, tape

    def replay(self):
        self._recorder.replayed += 1
        self._tape.replay()


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def use_simulated_graphs(monkeypatch):
    """Clients record and replay from now on, on the CPU; returns the recorder of all of them."""
    recorder = Recorder()

    def step_graph(method, train, device):
        return StepGraph(recorder) if can_replay(method, train) else None

    def from_host(context, make):
        def outside():
            with _disable_current_modes():  # a GPU records nothing of what a CPU does
                return make()

        return usual(context, outside)

    usual = ClientContext.from_host
    monkeypatch.setattr(ClientContext, "from_host", from_host)
    monkeypatch.setattr("atoll.engines.client.step_graph", step_graph)
    return recorder
