"""The exported files, read by a program of their own, give the trainer's logits."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from eagle3.config import UserError
from eagle3.draft.export import export_drafter, load_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.ttt import pack, unroll
from eagle3.features.record import FeatureSample

D, V, W, K = 32, 60, 24, 3
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": D,
    "num_hidden_layers": 12,
    "vocab_size": V,
    "max_position_embeddings": 128,
}
EAGLE_3_KEYS = {
    "fc.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
}
EAGLE_3_1_KEYS = EAGLE_3_KEYS | {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}


def make_drafter(*, eagle_3_1: bool = False, draft_vocab_size: int = W, seed: int = 0) -> Eagle3Drafter:
    config = DrafterConfig(
        hidden_size=D,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=V,
        draft_vocab_size=draft_vocab_size,
        capture_layers=(3, 6, 9),
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        fc_norm=eagle_3_1,
        norm_output=eagle_3_1,
    )
    drafter = Eagle3Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise / parameter.shape[1] ** 0.5)
    target_ids = torch.randperm(V, generator=generator)[:draft_vocab_size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[target_ids] = True
    drafter.set_draft_vocab(target_ids - torch.arange(draft_vocab_size), t2d)
    return drafter


def export(drafter: Eagle3Drafter, directory: Path, **settings: Any) -> Path:
    export_drafter(drafter, directory, target_config=TARGET, card="# A drafter\n\ntau 1.5\n", **settings)
    return directory


class FileReader:
    """A strict loader and drafter of its own: token by token with a list of keys, from the files alone."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        with safe_open(directory / "model.safetensors", framework="pt") as tensors:
            self.weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no dict
        expected = EAGLE_3_1_KEYS if self.config["fc_norm"] else EAGLE_3_KEYS
        assert set(self.weights) == expected, set(self.weights) ^ expected

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + self.config["rms_norm_eps"]).sqrt() * self.weights[name + ".weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return torch.mv(self.weights[name + ".weight"], x)

    def rotate(self, x: Tensor, position: int) -> Tensor:  # (heads, d)
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(position * self.config["rope_theta"] ** (-i / half))
            out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
            out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
        return out

    def fuse(self, aux: Tensor) -> Tensor:  # (3D,) -> (D,)
        if self.config["fc_norm"]:
            aux = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(aux.chunk(3))])
        return self.linear("fc", aux)

    def layer(self, embed: Tensor, hidden: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Adds the token's key and value to the cache; returns the layer's output (D,) before the final norm."""
        heads, kv_heads, head_dim = (
            self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        x = torch.cat([self.norm("midlayer.input_layernorm", embed), self.norm("midlayer.hidden_norm", hidden)])
        query = self.rotate(self.linear("midlayer.self_attn.q_proj", x).view(heads, head_dim), position)
        key = self.rotate(self.linear("midlayer.self_attn.k_proj", x).view(kv_heads, head_dim), position)
        cache.append((key, self.linear("midlayer.self_attn.v_proj", x).view(kv_heads, head_dim)))
        attended = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = torch.stack([query[head] @ past[shared] for past, _ in cache]) / head_dim**0.5
            values = torch.stack([past[shared] for _, past in cache])
            attended.append(scores.softmax(0) @ values)
        hidden = hidden + self.linear("midlayer.self_attn.o_proj", torch.cat(attended))
        x = self.norm("midlayer.post_attention_layernorm", hidden)
        gate = F.silu(self.linear("midlayer.mlp.gate_proj", x)) * self.linear("midlayer.mlp.up_proj", x)
        return hidden + self.linear("midlayer.mlp.down_proj", gate)

    def chain_logits(self, aux: Tensor, ids: Tensor, embed_tokens: Tensor, anchor: int, num_steps: int) -> Tensor:
        """Returns the logits (num_steps, W) of the chain drafted after token `anchor` + 1 was emitted."""
        cache: list[tuple[Tensor, Tensor]] = []
        output = torch.zeros(0)
        for token in range(anchor + 1):  # true features: what a server has re-read for accepted tokens
            output = self.layer(embed_tokens[ids[token + 1]], self.fuse(aux[token]), token, cache)
        logits = [self.linear("lm_head", self.norm("norm", output))]
        for step in range(1, num_steps):
            fed_back = self.norm("norm", output) if self.config["norm_output"] else output
            output = self.layer(embed_tokens[ids[anchor + 1 + step]], fed_back, anchor + step, cache)
            logits.append(self.linear("lm_head", self.norm("norm", output)))
        return torch.stack(logits)


@pytest.mark.parametrize("eagle_3_1", [False, True])
@torch.no_grad()
def test_files_give_the_trainers_logits(
    tmp_path: Path, make_sample: Callable[..., FeatureSample], eagle_3_1: bool
) -> None:
    drafter = make_drafter(eagle_3_1=eagle_3_1)
    reader = FileReader(export(drafter, tmp_path / "drafter", dtype=torch.float32))
    sample = make_sample("a", [0, 0, 0] + [1] * 8, hidden_size=D, vocab_size=V)
    embed_tokens = torch.randn(V, D, generator=torch.Generator().manual_seed(5))
    num_compared = 0
    for index, step in enumerate(unroll(drafter, embed_tokens, pack([sample]), K)):
        for row, logits in zip(step.rows.tolist(), drafter.logits(step.hidden), strict=True):
            chain = reader.chain_logits(sample.aux_hidden_states, sample.input_ids, embed_tokens, row, index + 1)
            # fp32, sums in another order
            torch.testing.assert_close(logits, chain[index], rtol=1e-4, atol=1e-5)
            num_compared += 1
    assert num_compared == 7 + 6 + 5


def test_the_config_records_what_the_drafter_was_trained_on(tmp_path: Path) -> None:
    directory = export(
        make_drafter(), tmp_path / "drafter", trained_on={"tokenizer_digest": "t", "target_revision": "r"}
    )
    record = json.loads((directory / "config.json").read_text())["eagle3"]
    assert record == {"capture_layers": [3, 6, 9], "tokenizer_digest": "t", "target_revision": "r"}


@pytest.mark.parametrize(("eagle_3_1", "keys"), [(False, EAGLE_3_KEYS), (True, EAGLE_3_1_KEYS)])
def test_tensors_are_the_literal_list(tmp_path: Path, eagle_3_1: bool, keys: set[str]) -> None:
    drafter = make_drafter(eagle_3_1=eagle_3_1)
    directory = export(drafter, tmp_path / "drafter")
    assert sorted(file.name for file in directory.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(directory / "model.safetensors")
    assert set(tensors) == keys
    shapes = {
        "fc.weight": (D, 3 * D),
        "midlayer.self_attn.q_proj.weight": (48, 2 * D),
        "midlayer.self_attn.v_proj.weight": (24, 2 * D),
        "lm_head.weight": (W, D),
        "d2t": (W,),
        "t2d": (V,),
    }
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(tensors["d2t"] + torch.arange(W), tensors["t2d"].nonzero().flatten())


@pytest.mark.parametrize("eagle_3_1", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafter_comes_back(tmp_path: Path, eagle_3_1: bool, dtype: torch.dtype) -> None:
    drafter = make_drafter(eagle_3_1=eagle_3_1)
    loaded = load_drafter(export(drafter, tmp_path / "drafter", dtype=dtype), TARGET)
    assert loaded.config == drafter.config
    state = loaded.state_dict()
    for name, tensor in drafter.state_dict().items():
        rounded = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        assert torch.equal(state[name], rounded), name
        assert state[name].dtype == rounded.dtype, name


def test_export_of_a_cast_drafter(tmp_path: Path) -> None:
    drafter = make_drafter()
    whole = load_file(export(drafter, tmp_path / "a") / "model.safetensors")
    cast = load_file(export(drafter.bfloat16(), tmp_path / "b") / "model.safetensors")
    for name, tensor in whole.items():
        assert torch.equal(tensor, cast[name]), name


def test_card_says_how_to_serve(tmp_path: Path) -> None:
    card = (export(make_drafter(), tmp_path / "drafter") / "README.md").read_text()
    assert card.startswith("# A drafter\n\ntau 1.5\n")
    for text in ("--speculative-algorithm EAGLE3", "[3, 6, 9]", "[2, 5, 8]", "LlamaForCausalLM", "EAGLE-3,"):
        assert text in card
    assert "0.5.12" not in card
    assert "vLLM (0.11.2, 0.32.0 and newer) reads the list beside `eagle_config`, [3, 6, 9]," in card
    assert '{"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": 3}' in card


def test_card_names_the_ids_of_older_servers(tmp_path: Path) -> None:
    target = TARGET | {"architectures": ["DeepseekV3ForCausalLM"]}
    export_drafter(make_drafter(eagle_3_1=True), tmp_path / "drafter", target_config=target, card="")
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "config.json, [3, 6, 9]," in card
    assert "up to 0.5.12.post1 adds 1 to them for this class: write [2, 5, 8] there" in card
    assert "EAGLE-3.1," in card
    assert "vLLM (0.32.0 and newer)" in card


def test_second_export_replaces_the_first(tmp_path: Path) -> None:
    export(make_drafter(seed=0), tmp_path / "drafter")
    (tmp_path / ".drafter.partial").mkdir()  # of an export that was killed
    (tmp_path / ".drafter.partial" / "junk").write_text("")
    second = make_drafter(seed=1)
    export(second, tmp_path / "drafter", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "drafter", TARGET)
    assert torch.equal(loaded.fc.weight, second.fc.weight)
    assert [file.name for file in tmp_path.iterdir()] == ["drafter"]


def test_failed_export_leaves_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_drafter(seed=0)
    export(first, tmp_path / "drafter", dtype=torch.float32)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("eagle3.draft.export.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export(make_drafter(seed=1), tmp_path / "drafter")
    assert torch.equal(load_drafter(tmp_path / "drafter", TARGET).fc.weight, first.fc.weight)


def test_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"must hold nothing but config\.json.*got \['notes\.txt'\]"):
        export(make_drafter(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = edit(load_file(directory / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("spelling", ["model.{}", "layers.0", "model.layers.0"])
def test_other_spellings_are_read(tmp_path: Path, spelling: str) -> None:
    drafter = make_drafter(eagle_3_1=True)
    directory = export(drafter, tmp_path / "drafter", dtype=torch.float32)

    def rename(name: str) -> str:
        for index, other in enumerate(["aux_norm_low", "aux_norm_mid", "aux_norm_high"]):
            name = name.replace(f"fc_norm.{index}", other)
        if spelling == "model.{}":
            return spelling.format(name) if name not in ("lm_head.weight", "d2t", "t2d") else name
        return name.replace("midlayer", spelling)

    edit_tensors(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    state = load_drafter(directory, TARGET).state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_maps_of_tokens_may_be_of_any_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = make_drafter()
    directory = export(drafter, tmp_path / "drafter", dtype=torch.float32)
    edit_tensors(directory, lambda tensors: tensors | {"d2t": tensors["d2t"].to(dtype)})
    assert torch.equal(load_drafter(directory, TARGET).d2t, drafter.d2t)


def test_embedding_of_a_drafter_is_ignored_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    edit_tensors(directory, lambda tensors: tensors | {"embed_tokens.weight": torch.zeros(V, D)})
    with caplog.at_level(logging.INFO):
        load_drafter(directory, TARGET)
    assert "tensors of the drafter that SGLang replaces are not used, 1 in all: ['embed_tokens.weight']" in caplog.text


def test_full_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    """vLLM refuses a d2t where it has no use for one; a map that is not the plain one is needed all the same."""
    drafter = make_drafter(draft_vocab_size=V)
    directory = export(drafter, tmp_path / "drafter")
    assert not {"d2t", "t2d"} & load_file(directory / "model.safetensors").keys()
    loaded = load_drafter(directory, TARGET)
    assert loaded.target_ids.tolist() == list(range(V))
    assert bool(loaded.t2d.all())
    drafter.d2t[:2] = torch.tensor([1, -1])  # the first two change places
    directory = export(drafter, tmp_path / "swapped")
    assert load_drafter(directory, TARGET).target_ids.tolist() == [1, 0, *range(2, V)]


def test_t2d_may_be_left_out(tmp_path: Path) -> None:
    drafter = make_drafter()
    directory = export(drafter, tmp_path / "drafter")
    edit_tensors(directory, lambda tensors: {k: v for k, v in tensors.items() if k != "t2d"})
    assert torch.equal(load_drafter(directory, TARGET).t2d, drafter.t2d)


def test_all_wrong_tensors_come_at_once(tmp_path: Path) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["fc.weight"], tensors["d2t"]
        return tensors | {
            "fc.bias": torch.zeros(D),
            "norm.weight": torch.zeros(D + 1),
            "lm_head.weight": torch.zeros(W, D, dtype=torch.int8),
        }

    edit_tensors(directory, spoil)
    with pytest.raises(UserError) as error:
        load_drafter(directory, TARGET)
    for problem in (
        f"- missing: fc.weight ({D}, {3 * D})",
        f"- missing: d2t ({W},)",
        f"- unknown: fc.bias ({D},)",
        f"- misshapen: norm.weight ({D + 1},), wanted ({D},)",
        "- quantised: lm_head.weight in torch.int8",
        str(directory),
    ):
        assert problem in str(error.value)


def test_tensor_in_two_spellings_is_refused(tmp_path: Path) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    edit_tensors(directory, lambda tensors: tensors | {"model.norm.weight": torch.ones(D)})
    with pytest.raises(UserError, match=r"must be stored once, got another spelling of \['(model\.)?norm\.weight'\]"):
        load_drafter(directory, TARGET)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.arange(W) * 2 + 10, r"target tokens 10\.\.79, wanted 0\.\.59; it must hold offsets"),
        (torch.arange(W).flip(0), "several draft tokens for one target token; it must hold offsets"),
        (torch.zeros(W, dtype=torch.int64), "- t2d: other target tokens than d2t's"),
    ],
)
def test_target_tokens_in_place_of_offsets_are_found(tmp_path: Path, d2t: Tensor, message: str) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    edit_tensors(directory, lambda tensors: tensors | {"d2t": d2t})
    with pytest.raises(UserError, match=message):
        load_drafter(directory, TARGET)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"must be model\.safetensors.*got \['pytorch_model\.bin'\].*save the model as"):
        load_drafter(directory, TARGET)


def test_drafter_directory_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must be a directory with config\.json and model\.safetensors, got '.*/none'"):
        load_drafter(tmp_path / "none", TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json must be JSON, got .*; export the drafter again"):
        load_drafter(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json must be an object, got a list"):
        load_drafter(tmp_path, TARGET)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    edit_tensors(directory, lambda tensors: tensors | {"fc.weight": tensors["fc.weight"] * float("nan")})
    with pytest.raises(UserError, match=r"- not finite: fc\.weight, wanted numbers alone"):
        load_drafter(directory, TARGET)


def test_short_position_range_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = export(make_drafter(), tmp_path / "drafter")
    load_drafter(directory, TARGET)
    assert not caplog.records
    load_drafter(directory, TARGET | {"max_position_embeddings": 4096})
    assert "max_position_embeddings is 128 and the target's 4096: SGLang's acceptance collapses" in caplog.text
