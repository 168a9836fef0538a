"""`python -m eagle3 features` on small stores: what it prints, how it exits, and that nothing else is touched."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_sample
from test_packs import bf16_samples, write_samples
from test_store import MANIFEST, contents

from eagle3.__main__ import main as dispatch
from eagle3.config import UserError
from eagle3.features.codec import decode, encode
from eagle3.features.commands import main
from eagle3.features.manifest import Manifest
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

WIDE = replace(MANIFEST, hidden_size=64, vocab_size=320)


def write_numbers(path: Path, numbers: range, manifest: Manifest = WIDE) -> Path:
    """Writes samples s0, s1, ...: the same under each number wherever they are written."""
    with FeatureWriter(path, manifest, shard_bytes=4000) as writer:
        for number in numbers:
            sample = random_sample(f"s{number}", [0, 0] + [1] * (2 + number % 3), seed=number)
            aux, last = sample.aux_hidden_states.bfloat16(), sample.last_hidden_states.bfloat16()
            writer.write(replace(sample, aux_hidden_states=aux, last_hidden_states=last))
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_inspect_prints_the_manifest_and_the_first_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", write_numbers(tmp_path, range(12)))
    printed = capsys.readouterr().out
    for text in ("capture_layers           (2, 4, 5)", "codec                    bf16", "12 samples in", "and 2 more"):
        assert text in printed
    assert FeatureStore(tmp_path).entries[0].checksum in printed


def test_verify_prints_counts_digests_and_ok_then_the_id_of_a_flipped_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_numbers(tmp_path, range(4))
    assert run("verify", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "4 samples in " in printed
    assert "tokenizer_digest         t0" in printed
    assert f"{tmp_path}: OK" in printed
    entry = FeatureStore(tmp_path).entries[3]
    shard = tmp_path / f"shard-{entry.shard:05d}.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run("verify", tmp_path) == 1
    printed = capsys.readouterr().out
    assert "sample 's3' must have the checksum" in printed
    assert f"{tmp_path}: 1 problem(s)" in printed
    assert "OK" not in printed


def test_verify_refuses_a_path_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a feature store must hold manifest\.json, got a path without one"):
        run("verify", tmp_path)


def test_stats_prints_lengths_bytes_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("stats", write_numbers(tmp_path, range(6)), "--out", tmp_path / "stats.json")
    printed = capsys.readouterr().out
    assert "tokens a sample: 4, 4, 5, 6, 6" in printed
    assert "int8, layer 4: error 0." in printed
    assert "fp8, last: error" in printed
    errors = {(row["codec"], row["state"]): row for row in json.loads((tmp_path / "stats.json").read_text())["errors"]}
    assert len(errors) == 8
    aux = torch.cat([FeatureStore(tmp_path)[index].aux_hidden_states for index in range(6)])[:, :64].float()
    decoded = decode(encode(aux.bfloat16(), 64, "int8"), 64, torch.bfloat16).float()
    wanted = ((decoded - aux).norm(dim=1) / aux.norm(dim=1)).mean()
    assert errors["int8", "2"]["of_length"] == pytest.approx(float(wanted), rel=1e-5)
    write_samples(tmp_path / "coded", "int8", bf16_samples())
    run("stats", tmp_path / "coded")
    assert "are coded already (int8)" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_numbers(tmp_path / "source", range(5))
    before = {path: path.read_bytes() for path in source.iterdir()}
    for command in (
        ["convert", source, tmp_path / "out", "--codec", "int8"],
        ["merge", tmp_path / "out", source],
        ["drop", source, tmp_path / "out", "--max-tokens", "5"],
    ):
        run(*command, "--dry-run")
        printed = capsys.readouterr().out
        assert "samples, " in printed
        assert "nothing written: --dry-run" in printed
        assert not (tmp_path / "out").exists()
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_merge_takes_every_sample_once_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_numbers(tmp_path / "first", range(6), replace(WIDE, prompts_digest="p1"))
    second = write_numbers(tmp_path / "second", range(4, 9))
    out = tmp_path / "out"
    write_numbers(out, range(2), replace(WIDE, prompts_digest=merged_digest(tmp_path, first, second)))  # as if killed
    run("merge", out, first, second)
    printed = capsys.readouterr().out
    assert "9 samples, " in printed
    assert "copies 2" in printed
    assert "wrote 7 samples; 2 were there" in printed
    merged = contents(FeatureStore(out))
    for source in (first, second):
        for name, sample in contents(FeatureStore(source)).items():
            assert torch.equal(merged[name].aux_hidden_states, sample.aux_hidden_states)
    assert len(merged) == 9
    assert FeatureStore(out).verify() == []


def merged_digest(tmp_path: Path, *sources: Path) -> str:
    run("merge", tmp_path / "digest", *sources)
    digest = FeatureStore(tmp_path / "digest").manifest.prompts_digest
    assert digest not in ("p0", "p1")
    return digest


def test_merge_refuses_stores_of_another_target_or_sample(tmp_path: Path) -> None:
    first = write_numbers(tmp_path / "first", range(3))
    other = write_numbers(tmp_path / "other", range(3), replace(WIDE, tokenizer_digest="t1", capture_layers=(1, 2, 3)))
    with pytest.raises(UserError) as caught:
        run("merge", tmp_path / "out", first, other)
    message = str(caught.value)
    assert "stores must belong together to become one:\n" in message
    assert f"  capture_layers must be (2, 4, 5), as in {first}, got (1, 2, 3) ({other})" in message
    assert "  tokenizer_digest must be 't0'" in message
    coded = tmp_path / "coded"
    run("convert", first, coded, "--codec", "fp8")
    with pytest.raises(UserError, match=r"codec must be one, got bf16, fp8; name the new store's with --codec"):
        run("merge", tmp_path / "out", first, coded)
    with pytest.raises(UserError, match=r"the same wherever it is stored, got another 's0' in .*coded than in .*first"):
        run("merge", tmp_path / "out", first, coded, "--codec", "fp8")


def test_convert_codes_every_sample(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "source", range(5))
    run("convert", source, tmp_path / "out", "--codec", "int8")
    exact, coded = FeatureStore(source), FeatureStore(tmp_path / "out")
    assert coded.manifest == replace(exact.manifest, codec="int8")
    for name, sample in contents(exact).items():
        wanted = decode(encode(sample.aux_hidden_states, 64, "int8"), 64, torch.bfloat16)
        assert torch.equal(contents(coded)[name].aux_hidden_states, wanted)
    with pytest.raises(UserError, match=r"codec must be bf16, int8 or fp8 for states in bfloat16, got fp32"):
        run("convert", source, tmp_path / "third", "--codec", "fp32")


def test_drop_leaves_samples_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_numbers(tmp_path / "source", range(6))
    ids = tmp_path / "ids.txt"
    ids.write_text("s1\ns4\n")
    run("drop", source, tmp_path / "out", "--ids", ids, "--max-tokens", 5)
    # Lengths are 4, 5, 6 in turns.
    assert sorted(contents(FeatureStore(tmp_path / "out"))) == ["s0", "s3"]
    assert "dropped 4" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"a new store must hold samples, got none left of .*source; drop fewer"):
        run("drop", source, tmp_path / "none", "--max-tokens", 1)
    with pytest.raises(UserError, match="drop must be told what, got neither --ids nor --max-tokens"):
        run("drop", source, tmp_path / "none")
    ids.write_text("s1\ns77\n")
    with pytest.raises(
        UserError, match=r"ids to drop must be in the store, got 1 that are not, first 's77' \(.*ids.txt"
    ):
        run("drop", source, tmp_path / "none", "--ids", ids)


@pytest.mark.parametrize(
    ("store", "printed"),
    [
        ("nowhere", "error: a feature store must hold manifest.json"),
        ("gopher://x/y", "error: a store's URL must be one that fsspec reads, got 'gopher://x/y'"),
    ],
)
def test_mistakes_are_printed_alone(
    store: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle3", "features", "verify", store])
    with pytest.raises(SystemExit) as ended:
        dispatch()
    assert ended.value.code == 2
    assert printed in capsys.readouterr().err
