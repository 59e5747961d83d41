"""Losses, metrics and mixing weights as pure functions of tensors, one equation each.

Losses and metrics take float tensors (N, d) unless their docstring says otherwise, compute in float32 or higher,
and raise a ValueError that names the shapes if these do not match. A row of zeros has no direction: it normalises
to zero, with gradient zero.
"""

from atoll.functional.aggregation import angular_divergence, metropolis_weights, min_norm_weights
from atoll.functional.agreement import alignment, byol, masked_reconstruction, simsiam
from atoll.functional.clustering import assignment_loss, sinkhorn_assignments, swav, swav_codes, swav_scores
from atoll.functional.contrastive import (
    dictionary_contrast,
    model_contrast,
    nt_xent,
    one_sided_nt_xent,
    queue_contrast,
    relational,
    supcon,
)
from atoll.functional.discrepancy import adaptive_mmd, mean_distance, mmd
from atoll.functional.gaussian import sigreg
from atoll.functional.geometry import (
    effective_rank,
    label_distance,
    representability,
    representation_angle,
    weight_distance,
)
from atoll.functional.metric_learning import fedquad, quadruplet, triplet
from atoll.functional.models import consensus_distance, spectral_gap, trajectory_plane
from atoll.functional.prototypes import (
    k_means,
    prototype_classification,
    prototype_contrast,
    prototype_divergence,
)
from atoll.functional.redundancy import (
    EncodingStatistics,
    barlow_twins,
    correlation_loss,
    decorrelation,
    encoding_statistics,
    vicreg,
)
from atoll.functional.self_distillation import dino, moving_centre
from atoll.functional.separation import dimension_scaling, projector_distillation
from atoll.functional.spectral import clipped_correlation, spectral_contrast
from atoll.functional.sphere import (
    UniformityDecomposition,
    sphere_sliced_uniformity,
    uniformity,
    uniformity_decomposition,
)

__all__ = [
    "EncodingStatistics",
    "UniformityDecomposition",
    "adaptive_mmd",
    "alignment",
    "angular_divergence",
    "assignment_loss",
    "barlow_twins",
    "byol",
    "clipped_correlation",
    "consensus_distance",
    "correlation_loss",
    "decorrelation",
    "dictionary_contrast",
    "dimension_scaling",
    "dino",
    "effective_rank",
    "encoding_statistics",
    "fedquad",
    "k_means",
    "label_distance",
    "masked_reconstruction",
    "mean_distance",
    "metropolis_weights",
    "min_norm_weights",
    "mmd",
    "model_contrast",
    "moving_centre",
    "nt_xent",
    "one_sided_nt_xent",
    "projector_distillation",
    "prototype_classification",
    "prototype_contrast",
    "prototype_divergence",
    "quadruplet",
    "queue_contrast",
    "relational",
    "representability",
    "representation_angle",
    "sigreg",
    "simsiam",
    "sinkhorn_assignments",
    "spectral_contrast",
    "spectral_gap",
    "sphere_sliced_uniformity",
    "supcon",
    "swav",
    "swav_codes",
    "swav_scores",
    "trajectory_plane",
    "triplet",
    "uniformity",
    "uniformity_decomposition",
    "vicreg",
    "weight_distance",
]
