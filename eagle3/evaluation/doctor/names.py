"""Names and shapes of a drafter's tensors, against those that SGLang makes of its config.json.

SGLang skips tensors that it does not know and leaves random what it does not find, without a word.
"""

from collections.abc import Mapping
from typing import Any

from eagle3.draft.export import IGNORED_NAMES, WEIGHT_NAMES
from eagle3.draft.serving_config import ARCHITECTURE, wrong_kinds
from eagle3.evaluation.doctor.files import DrafterFiles, Finding

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def check_names(files: DrafterFiles) -> list[Finding]:
    """Returns what SGLang would not load, or load into something else."""
    findings = []
    architectures = _architectures(files.config)
    if architectures != [ARCHITECTURE]:
        what = f"architectures is {architectures}, from which SGLang builds another model than {ARCHITECTURE}"
        findings.append(Finding("architecture", what, f'write "architectures": ["{ARCHITECTURE}"] into config.json'))
    wanted = set(_wanted_names(files.config))
    missing = sorted(wanted - set(files.tensors))
    unknown = sorted(set(files.tensors) - wanted - IGNORED_NAMES - {"d2t", "t2d"})
    if missing and unknown:
        pairs = _likely_pairs(missing, unknown)
        shown = ", ".join(f"{stored} for {name}" for name, stored in pairs.items()) or f"{unknown[0]} is unknown"
        what = (
            f"{len(unknown)} tensors have names that SGLang does not know, and {len(missing)} that it needs are not "
            f"there ({shown}): it skips the former without a word and leaves the latter random"
        )
        findings.append(Finding("tensor-names", what, "rename them: " + "; ".join(missing)))
    elif missing:
        what = f"{', '.join(missing)} is not in the file: SGLang leaves it random without a word"
        findings.append(Finding("missing-tensors", what, "export the drafter again, all of it, or find the whole file"))
    elif unknown:
        what = f"{', '.join(unknown)} is in the file and SGLang does not use it: config.json describes another drafter"
        remedy = "switch on what the tensors belong to (fc_norm: true for fc_norm.*), or remove them if they do nothing"
        findings.append(Finding("unused-tensors", what, remedy))
    return findings


def other_algorithm(files: DrafterFiles) -> Finding | None:
    """Recognises a drafter of EAGLE-1 or EAGLE-2: two inputs to fc, and the target's own head."""
    config, fc = files.config, files.tensors.get("fc.weight")
    hidden_size = config.get("hidden_size")
    has_two_inputs = fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0] and fc.shape[0] == hidden_size
    named_otherwise = any("eagle" in str(name).lower() and "3" not in str(name) for name in _architectures(config))
    eagle_config = config.get("eagle_config") or {}
    unfused = isinstance(eagle_config, dict) and eagle_config.get("use_aux_hidden_state") is False
    has_norm_of_states = "midlayer.hidden_norm.weight" in files.tensors  # EAGLE-3's alone
    if not (unfused or ((has_two_inputs or named_otherwise) and not has_norm_of_states)):
        return None
    seen = f"fc.weight {tuple(fc.shape)}" if fc is not None else f"architectures={config.get('architectures')!r}"
    what = f"these are files of an EAGLE-1 or EAGLE-2 drafter ({seen}), which reads the last hidden state alone"
    remedy = (
        "serve it with --speculative-algorithm EAGLE, or train an EAGLE-3 drafter; with EAGLE3 nothing it says is used"
    )
    return Finding("eagle-not-eagle3", what, remedy)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _wanted_names(config: Mapping[str, Any]) -> list[str]:
    names = list(WEIGHT_NAMES)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        names += [f"fc_norm.{index}.weight" for index in range(num_aux(config))]
    if config.get("draft_vocab_size") != config.get("vocab_size"):
        names.append("d2t")
    return names


def num_aux(config: Mapping[str, Any]) -> int:
    """Returns how many captured states SGLang feeds to a drafter with this config."""
    eagle_config = config.get("eagle_config") or {}
    return int(
        config.get("num_aux_hidden_states") or len(eagle_config.get("eagle_aux_hidden_state_layer_ids") or ()) or 3
    )


def _likely_pairs(missing: list[str], unknown: list[str]) -> dict[str, str]:
    """Returns, for the first missing names, the unknown ones that end alike."""
    pairs = {}
    for name in missing:
        tail = name.split(".")[-2:]
        alike = [stored for stored in unknown if stored.split(".")[-2:] == tail]
        if len(alike) == 1:
            pairs[name] = alike[0]
    return dict(list(pairs.items())[:3])


def check_kinds(files: DrafterFiles) -> Finding | None:
    """Returns which values of config.json are none that an engine reads."""
    wrong = wrong_kinds(files.config)
    if not wrong:
        return None
    what = f"config.json has {'; '.join(problem.removeprefix('- ') for problem in wrong)}"
    return Finding("config-values", what, "write the values that the drafter was trained with, or export it again")


def check_shapes(files: DrafterFiles) -> list[Finding]:
    """Compares the tensors' shapes with the sizes in config.json."""
    missing_sizes = [name for name in SIZES if not isinstance(files.config.get(name), int)]
    if missing_sizes:
        what = f"config.json has no {', '.join(missing_sizes)}: engines put defaults of other models in their place"
        return [Finding("config-sizes", what, "write the sizes that the drafter was trained with")]
    wrong = [
        f"{name} is {tuple(files.tensors[name].shape)} where config.json makes it {shape}"
        for name, shape in wanted_shapes(files.config).items()
        if name in files.tensors and tuple(files.tensors[name].shape) != shape
    ]
    if not wrong:
        return []
    remedy = "correct the size in config.json (head_dim, draft_vocab_size, num_aux_hidden_states ...), or export again"
    return [Finding("shapes", "; ".join(wrong), remedy)]


def wanted_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that SGLang gives the tensors of a drafter with this config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    kv_size = (config.get("num_key_value_heads") or num_heads) * head_dim
    draft_vocab_size = config.get("draft_vocab_size") or config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux(config) * hidden),
        "midlayer.self_attn.q_proj.weight": (num_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, num_heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (draft_vocab_size, hidden),
        "d2t": (draft_vocab_size,),
        "t2d": (config["vocab_size"],),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return shapes | {f"midlayer.{norm}.weight": (hidden,) for norm in norms} | {"norm.weight": (hidden,)}
