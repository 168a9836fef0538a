"""`python -m eagle3 features` on small stores: what it prints, how it exits, and that nothing else is touched."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_sample
from test_packs import bf16_samples, write_samples
from tiny_stores import MANIFEST, contents

from eagle3.__main__ import main as dispatch
from eagle3.commands.features import main
from eagle3.config import UserError
from eagle3.features import progress
from eagle3.features.codec import decode, encode
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

WIDE = replace(MANIFEST, hidden_size=64, vocab_size=320)


def bf16_sample(sample_id: str, mask: list[int], seed: int = 0) -> FeatureSample:
    sample = random_sample(sample_id, mask, seed=seed)
    aux, last = sample.aux_hidden_states.bfloat16(), sample.last_hidden_states.bfloat16()
    return replace(sample, aux_hidden_states=aux, last_hidden_states=last)


def write_numbers(path: Path, numbers: range, manifest: Manifest = WIDE) -> Path:
    """Writes samples s0, s1, ...: the same under each number wherever they are written."""
    with FeatureWriter(path, manifest, shard_bytes=4000) as writer:
        for number in numbers:
            writer.write(bf16_sample(f"s{number}", [0, 0] + [1] * (2 + number % 3), seed=number))
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_inspect_prints_the_manifest_and_the_first_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", write_numbers(tmp_path, range(12)))
    printed = capsys.readouterr().out
    for text in (
        "capture_layers           (2, 4, 5)",
        "codec                    exact (bf16)",
        "12 samples in",
        "and 2 more",
    ):
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
        ["merge", source, tmp_path / "out"],
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
    run("merge", first, second, out)
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
    run("merge", *sources, tmp_path / "digest")
    digest = FeatureStore(tmp_path / "digest").manifest.prompts_digest
    assert digest not in ("p0", "p1")
    return digest


def test_merge_refuses_stores_of_another_target_or_sample(tmp_path: Path) -> None:
    first = write_numbers(tmp_path / "first", range(3))
    other = write_numbers(tmp_path / "other", range(3), replace(WIDE, tokenizer_digest="t1", capture_layers=(1, 2, 3)))
    with pytest.raises(UserError) as caught:
        run("merge", first, other, tmp_path / "out")
    message = str(caught.value)
    assert "stores must belong together to become one:\n" in message
    assert f"  capture_layers must be (2, 4, 5), as in {first}, got (1, 2, 3) ({other})" in message
    assert "  tokenizer_digest must be 't0'" in message
    coded = tmp_path / "coded"
    run("convert", first, coded, "--codec", "fp8")
    with pytest.raises(UserError, match=r"codec must be one, got exact, fp8; name the new store's with --codec"):
        run("merge", first, coded, tmp_path / "out")
    with pytest.raises(UserError, match=r"the same wherever it is stored, got another 's0' in .*coded than in .*first"):
        run("merge", first, coded, tmp_path / "out", "--codec", "fp8")


def test_convert_codes_every_sample(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "source", range(5))
    run("convert", source, tmp_path / "out", "--codec", "int8")
    exact, coded = FeatureStore(source), FeatureStore(tmp_path / "out")
    assert coded.manifest == replace(exact.manifest, codec="int8")
    for name, sample in contents(exact).items():
        wanted = decode(encode(sample.aux_hidden_states, 64, "int8"), 64, torch.bfloat16)
        assert torch.equal(contents(coded)[name].aux_hidden_states, wanted)


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


def test_a_store_that_holds_anything_else_is_not_gone_on_with(tmp_path: Path) -> None:
    first, second = write_numbers(tmp_path / "first", range(6)), write_numbers(tmp_path / "second", range(4, 9))
    ids = tmp_path / "ids.txt"
    before = {path: path.read_bytes() for path in sorted(first.iterdir())}
    for command in (
        ["merge", second, first],  # as if the new store came first
        ["drop", first, first, "--max-tokens", 5],
        ["drop", f"file://{first}", first, "--max-tokens", 5, "--dry-run"],
        ["convert", first, tmp_path / "second" / ".." / "first", "--codec", "int8"],
    ):
        with pytest.raises(UserError, match=r"got (that of a source|4 others, first 's0') \(.*first\)"):
            run(*command)
    ids.write_text("s1\n")
    run("drop", first, tmp_path / "out", "--ids", ids)
    ids.write_text("s2\n")
    with pytest.raises(UserError, match=r"must hold samples of this command alone, got 1 others, first 's2' \(.*out\)"):
        run("drop", first, tmp_path / "out", "--ids", ids)
    # The same id and another sample under it.
    with FeatureWriter(tmp_path / "other", WIDE, shard_bytes=4000) as writer:
        writer.write(bf16_sample("s0", [0, 0, 1, 1], seed=99))
    with pytest.raises(UserError, match=r"got 1 others, first 's0' \(.*other\); choose another directory"):
        run("merge", first, tmp_path / "other")
    assert {path: path.read_bytes() for path in sorted(first.iterdir())} == before


def test_what_a_codec_took_is_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_numbers(tmp_path / "source", range(4))
    run("convert", source, tmp_path / "coded", "--codec", "int8")
    run("merge", tmp_path / "coded", tmp_path / "copy")  # as it was
    assert FeatureStore(tmp_path / "copy").manifest.engine_facts == {}
    capsys.readouterr()
    run("convert", tmp_path / "coded", tmp_path / "back", "--codec", "exact")
    assert "states that were int8 stay as that left them: exact brings nothing back" in capsys.readouterr().out
    assert FeatureStore(tmp_path / "back").manifest.engine_facts == {"coded_before": ["int8"]}
    with pytest.raises(UserError, match=r"went through the same codecs before, got \['int8'\] there and None in the"):
        run("convert", source, tmp_path / "back", "--codec", "exact")
    run("stats", tmp_path / "back")
    assert "errors: not measured, the states of this store are coded already (int8)" in capsys.readouterr().out
    run("convert", tmp_path / "back", tmp_path / "again", "--codec", "fp8")
    assert FeatureStore(tmp_path / "again").manifest.engine_facts == {"coded_before": ["int8"]}
    run("stats", tmp_path / "again")
    assert "are coded already (int8, fp8)" in capsys.readouterr().out


def test_stats_of_states_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FeatureWriter(tmp_path / "empty", WIDE, shard_bytes=4000):
        pass
    run("stats", tmp_path / "empty")
    assert "errors: not measured, the states of this store are none" in capsys.readouterr().out
    with FeatureWriter(tmp_path / "prompt", WIDE, shard_bytes=4000) as writer:
        writer.write(bf16_sample("p", [0, 0, 0, 0]))
    run("stats", tmp_path / "prompt")
    printed = capsys.readouterr().out
    assert "1 sample in 1 shard, 4 tokens, 0 supervised" in printed
    assert "int8, layer 2: error 0." in printed
    assert "nan" not in printed


def test_states_that_are_not_finite_are_named(tmp_path: Path) -> None:
    sample = bf16_sample("broken", [0, 0, 1, 1])
    sample.aux_hidden_states[1, 3] = float("nan")
    with FeatureWriter(tmp_path / "source", WIDE, shard_bytes=4000) as writer:
        writer.write(bf16_sample("whole", [0, 0, 1, 1]))
        writer.write(sample)
    with pytest.raises(
        FloatingPointError, match=r"states must be finite to be measured, got others \(sample 'broken'\)"
    ):
        run("stats", tmp_path / "source")
    with pytest.raises(
        FloatingPointError, match=r"must be finite, got nan \(sample 'broken'\); capture it again, drop"
    ):
        run("convert", tmp_path / "source", tmp_path / "out", "--codec", "int8")


def test_odd_ids_are_shown_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a\nb", "\x1b[31mred", "", "line\u2028end", "caf\u00e9"]
    with FeatureWriter(tmp_path / "source", WIDE, shard_bytes=4000) as writer:
        for name in names:
            writer.write(bf16_sample(name, [0, 0, 1, 1]))
    run("inspect", tmp_path / "source")
    printed = capsys.readouterr().out
    for shown in (r"'a\nb' ", r"'\x1b[31mred' ", "'' ", r"'line\u2028end' ", "caf\u00e9 "):
        assert f"\n{shown}" in printed
    ids = tmp_path / "ids.txt"
    ids.write_bytes("line\u2028end\r\n".encode())
    run("drop", tmp_path / "source", tmp_path / "out", "--ids", ids)
    assert [entry.sample_id for entry in FeatureStore(tmp_path / "out").entries] == [*names[:3], names[4]]


def test_a_damaged_index_decides_nothing(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "source", range(4))
    index = source / "index.jsonl"
    index.write_text(index.read_text().replace('"num_tokens": 4', '"num_tokens": 9'))
    for command in (["inspect", source], ["stats", source], ["drop", source, tmp_path / "out", "--max-tokens", 5]):
        with pytest.raises(UserError, match=r"index.jsonl must list the samples of its shards as they are, got others"):
            run(*command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"ids to drop must be UTF-8 text, got invalid start byte \("),
        (b"\n\n", r"one a line, got none \("),
    ],
)
def test_a_file_without_ids_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    source = write_numbers(tmp_path / "source", range(2))
    (tmp_path / "ids.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run("drop", source, tmp_path / "out", "--ids", tmp_path / "ids.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["drop", "s", "o", "--max-tokens", "-3"],
            "argument --max-tokens: must be a whole number of at least 1, got '-3'",
        ),
        (["stats", "s", "--samples", "0"], "argument --samples: must be a whole number of at least 1, got '0'"),
        (["merge", "s", "o", "--shard-bytes", "1e9"], "argument --shard-bytes: must be a whole number .*, got '1e9'"),
        (
            ["merge", "s", "s3://b/o"],
            "argument out: must be a directory: nothing is written to URLs, got 's3://b/o'",
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        run("convert", write_numbers(tmp_path / "source", range(2)), tmp_path / "out", "--codec", "fp8")
    assert [record.getMessage() for record in caplog.records] == ["writing: 44.4 %", "writing: 100.0 %"]


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
