"""Context attention merged with the row's own chain, over successive steps, against a dense mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft.attention import Places, draft_attention
from eagle3.draft.context_attention import PLANNED_TOKENS, Documents, context_backward, context_forward, kernel_for

ROWS = [1, 2, 4, 5, 8, 9, 16]  # a document's first and last token among them, and none of the third document's
LENGTHS = (5, 9, 1, 3)
STEP_ROWS = [ROWS, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16], [2, 16]]  # of each step; some leave, or none
NUM_KV_HEADS = 2


def random_leaf(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def random_inputs(
    step_rows: list[list[int]], num_tokens: int, *, heads: int = 6, dtype: torch.dtype, dim: int = 4
) -> list[Tensor]:
    """Returns what is attended to (T, 2 n_kv, d), and what each step projects (R_k, n_q [+ 2 n_kv], d)."""
    inputs = [random_leaf(num_tokens, 2 * NUM_KV_HEADS, dim, seed=99, dtype=dtype)]
    for step, rows in enumerate(step_rows):
        own = 2 * NUM_KV_HEADS if step else 0
        inputs.append(random_leaf(len(rows), heads + own, dim, seed=step, dtype=dtype))
    return inputs


def attend(step_rows: list[list[int]], lengths: tuple[int, ...], context: Tensor, *projected: Tensor) -> list[Tensor]:
    """Returns the attention output (R_k, n_q, d) of each step."""
    device = context.device
    documents = Documents.of(lengths, device)
    outputs = []
    chain: Tensor | None = None
    for step, rows in enumerate(step_rows):
        if step == 1:
            chain = context.new_empty(len(step_rows) - 1, *context.shape)
        row_of_token = torch.full((sum(lengths),), -1, dtype=torch.int64)
        row_of_token[rows] = torch.arange(len(rows))
        places = Places(torch.tensor(rows, device=device), row_of_token.to(device), documents)
        output, chain = draft_attention(projected[step], context, chain, step, places)
        outputs.append(output)
    return outputs


def attend_densely(
    step_rows: list[list[int]], lengths: tuple[int, ...], context: Tensor, *projected: Tensor
) -> list[Tensor]:
    """The same row by row, in plain softmaxes."""
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    outputs = []
    for step, rows in enumerate(step_rows):
        attended = []
        for row, token in enumerate(rows):
            seen = [j for j in range(token + 1) if document[j] == document[token]]
            visible = [context[seen]]
            for earlier in range(1, step + 1):
                at = step_rows[earlier].index(token)
                visible.append(projected[earlier][at : at + 1, -2 * NUM_KV_HEADS :])
            keys, values = torch.cat(visible).chunk(2, dim=1)  # (n, n_kv, d)
            num_heads = projected[step].shape[1] - (2 * NUM_KV_HEADS if step else 0)
            group = num_heads // NUM_KV_HEADS
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", projected[step][row, :num_heads], keys) / keys.shape[-1] ** 0.5
            attended.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
        outputs.append(torch.stack(attended))
    return outputs


def grads_of(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns gradients of the inputs for random gradients of all steps' outputs."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, grads)


@pytest.mark.parametrize("heads", [2, 6])
def test_every_step_equals_the_dense_mask_with_all_gradients(heads: int) -> None:
    inputs = random_inputs(STEP_ROWS, sum(LENGTHS), heads=heads, dtype=torch.float32)
    fast, dense = attend(STEP_ROWS, LENGTHS, *inputs), attend_densely(STEP_ROWS, LENGTHS, *inputs)
    for ours, exact in zip(fast, dense, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)  # fp32, other summation order
    for ours, exact in zip(grads_of(fast, inputs), grads_of(dense, inputs), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_gradients_are_those_of_finite_differences(num_steps: int) -> None:
    inputs = random_inputs(STEP_ROWS[:num_steps], sum(LENGTHS), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: attend(STEP_ROWS[:num_steps], LENGTHS, *tensors), inputs)


def test_a_step_whose_output_is_not_used_still_passes_the_chain_on() -> None:
    inputs = random_inputs(STEP_ROWS, sum(LENGTHS), dtype=torch.float32)
    fast, dense = attend(STEP_ROWS, LENGTHS, *inputs)[3], attend_densely(STEP_ROWS, LENGTHS, *inputs)[3]
    for ours, exact in zip(grads_of([fast], inputs[:1]), grads_of([dense], inputs[:1]), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_a_dominant_chain_key_takes_the_attention_and_the_gradient() -> None:
    """The merged log-sum-exp matters most where the context has almost no weight."""
    context, first, second = random_inputs([[3], [3]], 6, heads=2, dtype=torch.float64)
    with torch.no_grad():
        second[:, 2:4] = second[:, :2] * 60  # the key's score passes the context's by far
    output = attend([[3], [3]], (6,), context, first, second)[1]
    torch.testing.assert_close(output, second[:, 4:], rtol=0, atol=1e-6)
    output.sum().backward()
    assert context.grad is not None
    assert second.grad is not None
    torch.testing.assert_close(context.grad, torch.zeros_like(context), rtol=0, atol=1e-6)
    torch.testing.assert_close(second.grad[:, 4:], torch.ones_like(output), rtol=0, atol=1e-6)


def test_later_tokens_and_other_documents_get_no_gradient() -> None:
    inputs = random_inputs([[6], [6]], sum(LENGTHS), dtype=torch.float32)
    attend([[6], [6]], LENGTHS, *inputs)[1].sum().backward()
    assert inputs[0].grad is not None
    assert inputs[0].grad.abs().sum((1, 2)).ne(0).nonzero().flatten().tolist() == [5, 6]


def test_bf16_keeps_its_dtype_and_is_near() -> None:
    inputs = random_inputs(STEP_ROWS, sum(LENGTHS), dtype=torch.bfloat16)
    outputs = attend(STEP_ROWS, LENGTHS, *inputs)
    exact = attend_densely(STEP_ROWS, LENGTHS, *(tensor.float() for tensor in inputs))
    for ours, expected in zip(outputs, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.02)  # bf16: 8 bits
    assert {grad.dtype for grad in grads_of(outputs, inputs)} == {torch.bfloat16}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, (32,), (64, 32, 7), (31, 33, 1)])
def test_gpu_kernels_equal_the_dense_mask(
    lengths: tuple[int, ...], dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Lengths that fill the kernels' blocks, or all but one token of them, and one more."""
    cpu = random_inputs(STEP_ROWS, sum(lengths), dtype=dtype, dim=dim)
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in cpu]
    wide = [tensor.detach().float().requires_grad_() for tensor in cpu]
    fast, dense = attend(STEP_ROWS, lengths, *inputs), attend_densely(STEP_ROWS, lengths, *wide)
    for got, expected in zip(fast, dense, strict=True):
        torch.testing.assert_close(got.float().cpu(), expected, rtol=tolerance, atol=tolerance)  # other order; 8 bits
    for got, expected in zip(grads_of(fast, inputs), grads_of(dense, wide), strict=True):
        torch.testing.assert_close(got.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_documents", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_documents_of_one_length_on_a_gpu_equal_fp32(num_documents: int, dim: int) -> None:
    """cuDNN's kernels in bf16, where the GPU has them, against the memory-efficient ones in fp32."""
    lengths = (PLANNED_TOKENS,) * num_documents
    rows = list(range(sum(lengths)))
    step_rows = [rows, rows[:-3], rows[5:-7:2]]
    cpu = random_inputs(step_rows, sum(lengths), heads=8, dtype=torch.bfloat16, dim=dim)
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in cpu]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    newest = torch.cuda.get_device_capability()[0] >= 9
    kernels = [kernel_for(each[1], Documents.of(lengths, each[1].device)) for each in (inputs, wide)]
    assert kernels == ["cudnn" if newest else "flash", "efficient"]
    fast, exact = attend(step_rows, lengths, *inputs), attend(step_rows, lengths, *wide)
    pairs = zip([*fast, *grads_of(fast, inputs)], [*exact, *grads_of(exact, wide)], strict=True)
    for got, expected in pairs:
        error = (got.float() - expected).norm() / expected.norm()
        assert error < 0.02, float(error)  # bf16 has 8 bits; of what is added up only results are rounded to them


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_documents_of_any_length_make_no_plan() -> None:
    query = torch.empty(3 * PLANNED_TOKENS, 8, 128, device="cuda", dtype=torch.bfloat16)
    for lengths in ((PLANNED_TOKENS, 2 * PLANNED_TOKENS), (3 * PLANNED_TOKENS - 1, 1), (PLANNED_TOKENS // 2,) * 6):
        assert kernel_for(query, Documents.of(lengths, query.device)) == "flash", lengths


def test_memory_is_linear_in_tokens() -> None:
    num_tokens = 512
    rows = [list(range(num_tokens))] * 2
    inputs = random_inputs(rows, num_tokens, heads=2, dtype=torch.float32)
    with _LargestTensor() as seen:
        attend(rows, (num_tokens,), *inputs)[1].sum().backward()
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


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float64),
        pytest.param(
            "cuda", torch.float32, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
        pytest.param(
            "cuda", torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_the_end_of_a_document_attends_to_all_of_its_keys(device: str, dtype: torch.dtype) -> None:
    """What the last tokens of two documents see and give is what they do within the whole ones."""
    lengths, ends = (70, 33), (20, 33)
    tensors = [
        random_leaf(sum(lengths), heads, 8, seed=heads, dtype=dtype).detach().to(device) for heads in (4, 2, 2, 4)
    ]
    query, keys, values, grad = tensors
    own = torch.cat([torch.arange(50, 70), torch.arange(70, 103)]).to(device)
    whole, parts = Documents.of(lengths, query.device), Documents.of(ends, query.device, lengths)
    output, lse = context_forward(query, keys, values, whole)
    part_output, part_lse = context_forward(query[own], keys, values, parts)
    # fp64 and fp32: other summation orders; bf16: its rounding.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(part_output, output[own], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part_lse, lse[own], rtol=tolerance, atol=tolerance)
    alone = torch.zeros_like(grad).index_copy_(0, own, grad[own])  # rows of the others give nothing
    grads = context_backward(alone, query, output, lse, keys, values, whole)
    part_grads = context_backward(grad[own], query[own], part_output, part_lse, keys, values, parts)
    torch.testing.assert_close(part_grads[0], grads[0][own], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(part_grads[1:], grads[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
