import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_and_a_cache_of_its_own(tmp_path_factory):
    """Two cores may run two suites; and no test may lean on what an earlier one cached."""
    import os

    torch.set_num_threads(1)
    os.environ["ATOLL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
