"""The simulated GPU under the name ``cuda:0``, for what a program does if its device is CUDA's.

Python code sees a CUDA device, and PyTorch's Python code for it runs (names of devices, current device, generators,
fused optimisers); below it nothing is asked of a driver. PyTorch's C++ code takes the tensors for "meta" ones, so
autocast does not reach them.

    python -m tests.simulated_cuda              # one line of JSON
    python -m tests.simulated_cuda '{"ssd": ["method.name=ssd"]}'  # the races on CUDA streams of each method
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

from tests import simulated_gpu, simulated_streams
from tests.simulated_streams import Stream, Streams

CUDA = torch.device("cuda", 0)


class OnCuda(simulated_gpu.OnDevice):
    """A tensor on the simulated device."""

    known_as = ("meta",)
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    data = property(lambda self: self.detach(), lambda self, other: setattr(self, "held", other.held))
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo):
        made = OnCuda(self.held.detach().clone())
        simulated_streams.read([self.held], "deepcopy")
        simulated_streams.write([made.held])
        return torch.nn.Parameter(made, self.requires_grad) if hasattr(self, "_is_param") else made

    def data_ptr(self):
        return self.held.data_ptr()

    def get_device(self):
        return 0


def install() -> None:
    """Give this process a GPU, for good."""
    simulated_gpu.OnDevice, simulated_gpu.NAME = OnCuda, "cuda"
    simulated_streams.install()
    below = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": [0].index,
        "_cuda_synchronize": lambda: None,
        "_cuda_memoryStats": lambda device: {"allocated_bytes": {"all": {"peak": 1}}},
    }
    for name, function in below.items():
        setattr(torch._C, name, function)
    torch.cuda.is_available = lambda: True
    torch.backends.cudnn.version = lambda: 91002
    torch.cuda.is_bf16_supported = lambda *args: True
    torch.cuda.get_device_name = lambda device: f"GPU {torch.cuda._utils._get_device_index(device, True)}"
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda index: 0
    torch.cuda._check_stray_context = lambda index: None
    torch.cuda._initialized, torch.cuda.default_generators = True, (torch.Generator(),)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, lambda self: None)
    torch.__future__.set_swap_module_params_on_conversion(True)
    Tensor.to, Tensor.cpu = _to, lambda self: self.to(torch.device("cpu"))
    begin = threading.Thread.run

    def begun(thread):
        with simulated_gpu.Device():
            begin(thread)

    threading.Thread.run = begun


def _to(self, *args, _to=Tensor.to, **kwargs):
    """`Tensor.to`, whose C++ code asks the driver for the number of a device without one."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if args and isinstance(args[0], str | torch.device):
        args = (CUDA if torch.device(args[0]).type == "cuda" else torch.device(args[0]), *args[1:])
    return _to(self, *args, **kwargs)


RUNS = {
    "momentum": ("method.name=fed_byol", "train.keep_optimizer=true"),
    "adam": ("train.optimizer=adam", "train.lr=0.001", "train.keep_optimizer=true"),
    "late gradients": ("method.name=fed_dino", "options.dino.horizon=2"),
    "stack": ("method.name=fed_simclr", "engine.stack=2"),
    "streams": ("method.name=ssd", "engine.streams=2", "views.blur=0.5", "train.keep_optimizer=true"),
    "streams, momentum": ("method.name=fed_byol", "engine.streams=2", "train.accumulate=2"),
    "less memory": ("train.checkpoint_gradients=true", "train.accumulate=2"),
    "evaluation": (
        "evaluation.at_end=['knn', 'probe', 'finetune-10', 'geometry']", "evaluation.every=1",
        "evaluation.max_epochs=4",
    ),
}  # fmt: skip


def results(settings: tuple[str, ...], device: str) -> dict:
    """The losses of a run that is extended by a round, and its last evaluation."""
    from atoll.commands.run import run_recipe
    from tests.harness import tiny

    settings = (*settings, "data.limit=80", "partition.clients=2", f"engine.device={device}")
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(tiny(*settings, "train.rounds=1"), Path(folder) / "run")
        found = run_recipe(tiny(*settings, "train.rounds=2"), Path(folder) / "run", resume=True)
        accuracy = {k: v for k, v in found.read_json("evaluation.json").items() if k.endswith("accuracy")}
        return {
            "losses": [line["loss"] for line in found.metrics[1:]],
            **accuracy,
        }


def given(where: str) -> list[float]:
    """The losses of a run whose encoder is a module that Python code gives, on a device."""
    from atoll import simulate
    from tests.harness import tiny

    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16)).to(where)
    recipe = tiny("data.limit=80", "partition.clients=2", "views.mean=[0.5]", "views.std=[0.5]")
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(recipe, Path(folder) / "run", encoder=encoder)
        return [line["loss"] for line in run.metrics[1:]]


def searched(folder: Path, device: str) -> dict:
    """What ``atoll embed`` and ``atoll neighbours`` find on a device, and how they compute."""
    from atoll.commands.embed import embed_images
    from atoll.commands.neighbours import find_neighbours
    from atoll.commands.run import run_recipe
    from atoll.core.run_folder import Run
    from atoll.data.sources import load_data
    from atoll.evaluation.embed import device_of, embed
    from atoll.models import load_encoder
    from tests.harness import tiny

    run, images = Run(folder / "run"), folder / "images"
    if not run.finished:
        recipe = tiny("data.limit=80", "partition.clients=2", "train.rounds=1", "engine.device=cpu")
        run_recipe(recipe, run.folder)
        images.mkdir()
        for row, pixels in enumerate(load_data(recipe.data, 0).train.images.gather(torch.arange(3))):
            Image.fromarray(pixels[0].numpy()).save(images / f"{row}.png")
    used = set()

    def kernels() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32

    def noted(encoder, *given):
        used.add((device_of(encoder).type, *kernels()))
        return embed(encoder, *given)

    before = kernels()
    with patch("atoll.commands.embed.embed", noted), patch("atoll.commands.neighbours.embed", noted):
        names, h = embed_images(load_encoder(run.encoder_path), images, device=device)
        record = find_neighbours(run, images, k=2, device=device)
        own = find_neighbours(run, queries=2, k=2, device=device)
    return {
        "embedded": [names, h.tolist(), h.device.type],
        "found": [one[key] for one in (record, own) for key in ("names", "clients")],
        "numbers": [record["similarity"], own["similarity"], list(record["measures"].values())],
        "used": sorted(used),
        "restored": kernels() == before,
    }


def races(methods: dict[str, list[str]]) -> dict[str, list[str]]:
    """The races of clients that train on streams, by the method, from the settings of each."""
    from atoll.commands.run import run_recipe
    from tests.harness import tiny

    found = {}
    install()
    with simulated_gpu.Device():
        for name, settings in methods.items():
            Streams.races.clear()
            with tempfile.TemporaryDirectory() as folder:
                more = ("engine.streams=2", "engine.device=auto", "evaluation.at_end=[]", "train.rounds=2")
                run_recipe(tiny(*settings, *more), Path(folder) / "run")
            found[name] = list(Streams.races)
    return found


def main() -> None:
    """Run here and there; with methods and settings as an argument, find races."""
    from atoll.commands.bench import recommend
    from atoll.commands.cost import estimate
    from atoll.engines.worker_pool import _executor
    from tests.harness import tiny

    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(json.dumps(races(json.loads(sys.argv[1]))))
        return
    told = {name: [results(settings, "cpu")] for name, settings in RUNS.items()}
    encoders = [given("cpu")]
    place = tempfile.TemporaryDirectory()
    found = [searched(Path(place.name), "auto")]
    install()
    with simulated_gpu.Device(), place as folder:
        found += [searched(Path(folder), device) for device in ("auto", "cuda", "cpu")]
        for name, settings in RUNS.items():
            told[name].append(results(settings, "auto"))
        encoders.append(given("cuda"))
        (cost,) = estimate(tiny(), warm=1, timed=1)
        with patch("atoll.engines.step_graphs.LEAST", 10**9):  # graphs are not simulated here
            timed = recommend(tiny("train.epochs=3"), warm=1, timed=1).row_count
        with patch("cloudpickle.loads", lambda recipe: recipe):
            worker = _executor(tiny(), "cuda", Path(folder), ExitStack())
        repeats = torch.are_deterministic_algorithms_enabled()
        more = {
            "repeats": repeats,
            "tf32": torch.backends.cudnn.allow_tf32,
            "workers": cost.workers,
            "timed": timed,
            "worker": str(worker._federation.device),
            "given": encoders,
            "searched": found,
        }
        streams = {"count": Stream.count, "reads": Streams.reads, "races": Streams.races[:9]}
    print(json.dumps({"runs": told, **more, "streams": streams}))


if __name__ == "__main__":
    main()
