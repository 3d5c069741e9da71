from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvformat.errors import InputError, UsageError
from kvformat.extract.checkpoint import PRESETS, CheckpointSource, parse_checkpoint
from kvformat.extract.checkpoint.names import beginnings, first_of, select_names


def test_the_options_of_a_command_line() -> None:
    found = parse_checkpoint(
        "dcp:/data/iter_7/model",
        select=r"^net\.",
        rename=[r"^net\.=", r"(?<=a)b=c"],
        dtype="bf16",
    )
    assert found == CheckpointSource(
        kind="dcp",
        path="/data/iter_7/model",
        select=r"^net\.",
        rename=((r"^net\.", ""), (r"(?<=a)b", "c")),
        dtype="BF16",
    )
    assert found.text() == "dcp:model"
    assert parse_checkpoint(None) is None
    assert parse_checkpoint("safetensors:a:b/c.safetensors").path == "a:b/c.safetensors"
    assert parse_checkpoint("dcp:~/x").path == str(Path("~/x").expanduser())


def test_a_source_pickles() -> None:
    source = CheckpointSource(kind="dcp", path="x", preset="mot", weights="ema")
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize("text", ["", "/data", "dcp", "dcp:", "torch:/x", "DCP:/x", "dcp:s3://bucket/x", ":x"])
def test_what_is_no_checkpoint(text: str) -> None:
    with pytest.raises(UsageError, match="E081"):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "options",
    [
        {"select": "("},
        {"select": "[a"},
        {"rename": ["^net"]},
        {"rename": ["=x"]},
        {"rename": ["(=x"]},
        {"rename": [r"a=\1"]},
        {"rename": [r"a=\g<b>"]},
        {"preset": "moe"},
        {"preset": "mot", "select": "x"},
        {"preset": "mot", "rename": ["a=b"]},
        {"preset": "mot", "weights": "best"},
        {"weights": "ema"},
        {"dtype": "F8_E4M3"},
        {"dtype": "int8"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="E081"):
        parse_checkpoint("dcp:/x", **options)


@pytest.mark.parametrize(
    "options", [{"select": "x"}, {"rename": ["a=b"]}, {"preset": "x"}, {"weights": "ema"}, {"dtype": "F32"}]
)
def test_options_of_a_checkpoint_that_is_not_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="name that too"):
        parse_checkpoint(None, **options)


def test_options_load_no_torch() -> None:
    code = "import sys, kvformat.extract.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def plain(**options: Any) -> CheckpointSource:
    return CheckpointSource(kind="dcp", path="x", **options)


def test_selected_names_are_renamed_in_order() -> None:
    source = plain(select=r"^net\.", rename=((r"^net\.", "model."), (r"attn\.(.)$", r"self_attn.\1_proj")))
    assert select_names(["net.0.attn.k", "net.0.attn.v", "net_ema.0.attn.k", "vae"], source) == {
        "model.0.self_attn.k_proj": "net.0.attn.k",
        "model.0.self_attn.v_proj": "net.0.attn.v",
    }


def test_a_selection_is_searched_for_anywhere() -> None:
    assert select_names(["a.b", "b.a"], plain(select="b")) == {"a.b": "a.b", "b.a": "b.a"}
    assert select_names(["a.b", "b.a"], plain(select="^b")) == {"b.a": "b.a"}
    assert select_names(["a.b"], plain()) == {"a.b": "a.b"}


def test_a_selection_that_matches_nothing_says_what_there_is() -> None:
    with pytest.raises(InputError, match=r"E308.*matches '\^nett'.*net\.a \(2\), vae\.b \(1\)"):
        select_names(["net.a.x", "net.a.y", "vae.b"], plain(select="^nett"))
    with pytest.raises(InputError, match="holds no tensors; its names begin with nothing: it is empty"):
        select_names([], plain())


def test_two_names_that_become_one_are_refused() -> None:
    source = plain(rename=((r"^net(_ema)?\.", ""),))
    with pytest.raises(InputError, match=r"E308.*'net\.a' and 'net_ema\.a' both become 'a' \(2 names are met twice\)"):
        select_names(["net_ema.a", "net.a", "net.b", "net_ema.b"], source)


LIVE = [
    "net.language_model.model.embed_tokens.weight",
    "net.language_model.model.layers.0.self_attn.k_proj.weight",
    "net.language_model.model.layers.0.self_attn.k_norm.weight",
    "net.language_model.model.layers.0.mlp.down_proj.weight",
    "net.language_model.model.norm.weight",
]
OTHERS = [
    "net.language_model.lm_head.weight",
    "net.language_model.model.layers.0.mlp_moe_gen.down_proj.weight",
    "net.language_model.model.layers.0.self_attn._extra_state",
    "net.language_model.model.layers.0.self_attn.k_norm_und_for_gen.weight",
    "net.language_model.model.layers.0.self_attn.k_proj_moe_gen.weight",
    "net.language_model.model.norm_moe_gen.weight",
    "net.language_model.visual.blocks.0.attn.qkv.weight",
    "net.llm2vae.weight",
    "optim.state.net.language_model.model.embed_tokens.weight.exp_avg",
    "vae.0.weight",
]
EMA = [name.replace("net.", "net_ema.", 1) for name in LIVE]
SHORT = [name.removeprefix("net.language_model.model.") for name in LIVE]


def mot(weights: str | None = None) -> CheckpointSource:
    return plain(preset="mot", weights=weights)


def test_the_reasoner_of_a_mixture_of_transformers() -> None:
    assert select_names([*OTHERS, *LIVE], mot()) == dict(zip(SHORT, LIVE, strict=True))
    assert select_names([*LIVE, *EMA, *OTHERS], mot("live")) == dict(zip(SHORT, LIVE, strict=True))
    assert select_names([*LIVE, *EMA, *OTHERS], mot("ema")) == dict(zip(SHORT, EMA, strict=True))
    assert select_names(EMA, mot()) == dict(zip(SHORT, EMA, strict=True))
    bare = [name.removeprefix("net.") for name in LIVE]
    assert select_names([*bare, *EMA], mot("live")) == dict(zip(SHORT, bare, strict=True))


def test_a_generator_is_no_reason_to_leave_out_what_only_sounds_like_it() -> None:
    names = ["net.language_model.model.layers.0.moe_gen_gate.weight", "net.language_model.model.moe_generic.weight"]
    assert sorted(select_names(names, mot()).values()) == names


def test_live_and_ema_weights_are_never_chosen_between_silently() -> None:
    with pytest.raises(InputError, match=r"E308.*live weights \(5 .*moving average \(5\); choose with weights=live"):
        select_names([*LIVE, *EMA], mot())
    with pytest.raises(InputError, match="no ema weights of the model by the names of preset 'mot'"):
        select_names(LIVE, mot("ema"))


def test_presets_are_data_that_work() -> None:
    for name in PRESETS:
        CheckpointSource(kind="dcp", path="x", preset=name)


def test_what_messages_show_of_many_names() -> None:
    assert first_of(["b", "a"]) == "'a', 'b'"
    assert first_of(f"{n:04}" for n in range(5000)) == "'0000', '0001', '0002' and 4,997 more"
    assert beginnings([f"{n}.w" for n in range(9)]).endswith(", ...")
