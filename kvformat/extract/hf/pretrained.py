"""Loading what ``save_pretrained`` wrote, and refusing what would load into something else than its weights say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModel

from kvformat.errors import make_error
from kvformat.extract.hf.library import first_line, no_progress_bars
from kvformat.extract.hf.options import check_dtype, configured_dtype
from kvformat.extract.hf.stack import decoder_stack
from kvformat.tensors import torch_dtype

__all__ = ["load_pretrained"]


def load_pretrained(
    model: str | Path,
    config: Any,
    *,
    revision: str | None = None,
    compute_dtype: str | None = None,
    attn_implementation: str | None = None,
    own: Sequence[str] = (),
) -> Any:
    """The base model of a directory or hub id, on the CPU, in evaluation mode.

    Parameters
    ----------
    config
        Its configuration.
    own
        Prefixes of names of tensors that matter beside those of the decoder layers.

    Raises
    ------
    InputError
        E302 where an adapter came along; E304 where it does not load, where a weight is missing, and where files hold
        weights of the decoder layers, or of ``own``, that its class does not know.
    """
    compute = check_dtype(compute_dtype or configured_dtype(config), "compute")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with no_progress_bars():
            loaded, info = AutoModel.from_pretrained(
                str(model),
                config=config,
                revision=revision or "main",
                dtype=torch_dtype(compute),
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises whatever the missing or odd file led to
        raise make_error("E304", f"the model does not load: {first_line(error)}", path=model) from error
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise make_error(
            "E302", "an adapter was loaded with the model; merge it and save the merged model", path=model
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise make_error(
            "E304",
            f"the checkpoint lacks {len(missing)} tensors, the first {missing[0]!r}: they would be random",
            path=model,
        )
    decoder = loaded.get_decoder()
    stack, blocks = decoder_stack(decoder, int(decoder.config.num_hidden_layers))
    parts = [f".{stack}.{number}." for number in range(len(blocks))] + [f".{prefix}" for prefix in own]
    odd = sorted(name for name in info["unexpected_keys"] if any(part in f".{name}" for part in parts))
    if odd:
        raise make_error(
            "E304",
            f"the checkpoint holds {len(odd)} tensors that {type(loaded).__name__} does not have, the first "
            f"{odd[0]!r}: it is another model than its configuration says",
            path=model,
        )
    return loaded.eval()
