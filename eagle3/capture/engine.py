"""What the loop asks of an engine, whether the target runs in this process or behind servers."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from eagle3.capture.generation import Generation
from eagle3.config import RegenerateConfig
from eagle3.features.codec import CodedStates


@dataclass(frozen=True)
class Captured:
    """The states of one sequence, on the CPU, in the target's dtype."""

    aux_hidden_states: Tensor  # (T, A*D) entering each captured layer, side by side
    last_hidden_states: Tensor  # (T, D) after the final norm
    # Of states that were coded and decoded, how far apart the numbers are that the codec can tell; None: as they were.
    aux_steps: Tensor | None = None  # (T, A*D) fp32
    last_steps: Tensor | None = None  # (T, D) fp32


@dataclass(frozen=True)
class CodedCapture:
    """The states of one sequence as the engine has coded them, on the CPU."""

    aux: CodedStates  # (T, A*D)
    last: CodedStates  # (T, D)


@dataclass(frozen=True)
class SetAside:
    """A sequence was given up."""

    reason: str


@dataclass(frozen=True)
class TopTwo:
    """The two likeliest next tokens at each position of a sequence, from the engine's own logits."""

    ids: Tensor  # (T, 2) int64
    logprobs: Tensor  # (T, 2) fp32


@dataclass(frozen=True)
class EngineFacts:
    """What the features depend on besides the target's files."""

    version: str
    dtype: str  # of the running target
    settings: dict[str, Any] = field(default_factory=dict)  # of the server, those that change its numbers


@dataclass(frozen=True)
class StagingUse:
    """How full the directory is that samples pass through."""

    used_bytes: int  # of samples that were asked for and not read yet
    budget_bytes: int


class Engine(Protocol):
    """A target that runs."""

    capture_layers: list[int]  # boundaries

    @property
    def facts(self) -> EngineFacts:
        """What runs the target."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that it takes."""

    @property
    def staging(self) -> StagingUse | None:
        """How full the staging directory is; None where samples need none."""

    def num_answers_together(self, settings: RegenerateConfig) -> int:
        """Returns how many prompts it answers at the same time."""

    def capture(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        """Runs a few sequences together and returns their states, in their order."""

    def capture_each(
        self, sequences: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, Captured | CodedCapture | SetAside], None, None]:
        """Runs sequences, taken as there is room for them; yields (its place, states) in any order.

        Coded states are in the codec of the store that the engine was made for.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: RegenerateConfig,
        *,
        max_tokens: int | None = None,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> Sequence[Generation | SetAside]:
        """Answers each prompt; prompt and answer together have at most `max_tokens` tokens."""

    def top_two(self, sequences: Sequence[Sequence[int]], *, together: bool) -> list[TopTwo]:
        """Returns what it would say at each position: alone, or with all sequences in one batch."""

    def plain_tokens_per_second(self, sequences: Sequence[Sequence[int]]) -> float | None:
        """Measures the same prefills unrecorded; None from an engine that knows no other kind."""

    def log_normaliser(self, last_hidden_states: Tensor) -> Tensor | None:  # (R, D) -> (R,) fp32
        """Returns the log-sum-exp over V of the target's logits; None from an engine whose head is not at hand."""
