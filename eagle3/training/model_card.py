"""The card beside an exported drafter: its number with its setting, data and recipe."""

import json

from eagle3.config import TrainConfig, config_to_dict
from eagle3.features.samples import Samples
from eagle3.training.checkpoints import TrainState
from eagle3.training.validation import Validation
from eagle3.words import counted


def model_card(config: TrainConfig, store: Samples, state: TrainState, validation: Validation) -> str:
    """Returns the card in Markdown."""
    acceptance, manifest = validation.acceptance, store.manifest
    untrained = "" if state.tau_untrained is None else f" The untrained drafter has {state.tau_untrained:.3f}."
    return f"""\
# EAGLE-3 drafter for {manifest.target_path}

Acceptance length (tokens per verify round, the bonus token counts; greedy chains of {config.objective.ttt_steps} draft
tokens): **{acceptance.tau:.3f}**, 95 % interval {acceptance.low:.3f} to {acceptance.high:.3f}, without prefill's token
{acceptance.tau_without_prefill:.3f}.{untrained}
Measured on {counted(acceptance.num_answers, "held-out answer")} ({counted(acceptance.num_tokens, "token")}) of the \
store, along the recorded tokens.

- step {state.step} of the run
- captured with {manifest.engine} {manifest.engine_version} at boundaries {list(manifest.capture_layers)}, \
{counted(len(store), "sample")}, {counted(store.num_tokens, "token")}
- answers: {json.dumps(manifest.generation) if manifest.generation else "as given in the prompts file"}

## Recipe

```json
{json.dumps(config_to_dict(config), indent=1)}
```
"""
