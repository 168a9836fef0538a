"""Drafters for tiny targets: random ones, ones fitted to a few answers so that some drafts are right, and a store."""

from dataclasses import dataclass
from pathlib import Path

import torch
from target_stores import LAYERS, write_target_store
from torch import Tensor
from torch.nn import functional as F

from eagle3.draft.export import export_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.decoder import decode
from eagle3.evaluation.target import LocalTarget
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest


@dataclass(frozen=True)
class Fitted:
    """A drafter that is right more often than not, and what it was fitted to."""

    drafter: Path  # exported
    store: Path
    prompts: list[list[int]]


def write_fitted_drafter(directory: Path, target_path: Path, target: LocalTarget) -> Fitted:
    """Exports a drafter fitted to the target's answers to some prompts, and writes a store of them."""
    generator = torch.Generator().manual_seed(5)
    lengths = (4, 9, 11, 25, 8, 14, 6, 17, 12, 21, 10, 15)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]
    answers = decode(target, None, prompts, num_draft_tokens=0, max_new_tokens=40, batch_size=12)
    drafter = random_drafter(target, 320)
    # Blind to the embeddings, or it would learn these few answers by heart and not mind which states it gets.
    drafter.midlayer.input_layernorm.weight.detach().zero_()
    drafter.midlayer.input_layernorm.weight.requires_grad_(False)
    sequences = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    fit_drafter(drafter, target, sequences, num_steps=70)
    # Heads have a direction in common, which adds the same number to all logits; tiny random ones have not.
    with torch.no_grad():
        drafter.lm_head.weight += 0.2 * torch.randn(64, generator=generator)
    tokenizer = load_tokenizer(str(target_path), False)
    digests = {
        "tokenizer_digest": tokenizer_digest(tokenizer),
        "chat_template_digest": ChatRenderer(tokenizer, {}).template_digest(),
    }
    samples = [
        target.features(f"s{i}", prompt, answer.token_ids)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    write_target_store(directory / "store", target_path, samples, chat_template_digest=digests["chat_template_digest"])
    config = load_target_config(target_path)
    export_drafter(
        drafter, directory / "drafter", target_config=config, card="", dtype=torch.float32, trained_on=digests
    )
    return Fitted(directory / "drafter", directory / "store", prompts)


def random_drafter(
    target: LocalTarget, draft_vocab_size: int, *, seed: int = 0, eagle_3_1: bool = False
) -> Eagle3Drafter:
    """Returns a random drafter with the target's head and norm, in the target's dtype."""
    torch.manual_seed(seed)
    config = target.model.config
    drafter = Eagle3Drafter(
        DrafterConfig(
            hidden_size=config.hidden_size,
            intermediate_size=80,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            capture_layers=LAYERS,
            rms_norm_eps=1e-5,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            fc_norm=eagle_3_1,
            norm_output=eagle_3_1,
        )
    )
    drafter.init_from_target(target.model.lm_head.weight, target.model.model.norm.weight)
    return drafter.to(target.dtype).eval()


def fit_drafter(drafter: Eagle3Drafter, target: LocalTarget, sequences: list[list[int]], num_steps: int) -> None:
    """Fits step 0 to the sequences' next tokens but one, by an attention written out here."""
    wanted = torch.full((drafter.config.vocab_size,), -100)
    wanted[drafter.target_ids] = torch.arange(drafter.config.draft_vocab_size)
    features = [captured_states(target, ids) for ids in sequences]
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(num_steps):
        loss = torch.zeros(())
        for ids, aux in zip(sequences, features, strict=True):
            tokens = torch.tensor(ids)
            hidden = drafter.fuse(aux[:-2])
            positions = torch.arange(len(ids) - 2)
            query, keys, values = drafter.qkv(F.embedding(tokens[1:-1], target.embed_tokens), hidden, positions)
            output = drafter.finish(hidden, dense_attention(query, keys, values))
            loss = loss + F.cross_entropy(drafter.logits(output), wanted[tokens[2:]], ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def captured_states(target: LocalTarget, ids: list[int]) -> Tensor:
    """Returns what transformers calls hidden_states[k] for the captured layers, (T, A*D)."""
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[k][0] for k in LAYERS], dim=-1)


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last rows of (T, n_kv, d) keys: queries (N, n_q, d) stand at rows T-N..T-1."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    num_rows, num_keys = scores.shape[1:]
    future = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), values)
