"""A GPU that is not there: tensors on another device, computed on the CPU, with a GPU's rules kept and noted.

A tensor on the device is a wrapper around one on the CPU, so a run on it has a CPU run's numbers. Two devices in
one operation are refused, as CUDA refuses them. What would make the host wait for a real GPU is noted, with the
phase of a client's round in which it happened: numbers and shapes that depend on tensors' values, copies back, and
uploads from memory that is not pinned.

PyTorch takes one such backend for a process, and for good; so tests run programs on it, `tests.simulated_rounds`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import simulated_streams

NAME = "simulated"
WAITS = {  # their result, or its shape, is in the tensors' values
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "equal", "is_nonzero", "histc", "allclose",
}  # fmt: skip
DRAWS = {
    "rand", "randn", "randint", "randperm", "bernoulli", "bernoulli_", "normal", "normal_", "uniform_",
    "multinomial", "native_dropout", "rand_like", "randn_like", "randint_like", "random_",
}  # fmt: skip
BESIDE = {"scalar_tensor", "ones", "zeros"}  # which C++ code makes beside tensors
MOVES = {"_to_copy", "copy_", "_foreach_copy_"}


class OnDevice(Tensor):
    """A tensor on the simulated device."""

    known_as: ClassVar[tuple] = (NAME, 0)  # to PyTorch's C++ code

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(*cls.known_as),
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def tolist(self):
        Device.notes[Device.phase, f"tolist ({_line()})"] += 1
        return self.held.tolist()

    def numpy(self, *, force=False):
        raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")


class Device(TorchDispatchMode):
    """Makes what is asked for on the device; `notes` counts what a GPU would have waited for, by phase."""

    phase = "before"
    notes: ClassVar[Counter] = Counter()
    steps = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """One operation: on the CPU, by the device's rules."""
    name = func.__name__.partition(".")[0]
    tensors: list[Tensor] = []
    _mapped(tensors.append, (args, kwargs))
    there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    asked = kwargs.get("device")
    inside = (
        bool(there) if asked is None else torch.device(asked).type == NAME or _takes_after(name, asked, there)
    )
    if there or inside:  # not for what is asked for on PyTorch's "meta" device
        kwargs = {**kwargs, **({} if asked is None else {"device": torch.device("cpu")})}
    if name == "copy_":
        inside = isinstance(args[0], OnDevice)
    _check(name, tensors, there, args)
    waits = _note(name, there, inside, args, kwargs)
    if name in ("_pin_memory", "is_pinned"):
        return _pinned(name, args[0])
    plain_args, plain_kwargs = _mapped(lambda t: t.held if isinstance(t, OnDevice) else t, (args, kwargs))
    if name == "_to_copy":
        plain_kwargs = {**plain_kwargs, "pin_memory": None}
    simulated_streams.read([tensor.held for tensor in there], f"{name} ({_line()})")
    made = func(*plain_args, **plain_kwargs)
    written = [tensor.held for tensor in there] if name.endswith("_") else []
    if inside:
        _mapped(written.append, made)
    simulated_streams.write(written)
    if waits:
        simulated_streams.synchronise()
    if not inside or name == "_local_scalar_dense":
        return made
    known = {
        id(tensor.held): tensor for tensor in there
    }  # an operation in place gives back what it was given
    return _mapped(lambda tensor: known[id(tensor)] if id(tensor) in known else OnDevice(tensor), made)


def _takes_after(name: str, asked: Any, there: list[Tensor]) -> bool:
    """Whether C++ code makes a tensor beside those of `tests.simulated_cuda`, which it takes for meta tensors."""
    return NAME == "cuda" and torch.device(asked).type == "meta" and (bool(there) or name in BESIDE)


def _mapped(change: Callable[[Tensor], Any], values: Any) -> Any:
    """The values with every tensor changed; PyTorch's own walk over trees is slower than the operations here."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([_mapped(change, value) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    return values


def _check(name: str, tensors: list[Tensor], there: list[Tensor], args) -> None:
    """Refuse two devices in one operation; numbers, and indices into a tensor of the device, may be the host's."""
    here = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    if not there or not here or name in MOVES:
        return
    if name in ("index", "index_put", "index_put_", "_index_put_impl_") and isinstance(args[0], OnDevice):
        Device.notes[Device.phase, f"{name} with indices of the host"] += 1
        return
    raise RuntimeError(
        f"{name}: tensors of two devices, {[(tuple(t.shape), t.device.type) for t in tensors]} ({_line()})"
    )


def _note(name: str, there: list[Tensor], inside: bool, args, kwargs) -> bool:
    """Note what a GPU would have to be waited for; return whether the host waits for what the stream has to do."""
    note = ""
    if name in WAITS and there:
        note = name
    elif name.startswith("index") and there and len(args) > 1 and _masks(args[1]):
        note = f"{name} by a mask"
    elif name in DRAWS and inside:
        note = f"{name} drawn on the device"
    elif name in MOVES:
        source = args[0] if name == "_to_copy" else args[1]
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        for one in source if isinstance(source, list) else [source]:
            if isinstance(one, OnDevice) and not inside:
                note = "copy to the host"
            elif not isinstance(one, OnDevice) and inside and (blocking or not getattr(one, "pinned", False)):
                note = "upload that waits"
    if note:
        Device.notes[Device.phase, f"{note} ({_line()})"] += 1
    return bool(note) and "drawn" not in note


def _masks(indices) -> bool:
    listed = indices if isinstance(indices, list | tuple) else [indices]
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in listed)


def _pinned(name: str, tensor: Tensor):
    if name == "is_pinned":
        return getattr(tensor, "pinned", False)
    copy = tensor.clone()
    copy.pinned = True
    return copy


def _line() -> str:
    """The line of the program, not of PyTorch or of this file, that is at work."""
    frame = sys._getframe(1)
    last = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/atoll/" in name:
            return f"{name.split('/atoll/')[-1]}:{frame.f_lineno}"
        if not last and "site-packages" not in name and name != __file__:
            last = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return last or "in backward"


def install() -> None:
    """Make the device known to this process, for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.__future__.set_swap_module_params_on_conversion(True)


def rules() -> None:
    """What the device must refuse and note; it is of no use if it does not."""
    host, device = torch.arange(3.0), torch.device(NAME, 0)

    def noted(work) -> list[str]:
        Device.notes = Counter()
        work()
        return [what.split(" (")[0] for _, what in Device.notes]

    with Device():
        there = host.pin_memory().to(device, non_blocking=True)
        assert there.device == device
        for wrong in (lambda: there + host, lambda: torch.cat([there, host]), lambda: there.add_(host)):
            try:
                wrong()
            except RuntimeError as refusal:
                assert "two devices" in str(refusal)  # noqa: PT017
            else:
                raise AssertionError("two devices went into one operation")
        assert noted(lambda: there * 2 + host[0] + torch.ones(3, device=device)) == []
        assert noted(lambda: host.pin_memory().to(device, non_blocking=True)) == []
        assert noted(lambda: host.to(device)) == noted(lambda: there.copy_(host)) == ["upload that waits"]
        assert noted(lambda: host.to(device, non_blocking=True)) == ["upload that waits"]
        assert noted(there.cpu) == ["copy to the host"]
        assert noted(lambda: there.sum().item()) == noted(lambda: float(there[0])) == ["_local_scalar_dense"]
        assert noted(lambda: bool((there > 1).any())) != []
        assert noted(lambda: there.nonzero()) == ["nonzero"]
        assert noted(lambda: there[there > 1]) == ["index by a mask"]
        assert noted(lambda: torch.rand(2, device=device)) == ["rand drawn on the device"]
        assert noted(lambda: there.uniform_()) == ["uniform_ drawn on the device"]
