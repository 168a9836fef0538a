"""A drafter's config.json against its target: sizes, positions, RoPE, layers, tokenizer, template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from eagle3.config import UserError
from eagle3.draft.serving_config import (
    IDS_ARE_BOUNDARIES,
    LAYER_IDS_KEY,
    RECORD_KEY,
    served_boundaries,
    served_layer_ids,
    target_architecture,
)
from eagle3.draft.target_weights import default_capture_layers, load_target_config, rope_parameters
from eagle3.evaluation.doctor.files import DrafterFiles, Finding
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest

# Modes that templates know; to name the one that a drafter was trained in.
KNOWN_MODES = [{}, *({name: value} for name in ("enable_thinking", "thinking") for value in (True, False))]


@dataclass(frozen=True)
class Target:
    """What can be asked of a target without loading it."""

    path: Path
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    chat_template_kwargs: dict[str, Any]  # as the server is asked


def read_target(path: Path, chat_template_kwargs: dict[str, Any]) -> Target:
    """Reads config and tokenizer.

    Raises:
        UserError: the directory has no such thing.
    """
    return Target(path, load_target_config(path), load_tokenizer(str(path), False), chat_template_kwargs)


def check_settings(files: DrafterFiles, target: Target) -> list[Finding]:
    """Returns where the drafter's files contradict the target; RoPE apart, of which see `rope_difference`."""
    record = files.config.get(RECORD_KEY)
    record = record if isinstance(record, dict) else {}
    return [
        *_check_sizes(files, target.config),
        *check_layers(files, target.config),
        *_check_tokenizer(files, target, record),
        *_check_template(files, target, record),
    ]


def _check_sizes(files: DrafterFiles, target_config: Mapping[str, Any]) -> list[Finding]:
    config, findings = files.config, []
    # A size that is not there says nothing of the target, and is named with the others that config.json lacks.
    others = [name for name in ("vocab_size", "hidden_size") if config.get(name) not in (None, target_config[name])]
    if others:
        seen = ", ".join(f"{name} is {config[name]} and the target's {target_config[name]}" for name in others)
        remedy = "take a drafter that was trained for this target"
        findings.append(Finding("other-target", f"{seen}: another target's drafter", remedy))
    if "draft_vocab_size" in config and config["draft_vocab_size"] is None:
        what = "draft_vocab_size is null: SGLang serves the target's own head instead of the drafter's"
        remedy = "write the number of rows of lm_head.weight there, and see that the file holds that head"
        findings.append(Finding("draft-vocab-size", what, remedy))
    positions, target_positions = config.get("max_position_embeddings"), target_config["max_position_embeddings"]
    if not isinstance(positions, int) or positions < target_positions:
        what = (
            f"max_position_embeddings is {positions if positions is not None else 'not set, so 2048'} and the target's "
            f"{target_positions}: acceptance collapses beyond the former"
        )
        remedy = f"write {target_positions} into config.json; RoPE needs no training for it where its base is right"
        findings.append(Finding("context-length", what, remedy))
    return findings


def rope_difference(files: DrafterFiles, target_config: Mapping[str, Any]) -> Finding | None:
    """Compares RoPE's settings with themselves and with the target's; only the drafter at work shows which is right."""
    config = files.config
    theta, parameters = config.get("rope_theta"), config.get("rope_parameters")
    remedy = "write the base and scaling that the drafter was trained with, in both schemas"
    if theta is not None and isinstance(parameters, dict) and parameters.get("rope_theta") not in (None, theta):
        what = f"config.json says rope_theta={theta} and rope_parameters.rope_theta={parameters['rope_theta']}"
        return Finding("rope-schemas", what + ": which one counts depends on the engine's version", remedy)
    own, targets = rope_parameters(dict(config)), rope_parameters(dict(target_config))
    if own == targets:
        return None
    return Finding("rope", f"RoPE is {own} and the target's {targets}: few drafters are trained so", remedy)


def layer_ids(files: DrafterFiles) -> list[int] | None:
    """Returns the ids from which SGLang makes the boundaries, None where it takes its own."""
    eagle_config = files.config.get("eagle_config")
    ids = eagle_config.get(LAYER_IDS_KEY) if isinstance(eagle_config, dict) else None
    return ids if isinstance(ids, list) and all(isinstance(each, int) for each in ids) else None


def check_layers(files: DrafterFiles, target_config: Mapping[str, Any]) -> list[Finding]:
    """Compares the boundaries that will be captured with those of the training, or with what such lists look like."""
    ids = layer_ids(files)
    num_layers = target_config["num_hidden_layers"]
    try:
        architecture = target_architecture(dict(target_config))
        served = served_boundaries(ids, architecture, num_layers)
    except UserError as error:
        what = f"no boundaries can be made of the layer ids {ids}: {error}"
        return [Finding("layer-ids", what, "write the ids of the layers that the drafter was trained on")]
    record = files.config.get(RECORD_KEY)
    trained = record.get("capture_layers") if isinstance(record, dict) else None
    if trained is not None and trained != served:
        return [layers_differ(ids, served, trained, architecture, "it was trained on")]
    vllms = files.config.get(LAYER_IDS_KEY)
    # Drafters of others mostly lack vLLM's list and are served elsewhere; our exporter always writes it.
    if vllms != served and (vllms is not None or trained is not None):
        return [_engines_differ(vllms, served, trained is not None)]
    if trained is not None:
        return []
    adds_one = architecture not in IDS_ARE_BOUNDARIES
    if adds_one and num_layers >= 7 and ids == default_capture_layers(num_layers):
        what = (
            f"the layer ids {ids} are EAGLE's own list of boundaries, to which SGLang's {architecture} adds 1: it "
            f"captures {served}, one layer late if the drafter was trained on the list itself"
        )
        remedy = f"try {[each - 1 for each in ids]}; --try-layers and a store tell which of the two it reads"
        return [Finding("layer-ids", what, remedy)]
    return []


def _engines_differ(vllms: Any, served: list[int], is_known: bool) -> Finding:
    """Says that vLLM will capture other boundaries than SGLang does; `is_known`: those that SGLang does are right."""
    if vllms is None:
        what = f"config.json has no {LAYER_IDS_KEY} beside eagle_config: vLLM may capture others than the {served}"
        return Finding("layer-ids", f"{what} of the training", f"write {served} there, if vLLM is to serve it")
    what = f"vLLM takes {LAYER_IDS_KEY}: {vllms} beside eagle_config as boundaries, and SGLang will capture {served}"
    if is_known:
        return Finding("layer-ids", f"{what}, as in training", f"write {served} there, if vLLM is to serve it")
    remedy = "make both lists mean the layers that it was trained on; --try-layers and a store tell which those are"
    return Finding("layer-ids", what, remedy)


def layers_differ(ids: list[int] | None, served: list[int], wanted: list[int], architecture: str, why: str) -> Finding:
    """Says that other boundaries will be captured than the drafter reads."""
    shifts = {each - want for each, want in zip(served, wanted, strict=False)}
    shift = f", all shifted by {shifts.copy().pop():+d}" if len(shifts) == 1 and len(served) == len(wanted) else ""
    what = (
        f"the layer ids {ids} make SGLang's {architecture} capture the boundaries {served}{shift}, and {why} {wanted}"
    )
    try:
        remedy = f"write eagle_aux_hidden_state_layer_ids: {served_layer_ids(wanted, architecture)} into config.json"
    except UserError as error:
        remedy = str(error)
    return Finding("layer-ids", what, remedy)


def _check_tokenizer(files: DrafterFiles, target: Target, record: Mapping[str, Any]) -> list[Finding]:
    path = files.directory / "tokenizer.json"
    if "tokenizer_digest" in record:
        here = tokenizer_digest(target.tokenizer)
        if record["tokenizer_digest"] == here:
            return []
        seen = f"it was trained with the tokenizer {record['tokenizer_digest']}, and the target's is {here}"
    elif path.is_file():
        own, targets = Tokenizer.from_file(str(path)).get_vocab(), target.tokenizer.get_vocab()
        others = [token for token in own if own[token] != targets.get(token)]
        if not others:
            return []
        seen = (
            f"its tokenizer.json has tokens that are not the target's, {len(others)} of {len(own)}, {others[0]!r} first"
        )
    else:
        return []
    what = f"{seen}: its token ids mean other text"
    return [Finding("other-tokenizer", what, "take a drafter of this very target, or train one")]


def _check_template(files: DrafterFiles, target: Target, record: Mapping[str, Any]) -> list[Finding]:
    if target.tokenizer.chat_template is None:
        return []
    if "chat_template_digest" in record:
        return compare_template(target, record["chat_template_digest"], "the drafter was trained with")
    own = _stored_template(files.directory)
    if own is None or own.strip() == str(target.tokenizer.get_chat_template()).strip():
        return []
    what = "the chat template beside the drafter is not the target's: it learned to continue other text"
    remedy = f"serve with the template it was trained with (--chat-template), or train on {target.path}'s own"
    return [Finding("template", what, remedy)]


def compare_template(target: Target, digest: str, who: str) -> list[Finding]:
    """Compares a template's digest, its keywords included, with the target's, and names the mode if another fits."""
    kwargs = target.chat_template_kwargs
    if ChatRenderer(target.tokenizer, kwargs).template_digest() == digest:
        return []
    fitting = [mode for mode in KNOWN_MODES if ChatRenderer(target.tokenizer, mode).template_digest() == digest]
    if fitting:
        what = f"{who} chat_template_kwargs={fitting[0]}, and will be asked with {kwargs}: another thinking mode"
        return [Finding("thinking-mode", what, f"ask with {fitting[0]}, or train on answers given with {kwargs}")]
    what = f"{who} another chat template than {target.path} has: it learned to continue other text"
    return [Finding("template", what, "serve with that template, or train on the target's own")]


def _stored_template(directory: Path) -> str | None:
    path, config_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not config_path.is_file():
        return None
    template = json.loads(config_path.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else None
