"""A drafter whose config.json somebody edited is loaded, or refused in one sentence, and the doctor says why."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from target_stores import LAYERS
from tiny_drafters import random_drafter
from transformers import AutoModelForCausalLM

from eagle3.config import UserError
from eagle3.draft.export import export_drafter, load_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.doctor.examination import Examination, examine
from eagle3.evaluation.target import LocalTarget

REMOVED = object()
OTHERS = [REMOVED, None, 0, -1, "x", [], {}, 10**400, 10**9, float("inf")]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def drafter(tmp_path: Path, tiny_target: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    config = load_target_config(tiny_target)
    drafter = random_drafter(LocalTarget(model, LAYERS, frozenset()), 200)
    record = {"tokenizer_digest": "t", "chat_template_digest": "c"}
    export_drafter(drafter, tmp_path / "drafter", target_config=config, card="", trained_on=record)
    return tmp_path / "drafter"


def look_at(drafter: Path, target: Path | None) -> Examination:
    return examine(
        drafter, target_path=target, store_path=None, server=None, tries_layers=False, chat_template_kwargs={}
    )


def edits(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields what was changed, and the whole, for every value and every entry of an inner object."""
    for place in [(key,) for key in config] + [(key, inner) for key in config if isinstance(config[key], dict)
                                                for inner in config[key]]:  # fmt: skip
        for value in OTHERS:
            edited = copy.deepcopy(config)
            holder = edited if len(place) == 1 else edited[place[0]]
            if value is REMOVED:
                del holder[place[-1]]
            else:
                holder[place[-1]] = value
            yield ".".join(place), value, edited


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": YARN}])
def test_no_edit_makes_a_traceback_and_none_that_is_refused_is_passed_over(
    drafter: Path, tiny_target: Path, rope: dict[str, Any]
) -> None:
    path, target_config = drafter / "config.json", load_target_config(tiny_target)
    config = json.loads(path.read_text()) | rope
    path.write_text(json.dumps(config))
    load_drafter(drafter, target_config)
    known = {finding.name for finding in look_at(drafter, tiny_target).findings}
    num_refused = 0
    for name, value, edited in edits(config):
        path.write_text(json.dumps(edited))
        try:
            load_drafter(drafter, target_config)
            is_refused = False
        except UserError:
            is_refused = True
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}") from error
        found = {finding.name for finding in look_at(drafter, tiny_target).findings}
        # Findings in the tensors come before the drafter is loaded, and are there in any case.
        assert not is_refused or found - known or "random-head" in known, f"{name} = {value!r}"
    assert num_refused > 100


def test_values_of_another_kind_are_named_at_once(drafter: Path) -> None:
    path = drafter / "config.json"
    config = json.loads(path.read_text()) | {"num_key_value_heads": {"a": 1}, "rope_theta": 1, "rope_scaling": -1}
    path.write_text(json.dumps(config))
    examination = look_at(drafter, None)
    (finding,) = examination.findings
    assert finding.name == "config-values"
    assert finding.what == (
        "config.json has num_key_value_heads={'a': 1}, wanted an integer of 1 or more; rope_scaling=-1, wanted an "
        "object; rope_theta=1, wanted a number above 1"
    )
    assert "everything else, which config.json decides" in examination.skipped


def test_rope_that_transformers_cannot_compute_is_refused(drafter: Path, tiny_target: Path) -> None:
    path = drafter / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "yarn"}}))
    with pytest.raises(UserError, match=r"rope_parameters must be ones that transformers computes, got \{.*'yarn'"):
        load_drafter(drafter, load_target_config(tiny_target))


def test_sizes_that_no_machine_has_room_for_are_compared_first(drafter: Path, tiny_target: Path) -> None:
    path = drafter / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 10**9}))
    with pytest.raises(UserError, match=r"misshapen: midlayer\.mlp\.down_proj\.weight .* wanted \(64, 1000000000\)"):
        load_drafter(drafter, load_target_config(tiny_target))
