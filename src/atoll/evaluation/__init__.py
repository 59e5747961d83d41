"""Evaluation of encoders: kNN, linear probes, fine-tuning with few labels, and geometry of the features."""

from atoll.evaluation.classifier import classifier_accuracy, classifier_correct
from atoll.evaluation.client_tests import client_accuracies, split_test
from atoll.evaluation.embed import embed, sample
from atoll.evaluation.embedding_map import embedding_map, map_rows
from atoll.evaluation.finetune import FineTuneResult, finetune, label_subset
from atoll.evaluation.geometry import geometry
from atoll.evaluation.knn import knn_accuracy
from atoll.evaluation.models import mean_over_clients, mean_over_sites, mean_results
from atoll.evaluation.neighbours import nearest, same_client_share, same_image_retrieval
from atoll.evaluation.options import PROTOCOLS, EvaluationOptions
from atoll.evaluation.own import Representations
from atoll.evaluation.probe import ProbeResult, linear_probe
from atoll.evaluation.protocols import FINE_TUNES, PROBES, FineTuneProtocol, ProbeProtocol, find_probe
from atoll.evaluation.suite import Results, evaluate

__all__ = [
    "FINE_TUNES",
    "PROBES",
    "PROTOCOLS",
    "EvaluationOptions",
    "FineTuneProtocol",
    "FineTuneResult",
    "ProbeProtocol",
    "ProbeResult",
    "Representations",
    "Results",
    "classifier_accuracy",
    "classifier_correct",
    "client_accuracies",
    "embed",
    "embedding_map",
    "evaluate",
    "find_probe",
    "finetune",
    "geometry",
    "knn_accuracy",
    "label_subset",
    "linear_probe",
    "map_rows",
    "mean_over_clients",
    "mean_over_sites",
    "mean_results",
    "nearest",
    "same_client_share",
    "same_image_retrieval",
    "sample",
    "split_test",
]
