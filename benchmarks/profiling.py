"""Where the time of one step goes, by stage and by kernel."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

LIMIT_FLOPS = 989e12  # dense bf16, NVIDIA's data sheet of the H100 and H200 SXM
# Which stage a kernel belongs to, by a part of its name; the first that fits.
STAGES = {
    "attention over the context": ("flash", "fmha", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "own chains": ("merge_chain",),
    "head scores": ("score_rows", "log_sum_exp"),
    "norms": ("_norm_",),
    "gated product": ("swiglu",),
    "RoPE": ("_rotate_",),
    "rows moved": ("_take_",),
    "optimizer and clipping": ("multi_tensor", "lpnorm"),
}


def profile_step(step: Callable[[], object], device: torch.device, directory: Path, name: str) -> dict[str, float]:
    """Writes a trace of one step to `name.json.gz`, and to `name.txt` a table of where its time goes.

    Returns the milliseconds of each stage.
    """
    directory.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        step()
        wall = (time.perf_counter() - started) * 1e3
    profile.export_chrome_trace(str(directory / f"{name}.json.gz"))
    kernels: dict[str, list[float]] = {}  # ms of each launch
    for event in profile.events():
        # The optimizer's own mark spans kernels that are there, too.
        if not on_gpu or (event.device_type.name == "CUDA" and not event.name.startswith("Optimizer.step#")):
            milliseconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
            kernels.setdefault(event.name, []).append(milliseconds)
    stages = dict.fromkeys([*STAGES, "everything else"], 0.0)
    for kernel, launches in kernels.items():
        fitting = (stage for stage, parts in STAGES.items() if any(part in kernel for part in parts))
        stages[next(fitting, "everything else")] += sum(launches)
    busy = sum(stages.values())
    lines = [f"one step: {wall:.1f} ms, of which kernels ran {busy:.1f} ms", ""]
    lines += [f"{milliseconds:9.2f} ms {milliseconds / wall:6.1%}  {stage}" for stage, milliseconds in stages.items()]
    lines += ["", "       ms launches  kernel"]
    for kernel, launches in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(launches):9.3f} {len(launches):8d}  {kernel[:120]}")
    (directory / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return stages
