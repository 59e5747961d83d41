"""Partitions: properties of every kind, the papers' label distances, the record, sentences for mistakes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.options import KINDS, PartitionOptions
from atoll.data.partition.dirichlet import VARIANTS
from atoll.data.partition.make import make_partition
from atoll.data.partition.partition import Partition

LABELS = torch.arange(10).repeat_interleave(500)[
    torch.randperm(5000, generator=torch.Generator().manual_seed(0))
]


def partition(labels=LABELS, seed=0, columns=None, size=None, **options):
    size = len(labels) if size is None else size
    return make_partition(PartitionOptions(**options), labels, columns or {}, size, seed)


def mean_distance(clients, seeds, **options):
    values = [partition(LABELS, seed, clients=clients, **options).label_distance for seed in range(seeds)]
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("alpha", "distance", "spread"),
    [(5, 0.31, 0.03), (1, 0.68, 0.08), (0.5, 0.86, 0.12), (0.1, 1.33, 0.06), (0.01, 1.57, 0.02)],
)
def test_label_distance_of_dec_ssls_dirichlet(alpha, distance, spread):
    """Dec-SSL, Fig. 17: replayed values (mean and spread of eight draws), ten equal classes, five clients."""
    assert mean_distance(5, 40, alpha=alpha, variant="dec-ssl") == pytest.approx(distance, abs=spread)


@pytest.mark.parametrize(("beta", "distance"), [(0.7, 0.48), (0.5, 0.80), (0.3, 1.12), (0.0, 1.6)])
def test_label_distance_of_skewness(beta, distance):
    """Dec-SSL, Fig. 17: 1.6 (1 − β)."""
    assert mean_distance(5, 2, kind="skew", beta=beta) == pytest.approx(distance, abs=0.02)


def test_label_distance_of_the_extremes():
    assert partition(kind="shards", clients=5).label_distance == pytest.approx(1.6)
    assert partition(kind="single-class").label_distance == pytest.approx(1.8)
    assert partition(kind="iid", clients=5).label_distance < 0.12
    assert partition(kind="centralised").label_distance == pytest.approx(0, abs=1e-6)


CASES = [
    *({"kind": "dirichlet", "variant": variant, "alpha": 1.0} for variant in VARIANTS),
    {"kind": "dirichlet", "variant": "l-dawa", "alpha": 1.0, "balanced": True},
    {"kind": "iid"},
    {"kind": "quantity", "alpha": 1.0},
    {"kind": "skew", "beta": 0.3},
    {"kind": "shards", "classes_per_client": 3},
    {"kind": "single-class"},
    {"kind": "natural"},
    {"kind": "natural", "clients_per_value": 3},
    {"kind": "centralised"},
]


@settings(max_examples=60, deadline=None)
@given(
    options=st.sampled_from(CASES),
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    clients=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_every_kind_deals_distinct_samples_to_every_client_or_says_why_not(options, sizes, clients, seed):
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[order]
    columns = {"site": labels // 2}

    def split():
        return partition(labels, seed, columns, clients=clients, retries=50, **options)

    try:
        result = split()
    except UserError:
        return  # too few images; the sentences have tests of their own
    together = torch.cat(result.clients)
    assert len(together.unique()) == len(together)
    assert together.min() >= 0
    assert together.max() < len(labels)
    assert min(result.sizes) >= result.options.smallest_client
    counted = torch.stack(
        [torch.bincount(labels[indices], minlength=len(sizes)) for indices in result.clients]
    )
    assert torch.equal(result.counts, counted)
    assert len(result.names) == len(set(result.names)) == len(result)
    assert all(map(torch.equal, result.clients, split().clients))


def test_cases_cover_every_kind():
    assert {case["kind"] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("options", CASES)
def test_another_seed_is_another_deal(options):
    columns = {"site": LABELS // 2}
    first, second = (partition(seed=seed, columns=columns, clients=10, **options) for seed in (1, 2))
    fixed = options["kind"] in ("single-class", "centralised") or options == {"kind": "natural"}
    assert (first.clients[0].tolist() == second.clients[0].tolist()) == fixed


def test_sizes_are_in_each_variants_bounds():
    moon = [partition(seed=seed, alpha=0.1) for seed in range(5)]
    assert min(min(result.sizes) for result in moon) >= 10
    assert all(sum(result.sizes) == 5000 for result in moon)
    for seed in range(5):
        sizes = partition(seed=seed, alpha=0.1, clients=5, variant="dec-ssl").sizes
        assert (min(sizes) >= 500, max(sizes) <= 1500) == (True, True)
    assert sum(partition(alpha=0.5, variant="fedu2").sizes) == 5000
    unbalanced = partition(alpha=0.5, variant="l-dawa")
    assert 4900 <= sum(unbalanced.sizes) < 5000
    balanced = partition(alpha=0.5, variant="l-dawa", balanced=True)
    assert max(balanced.sizes) - min(balanced.sizes) < 60 < max(unbalanced.sizes) - min(unbalanced.sizes)


def test_natural_clients_are_the_columns_values():
    columns = {"domain": torch.tensor([2, 0, 2, 1]), "year": torch.tensor([7, 7, 8, 9])}
    values = {"domain": ["art", "photo", "sketch"]}
    options = PartitionOptions("natural", column="domain")
    result = make_partition(options, None, columns, 4, 0, column_values=values)
    assert result.names == ["art", "photo", "sketch"]
    assert [indices.tolist() for indices in result.clients] == [[1], [3], [0, 2]]
    assert (result.counts, result.label_distance) == (None, None)
    years = make_partition(PartitionOptions("natural", column="year"), None, columns, 4, 0)
    assert years.names == ["year=7", "year=8", "year=9"]


def test_several_clients_to_a_value():
    columns = {"site": torch.arange(100) % 2}
    result = partition(None, columns=columns, size=100, kind="natural", clients_per_value=2)
    assert result.names == ["site=0/0", "site=0/1", "site=1/0", "site=1/1"]
    assert result.sizes == [25] * 4
    assert {int(columns["site"][indices].sum()) for indices in result.clients} == {0, 25}


def test_a_column_can_stand_in_for_labels():
    clusters = torch.arange(5000) % 5
    result = partition(columns={"cluster": clusters}, kind="single-class", clients=5, column="cluster")
    assert [clusters[indices].unique().tolist() for indices in result.clients] == [[k] for k in range(5)]
    assert result.counts.shape == (5, 10)  # the record stays one of labels


def test_a_thousand_clients_cost_one_index_a_sample():
    labels = torch.arange(10).repeat(5000)
    result = partition(labels, clients=1000, alpha=1.0)
    storages = {indices.untyped_storage().data_ptr() for indices in result.clients}
    assert len(storages) == 1
    assert result.clients[0].untyped_storage().nbytes() == 8 * len(labels)


def test_the_record_reads_back_whole():
    options = PartitionOptions(alpha=0.5, clients=4, min_size=3)
    names = [f"class {c}" for c in range(12)]
    first = make_partition(options, LABELS, {}, 5000, 7, classes=names, fingerprint="abc")
    text = first.to_json()
    record = json.loads(text)
    assert record["options"]["variant"] == "moon"
    assert record["fingerprint"] == "abc"
    assert len(record["clients"][0]["label_counts"]) == 12
    assert record["clients"][2]["indices"] == first.clients[2].tolist()
    again = Partition.from_json(text)
    assert again.to_json() == text
    assert torch.equal(again.counts, first.counts)
    assert again.options == options
    unlabelled = partition(None, size=20, kind="iid", clients=3)
    assert Partition.from_json(unlabelled.to_json()).counts is None
    assert unlabelled.distances() is None
    shifted = replace(unlabelled, shifts=("", "rotated by 90°", ""))
    assert [each["shift"] for each in json.loads(shifted.to_json())["clients"]] == list(shifted.shifts)
    assert Partition.from_json(shifted.to_json()).shifts == shifted.shifts


COUNTS = '{"clients": [{"indices": [0], "label_counts": [Infinity]}], "classes": []}'


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"clients": [{}]}', "null", COUNTS, COUNTS.replace("[0]", f"[{10**30}]")],
)
def test_a_damaged_record_gets_a_sentence(text):
    with pytest.raises(UserError, match="does not describe a partition: "):
        Partition.from_json(text)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"alpha": 0.001, "clients": 50, "retries": 20},
            r"20 with partition\.alpha = 0\.001 .*50 clients at least 10 images .*; raise alpha",
        ),
        ({"alpha": 0.01, "variant": "dec-ssl", "clients": 40, "retries": 5}, "between 62.5 and 187.5 images"),
        ({"kind": "iid", "clients": 5001}, "5001 clients need 5001 training images, but there are 5000"),
        ({"clients": 501}, "501 clients of at least 10 images need 5010"),
        ({"kind": "single-class", "clients": 9}, r"10 classes .*set partition\.clients = 10"),
        ({"kind": "shards", "clients": 4}, "do not fit 10 classes; raise"),
        ({"kind": "shards", "classes_per_client": 11}, "do not fit 10 classes; lower"),
        ({"kind": "natural"}, "needs a column"),
        ({"kind": "natural", "column": "domian"}, "none was read except labels"),
    ],
)
def test_impossible_partitions_get_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        partition(**options)


def test_partitions_at_the_limits_of_what_is_possible():
    assert partition(LABELS[:20], alpha=100.0, clients=2, min_size=10).sizes == [10, 10]
    assert (partition(kind="shards", clients=3, classes_per_client=10).counts > 0).all()
    assert (partition(kind="shards", clients=5, classes_per_client=2).counts > 0).sum(0).tolist() == [1] * 10
    with pytest.raises(UserError, match=r"at least 1 image \(partition\.min_size = 1\); raise alpha"):
        partition(LABELS[:6], alpha=1e-3, clients=6, min_size=1, retries=3)


@pytest.mark.parametrize("kind", ["dirichlet", "skew", "shards", "single-class"])
def test_labels_are_needed_to_deal_by_them(kind):
    with pytest.raises(UserError, match="splits by label and the source has none"):
        partition(None, size=100, kind=kind)


def test_natural_wants_one_clear_column():
    columns = {"domain": LABELS, "year": LABELS}
    with pytest.raises(UserError, match="domain, year"):
        partition(columns=columns, kind="natural")
    with pytest.raises(UserError, match="did you mean 'domain'"):
        partition(columns=columns, kind="natural", column="domian")
    assert len(partition(columns={**columns, "client": LABELS // 5}, kind="natural")) == 2


def test_a_column_of_texts_that_was_not_read_is_told_how_it_is():
    with pytest.raises(UserError, match=r"read; of Parquet, CSV, .* column of texts in data\.natural_column"):
        partition(kind="natural")
    with pytest.raises(UserError, match=r"'site' is not .* of Parquet, CSV, .*\.natural_column = 'site'$"):
        partition(kind="natural", column="site")


def test_a_natural_client_without_images_is_named():
    columns, values = {"site": torch.tensor([0, 0, 2])}, {"site": ["north", "south", "east"]}
    with pytest.raises(UserError, match="client 'south' with 0 training images"):
        make_partition(PartitionOptions("natural"), None, columns, 3, 0, column_values=values)


def test_consecutive_clients_hold_their_images_one_after_another():
    result = Partition.consecutive([2, 1, 3], ["a", "b", "c"], PartitionOptions(kind="iid"), seed=4)
    assert [indices.tolist() for indices in result.clients] == [[0, 1], [2], [3, 4, 5]]
    assert (result.names, result.num_samples, result.counts) == (["a", "b", "c"], 6, None)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"labels must have shape \(7,\), not \(5000,\)"):
        partition(size=7)
    with pytest.raises(UserError, match="no training images"):
        partition(torch.zeros(0, dtype=torch.int64))


def test_it_says_which_client_holds_each_image_of_its_own_set():
    images = ImageSet(StoredPixels(torch.zeros(7, 1, 2, 2, dtype=torch.uint8)), fingerprint="ours")
    options = PartitionOptions(kind="iid", clients=2)
    partition = replace(
        make_partition(options, None, {}, 7, 0, fingerprint="ours"),
        clients=[torch.tensor([6, 1]), torch.tensor([0, 3, 2])],
    )
    assert partition.client_ids(images).tolist() == [1, 0, 1, 1, -1, -1, 0]
    other = replace(images, fingerprint="theirs")
    assert partition.client_ids(other).tolist() == [-1] * 7


def test_quantity_skew_has_the_sizes_of_a_dirichlet_draw_and_nearly_equal_labels():
    skewed = partition(kind="quantity", clients=5, alpha=0.5)
    assert sum(skewed.sizes) == 5000
    for size, counts in zip(skewed.sizes, skewed.counts, strict=True):
        assert torch.allclose(counts / size, torch.full((10,), 0.1), atol=4 * (0.09 / size) ** 0.5)
    # The variance of a proportion of Dir(α 1_K) is (K − 1) / (K² (K α + 1)).
    draws = [
        np.array(partition(seed=s, kind="quantity", clients=5, alpha=2.0).sizes) / 5000 for s in range(300)
    ]
    assert np.var(draws) == pytest.approx(4 / (25 * 11), rel=0.15)


def test_quantity_skew_keeps_the_minimum_or_says_why_not():
    assert min(partition(kind="quantity", clients=10, alpha=0.3, min_size=50).sizes) >= 50
    with pytest.raises(UserError, match=r"no draw of sizes out of 3 .* at least 1 image; raise alpha"):
        partition(kind="quantity", clients=100, alpha=0.01, retries=3)


@pytest.mark.parametrize("kind", ["dirichlet", "skew", "shards", "single-class"])
def test_clusters_are_split_as_labels_are(kind):
    clusters = LABELS.flip(0)
    options = PartitionOptions(kind=kind, clients=10, features="untrained")
    found = make_partition(options, LABELS, {}, 5000, 0, clusters=clusters)
    as_labels = partition(labels=clusters, kind=kind, clients=10)
    assert all(map(torch.equal, found.clients, as_labels.clients))
    assert torch.equal(found.cluster_counts, as_labels.counts)
    assert not torch.equal(found.counts, as_labels.counts)
    assert torch.equal(Partition.from_json(found.to_json()).cluster_counts, found.cluster_counts)
    kept = sorted(found.sizes)[-6:]
    rest = found.without_small(kept[0])
    assert rest.cluster_counts.sum(1).tolist() == rest.sizes
    assert sorted(rest.sizes)[-6:] == kept


def test_features_that_are_not_split_are_refused():
    for kind in ("iid", "quantity", "natural"):
        with pytest.raises(UserError, match="does not split clusters"):
            PartitionOptions(kind=kind, features="untrained")
    with pytest.raises(UserError, match="both replace the labels"):
        PartitionOptions(features="untrained", column="domain")
