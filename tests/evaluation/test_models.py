import pytest

from atoll.evaluation import mean_over_clients, mean_over_sites

TWO = {
    "a": {"knn/accuracy": 0.25, "knn/k": 20, "note": "first", "geometry/singular_values": [2.0]},
    "b": {"knn/accuracy": 0.5, "knn/k": 20, "note": "second", "geometry/singular_values": [1.0]},
}


def test_one_model_speaks_for_itself() -> None:
    assert mean_over_clients({"a": TWO["a"]}, {"a": 3}) == TWO["a"]
    assert mean_over_clients({"a": TWO["a"]}, {}) == TWO["a"]


def test_models_count_by_their_clients() -> None:
    found = mean_over_clients(TWO, {"a": 3, "b": 1})
    assert found == {
        "knn/accuracy": 0.3125,  # (3 · 0.25 + 0.5) / 4
        "knn/k": 20,
        "note": "first",
        "geometry/singular_values": [2.0],
        "by_model": TWO,
        "clients_by_model": {"a": 3, "b": 1},
    }
    assert type(found["knn/k"]) is int


def test_models_that_nobody_uses_count_alike() -> None:
    assert mean_over_clients(TWO, {"a": 0, "b": 0})["knn/accuracy"] == pytest.approx(0.375)


def test_the_users_constants_that_differ_between_models_have_no_mean() -> None:
    one = {"mine:m/k": 3, "mine:m/kind": "x", "mine:m/nmi": 0, "mine:m/gap": 0.5, "mine:m/seed": 1}
    two = {"mine:m/k": 5, "mine:m/kind": "y", "mine:m/nmi": 0.5, "mine:m/gap": "none", "mine:m/seed": 1}
    mean = mean_over_clients({"a": one, "b": two}, {"a": 1, "b": 1})
    del mean["by_model"], mean["clients_by_model"]
    assert mean == {"mine:m/nmi": 0.25, "mine:m/gap": 0.5, "mine:m/seed": 1}


def test_what_the_users_code_measures_is_no_count_whatever_its_name() -> None:
    east = {"mine:m/hard_images": 0.25, "mine:m/images": 5, "mine:m/labels": 2}
    west = {"mine:m/hard_images": 0.75, "mine:m/images": 7, "mine:m/labels": 2}
    assert mean_over_sites([east, west], [10, 30]) == {"mine:m/hard_images": 0.625, "mine:m/labels": 2}


def test_sites_count_by_their_images_and_their_counts_add_up() -> None:
    east = {"knn/accuracy": 0.25, "knn/k": 20.0, "knn/test_images": 10}
    west = {"knn/accuracy": 0.5, "knn/k": 20.0, "knn/test_images": 30, "probe/accuracy": 0.75}
    assert mean_over_sites([east, west], [10, 30]) == {
        "knn/accuracy": 0.4375,  # (10 · 0.25 + 30 · 0.5) / 40
        "knn/k": 20.0,
        "knn/test_images": 40,
        "probe/accuracy": 0.75,
    }


def test_a_constant_that_differs_between_sites_has_no_mean_and_labels_add_up() -> None:
    east = {
        "knn/accuracy": 0.25,
        "knn/k": 13,
        "knn/temperature": 0.1,
        "finetune-1/labels": 3,
        "finetune-1/epoch": 50,
    }
    west = {
        "knn/accuracy": 0.5,
        "knn/k": 200,
        "knn/temperature": 0.1,
        "finetune-1/labels": 9,
        "finetune-1/epoch": 100,
    }
    assert mean_over_sites([east, west], [10, 30]) == {
        "knn/accuracy": 0.4375,
        "knn/temperature": 0.1,
        "finetune-1/labels": 12,
        "finetune-1/epoch": 87.5,  # measured, not a constant
    }
