"""Broken drafters are named for what is broken, whoever wrote them; of a good one nothing is said."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_drafters import BROKEN, EXPORTED, IDS, change_config, change_weights, missing_norm, write_as_others_do
from json_servers import Reply
from rich.console import Console
from target_stores import LAYERS
from test_served import INFO, running_server
from tiny_drafters import write_fitted_drafter
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle3.commands.doctor import main
from eagle3.config import UserError
from eagle3.evaluation.doctor.examination import SETTINGS, Examination, examine, show
from eagle3.evaluation.doctor.tensors import singular_ratio
from eagle3.evaluation.target import LocalTarget
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def local(tiny_target: Path) -> LocalTarget:
    return LocalTarget(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), LAYERS, frozenset([2]))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, local: LocalTarget) -> tuple[Path, Path]:
    """An exported drafter fitted to the target's answers, and a store of them."""
    fitted = write_fitted_drafter(tmp_path_factory.mktemp("good"), tiny_target, local)
    return fitted.drafter, fitted.store


def look(drafter: Path, target: Path | None, store: Path | None = None, **more: Any) -> Examination:
    settings = {"server": None, "tries_layers": False, "chat_template_kwargs": {}} | more
    return examine(drafter, target_path=target, store_path=store, **settings)


def names(examination: Examination) -> list[str]:
    return [finding.name for finding in examination.findings]


def test_of_a_good_drafter_nothing_is_found(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, store = good
    others = write_as_others_do(drafter, tmp_path / "others")
    for directory in (drafter, others):
        examination = look(directory, tiny_target, store, tries_layers=True)
        assert examination.findings == []
        assert examination.position_0 is not None
        assert examination.position_0.value > 0.5
    assert main([str(others), "--target", str(tiny_target), "--store", str(store)]) == 0
    shown = capsys.readouterr().out
    assert f"Nothing found in {others}." in shown
    assert "Not looked at: what a server accepts (--server URL)." in shown


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_of_others_is_named(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path], name: str
) -> None:
    """None of these files was written by our exporter."""
    break_it, said = BROKEN[name]
    directory = write_as_others_do(good[0], tmp_path / "drafter")
    break_it(directory)
    examination = look(directory, tiny_target, good[1])
    assert names(examination) == [name]
    (finding,) = examination.findings
    assert re.search(said, finding.what), finding.what
    assert finding.remedy


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_drafter_that_was_changed_is_named(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path], name: str
) -> None:
    changes, said = EXPORTED[name]
    directory = Path(shutil.copytree(good[0], tmp_path / "drafter"))
    change_config(directory, **changes)
    examination = look(directory, tiny_target, good[1])
    assert names(examination) == [name]
    assert re.search(said, examination.findings[0].what), examination.findings[0].what


def test_the_thinking_mode_of_the_training_is_named(tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny_target), False)
    digest = ChatRenderer(tokenizer, {"enable_thinking": False}).template_digest()
    directory = Path(shutil.copytree(good[0], tmp_path / "drafter"))
    change_config(directory, eagle3={"capture_layers": list(LAYERS), "chat_template_digest": digest})
    (finding,) = look(directory, tiny_target).findings
    assert finding.name == "thinking-mode"
    assert "chat_template_kwargs={'enable_thinking': False}, and will be asked with {}" in finding.what
    assert look(directory, tiny_target, chat_template_kwargs={"enable_thinking": False}).findings == []


def test_layers_are_tried_where_nothing_says_which_they_are(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]
) -> None:
    """The ids are wrong, the store was captured accordingly, and only the target's own states tell."""
    directory = write_as_others_do(good[0], tmp_path / "drafter", num_aux_hidden_states=3)
    change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)})
    (finding,) = look(directory, tiny_target, good[1], tries_layers=True).findings
    assert finding.name == "layer-ids"
    assert "the drafter reads [2, 4, 5]" in finding.what
    assert "eagle_aux_hidden_state_layer_ids: [1, 3, 4]" in finding.remedy


def test_eagles_own_list_is_suspected_without_a_store(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]
) -> None:
    directory = write_as_others_do(good[0], tmp_path / "drafter")
    change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})  # of 8 layers
    (finding,) = look(directory, tiny_target).findings
    assert (finding.name, finding.remedy[:13]) == ("layer-ids", "try [1, 3, 4]")
    change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 9]})
    (finding,) = look(directory, tiny_target).findings
    assert "no boundaries can be made of the layer ids [2, 4, 9]" in finding.what


def test_the_list_for_vllm_must_mean_the_layers_of_sglangs(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]
) -> None:
    """vLLM takes its list for boundaries; drafters of others may hold it alone, and SGLang does not read it."""
    directory = Path(shutil.copytree(good[0], tmp_path / "ours"))
    change_config(directory, eagle_aux_hidden_state_layer_ids=IDS, eagle3={"capture_layers": list(LAYERS)})
    (finding,) = look(directory, tiny_target).findings
    assert finding.name == "layer-ids"
    assert finding.what.endswith(f"layer_ids: {IDS} beside eagle_config as boundaries, and SGLang will capture "
                                 f"{list(LAYERS)}, as in training")  # fmt: skip
    assert finding.remedy == f"write {list(LAYERS)} there, if vLLM is to serve it"
    change_config(directory, eagle_aux_hidden_state_layer_ids=list(LAYERS))
    assert look(directory, tiny_target).findings == []
    change_config(directory, eagle_aux_hidden_state_layer_ids=None)
    (finding,) = look(directory, tiny_target).findings
    assert finding.what.endswith(f"vLLM may capture others than the {list(LAYERS)} of the training")
    assert finding.remedy == f"write {list(LAYERS)} there, if vLLM is to serve it"
    change_config(directory, eagle_aux_hidden_state_layer_ids=[1, 2, 3], eagle3=None, eagle_config=None)
    (finding,) = look(directory, tiny_target).findings
    assert finding.what.endswith("[1, 2, 3] beside eagle_config as boundaries, and SGLang will capture [2, 4, 5]")
    assert finding.remedy.startswith("make both lists mean the layers that it was trained on")


def test_a_size_that_is_missing_says_nothing_of_the_target(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]
) -> None:
    directory = Path(shutil.copytree(good[0], tmp_path / "drafter"))
    change_config(directory, hidden_size=None)
    (finding,) = look(directory, tiny_target).findings
    assert (finding.name, finding.what[:32]) == ("config-sizes", "config.json has no hidden_size: ")


def test_a_drafter_that_knows_nothing_is_told_from_a_weak_one(
    tmp_path: Path, tiny_target: Path, good: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_as_others_do(good[0], tmp_path / "drafter")

    def scramble(weights: dict[str, Tensor]) -> None:
        weights["fc.weight"] = torch.randn(weights["fc.weight"].shape, generator=torch.Generator().manual_seed(0))

    change_weights(directory, scramble)
    examination = look(directory, tiny_target, good[1])
    assert names(examination) == ["no-skill"]
    show(examination, directory, Console())
    # Two figures of first drafts, which are not the same: over the places where rounds start, and over all.
    shown = capsys.readouterr().out
    assert f"Where rounds start, first drafts are right {examination.position_0} of the time" in shown
    assert "at every place of the store's answers, where a round starts or not, first drafts are right" in shown
    assert "the drafter has learned nothing that holds here" in examination.findings[0].what


def test_tokens_that_cannot_be_drafted_are_counted(
    tmp_path: Path, tiny_target: Path, local: LocalTarget, good: tuple[Path, Path]
) -> None:
    directory = write_as_others_do(good[0], tmp_path / "drafter", draft_vocab_size=120)

    def shrink(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][200:].clone()
        weights["d2t"] = torch.full((120,), 200)

    change_weights(directory, shrink)
    found = {finding.name: finding for finding in look(directory, tiny_target, good[1]).findings}
    assert (
        "are in the draft vocabulary of 120, end tokens outside it: 1 of 1; each" in found["vocabulary-coverage"].what
    )


def test_a_store_of_another_target_or_other_states_is_named(
    tmp_path: Path, tiny_target: Path, make_target: Callable[..., Path], good: tuple[Path, Path]
) -> None:
    drafter, store = good
    other = make_target(tmp_path / "other", seed=3)
    assert names(look(drafter, other, store)) == ["other-store"]
    directory = write_as_others_do(drafter, tmp_path / "drafter", num_aux_hidden_states=2)
    change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": IDS[:2]})

    def narrow(weights: dict[str, Tensor]) -> None:
        weights["fc.weight"] = weights["fc.weight"][:, :128].clone()

    change_weights(directory, narrow)
    # Two states look like EAGLE-1's two inputs, so three names decide; here the norms of EAGLE-3 are there.
    (finding,) = look(directory, tiny_target, store).findings
    assert finding.what == "the drafter reads 2 states and the store has those of [2, 4, 5]"


def test_numbers_that_cannot_be_are_named(tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]) -> None:
    directory = write_as_others_do(good[0], tmp_path / "drafter")

    def break_numbers(weights: dict[str, Tensor]) -> None:
        weights["fc.weight"][0, 0] = float("nan")
        weights["layers.0.mlp.up_proj.weight"] = weights["layers.0.mlp.up_proj.weight"].to(torch.int8)
        weights["d2t"] = torch.zeros(320, dtype=torch.int64).index_fill(0, torch.tensor([3]), 1)
        weights["fc_norm.0.weight"] = torch.ones(64)

    change_weights(directory, break_numbers)
    found = {finding.name: finding.what for finding in look(directory, None).findings}
    assert list(found) == ["unused-tensors", "d2t", "non-finite", "quantised"]
    assert "fc_norm.0.weight is in the file and SGLang does not use it" in found["unused-tensors"]
    assert "gives 319 tokens in 0..319 for 320 draft tokens of a vocabulary of 320" in found["d2t"]
    assert "fc.weight has NaN or Inf" in found["non-finite"]
    assert "midlayer.mlp.up_proj.weight is stored in torch.int8" in found["quantised"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert names(look(tmp_path, None)) == ["no-config"]


def test_a_runs_directory_is_told_from_its_drafter(tmp_path: Path, good: tuple[Path, Path]) -> None:
    (finding,) = look(tmp_path, None).findings
    assert (finding.name, finding.remedy) == ("no-config", "copy the drafter's config.json there")
    shutil.copytree(good[0], tmp_path / "drafter")
    (finding,) = look(tmp_path, None).findings
    assert finding.remedy == f"this is the directory of a training: give what it exported, {tmp_path / 'drafter'}"


def test_random_numbers_are_told_from_structure() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((4096, 576), (320, 64)):
        noise = torch.randn(rows, columns, generator=generator)
        assert singular_ratio(noise) == pytest.approx(1, abs=0.1)
        assert singular_ratio(torch.nn.init.kaiming_uniform_(noise.clone(), generator=generator)) < 1.1
        assert singular_ratio(noise + 0.5 * torch.randn(columns, generator=generator)) > 2
    assert singular_ratio(torch.ones(4, 4)) == 0


# Of a server, by its flags.
FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "speculation-off": ({"speculative_algorithm": None}, "runs without speculation"),
    "eagle-algorithm": ({"speculative_algorithm": "EAGLE"}, "runs --speculative-algorithm EAGLE: the drafter gets one"),
    "other-drafter": ({"speculative_draft_model_path": "/models/other"}, "serves the drafter /models/other, not"),
    "draft-quantization": ({"quantization": "fp8"}, "quantization=fp8, and the drafter with None"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_server_that_cannot_run_the_drafter_is_named(good: tuple[Path, Path], name: str) -> None:
    changes, said = FLAGS[name]
    with running_server(lambda body: (500, {}), (200, INFO | changes)) as url:
        (finding,) = look(good[0], None, server=url).findings
    assert finding.name == name
    assert said in finding.what


def test_an_old_server_that_adds_one_is_named(tmp_path: Path, tiny_target: Path, good: tuple[Path, Path]) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    change_config(target, architectures=["DeepseekV3ForCausalLM"])
    directory = Path(shutil.copytree(good[0], tmp_path / "drafter"))
    change_config(directory, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)})
    for version, found in (("0.5.12.post1", ["layer-ids"]), ("0.5.17", [])):
        with running_server(lambda body: (500, {}), (200, INFO | {"version": version})) as url:
            examination = look(directory, target, server=url)
        assert names(examination) == found, version
        if found:
            assert "SGLang 0.5.12.post1 adds 1 to the layer ids [2, 4, 5]" in examination.findings[0].what


@pytest.mark.parametrize(
    ("histogram", "found"),
    [([30, 0, 0, 0], "nothing-accepted"), ([20, 10, 0, 0], "served-below-offline"), ([0, 0, 0, 9], "")],
)
def test_served_and_offline_first_drafts_are_compared(
    tiny_target: Path, good: tuple[Path, Path], histogram: list[int], found: str
) -> None:
    """Offline nearly all first drafts are right."""
    rounds = sum(histogram)
    num_tokens = 1 + rounds + sum(index * count for index, count in enumerate(histogram))

    def generate(body: dict[str, Any]) -> Reply:
        meta = {
            "completion_tokens": num_tokens,
            "spec_verify_ct": rounds,
            "spec_correct_drafts_histogram": histogram,
        }
        return 200, {"output_ids": list(range(num_tokens)), "meta_info": meta}

    with running_server(generate) as url:
        examination = look(good[0], tiny_target, good[1], server=url)
    assert names(examination) == ([found] if found else [])
    if found == "nothing-accepted":
        assert re.match(r"the server accepted no draft in 3\d0 rounds", examination.findings[0].what)
    elif found:
        assert "first drafts are right 33.3% of the time on the server and" in examination.findings[0].what


def test_arguments_that_need_others_are_refused(tmp_path: Path, good: tuple[Path, Path]) -> None:
    drafter, store = good
    for argv, said in (
        ([str(drafter), "--store", str(store)], "--target must be given with --store and --try-layers, got none"),
        ([str(drafter), "--target", "x", "--try-layers"], "--store must be given with --try-layers, got none"),
        ([str(drafter), "--chat-template-kwargs", "[]"], r"--chat-template-kwargs must be a JSON object, got '\[\]'"),
        ([str(drafter), "--chat-template-kwargs", "{"], "--chat-template-kwargs must be a JSON object, got '{'"),
        ([str(tmp_path / "nothing")], "a drafter must be a directory with config.json and weights, got '.*nothing'"),
    ):
        with pytest.raises(UserError, match=said):
            main(argv)


def test_what_was_not_looked_at_is_named_as_the_command_takes_it(tiny_target: Path, good: tuple[Path, Path]) -> None:
    at_work = "the drafter at work on recorded features"
    assert look(good[0], tiny_target).skipped == [
        f"{at_work} (--target DIR --store DIR)", "what a server accepts (--server URL)",
    ]  # fmt: skip
    assert look(good[0], tiny_target, spelling=SETTINGS).skipped == [
        f"{at_work} (target.path=DIR store=DIR)", "what a server accepts (server=URL)",
    ]  # fmt: skip


def test_findings_are_printed_with_their_remedies(
    tmp_path: Path, good: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_as_others_do(good[0], tmp_path / "drafter")
    missing_norm(directory)
    assert main([str(directory)]) == 1
    shown = capsys.readouterr().out
    assert "1. missing-tensors: norm.weight is not in the file: SGLang leaves it random without a word." in shown
    assert "   Remedy: export the drafter again, all of it, or find the whole file." in shown
    assert "Not looked at: sizes, layers, RoPE, tokenizer and template (--target DIR)." in shown
