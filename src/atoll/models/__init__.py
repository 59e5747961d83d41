"""The networks that a federation trains: encoders and their heads."""

from atoll.models.cnn import ConvDecoder, build_decoder
from atoll.models.encoder import Encoder
from atoll.models.external import (
    ExternalEncoder,
    call_it,
    give_encoder,
    input_config,
    is_external,
    is_own_code,
)
from atoll.models.files import load_encoder, load_weights, save_encoder
from atoll.models.heads import build_predictor, build_projector, embedding_dim, mlp
from atoll.models.libraries import InputConfig, MissingEncoderError
from atoll.models.options import (
    ENCODER_OPTIONS,
    ENCODERS,
    ModelOptions,
    build_encoder,
    build_mae_decoder,
    rebuild_encoder,
)
from atoll.models.pretrained import load_pretrained, weights_input
from atoll.models.resnet import ResNet
from atoll.models.vit import MAEDecoder, ViT, patchify, random_masking, unpatchify

__all__ = [
    "ENCODERS",
    "ENCODER_OPTIONS",
    "ConvDecoder",
    "Encoder",
    "ExternalEncoder",
    "InputConfig",
    "MAEDecoder",
    "MissingEncoderError",
    "ModelOptions",
    "ResNet",
    "ViT",
    "build_decoder",
    "build_encoder",
    "build_mae_decoder",
    "build_predictor",
    "build_projector",
    "call_it",
    "embedding_dim",
    "give_encoder",
    "input_config",
    "is_external",
    "is_own_code",
    "load_encoder",
    "load_pretrained",
    "load_weights",
    "mlp",
    "patchify",
    "random_masking",
    "rebuild_encoder",
    "save_encoder",
    "unpatchify",
    "weights_input",
]
