"""Options of partitions: sentences for mistakes."""

import pytest

from atoll.core.errors import UserError
from atoll.data.options import PartitionOptions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "dirichelet"}, "did you mean 'dirichlet'"),
        ({"variant": "monn"}, "did you mean 'moon'"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"beta": 1.5}, "beta"),
        ({"clients": 0}, r"partition\.clients"),
        ({"classes_per_client": 0}, "classes_per_client"),
        ({"clients_per_value": 0}, "clients_per_value"),
        ({"retries": 0}, "retries"),
        ({"min_size": 0}, "no client may be empty"),
        ({"balanced": True}, "balanced"),
    ],
)
def test_wrong_options_get_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        PartitionOptions(**options)
