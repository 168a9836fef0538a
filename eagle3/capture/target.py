"""A target before it runs: what its files say, its tokenizer, and prompts as it reads them."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eagle3.capture.parity import TargetFacts, read_target
from eagle3.config import ExtractConfig
from eagle3.prompts.rendering import ChatRenderer, make_renderer
from eagle3.prompts.tokenizers import load_tokenizer


@dataclass(frozen=True)
class Target:
    """What is known of a target from its directory."""

    facts: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer


def open_target(config: ExtractConfig) -> Target:
    """Reads what the target of an extraction says of itself.

    Raises:
        UserError: its files, its tokenizer or the chat template cannot be used.
    """
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    return Target(read_target(config.target), tokenizer, make_renderer(tokenizer, config.prompts))
