"""Foreign features become the samples that capture itself would have stored, or are refused with what is wrong."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.capture import importing
from eagle3.capture.foreign import find_files, read_foreign
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.parity import ParityError
from eagle3.commands.features import main
from eagle3.config import TargetConfig, UserError
from eagle3.features.store import FeatureStore
from eagle3.prompts.tokenizers import load_tokenizer

LAYERS = [2, 4, 5]


@dataclass(frozen=True)
class Forward:
    """One sequence and what transformers says of it."""

    input_ids: Tensor  # (T,) int64
    states: list[Tensor]  # L+1 of (T, D), the last after the norm
    before_norm: Tensor  # (T, D)
    logits: Tensor  # (T, V)


@pytest.fixture(scope="module")
def forwards(tiny_target: Path) -> list[Forward]:
    tokenizer = load_tokenizer(str(tiny_target), trust_remote_code=False)
    engine = TransformersEngine(TargetConfig(str(tiny_target), dtype="float32", device="cpu"), LAYERS, tokenizer)
    found = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(3, 300, (30 + seed,), generator=generator)
        kept: list[Tensor] = []
        hook = engine._body.norm.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][0]))
        states = engine.hidden_states(input_ids.tolist())
        hook.remove()
        (logits,) = engine.logits([input_ids.tolist()])
        found.append(Forward(input_ids, states, kept[0].detach(), logits))
    return found


def mask_of(forward: Forward) -> Tensor:
    return (torch.arange(forward.input_ids.numel()) >= 10).long()


def write_ckpt(path: Path, forwards: list[Forward], layers: list[int] = LAYERS) -> Path:
    path.mkdir()
    for number, forward in enumerate(forwards):
        values: dict[str, Any] = {
            "input_ids": forward.input_ids,
            "loss_mask": mask_of(forward),
            "hidden_state": forward.states[-1][None],
            "aux_hidden_state": torch.cat([forward.states[layer] for layer in layers], dim=1)[None],
        }
        torch.save(values, path / f"data_{number}.ckpt")
    return path


def write_vllm(path: Path, forwards: list[Forward], *, with_mask: bool = True) -> Path:
    path.mkdir()
    for number, forward in enumerate(forwards):
        states = torch.stack([*(forward.states[layer] for layer in LAYERS), forward.before_norm], dim=1)
        values = {"token_ids": forward.input_ids, "hidden_states": states.contiguous()}
        if with_mask:
            values["loss_mask"] = mask_of(forward)
        save_file(values, path / f"request-{number}.safetensors")
    return path


def run(*arguments: object) -> int:
    return main(["import", *map(str, arguments)])


def assert_store_is(path: Path, forwards: list[Forward], names: str, first: int) -> None:
    store = FeatureStore(path)
    assert store.verify() == []
    assert store.manifest.capture_layers == tuple(LAYERS)
    samples = {store.entries[i].sample_id: store[i] for i in range(len(store))}
    assert sorted(samples) == sorted(f"{names}{number}" for number in range(len(forwards)))
    for number, forward in enumerate(forwards):
        sample = samples[f"{names}{number}"]
        assert sample.input_ids.tolist() == forward.input_ids.tolist()
        assert sample.loss_mask.tolist() == [i >= first for i in range(forward.input_ids.numel())]
        rows = torch.arange(first - 1, forward.input_ids.numel() - 1)
        assert sample.last_rows.tolist() == rows.tolist()
        aux = torch.cat([forward.states[layer] for layer in LAYERS], dim=1)
        assert torch.equal(sample.aux_hidden_states, aux)
        # Another order of sums in the norm.
        torch.testing.assert_close(sample.last_hidden_states, forward.states[-1][rows], rtol=1e-5, atol=1e-5)
        assert sample.target_logz is not None
        torch.testing.assert_close(sample.target_logz, forward.logits[rows].logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_specforge_files_become_a_store_and_go_on_where_they_were(
    tiny_target: Path,
    forwards: list[Forward],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = write_ckpt(tmp_path / "source", forwards), tmp_path / "out"
    arguments = (source, out, "--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm")
    assert run(*arguments, "--dry-run") == 0
    assert not out.exists()
    assert "nothing written: --dry-run" in capsys.readouterr().out
    assert run(*arguments) == 0
    assert "GB, the gates passed; wrote 8 samples" in capsys.readouterr().out
    assert_store_is(out, forwards, "data_", first=10)
    assert FeatureStore(out).manifest.engine_version == "SpecForge"
    assert run(*arguments) == 0
    assert "wrote 0 samples" in capsys.readouterr().out
    monkeypatch.setattr(importing, "run_gates", None)
    with pytest.raises(UserError, match=r"codec must be 'fp32', as stored, got 'fp8'"):
        run(*arguments, "--codec", "fp8")


@pytest.mark.parametrize("with_mask", [True, False])
def test_vllm_files_become_a_store(tiny_target: Path, forwards: list[Forward], tmp_path: Path, with_mask: bool) -> None:
    source, out = write_vllm(tmp_path / "source", forwards, with_mask=with_mask), tmp_path / "out"
    mask = "file" if with_mask else "all"
    arguments = ("--target", tiny_target, "--layers", *LAYERS, "--last", "before-norm", "--loss-mask", mask)
    assert run(source, out, *arguments) == 0
    assert_store_is(out, forwards, "request-", first=10 if with_mask else 1)


def test_states_of_other_layers_and_unnormed_ones_do_not_pass_the_gates(
    tiny_target: Path, forwards: list[Forward], tmp_path: Path
) -> None:
    source = write_ckpt(tmp_path / "source", forwards, layers=[3, 4, 5])
    target = ("--target", tiny_target)
    with pytest.raises(
        ParityError, match=r"captured layer 2 must be .* the nearest is hidden_states\[3\] .*correct --lay"
    ):
        run(source, tmp_path / "out", *target, "--layers", *LAYERS, "--last", "after-norm")
    with pytest.raises(ParityError, match="the last hidden state must be the target's"):
        run(
            write_vllm(tmp_path / "vllm", forwards),
            tmp_path / "out",
            *target,
            "--layers",
            *LAYERS,
            "--last",
            "after-norm",
        )
    assert not (tmp_path / "out").exists()


def test_the_meaning_is_asked_for_all_at_once(tiny_target: Path, forwards: list[Forward], tmp_path: Path) -> None:
    source = write_vllm(tmp_path / "source", forwards[:1], with_mask=False)
    with pytest.raises(UserError) as caught:
        run(source, tmp_path / "out", "--target", tiny_target, "--layers", 2, 4)
    message = str(caught.value)
    assert "has 30 tokens with 3 states and a last one, of D 64:\n" in message
    assert "  --layers must name 3 boundaries, one for each state besides the last, got [2, 4]" in message
    assert "  --last must be after-norm or before-norm, got none" in message
    assert "  --loss-mask must be all, got file" in message


def test_states_of_another_target_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    values = {"input_ids": torch.arange(4), "loss_mask": torch.ones(4), "hidden_state": torch.zeros(1, 4, 32)}
    torch.save(values | {"aux_hidden_state": torch.zeros(1, 4, 96)}, tmp_path / "source" / "a.ckpt")
    with pytest.raises(UserError, match=r"states must have the target's hidden_size=64, got 32 \(.*a.ckpt\)"):
        run(tmp_path / "source", tmp_path / "out", "--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm")


def test_samples_that_are_not_finite_are_left_out_and_named(
    tiny_target: Path, forwards: list[Forward], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_ckpt(tmp_path / "source", [*forwards, forwards[0]])
    path = source / "data_8.ckpt"
    values = torch.load(path, weights_only=True)
    values["aux_hidden_state"][0, 3, 5] = float("nan")
    torch.save(values, path)
    target = ("--target", tiny_target)
    assert run(source, tmp_path / "out", *target, "--layers", *LAYERS, "--last", "after-norm") == 1
    printed = capsys.readouterr().out
    assert f"{path}: aux_hidden_states must be finite, got 1 rows that are not, first at token 3" in printed
    assert "wrote 8 samples" in printed
    assert "1 left out" in printed


def change_file(path: Path, change: dict[str, Any]) -> None:
    torch.save(torch.load(path, weights_only=True) | change, path)


def test_files_unlike_the_first_are_left_out_and_named(
    tiny_target: Path, forwards: list[Forward], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_ckpt(tmp_path / "source", [*forwards, *forwards])
    first = torch.load(source / "data_0.ckpt", weights_only=True)
    last, aux, ids = first["hidden_state"], first["aux_hidden_state"], first["input_ids"]
    change_file(source / "data_2.ckpt", first | {"aux_hidden_state": aux[..., :128]})
    change_file(source / "data_4.ckpt", first | {"hidden_state": last.bfloat16(), "aux_hidden_state": aux.bfloat16()})
    change_file(source / "data_5.ckpt", first | {"input_ids": ids.clone().fill_(320)})
    change_file(source / "data_6.ckpt", first | {"loss_mask": None})
    (source / "data_7.ckpt").write_bytes((source / "data_7.ckpt").read_bytes()[:500])
    change_file(source / "data_8.ckpt", {name: torch.zeros(2, *one.shape[-2:]) for name, one in first.items()})
    change_file(source / "data_9.ckpt", first | {"input_ids": ids.float()})
    out = tmp_path / "out"
    assert run(source, out, "--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm") == 1
    printed = capsys.readouterr().out
    for number, message in (
        (2, "must be like the first one, and of the target, got 2 states of 64 where 3 of 64 are"),
        (4, "got states in torch.bfloat16 where float32 is"),
        (5, "got token ids from 320 to 320 in a vocabulary of 320"),
        (6, "got no loss_mask"),
        (7, "must be readable without running its code, got "),
        (8, "a file of features must hold one sequence: "),
        (9, "ids must be integers and states numbers of one floating dtype, got torch.float32, torch.float32 and "),
    ):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{source / f'data_{number}.ckpt'}: ")]
        assert message in line
    assert "wrote 9 samples" in printed
    assert "7 left out" in printed
    assert len(FeatureStore(out)) == 9


def test_an_import_that_brings_nothing_is_refused(tiny_target: Path, forwards: list[Forward], tmp_path: Path) -> None:
    source = write_ckpt(tmp_path / "source", forwards[:2])
    arguments = ("--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm")
    for number in range(2):
        change_file(source / f"data_{number}.ckpt", {"input_ids": torch.full((30 + number,), -1)})
    with pytest.raises(UserError, match=r"some of the files must be readable, got none of 2 \(.*source\)"):
        run(source, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_files_from_everywhere_pass_the_gates(tiny_target: Path, forwards: list[Forward], tmp_path: Path) -> None:
    # The first half is right: an extraction that was gone on with under other settings.
    source = write_ckpt(tmp_path / "source", forwards)
    others = write_ckpt(tmp_path / "others", forwards, layers=[3, 4, 5])
    for number in range(8):
        (others / f"data_{number}.ckpt").rename(source / f"later_{number}.ckpt")
    arguments = ("--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm")
    with pytest.raises(ParityError, match=r"captured layer 2 must be"):
        run(source, tmp_path / "out", *arguments)


def test_packed_files_are_those_that_were_packed(tiny_target: Path, forwards: list[Forward], tmp_path: Path) -> None:
    source, out = write_ckpt(tmp_path / "source", forwards), tmp_path / "out"
    for path in sorted(source.iterdir()):
        (source / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), compresslevel=1))
        path.unlink()
    assert run(source, out, "--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm") == 0
    assert_store_is(out, forwards, "data_", first=10)
    (source / "data_1.ckpt.gz").write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(UserError, match=r"readable without running its code, got .*data_1\.ckpt\.gz"):
        read_foreign(source / "data_1.ckpt.gz")
    (source / "data_1.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"a sample must be in one file, got .*data_1\.ckpt and .*data_1\.ckpt\.gz"):
        find_files(source)
    (source / "data_1.ckpt").unlink()
    os.rename(os.fsencode(source / "data_2.ckpt.gz"), os.fsencode(source) + b"/\xff.ckpt.gz")
    with pytest.raises(UserError, match=r"a file must have a name that can be printed, got '.*udcff\.ckpt\.gz'"):
        find_files(source)


class Payload:
    """Would write a file if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pickled",))


def test_files_that_would_run_code_or_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (Payload(), {"input_ids": torch.arange(3)}, [1, 2]):
        torch.save(content, tmp_path / "a.ckpt")
        with pytest.raises(UserError, match=r"a file of features must .*a\.ckpt\); (extract it again|move such files)"):
            read_foreign(tmp_path / "a.ckpt")
    assert not (tmp_path / "pickled").exists()
    (tmp_path / "b.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match=r"readable without running its code, got .*b\.safetensors"):
        read_foreign(tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=r"\.safetensors files of one program under a directory, got both"):
        find_files(tmp_path)
    with pytest.raises(UserError, match=r"\.safetensors files of one program under a directory, got none"):
        find_files(tmp_path / "nowhere")
    values = {"token_ids": torch.arange(3), "hidden_states": torch.zeros(4, 4, 8)}
    save_file(values, tmp_path / "c.safetensors")
    with pytest.raises(
        UserError, match=r"ids, mask and states must be equally many, got .*\[4, 4, 8\].*c\.safetensors"
    ):
        read_foreign(tmp_path / "c.safetensors")
    save_file({f"model.{number}": torch.zeros(2) for number in range(9)}, tmp_path / "d.safetensors")
    with pytest.raises(UserError, match=r"one sequence: .*, model\.5 \[2\], 3 more \(.*d\.safetensors\); move such"):
        read_foreign(tmp_path / "d.safetensors")
