"""Context attention merged with the row's own chain, against a dense mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft.attention import chain_attention


def random_inputs(
    rows: list[int], document_lengths: tuple[int, ...], *, chain: int, heads: int = 6, dtype: torch.dtype, dim: int = 4
) -> tuple[Any, ...]:
    """Returns the arguments of `chain_attention`: query, keys, values, own keys and values, rows, lengths."""
    generator = torch.Generator().manual_seed(len(rows) + chain)
    num_tokens = sum(document_lengths)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    query, keys, values = leaf(len(rows), heads, dim), leaf(num_tokens, 2, dim), leaf(num_tokens, 2, dim)
    own_keys, own_values = leaf(len(rows), chain, 2, dim), leaf(len(rows), chain, 2, dim)
    return query, keys, values, own_keys, own_values, torch.tensor(rows, dtype=torch.int64), document_lengths


def dense_chain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    rows: Tensor,
    document_lengths: tuple[int, ...],
) -> Tensor:
    """The same by a mask over (R, T + C), in plain operations."""
    num_tokens, chain = keys.shape[0], own_keys.shape[1]
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)  # (T, n_q, d)
    own_keys, own_values = own_keys.repeat_interleave(group, 2), own_values.repeat_interleave(group, 2)
    document = torch.tensor([i for i, length in enumerate(document_lengths) for _ in range(length)])  # (T,)
    tokens_up_to = torch.arange(num_tokens) <= rows.cpu()[:, None]
    visible = ((document[rows.cpu()][:, None] == document) & tokens_up_to).to(rows.device)  # (R, T)
    scores = torch.einsum("rhd,thd->rht", query, keys).masked_fill(~visible[:, None], float("-inf"))
    own_scores = torch.einsum("rhd,rchd->rhc", query, own_keys)
    probs = (torch.cat([scores, own_scores], dim=-1) / query.shape[-1] ** 0.5).softmax(-1)  # (R, n_q, T + C)
    context, own = probs.split([num_tokens, chain], dim=-1)
    return torch.einsum("rht,thd->rhd", context, values) + torch.einsum("rhc,rchd->rhd", own, own_values)


ROWS = [1, 2, 4, 5, 8, 9, 16]  # a document's first and last token among them, and none of the third document's
LENGTHS = (5, 9, 1, 3)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("chain", [0, 1, 3])
def test_equals_the_dense_mask_with_all_gradients(chain: int, heads: int) -> None:
    inputs = random_inputs(ROWS, LENGTHS, chain=chain, heads=heads, dtype=torch.float32)
    fast, dense = chain_attention(*inputs), dense_chain_attention(*inputs)
    torch.testing.assert_close(fast, dense, rtol=1e-5, atol=1e-5)  # fp32, other summation order
    grad = torch.randn(fast.shape, generator=torch.Generator().manual_seed(0))
    for ours, exact in zip(
        torch.autograd.grad(fast, inputs[:5], grad), torch.autograd.grad(dense, inputs[:5], grad), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chain", [0, 2])
def test_gradients_are_those_of_finite_differences(chain: int) -> None:
    inputs = random_inputs(ROWS, LENGTHS, chain=chain, dtype=torch.float64)
    assert torch.autograd.gradcheck(chain_attention, inputs)


def test_a_dominant_chain_key_takes_the_attention_and_the_gradient() -> None:
    """The merged log-sum-exp matters most where the context has almost no weight."""
    inputs = list(random_inputs([3], (6,), chain=1, heads=2, dtype=torch.float64))
    inputs[3] = (inputs[0].detach()[:, None] * 60).requires_grad_()  # its score passes the context's by far
    output = chain_attention(*inputs)
    torch.testing.assert_close(output, inputs[4][:, 0], rtol=0, atol=1e-6)
    output.sum().backward()
    torch.testing.assert_close(inputs[2].grad, torch.zeros_like(inputs[2]), rtol=0, atol=1e-6)
    torch.testing.assert_close(inputs[4].grad, torch.ones_like(inputs[4]), rtol=0, atol=1e-6)


def test_later_tokens_and_other_documents_get_no_gradient() -> None:
    inputs = random_inputs([6], LENGTHS, chain=2, dtype=torch.float32)
    chain_attention(*inputs).sum().backward()
    for tensor in inputs[1:3]:
        assert tensor.grad.abs().sum((1, 2)).ne(0).nonzero().flatten().tolist() == [5, 6]


def test_no_rows_give_no_output() -> None:
    inputs = random_inputs([], LENGTHS, chain=1, dtype=torch.float32)
    output = chain_attention(*inputs)
    assert output.shape == (0, 6, 4)
    assert output.requires_grad


def test_bf16_keeps_its_dtype_and_is_near() -> None:
    inputs = random_inputs(ROWS, LENGTHS, chain=2, dtype=torch.bfloat16)
    wide = [tensor.float() for tensor in inputs[:5]]
    output = chain_attention(*inputs)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(
        output.float(), dense_chain_attention(*wide, *inputs[5:]), rtol=0.02, atol=0.02
    )  # bf16: 8 bits
    output.sum().backward()
    assert [tensor.grad.dtype for tensor in inputs[:5]] == [torch.bfloat16] * 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("chain", [0, 3])
def test_gpu_kernels_equal_the_dense_mask(chain: int, dtype: torch.dtype, tolerance: float) -> None:
    cpu = random_inputs(ROWS, LENGTHS, chain=chain, dtype=dtype, dim=64)
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in cpu[:5]]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    where: tuple[Any, ...] = (cpu[5].cuda(), LENGTHS)
    fast = chain_attention(*inputs, *where)
    dense = dense_chain_attention(*wide, *where)
    torch.testing.assert_close(fast.float(), dense, rtol=tolerance, atol=tolerance)  # other order; bf16: 8 bits
    grad = torch.randn_like(fast)
    ours, exact = torch.autograd.grad(fast, inputs, grad), torch.autograd.grad(dense, wide, grad.float())
    for got, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def test_memory_is_linear_in_tokens() -> None:
    num_tokens = 512
    inputs = random_inputs(list(range(num_tokens)), (num_tokens,), chain=2, heads=2, dtype=torch.float32)
    with _LargestTensor() as seen:
        chain_attention(*inputs).sum().backward()
    assert seen.elements < num_tokens * num_tokens, seen.elements


class _LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result
