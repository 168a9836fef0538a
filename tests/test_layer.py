"""The layer that training runs is the model's, with the same gradients; and it keeps little."""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from draft_oracle import tiny_drafter
from torch import Tensor

from eagle3.draft.fusion import TokenHeads
from eagle3.draft.layer import Rotation, embeds_heads, finish, layer_weights, project
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import pack
from eagle3.features.record import FeatureSample

TOKEN_IDS = torch.tensor([3, 39, 3, 0, 17])
POSITIONS = torch.tensor([0, 7, 1, 63, 7])


def random_table() -> Tensor:  # (V, D)
    return torch.randn(40, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain_layer(drafter: Eagle3Drafter, hidden: Tensor) -> list[Tensor]:
    """Returns query, key, value, output and normed output, by the model; attention is to the row's own key alone."""
    query, key, value = drafter.qkv(random_table()[TOKEN_IDS], hidden, POSITIONS)
    output = drafter.finish(hidden, value.repeat_interleave(2, dim=1))
    return [query, key, value, output, drafter.norm(output)]


def fused_layer(drafter: Eagle3Drafter, hidden: Tensor) -> list[Tensor]:
    weights = layer_weights(drafter)
    rotation = Rotation(POSITIONS, drafter.rope_tables(64), num_rotated=6, head_dim=6)
    embeds = TokenHeads(embeds_heads(random_table(), TOKEN_IDS, weights, 6), torch.arange(5), 0)
    heads, residual, _ = project(embeds, hidden, weights, weights.query_key_value, rotation)
    query, key, value = heads.split([4, 2, 2], dim=1)
    return [query, key, value, *finish(residual, value.repeat_interleave(2, dim=1), weights)]


def test_equals_the_model_with_all_gradients() -> None:
    drafter = tiny_drafter(dtype=torch.float64)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    inputs = [hidden, *(p for name, p in drafter.named_parameters() if name not in ("fc.weight", "lm_head.weight"))]
    results = []
    for layer in (fused_layer, plain_layer):
        outputs = layer(drafter, hidden)
        generator = torch.Generator().manual_seed(3)
        grads = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, grads)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)  # fp64, other summation order


def test_gate_and_up_that_are_made_again_are_not_kept() -> None:
    drafter = tiny_drafter(intermediate_size=64, dtype=torch.float64)
    residual, attended = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    residual, attended = residual[:, :16].clone().requires_grad_(), attended.unflatten(1, (4, 6))
    weights = layer_weights(drafter)
    results, sizes = [], []

    def normed_output(recompute: bool) -> Tensor:
        return finish(residual, attended, weights, recompute=recompute)[1]

    for recompute in (False, True):
        run = partial(normed_output, recompute)
        sizes.append(kept_elements(run))
        results.append(torch.autograd.grad(run().sum(), residual))
    assert sizes[0] - sizes[1] == 5 * 2 * 64
    assert torch.equal(results[0][0], results[1][0])


def test_queries_alone_and_keys_alone_are_parts_of_the_whole() -> None:
    drafter = tiny_drafter(dtype=torch.float64)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights, tables = layer_weights(drafter), drafter.rope_tables(64)

    table = embeds_heads(random_table(), TOKEN_IDS, weights, 6)

    def heads(matrix: Tensor, first: int, num_rotated: int) -> Tensor:
        rotation = Rotation(POSITIONS, tables, num_rotated, head_dim=6)
        return project(TokenHeads(table, torch.arange(5), first), hidden, weights, matrix, rotation)[0]

    parts = torch.cat([heads(weights.query, 0, 4), heads(weights.key_value, 4, 2)], dim=1)
    torch.testing.assert_close(parts, heads(weights.query_key_value, 0, 6), rtol=1e-12, atol=1e-12)


def test_tokens_that_several_calls_read_have_all_their_gradients() -> None:
    """Rows read other tokens at each call, some none, and not all tokens are read."""
    drafter = tiny_drafter(dtype=torch.float64)
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights, tables = layer_weights(drafter), drafter.rope_tables(64)
    reads = [torch.tensor([1, 4, 0]), torch.tensor([3, -1, 1]), torch.tensor([0, 4, 1])]
    rotation = Rotation(POSITIONS[:3], tables, num_rotated=6, head_dim=6)
    parameters = [drafter.midlayer.input_layernorm.weight, drafter.midlayer.self_attn.q_proj.weight]
    ours, plain = [], []
    table = embeds_heads(random_table(), TOKEN_IDS, weights, 6)
    for tokens in reads:
        heads, _, table = project(TokenHeads(table, tokens, 0), hidden, weights, weights.query_key_value, rotation)
        ours.append(heads)
        embeds = random_table()[TOKEN_IDS[tokens]] * (tokens >= 0)[:, None]  # the norm of nothing is nothing
        plain.append(torch.cat(drafter.qkv(embeds, hidden, POSITIONS[:3]), dim=1))
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)  # fp64, other summation order
    grads = [torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    results = zip(*(torch.autograd.grad(outputs, parameters, grads) for outputs in (ours, plain)), strict=True)
    for got, expected in results:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def kept_elements(function: Callable[[], Tensor]) -> int:
    """Returns how many numbers a function's graph keeps for the backward, each storage once."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(sizes.values())


def test_a_draft_step_keeps_what_products_made_and_nothing_else(make_sample: Callable[..., FeatureSample]) -> None:
    """The difference between K and K + 1 steps is one step, that between T and 2T is linear."""
    drafter = tiny_drafter(intermediate_size=64)
    target = TargetWeights(torch.randn(40, 16), torch.randn(40, 16), torch.ones(16), rms_norm_eps=1e-5)

    def kept(num_tokens: int, ttt_steps: int) -> int:
        packed = pack([make_sample("s", [1] * num_tokens, hidden_size=16, vocab_size=40)])
        packed = dataclasses.replace(packed, target_logz=torch.zeros(packed.target_rows.numel()))
        return kept_elements(
            lambda: ttt_sums(drafter, target, packed, ttt_steps=ttt_steps, ttt_decay=0.8, renormalise=True).loss
        )

    hidden_size, inner, query_size, heads = 16, 64, 4 * 6, 4
    # What the layer reads and its two sums; gate and up; queries, attention output, log-sum-exp; token ids; positions;
    # the gradient of the normed output. Which rows went on costs as many integers as there are tokens, twice.
    per_row = 3 * hidden_size + 2 * inner + 2 * query_size + heads + 1 + hidden_size + 4
    num_tokens = 200
    one_step = kept(num_tokens, 5) - kept(num_tokens, 4)
    assert one_step <= per_row * num_tokens, (one_step / num_tokens, per_row)
    assert kept(2 * num_tokens, 4) <= 2.1 * kept(num_tokens, 4)
