"""A small local vision-language model for tests: random weights, a real architecture, images made on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tests.models import randomise, tiny_tokenizer

__all__ = [
    "IMAGE_ID",
    "Processor",
    "image_processor",
    "live",
    "ordinary_inputs",
    "picture",
    "save_vision",
    "vision_config",
    "vision_model",
    "vision_tokenizer",
]

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_FIRST_ID = 258
IMAGE_ID = _FIRST_ID + 2
VISION_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' and message['role'] != 'system' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Processor(Qwen3VLProcessor):
    """The processor of the model without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token, self.video_token = _SPECIAL[2:]
        self.image_token_id, self.video_token_id = _FIRST_ID + 2, _FIRST_ID + 3
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=tokenizer.chat_template)


def vision_config(*, depth: int = 24, **overrides: Any) -> Any:
    """Configuration of a tiny model. With the default depth its tower is of a published kind, else of none."""
    vision = {
        "depth": depth,
        "hidden_size": 64,
        "intermediate_size": 24,
        "num_heads": 16,
        "out_hidden_size": 32,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": (5, 11, 17) if depth == 24 else (0,),
    }
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    return AutoConfig.for_model(
        "qwen3_vl",
        text_config=text | overrides.pop("text", {}),
        vision_config=vision | overrides.pop("vision", {}),
        image_token_id=IMAGE_ID,
        video_token_id=_FIRST_ID + 3,
        vision_start_token_id=_FIRST_ID,
        vision_end_token_id=_FIRST_ID + 1,
        **overrides,
    )


def vision_model(
    config: Any = None, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> Any:
    """A model with random weights, in evaluation mode."""
    options = {} if attention is None else {"attn_implementation": attention}
    made = AutoModelForImageTextToText.from_config(config or vision_config(), dtype=dtype, **options)
    return randomise(made, seed=seed).eval()


def vision_tokenizer() -> Any:
    """A byte-level tokenizer with the tokens that images need."""
    tokenizer = tiny_tokenizer(chat_template=VISION_TEMPLATE, bos=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return tokenizer


def image_processor(**overrides: Any) -> Any:
    """An image processor that makes few patches of small images."""
    settings: dict[str, Any] = {
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 128, "longest_edge": 1024},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    return Qwen2VLImageProcessorPil(**(settings | overrides))


def save_vision(directory: Path, model: Any = None, **processing: Any) -> Path:
    """Save a model, its tokenizer and its image processor."""
    (model or vision_model()).save_pretrained(directory)
    vision_tokenizer().save_pretrained(directory)
    image_processor(**processing).save_pretrained(directory)
    return directory


def picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image of random samples."""
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), samples.tobytes())


def ordinary_inputs(messages: Sequence[Mapping[str, Any]], images: Sequence[Image.Image], **processing: Any) -> Any:
    """What the model is called with the ordinary way: the template rendered, images and text through the processor."""
    processor = Processor(image_processor(**processing), vision_tokenizer())
    text = processor.apply_chat_template([dict(message) for message in messages])
    return processor(text=[text], images=list(images), return_tensors="pt")


def live(model: Any, **inputs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V, ``[tokens, heads, width]``, that each decoder layer of a model hands to its attention function."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen3_vl.modeling_qwen3_vl import eager_attention_forward

    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    text, vision = model.config.text_config, model.config.vision_config
    chosen = text._attn_implementation
    plain = mapping.get(chosen, eager_attention_forward)
    seen = []

    def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(module, "layer_idx"):  # a layer of the tower has none
            seen.append((key[0].transpose(0, 1).clone(), value[0].transpose(0, 1).clone()))
        return plain(module, query, key, value, *args, **kwargs)

    mapping["recording"] = recording
    mask = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    mask["recording"] = mask[chosen]
    text._attn_implementation = vision._attn_implementation = "recording"
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        text._attn_implementation = vision._attn_implementation = chosen
        del mapping["recording"], mask["recording"]
    return seen
