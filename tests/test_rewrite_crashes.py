"""Commands that write stores, killed and interrupted: run again, each ends with the store of an undisturbed run."""

import json
from pathlib import Path

from test_commands import write_numbers
from test_importing import LAYERS, Forward, forwards, write_ckpt  # noqa: F401 - a fixture
from test_store_crashes import COMMON, PHASES, run

ENDS = (
    COMMON
    + """
from eagle3.commands import features
from eagle3.features import looking, making  # once, rather than in every child

chosen = random.Random(3)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would its children

def in_child(arguments, phase=None, number=signal.SIGKILL):
    count = chosen.randrange(1, 5)
    child = os.fork()
    if child == 0:
        signalled_at(phase, count, number)
        try:
            os._exit(features.main(arguments))
        except KeyboardInterrupt:
            os._exit(130)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def stored(out):
    return {entry.sample_id: entry.checksum for entry in FeatureStore(out).entries}

def stop_and_go_on(out, arguments):
    assert in_child(arguments) == 0
    undisturbed, problems, codes, num_partial = stored(out), [], [], 0
    for number in (signal.SIGKILL, signal.SIGINT):
        for phase in ("write", "fsync", "rename", "index"):
            shutil.rmtree(out)
            codes += [in_child(arguments, phase, number) for _ in range(2)]
            if (out / "manifest.json").exists():
                problems += verify_store(out)
                num_partial += 0 < len(stored(out)) < len(undisturbed)
            codes.append(in_child(arguments))
            problems += verify_store(out)
            assert stored(out) == undisturbed, (phase, number)
    return {"codes": codes, "problems": problems, "num_partial": num_partial, "num_stored": len(undisturbed)}

done = {name: stop_and_go_on(Path(out), arguments) for name, out, arguments in json.loads(sys.argv[1])}
print(json.dumps(done))
"""
).replace("resource, signal", "resource, shutil, signal")


def test_a_command_that_was_stopped_goes_on_and_loses_nothing(
    tmp_path: Path,
    tiny_target: Path,
    forwards: list[Forward],  # noqa: F811
) -> None:
    first, second = write_numbers(tmp_path / "first", range(6)), write_numbers(tmp_path / "second", range(4, 9))
    foreign = write_ckpt(tmp_path / "foreign", forwards)
    before = {path: path.read_bytes() for source in (first, second, foreign) for path in source.iterdir()}
    meaning = ["--target", tiny_target, "--layers", *LAYERS, "--last", "after-norm"]
    commands: list[tuple[str, list[object]]] = [
        ("merge", [first, second, tmp_path / "merge"]),
        ("convert", [first, tmp_path / "convert", "--codec", "int8"]),
        ("drop", [first, tmp_path / "drop", "--max-tokens", 5]),
        ("import", [foreign, tmp_path / "import", *meaning]),
    ]
    texts = [
        (name, str(tmp_path / name), [name, *map(str, arguments), "--shard-bytes", "2000"])
        for name, arguments in commands
    ]
    results = run(ENDS, json.dumps(texts))
    assert {name: result["num_stored"] for name, result in results.items()} == {
        "merge": 9,
        "convert": 6,
        "drop": 4,
        "import": 8,
    }
    for result in results.values():
        assert result["problems"] == []
        assert len(result["codes"]) == 2 * len(PHASES) * 3
        assert {-9, 0, 130} >= set(result["codes"])
        assert result["codes"].count(-9) >= 4, result
        assert result["codes"].count(130) >= 4, result
        assert result["num_partial"] >= 2, result
    assert {path: path.read_bytes() for source in (first, second, foreign) for path in source.iterdir()} == before
