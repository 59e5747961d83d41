"""Devices of computations, and the upload of tensors to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import UserError


def check_device(name: str, option: str) -> None:
    """Check the name of a device; `find_device` also checks that the device exists.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``…
        option: The option that holds the name, for the error message.

    Raises:
        UserError: It names none of these.
    """
    if name != "auto":
        with contextlib.suppress(RuntimeError):
            if torch.device(name).type in ("cpu", "cuda"):
                return
        raise UserError(f"{option} is {name!r}; use auto, cpu or cuda")


def find_device(name: str, option: str) -> torch.device:
    """Return the device of a name; for ``"auto"`` a GPU if there is one.

    Raises:
        UserError: The name names no device, or requires a GPU that is not there.
    """
    check_device(name, option)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{option} names {name}, and PyTorch finds no GPU; name cpu instead")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{option} is {name}, and PyTorch finds {', '.join(_gpus())}; use one of them")
    return device


def find_devices(names: Sequence[str], option: str) -> list[torch.device]:
    """Return the devices of a list of names; for ``"auto"`` instead of a list, all GPUs, or the CPU without any.

    Raises:
        UserError: A GPU is missing, or the devices are of several kinds, so that the weights would depend on which
            device trains which client.
    """
    if names == "auto":
        names = _gpus() or ["cpu"]
    devices = [find_device(name, option) for name in names]
    kinds = {device_kind(device): name for name, device in zip(names, devices, strict=True)}
    if len(kinds) > 1:
        found = " and ".join(f"{name} ({kind})" for kind, name in list(kinds.items())[:2])
        raise UserError(
            f"{option} has devices of different kinds, {found}, which round differently; name devices of one kind"
        )
    return devices


def use_gpu(device: torch.device) -> None:
    """Make a GPU the current one of this thread; operations without a device, such as pinning, would use the first.

    A device without a number means the current one; `torch.cuda.set_device` would refuse it.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def make_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of a GPU, whose kernels run beside those of other streams."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def repeat_results(device: torch.device, wanted: bool = True) -> None:
    """Make a GPU's kernels return the same bits each time, where PyTorch has such kernels.

    The usual kernels may add in any order in which their threads end. PyTorch only warns of operations without a
    deterministic kernel, because an error would stop methods that need them. With warnings, fused attention would
    remain nondeterministic, so attention is computed with matrix products. `settings_kept` undoes these settings.

    In any case, float32 convolutions compute in float32, like matrix products, and not in TF32.
    """
    if device.type == "cuda":
        if tf32_convolutions():
            torch.backends.cudnn.allow_tf32 = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, PyTorch warns of cuBLAS
        # Filling memory before it is written would cost a pass over it, and no result depends on that.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if wanted:  # cuDNN's search picks the kernel that is fastest now, and kernels round differently
            torch.backends.cudnn.benchmark = False
        # `use_deterministic_algorithms` would do the same, but import PyTorch's compiler in each process.
        torch.set_deterministic_debug_mode("warn" if wanted else "default")
        set_attention(_PLAIN_ATTENTION if wanted else _ANY_ATTENTION)


class Attention(NamedTuple):
    """The kernels that PyTorch's attention may use.

    Attributes:
        flash, efficient, cudnn: The fused ones.
        plain: Products of matrices.
        half: Whether the plain kernels compute in autocast's type, like the fused ones, or in float32.
    """

    flash: bool
    efficient: bool
    cudnn: bool
    plain: bool
    half: bool


_PLAIN_ATTENTION = Attention(flash=False, efficient=False, cudnn=False, plain=True, half=True)
# PyTorch's initial settings.
_ANY_ATTENTION = Attention(flash=True, efficient=True, cudnn=True, plain=True, half=False)


def attention() -> Attention:
    """The kernels that attention may use now."""
    cuda: Any = torch.backends.cuda  # its functions have no types
    return Attention(
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )


def set_attention(kernels: Attention) -> None:
    """Set the kernels that attention may use."""
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(kernels.flash)
    cuda.enable_mem_efficient_sdp(kernels.efficient)
    cuda.enable_cudnn_sdp(kernels.cudnn)
    cuda.enable_math_sdp(kernels.plain)
    cuda.allow_fp16_bf16_reduction_math_sdp(kernels.half)


def tf32_convolutions() -> bool | None:
    """Whether a GPU's convolutions may round float32 to TF32's 10 bits; None if this is set per operation."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # PyTorch does not mix the two ways to set it
        return None


def device_kind(device: torch.device) -> str:
    """Model of a device; with the same libraries, devices of the same model compute the same numbers."""
    gpu = device.type == "cuda"
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}" if gpu else device.type


def _gpus() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, without waiting for a GPU.

    A copy from ordinary memory would wait until the GPU has finished all earlier work; a copy from pinned memory is
    queued. Use this function for all uploads within a step; a tensor that is already on the device is returned as
    it is.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    # Pinned memory that is not contiguous would be copied to ordinary memory first.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
