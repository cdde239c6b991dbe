"""Inputs of a model of transformers, made from the configuration: tokens, images, sound, and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.estimate.positions import most_positions

if TYPE_CHECKING:
    from mempool.torch.estimate.sources.transformers_models import Hub

#: Tokens per sequence, if the configuration allows more and no length was requested.
USUAL_TOKENS = 1024
#: Samples of sound: ten seconds at 16 kHz.
USUAL_SAMPLES = 160_000


def sequence(hub: Hub, asked: int | None) -> int | None:
    """Return the length of the sequences, in tokens or sound samples; None for a model of images.

    Raises:
        UsageError: the length exceeds the model's positions.
    """
    main = hub.kind.main_input_name
    if main == "pixel_values" and "input_ids" not in hub.takes:
        return None
    if main == "input_values":
        return asked or USUAL_SAMPLES
    most = most_positions(hub.config)
    if asked is None:
        return min(most or USUAL_TOKENS, USUAL_TOKENS)
    if most is not None and asked > most and not _unbounded(hub):
        raise UsageError(f"--seq {asked:,}: {hub.kind.__name__} has positions for {most:,} only")
    return asked


def _unbounded(hub: Hub) -> bool:
    """Return whether positions are computed, so that longer sequences run nevertheless."""
    text = hub.config.get_text_config()
    return getattr(text, "rope_parameters", None) is not None or hasattr(text, "rope_theta")


def inputs(hub: Hub, batch: int, seq: int | None, image: int | None, *, labels: bool) -> dict[str, Any]:
    """Return the named arguments of the model's forward.

    Args:
        hub: the model.
        batch: samples.
        seq: length returned by `sequence`.
        image: height and width; None for the configuration's.
        labels: whether to include the arguments of the loss.

    Raises:
        UsageError: the shape of the model's main input is not known.
    """
    main, takes = hub.kind.main_input_name, hub.takes
    given = {}
    if main == "input_features":
        given["input_features"] = torch.zeros(batch, *_features(hub))
    elif main == "input_values":
        given["input_values"] = torch.zeros(batch, seq or USUAL_SAMPLES)
    if main == "pixel_values" or "pixel_values" in takes:
        given["pixel_values"] = torch.zeros(batch, *_image(hub, image))
    if main == "input_ids" or ("input_ids" in takes and hub.task == "base"):
        given["input_ids"] = _tokens(batch, seq)
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(batch, seq or 1, dtype=torch.int64)
    if main not in given:
        raise UsageError(f"{hub.kind.__name__} takes {main}, whose shape is not known: give --inputs")
    return given | (_labels(hub, batch, seq) if labels else _decoder(hub, batch, seq))


def _tokens(batch: int, seq: int | None) -> torch.Tensor:
    return torch.zeros(batch, seq or 1, dtype=torch.int64)


def _labels(hub: Hub, batch: int, seq: int | None) -> dict[str, Any]:
    if "return_loss" in hub.takes and "labels" not in hub.takes:
        return {"return_loss": True}
    if hub.task == "question-answering":
        ends = {key: torch.zeros(batch, dtype=torch.int64) for key in ("start_positions", "end_positions")}
        return {key: ends[key] for key in ends if key in hub.takes}
    if "labels" not in hub.takes:
        return _decoder(hub, batch, seq)
    whole = hub.task in ("sequence-classification", "image-classification", "audio-classification")
    return {"labels": torch.zeros(batch, dtype=torch.int64) if whole else _tokens(batch, seq)}


def _decoder(hub: Hub, batch: int, seq: int | None) -> dict[str, Any]:
    """Return the decoder's tokens, which a decoder needs without labels."""
    needs = getattr(hub.config, "is_encoder_decoder", False) and "decoder_input_ids" in hub.takes
    return {"decoder_input_ids": _tokens(batch, seq)} if needs else {}


def _features(hub: Hub) -> tuple[int, int]:
    mels = getattr(hub.config, "num_mel_bins", None)
    frames = getattr(hub.config, "max_source_positions", None)
    if not isinstance(mels, int) or not isinstance(frames, int):
        raise UsageError(f"{hub.kind.__name__} takes features whose shape is not known: give --inputs")
    return mels, 2 * frames


def _image(hub: Hub, image: int | None) -> tuple[int, int, int]:
    vision = getattr(hub.config, "vision_config", hub.config)
    size = image or getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(getattr(vision, "num_channels", 3) or 3), int(height), int(width)
