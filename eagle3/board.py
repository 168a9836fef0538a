"""What shows a run's numbers: W&B, TensorBoard or Trackio.

Scalars go to any of them. Tables, charts and artifacts are W&B's; what they hold lies in the run's directory as well.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import wandb
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from eagle3.config import TrackingConfig, UserError, by_dotted_name

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | Sequence[float | None]]

# How W&B sums a curve up to one number; a curve that is not named here ends as its last value.
SUMMARIES = {
    "tau": "max",
    "held_out/tau": "max",
    "held_out/tau_without_prefill": "max",
    "held_out/loss": "min",
    "loss": "min",
    "tokens_per_second": "mean",
    "supervised_tokens_per_second": "mean",
}


@dataclass(frozen=True)
class Identity:
    """Which run of which experiment this is; the same one after a crash."""

    id: str  # W&B's run id
    name: str
    group: str  # the experiment: extract, train and evaluate runs that read each other's files
    job_type: str  # extract | train | evaluate
    inputs: list[str] = field(default_factory=list)  # ids of the runs whose files this one reads


@dataclass(frozen=True)
class Files:
    """A directory that a run reads or makes: an artifact."""

    name: str
    type: str  # feature-store | model
    where: Path | str  # a directory, or a URL, of which W&B gets a list alone
    small: list[str]  # file names, uploaded in any case
    large: list[str]  # file names, uploaded if the config says so
    metadata: dict[str, Any] = field(default_factory=dict)


class Board:
    """One run, shown; a context manager, which marks the run as failed when an exception leaves it."""

    def __init__(
        self, directory: Path, config: TrackingConfig, identity: Identity, settings: Mapping[str, Any]
    ) -> None:
        """`settings` are shown as the run's config; local files of the board go into `directory`.

        Raises:
            UserError: the backend cannot start as it is set up.
        """
        self.run_id = identity.id
        self._config = config
        self._run: Any = None  # W&B's
        self._tracker: GeneralTracker | None = None
        if config.backend == "wandb":
            self._run = _start_wandb(directory, config, identity, settings)
        elif config.backend != "none":
            self._tracker = _start_tracker(directory, config, identity, settings)

    def log(self, step: int, metrics: Metrics) -> None:
        """Adds a point to each curve; a list is one curve per draft position."""
        if self._run is not None:
            self._run.log(curves(metrics), step=step)
        elif self._tracker is not None:
            self._tracker.log(curves(metrics), step=step)

    def summarise(self, values: Mapping[str, float]) -> None:
        """Shows numbers that have no curve."""
        if self._run is not None:
            self._run.summary.update(dict(values))
        elif self._tracker is not None:
            self._tracker.log(dict(values), step=0)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a table."""
        if self._run is not None:
            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, commit=False)

    def image(self, name: str, png: Path) -> None:
        """Shows a picture."""
        if self._run is not None:
            self._run.log({name: wandb.Image(str(png))}, commit=False)

    def scatter(self, name: str, columns: tuple[str, str], points: Sequence[tuple[float, float]]) -> None:
        """Shows a chart of the second column over the first."""
        if self._run is not None and points:
            table = wandb.Table(columns=list(columns), data=[list(point) for point in points])
            self._run.log(
                {name: wandb.plot.scatter(table, columns[0], columns[1], title=name.split("/")[-1])}, commit=False
            )

    def bars(self, name: str, columns: tuple[str, str], bars: Sequence[tuple[str, float]]) -> None:
        """Shows a bar for each name of the first column."""
        if self._run is not None and bars:
            table = wandb.Table(columns=list(columns), data=[list(bar) for bar in bars])
            self._run.log(
                {name: wandb.plot.bar(table, columns[0], columns[1], title=name.split("/")[-1])}, commit=False
            )

    def makes(self, files: Files) -> None:
        """Says that the run made these files."""
        if self._run is not None:
            self._run.log_artifact(self._artifact(files))

    def reads(self, files: Files) -> None:
        """Says that the run read these files; W&B takes that online alone, so an offline run has it in its config."""
        if self._run is not None and not self._run.offline:
            self._run.use_artifact(self._artifact(files))

    def close(self, exit_code: int = 0) -> None:
        """Ends the run."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
        elif self._tracker is not None:
            self._tracker.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(exit_code=0 if error is None else 1)

    def _artifact(self, files: Files) -> wandb.Artifact:
        artifact = wandb.Artifact(files.name, type=files.type, metadata=files.metadata)
        if isinstance(files.where, str):
            # A reference to it would need the package of its cloud, even unread.
            with artifact.new_file("files.txt") as file:
                file.write("".join(f"{files.where}/{name}\n" for name in [*files.small, *files.large]))
            return artifact
        for name in [*files.small, *files.large]:
            if name in files.small or self._config.upload:
                artifact.add_file(str(files.where / name), name=name)
            else:
                # Terabytes are not hashed for this; the artifact is named after their digest.
                artifact.add_reference((files.where / name).absolute().as_uri(), name=name, checksum=False)
        return artifact


def check_backend(config: TrackingConfig) -> None:
    """Looks for the backend's package, before there is work that could not be shown.

    Raises:
        UserError: it is not installed.
    """
    if config.backend != "none" and importlib.util.find_spec(config.backend) is None:
        raise UserError(
            f"tracking.backend must be an installed package, got {config.backend!r}; "
            f"pip install {config.backend}, or choose another backend"
        )


def curves(metrics: Metrics) -> dict[str, float]:
    """Returns one number per curve: a list becomes name/0, name/1, ..., without what has no value."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float):
            values[name] = value
        else:
            values |= {f"{name}/{index}": part for index, part in enumerate(value) if part is not None}
    return values


def drafter_files(directory: Path, run_id: str, metadata: dict[str, Any]) -> Files:
    """Returns an exported drafter as an artifact; `run_id` is that of the training."""
    small = [name for name in ("config.json", "README.md") if (directory / name).is_file()]  # others' have no card
    large = sorted(path.name for path in directory.glob("*.safetensors"))
    return Files(f"drafter-{run_id}", "model", directory, small, large, metadata)


def feature_store(where: Path | str, names: Iterable[str], digest: str, manifest: dict[str, Any]) -> Files:
    """Returns a store's files among `names` as an artifact; its name is the same for all runs that know its digest."""
    shards = [name for name in names if name.startswith("shard-") and name.endswith(".safetensors")]
    return Files(
        name=f"features-{digest[:12]}",
        type="feature-store",
        where=where,
        small=["manifest.json"],
        large=sorted(shards),
        metadata={"digest": digest, "manifest": manifest},
    )


def _start_wandb(directory: Path, config: TrackingConfig, identity: Identity, settings: Mapping[str, Any]) -> Any:
    try:
        run = wandb.init(
            project=config.project,
            name=identity.name,
            group=identity.group,
            job_type=identity.job_type,
            tags=config.tags,
            dir=directory,
            id=identity.id,
            resume="allow",
            mode=_wandb_mode(),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),  # its lines would break the progress line
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"tracking.backend must be able to start, got 'wandb' and from it: {error}; "
            f"set WANDB_MODE=offline and `wandb sync` later, or tracking.backend=none"
        ) from None
    for name, summary in SUMMARIES.items():
        run.define_metric(name, summary=summary)
    logger.info("W&B: %s", f"offline in {Path(run.dir).parent}" if run.offline else run.url)
    return run


def _wandb_mode() -> Any:
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]  # W&B itself looks once in a process's life
    return "online" if wandb.login(prompt=False) else "offline"


def _start_tracker(
    directory: Path, config: TrackingConfig, identity: Identity, settings: Mapping[str, Any]
) -> GeneralTracker:
    PartialState()  # accelerate's trackers ask it for the rank, also outside of training
    flat = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in by_dotted_name(settings).items()
    }
    tracker: GeneralTracker
    if config.backend == "tensorboard":
        tracker = TensorBoardTracker(identity.id, logging_dir=directory / "tensorboard")
    else:
        tracker = TrackioTracker(config.project, name=f"{identity.name}-{identity.id}", resume="allow")
    tracker.start()
    tracker.store_init_configuration(flat)
    logger.info("%s: %s", config.backend, directory / "tensorboard" if config.backend == "tensorboard" else identity.id)
    return tracker
