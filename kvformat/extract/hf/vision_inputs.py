"""Documents with images as the arguments of a decoder's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvformat.errors import make_error
from kvformat.extract.hf.images import Patches
from kvformat.extract.hf.vision_tokenise import media_spans

if TYPE_CHECKING:
    from kvformat.spec.document import Document

__all__ = ["check_media", "embedded_inputs", "position_rows"]


def check_media(document: Document, *, image_id: int) -> None:
    """Refuse media that are not the images of a document's runs of image tokens; E110."""
    spans = [(entry.first, entry.count) for entry in document.media]
    if spans and (
        any(entry.scheme != "pixels" for entry in document.media)
        or spans != list(media_spans(document.token_ids, image_id))
    ):
        raise make_error("E110", "media must be images by their pixels, each the span of one run of image tokens")


def position_rows(documents: Sequence[Document]) -> torch.Tensor:
    """Rows of time, height and width, int64 ``[3, documents, tokens]``, on the CPU."""
    rows = [
        np.arange(document.num_tokens)[None] if document.position_ids is None else document.position_ids
        for document in documents
    ]
    shape = (3, documents[0].num_tokens)
    return torch.from_numpy(np.stack([np.broadcast_to(row, shape) for row in rows], axis=1).astype(np.int64))


def embedded_inputs(whole: Any, ids: torch.Tensor, patches: Sequence[Patches], *, image_id: int) -> dict[str, Any]:
    """The decoder's input with images in place, and what the tower adds behind its first layers.

    As the forward of the whole model does it, which would also work out positions and keep them.

    Parameters
    ----------
    whole
        The model with tower and decoder.
    ids
        Token ids, int64 ``[documents, tokens]``, on the model's device.
    patches
        Of all images, in the order of their tokens.
    """
    features = whole.get_image_features(
        torch.cat([one.values for one in patches]).to(ids.device),
        torch.tensor([one.grid for one in patches], device=ids.device),
        return_dict=True,
    )
    embedded = whole.get_input_embeddings()(ids)
    seen = torch.cat(features.pooler_output).to(embedded.device, embedded.dtype)
    inside = ids == image_id
    return {
        "inputs_embeds": embedded.masked_scatter(inside[..., None].expand_as(embedded), seen),
        "visual_pos_masks": inside,
        "deepstack_visual_embeds": [torch.cat(feature) for feature in features.deepstack_features],
    }
