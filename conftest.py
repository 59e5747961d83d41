"""What the tests share with the examples in docstrings."""

import os

# Two cores may run two suites. Libraries, also those of the programs that tests start, read this when they load.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

# Old names, kept for one version: importing them warns.
collect_ignore = ["src/atoll/parts.py", "src/atoll/engines/flower/server_app.py"]


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_its_own(tmp_path_factory):
    """No test may lean on what an earlier one cached."""
    os.environ["ATOLL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _examples_write_into_a_folder_of_their_own(request, monkeypatch):
    if not isinstance(request.node, pytest.Function):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled, as graphs, without generating code, which takes half a minute."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph

    def compile(function, *, dynamic, options):
        return real(function, dynamic=dynamic, backend=backend)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    yield found
    torch.compiler.reset()


@pytest.fixture
def memory_is_used_again(monkeypatch):
    """Passes as by CUDA graphs: outputs and gradients are lost in the next step. The number of outputs by step."""
    found, outputs = [], []

    def compile(function, *, dynamic, options):
        def code(encoder, images):
            if not outputs:  # the first pass of a step
                for weight in encoder.parameters():
                    if weight.grad is not None:
                        weight.grad.fill_(torch.nan)
            h = function(encoder, images)
            outputs.append(h.detach())
            return h

        return code

    def begin_step():
        for h in outputs:
            h.fill_(torch.nan)
        found.append(len(outputs))
        outputs.clear()

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", begin_step)
    return found
