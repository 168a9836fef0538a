"""Speed of the feature store: codecs, writer and reader, each against what the machine can do.

    python benchmarks/store.py --dir DIR [--gigabytes 16] [--out benchmarks/results/store.json]

DIR is a folder on the disk in question; it is left empty. Features are random, of a target of --hidden-size. GB are
10^9 bytes: of files for reader and writer, of decoded bf16 states for codecs.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eagle3.config import DataConfig
from eagle3.features.codec import Codec, decode, encode
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.features.stored import StoredSample, encode_sample
from eagle3.features.writer import FeatureWriter
from eagle3.training.batches import Batches, Position
from eagle3.training.packs import on_device
from eagle3.training.prefetch import prefetched
from eagle3.training.sequence_split import Ranks

BLOCK = 8 * 2**20  # bytes of one plain read or write
SHARD_BYTES = 256 * 2**20
NUM_AUX = 3
SAMPLE_TOKENS = (300, 700, 1500)  # in turns; the second half of each is supervised
BATCH_TOKENS = 8192
SAMPLES_PER_STEP = 16
WRITER_PAIRS = 7  # with and without an fsync per shard, in turns, after one pair that is not counted


def random_samples(hidden_size: int, codec: Codec) -> list[StoredSample]:
    """Returns one sample of each length, coded."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, num_tokens in enumerate(SAMPLE_TOKENS):
        loss_mask = torch.arange(num_tokens) >= num_tokens // 2
        rows = supervised_rows(loss_mask)
        sample = FeatureSample(
            sample_id=str(number),
            input_ids=torch.randint(1000, (num_tokens,), generator=generator, dtype=torch.int32),
            loss_mask=loss_mask,
            aux_hidden_states=torch.randn(num_tokens, NUM_AUX * hidden_size, generator=generator).bfloat16(),
            last_hidden_states=torch.randn(rows.numel(), hidden_size, generator=generator).bfloat16(),
            last_rows=rows,
            target_logz=torch.randn(rows.numel(), generator=generator),
        )
        samples.append(encode_sample(sample, hidden_size, codec))
    return samples


def make_manifest(hidden_size: int, codec: Codec) -> Manifest:
    """Returns a manifest of no target."""
    return Manifest(
        target_path="none",
        target_config_digest="none",
        target_revision="none",
        target_quantization=None,
        engine="none",
        engine_version="none",
        capture_layers=(1, 2, 3),
        dtype="bfloat16",
        codec=codec,
        hidden_size=hidden_size,
        vocab_size=1000,
        tokenizer_digest="none",
        chat_template_digest="none",
        prompts_digest="none",
        last_rows="supervised",
    )


def measure_writer(root: Path, hidden_size: int, codec: Codec, num_bytes: int) -> dict[str, Any]:
    """Writes the same bytes as a store and as plain files of a shard's size, each with an fsync per file and without.

    A writer without it is timed until one sync at its end: what the policy costs, all bytes being on the disk. The
    share is the median over pairs of neighbouring runs.
    """
    samples = random_samples(hidden_size, codec)
    manifest = make_manifest(hidden_size, codec)
    before = peak_rss_bytes()
    speeds: dict[str, list[float]] = {"writer": [], "writer_synced_once": []}
    for pair in range(1 + WRITER_PAIRS):
        for name, times in speeds.items():
            shutil.rmtree(root / "store", ignore_errors=True)
            with mock.patch("os.fsync") if name == "writer_synced_once" else contextlib.nullcontext():
                seconds = fill_store(root / "store", samples, manifest, num_bytes)
            if pair > 0:
                times.append(seconds)
    sizes = [path.stat().st_size for path in (root / "store").glob("shard-*")]
    figures: dict[str, Any] = {
        "gb_per_second": sum(sizes) / median(speeds["writer"]) / 1e9,
        "synced_once_gb_per_second": sum(sizes) / median(speeds["writer_synced_once"]) / 1e9,
        "seconds": speeds,
        "peak_rss_bytes_added": peak_rss_bytes() - before,
        "files": len(sizes),
        "gb": sum(sizes) / 1e9,
    }
    figures["share_of_synced_once"] = median(
        once / each for each, once in zip(speeds["writer"], speeds["writer_synced_once"], strict=True)
    )
    for name, with_fsync in (("plain_fsync", True), ("plain", False)):
        figures[f"{name}_gb_per_second"] = write_plain(root / "plain", sizes, with_fsync=with_fsync)
    figures["share_of_plain_fsync"] = figures["gb_per_second"] / figures["plain_fsync_gb_per_second"]
    return figures


def fill_store(path: Path, samples: list[StoredSample], manifest: Manifest, num_bytes: int) -> float:
    """Writes a store of so many bytes; returns the seconds until all of it is on the disk."""
    os.sync()
    started = time.perf_counter()
    with FeatureWriter(path, manifest, SHARD_BYTES) as writer:
        total = number = 0
        while total < num_bytes:
            sample = samples[number % len(samples)]
            writer.write_stored(StoredSample(f"sample-{number}", sample.columns))
            total += sample.num_bytes
            number += 1
    os.sync()
    return time.perf_counter() - started


def write_plain(path: Path, sizes: list[int], *, with_fsync: bool) -> float:
    """Writes files as `dd` does, in blocks from one buffer; returns GB/s."""
    os.sync()
    path.mkdir()
    block = memoryview(os.urandom(BLOCK))
    started = time.perf_counter()
    for number, size in enumerate(sizes):
        descriptor = os.open(path / str(number), os.O_CREAT | os.O_WRONLY, 0o600)
        for offset in range(0, size, BLOCK):
            os.write(descriptor, block[: min(BLOCK, size - offset)])
        if with_fsync:
            os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(path)
    return sum(sizes) / seconds / 1e9


def measure_reader(root: Path, threads: list[int], num_steps: int) -> dict[str, Any]:
    """Reads the store of `measure_writer` as training does, and its files plainly, each cold and warm."""
    path = root / "store"
    pin = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    plain = {}
    for cache in ("cold", "warm"):
        if cache == "cold":
            drop_caches(path)
        plain[cache] = measured(lambda: read_plain(path, pin=pin))
    # The last one says what the first epoch costs besides: each sample's checksum.
    settings = [(number, False) for number in threads] + [(threads[-1], True)]
    for cache in ("cold", "warm"):
        for number, checked in settings:
            figures = read_store(path, number, pin, num_steps, cold=cache == "cold", checked=checked)
            rows.append({"threads": number, "cache": cache, "checked": checked} | figures)
    for row in rows:
        row["share_of_plain"] = row["gb_per_second"] / plain[row["cache"]]["gb_per_second"]
    report: dict[str, Any] = {"plain": plain, "rows": rows, "pinned": pin, "peak_rss_bytes": peak_rss_bytes()}
    if pin:
        report["decoded_on_gpu"] = read_store(path, threads[-1], pin, num_steps, cold=False, decoded=True)
    return report


def read_store(
    path: Path, num_threads: int, pin: bool, num_steps: int, *, cold: bool, checked: bool = False, decoded: bool = False
) -> dict[str, Any]:
    """Reads an epoch's steps in their shuffled order; unless `checked`, every sample counts as checked before."""
    store = FeatureStore(path)
    if not checked:
        store._checked = set(range(len(store)))
    config = DataConfig(
        path=str(path), samples_per_step=SAMPLES_PER_STEP, batch_tokens=BATCH_TOKENS, read_threads=num_threads
    )
    batches = Batches(store, list(range(len(store))), config, Ranks(0, 1, None), 7, pin=pin)
    positions = list(itertools.islice(batches.positions(Position()), min(num_steps, batches.steps_per_epoch)))
    device = torch.device("cuda") if decoded else None

    def read() -> int:
        num_bytes = 0
        for batch in prefetched(batches.load, positions, config.prefetch_steps):
            num_bytes += sum(tensor.nbytes for pack in batch.packs for tensor in pack.tensors())
            if device is not None:
                for _ in on_device(batch.packs, device):
                    pass
                torch.cuda.synchronize()
        return num_bytes

    if pin:
        # Pinned memory is made once and kept, which is no part of an epoch's speed.
        list(prefetched(batches.load, itertools.islice(batches.positions(Position(epoch=1)), 3), config.prefetch_steps))
        if checked:
            store._checked.clear()
    if cold:
        drop_caches(path)
    return measured(read)


def read_plain(path: Path, *, pin: bool) -> int:
    """Reads all shards one after another into one buffer, which is pinned if the reader's is."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pin).numpy().data
    num_bytes = 0
    for shard in sorted(path.glob("shard-*")):
        with shard.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes


def measured(read: Callable[[], int]) -> dict[str, Any]:
    """Returns GB/s, and the bytes that came from the disk, which says whether the cache was what it was called."""
    from_disk = disk_bytes_read()
    started = time.perf_counter()
    num_bytes = read()
    seconds = time.perf_counter() - started
    return {
        "gb_per_second": num_bytes / seconds / 1e9,
        "gb": num_bytes / 1e9,
        "gb_from_disk": None if from_disk is None else ((disk_bytes_read() or 0) - from_disk) / 1e9,
    }


def measure_codec(hidden_size: int, codec: Codec, device: torch.device) -> dict[str, Any]:
    """Times coding and decoding of a micro-batch's captured states."""
    num_rows = BATCH_TOKENS if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(num_rows, NUM_AUX * hidden_size, device=device, generator=generator).bfloat16()
    coded = encode(states, hidden_size, codec)
    decoded = decode(coded, hidden_size, torch.bfloat16)
    error = float((decoded.float() - states.float()).norm() / states.float().norm())
    return {
        "codec": codec,
        "device": device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "encode_gb_per_second": states.nbytes / seconds_of(lambda: encode(states, hidden_size, codec), states) / 1e9,
        "decode_gb_per_second": states.nbytes
        / seconds_of(lambda: decode(coded, hidden_size, torch.bfloat16), states)
        / 1e9,
        "relative_error_of_random_states": error,
    }


def seconds_of(work: Callable[[], object], on: Tensor) -> float:
    """Returns the median of seven runs after two."""
    seconds = []
    for run in range(9):
        started = time.perf_counter()
        work()
        if on.is_cuda:
            torch.cuda.synchronize()
        if run >= 2:
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)[len(seconds) // 2]


def drop_caches(path: Path) -> None:
    """Has the kernel forget a store's files, which needs no rights once they are on the disk."""
    os.sync()
    for shard in path.glob("shard-*"):
        descriptor = os.open(shard, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_bytes_read() -> int | None:
    """Returns what this process has had read from disks so far; None where the kernel does not count it."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    lines = counters.read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def peak_rss_bytes() -> int:
    """Returns the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=16, help="size of the store that is written and read")
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--codec", choices=["bf16", "int8", "fp8"], default="int8", help="of the store")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only-writer", action="store_true", help="leave out reader and codecs")
    parser.add_argument("--steps", type=int, default=10**9, help="steps that are read, at most an epoch")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    root = arguments.dir / "store-benchmark"
    root.mkdir(parents=True)
    try:
        writer = measure_writer(root, arguments.hidden_size, arguments.codec, int(arguments.gigabytes * 1e9))
        reader = None if arguments.only_writer else measure_reader(root, arguments.threads, arguments.steps)
    finally:
        shutil.rmtree(root)
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    if arguments.only_writer:
        devices = []
    codecs = [measure_codec(arguments.hidden_size, codec, device) for device in devices for codec in ("int8", "fp8")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "command": f"python benchmarks/store.py --dir DIR --gigabytes {arguments.gigabytes:g} "
        f"--hidden-size {arguments.hidden_size} --codec {arguments.codec}" + " --only-writer" * arguments.only_writer,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "hardware": {
            "cpu": platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "codec": arguments.codec,
        "writer": writer,
        "reader": reader,
        "codecs": codecs,
    }
    show(report)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def reader_rows(reader: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns what the table says of the reader, with its name there."""
    rows = [(f"plain read, {cache}", row) for cache, row in reader["plain"].items()]
    for row in reader["rows"]:
        checked = ", with checksums" if row["checked"] else ""
        rows.append((f"reader, {row['cache']}, {row['threads']} threads{checked}", row))
    if "decoded_on_gpu" in reader:
        rows.append(("reader, warm, decoded on the GPU", reader["decoded_on_gpu"]))
    return rows


def show(report: dict[str, Any]) -> None:
    writer, reader = report["writer"], report["reader"]
    table = Table("what", "GB/s", "of the plain one", "GB", "GB from disk")
    share = f"{writer['share_of_plain_fsync']:.0%}"
    table.add_row("writer", f"{writer['gb_per_second']:.2f}", share, f"{writer['gb']:.1f}", "-")
    speed, cost = writer["synced_once_gb_per_second"], 1 - writer["share_of_synced_once"]
    table.add_row(f"writer, one sync at the end: fsync costs {cost:.0%}", f"{speed:.2f}", "-", "-", "-")
    table.add_row("plain write, fsync", f"{writer['plain_fsync_gb_per_second']:.2f}", "-", "-", "-")
    table.add_row("plain write", f"{writer['plain_gb_per_second']:.2f}", "-", "-", "-")
    for name, row in reader_rows(reader) if reader else []:
        share = f"{row['share_of_plain']:.0%}" if "share_of_plain" in row else "-"
        from_disk = "-" if row["gb_from_disk"] is None else f"{row['gb_from_disk']:.1f}"
        table.add_row(name, f"{row['gb_per_second']:.2f}", share, f"{row['gb']:.1f}", from_disk)
    console = Console(width=120)
    console.print(table)
    if not report["codecs"]:
        return
    table = Table("codec", "device", "encodes GB/s", "decodes GB/s", "relative error")
    for row in report["codecs"]:
        table.add_row(
            row["codec"],
            row["device"] + (f", {row['threads']} threads" if row["threads"] else ""),
            f"{row['encode_gb_per_second']:.2f}",
            f"{row['decode_gb_per_second']:.2f}",
            f"{row['relative_error_of_random_states']:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
