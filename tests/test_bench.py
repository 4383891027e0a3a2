"""The benchmark measures real checkpoints: what it writes is read correctly, and its results have their shape."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from ckptfs.tensors.ranges import to_bytes
from tests.paths import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench
from benchmarks import cases, emit, files, growth, models
from benchmarks.common import Bench, Result, Skipped
from benchmarks.memory import HeldMemory
from benchmarks.mounting import drop_cached, forget, loopback_tree, resident, warm
from benchmarks.state import Stored, flatten, metadata_text

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = models.llama(hidden=64, ffn=96, layers=2, heads=4, kv=2, vocab=300)


@pytest.fixture(scope="module")
def h5py() -> Any:
    pytest.importorskip("hdf5plugin")
    return pytest.importorskip("h5py")


def test_a_written_checkpoint_says_itself_what_it_is(h5py: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    files.write_checkpoint(str(path), SMALL)
    with ckptfs.open(path) as opened:
        assert opened.metadata[-1]["params"]["trainer"]["init"]["model"] == SMALL.config
        view = ckptfs.view(opened)
        assert view.config["num_key_value_heads"] == 2
        assert view["model.layers.1.mlp.up_proj.weight"].shape == (96, 64)


def test_a_written_checkpoint_is_read_as_h5py_reads_it(h5py: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    files.write_checkpoint(str(path), models.gpt2(64, 1, vocab=300, dtype="float32"), optimizer=True)
    with ckptfs.open(path) as opened, h5py.File(path) as file:
        tensors = opened.source.tensors()
        assert sorted(tensors) == sorted(file)
        for key, tensor in tensors.items():
            assert to_bytes(tensor) == file[key][()].tobytes(), key


def test_weights_are_stored_plainly_as_in_trained_models(h5py: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    files.write_checkpoint(str(path), models.llama(256, 512, 1, 4, 2, 1024))
    assert files.stored_plainly(str(path)) == 1


def test_weights_are_normal_and_differ_between_tensors() -> None:
    pool = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    first, second = (files.weights(pool, i, Stored((300, 300), "float32")) for i in (1, 2))
    assert abs(first.mean()) < 0.05 and abs(first.std() - 1) < 0.05
    assert not np.array_equal(first, second)
    short = files.weights(pool, 1, Stored((300, 300), "bfloat16"))
    assert np.array_equal(short.view(np.uint16), first.view(np.uint32) >> 16)


def test_an_emitted_checkpoint_is_what_libhdf5_reads(h5py: Any, tmp_path: Path) -> None:
    path = tmp_path / "e.mdl"
    pattern = np.random.default_rng(1).bytes(1 << 16)
    model = models.llama(256, 320, 40, 4, 2, 500)  # enough keys for two levels of each tree
    state = models.state_dict(model, optimizer=True)
    n = emit.emit_checkpoint(str(path), state, {"model.embedding": bytes(8), "model.": pattern})
    leaves = dict(flatten(state))
    assert n == len(leaves) > 1000
    with h5py.File(path) as file:
        assert len(file.attrs) == n + 4
        for key, leaf in leaves.items():
            assert file.attrs[f"{key}.__metadata__"] == metadata_text(key, leaf)
        assert set(file) == {key for key, leaf in leaves.items() if isinstance(leaf, Stored)}
        for key in file:
            assert file[key].shape == leaves[key].shape
            assert file[key].attrs["dtypes"][0] == f"torch.{leaves[key].dtype}"
        with ckptfs.open(path) as opened:
            tensors = opened.source.tensors()
            for key in [k for k in file if k.startswith("model.")][:40]:
                assert to_bytes(tensors[key]) == file[key][()].tobytes(), key
        stored = file["model.transformer_decoder.layers.0.ffn.ffn.1.linear_layer.weight"]
        nbytes = int(np.prod(stored.chunks)) * 2
        assert stored[: stored.chunks[0], : stored.chunks[1]].tobytes() == pattern[:nbytes]
        assert stored.id.get_chunk_info(0).size == nbytes + struct.calcsize(">QII")
        assert not file["model.embedding_layer.word_embeddings.weight"][...].any()


def test_emitted_and_written_checkpoints_have_the_same_structure(h5py: Any, tmp_path: Path) -> None:
    files.write_checkpoint(str(tmp_path / "w.mdl"), SMALL)
    emit.emit_checkpoint(str(tmp_path / "e.mdl"), models.state_dict(SMALL), {"model.": b"\1\2"})
    with h5py.File(tmp_path / "w.mdl") as written, h5py.File(tmp_path / "e.mdl") as emitted:
        assert dict(written.attrs) == dict(emitted.attrs)
        for key in written:
            a, b = written[key], emitted[key]
            assert (a.shape, a.dtype, a.chunks) == (b.shape, b.dtype, b.chunks)
            assert filters(a) == filters(b) == ([(32004, 1, (0,))] if a.shape else [])
            assert sorted(a.attrs) == sorted(b.attrs)
            assert all(np.array_equal(a.attrs[name], b.attrs[name]) for name in a.attrs)


def filters(dataset: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    plist = dataset.id.get_create_plist()
    return [plist.get_filter(i)[:3] for i in range(plist.get_nfilters())]


def test_sizes_follow_what_was_asked_for() -> None:
    for make in (models.usual_gptj, models.usual_llama, models.usual_gpt2):
        assert 1e9 <= make(10**9).nbytes < 1.3e9
        assert 4e9 <= make(4 * 10**9).nbytes < 4.5e9
    assert models.llama_70b().nbytes == pytest.approx(2 * 68.98e9, rel=1e-3)
    published = models.gptj(4096, 28)  # 6,050,882,784 parameters; one norm stands twice in a Cerebras checkpoint
    assert published.nbytes == 2 * (6_050_882_784 + 2 * 4096)


def test_p1_is_all_renames(h5py: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "gptj.mdl")
    files.write_checkpoint(path, models.gptj(512, 2, vocab=300))
    with ckptfs.open(path) as opened:
        stored = {to_bytes(tensor) for tensor in opened.source.tensors().values()}
        found = {name: to_bytes(tensor) for name, tensor in ckptfs.view(opened).plan.tensors.items()}
    assert len(found) == 2 * 10 + 5
    assert set(found.values()) <= stored


def test_held_memory_is_there_until_it_is_released() -> None:
    before = resident_bytes()
    with HeldMemory(64 << 20) as held:
        assert resident_bytes() - before > 60 << 20
        held.release()
        assert resident_bytes() - before < 30 << 20


def test_what_is_forgotten_is_read_from_the_disk_again() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp may be memory
        path = Path(folder, "f")
        path.write_bytes(b"checkpoint" * 100_000)
        before = resident(str(path))
        forget(str(path))
        assert before == 1
        assert resident(str(path)) < 0.05 or not drop_cached(str(path))
        assert path.read_bytes() == b"checkpoint" * 100_000


@pytest.mark.parametrize(
    ("runs", "enough", "each", "wanted"),
    [(5, 3, 1.0, 5), (5, 3, 9.0, 3), (5, 3, 6.0, 4), (5, None, 99.0, 5), (2, 3, 99.0, 2)],
)
def test_repeats_end_in_time(
    runs: int, enough: int | None, each: float, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    done = 0
    for i in Bench("", 1, runs, enough=enough).repeats(20.0):
        assert i == done
        done += 1
        now[0] += each
    assert done == wanted


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_loopback_shows_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    found: Any = loopback_tree(str(tmp_path)).lookup("/a")
    out = bytearray(6)
    try:
        assert found.size == 10
        assert found.file.read_into(7, memoryview(out)) == 3
        assert bytes(out[:3]) == b"789"
    finally:
        os.close(found.file.fd)


def test_json_has_the_fields_that_readers_rely_on(tmp_path: Path) -> None:
    good = Result(0.83, "ratio", 0.8, [0.83], more={"cold": float("nan")})
    slow = Result(0.4, "s", 0.5, [0.4], at_most=True, unmet="100,000 keys: 4 s, target 3 s")
    bench.write_json(str(tmp_path / "r.json"), {"P1": good, "P6": slow})
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["P1"] == {"value": 0.83, "unit": "ratio", "target": 0.8, "met": True, "runs": [0.83], "cold": None}
    assert found["P6"]["met"] is False
    assert "missed" in bench.row("P6", slow)


@pytest.mark.fuse
@pytest.mark.parametrize("name", ["P2", "P7"])
def test_a_measure_runs_and_leaves_no_mount(h5py: Any, tmp_path: Path, name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source = tmp_path / "a.mdl"
    files.write_checkpoint(str(source), models.llama(256, 320, 1, 4, 2, 32000))
    result = bench.MEASURES[name][2](Bench(str(tmp_path), 10**6, 1, str(source)))
    assert result.value > 0
    assert not os.path.ismount(tmp_path / "mnt")


@pytest.mark.fuse
def test_peers_that_are_missing_are_named(h5py: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """hdfuse is played by a script that shows a file where hdfuse would; ratarmount is not to be found."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source, tools = tmp_path / "a.mdl", tmp_path / "bin"
    files.write_checkpoint(str(source), SMALL)
    tools.mkdir()
    shown = 'mkdir -p "$2/mnt/model.h5" && echo > "$2/mnt/$CKPTFS_BENCH_TENSOR" && exec "$4" "$2/mnt"'
    (tools / "hdfuse").write_text(f"#!/bin/sh\n{shown}\n")
    (tools / "hdfuse").chmod(0o755)
    for name in ("sh", "cat", "date", "mkdir", "fusermount3"):
        (tools / name).symlink_to(shutil.which(name) or "/bin/false")
    monkeypatch.setenv("PATH", str(tools))
    result = bench.MEASURES["PEERS"][2](Bench(str(tmp_path), 10**6, 1, str(source)))
    assert result.notes == ("ratarmount, .bin: left out, not installed (pip install ratarmount)",)
    assert {"ckptfs, .mdl", "h5py, .mdl", "hdfuse, .mdl"} <= set(result.more)
    assert "ckptfs, .bin" not in result.more  # nothing would be compared with it
    assert all(result.more[name]["min"] > 0 for name in ("ckptfs, .mdl", "hdfuse, .mdl"))
    assert result.value == min(result.runs)


@pytest.mark.fuse
def test_a_converter_that_cannot_be_imported_is_skipped_with_its_reason(h5py: Any, tmp_path: Path) -> None:
    source = tmp_path / "a.mdl"
    files.write_checkpoint(str(source), SMALL)
    with pytest.raises(Skipped, match=r"No module named '\w+'"):
        bench.MEASURES["P4"][2](Bench(str(tmp_path), 10**6, 1, str(source), converter=sys.executable))


@pytest.mark.fuse
def test_the_converter_is_run_with_its_own_flags(h5py: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """`ckptfs convert` has the converter's flags and stands in for it: a Python that answers to its module's name."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source, python = tmp_path / "a.mdl", tmp_path / "python"
    files.write_checkpoint(str(source), SMALL)
    lines = ["#!/bin/sh", '[ "$1" = -c ] && exit', f'echo "$@" >> {tmp_path}/ran', "shift 2"]
    python.write_text("\n".join([*lines, f'exec {sys.executable} -m ckptfs "$@"\n']))
    python.chmod(0o755)
    result = bench.MEASURES["P4"][2](Bench(str(tmp_path), 10**6, 1, str(source), converter=str(python)))
    assert result.more["mount: written"] == 0
    assert result.more["converter: written"] > SMALL.nbytes
    assert result.more["mount: parameters"] == result.more["converter: parameters"]
    assert "-m cerebras.modelzoo.tools.convert_checkpoint convert" in (tmp_path / "ran").read_text()
    assert not result.notes


@pytest.mark.fuse
def test_a_checkpoint_that_does_not_tell_its_model_is_skipped(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    case = FAMILIES / "llama/cs2hf-gqa-fp32"
    source = shutil.copy(case / "cs.mdl", tmp_path / "alone.mdl")
    with pytest.raises(Skipped, match="--model"):
        bench.MEASURES["P1"][2](Bench(str(tmp_path), 10**6, 1, str(source)))
    view = ("--model", "llama", "--config", str(case / "cs.yaml"))
    assert bench.MEASURES["P1"][2](Bench(str(tmp_path), 10**6, 1, str(source), view=view)).value > 0
    with pytest.raises(Skipped, match="--converter"):
        bench.MEASURES["P4"][2](Bench(str(tmp_path), 10**6, 1, str(source), view=view))


def test_a_dropped_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:  # /tmp may be memory
        file.write(bytes(1 << 20))
        file.flush()
        warm(file.name)
        assert resident(file.name) == 1
        assert drop_cached(file.name) == (resident(file.name) < 0.05)
    (tmp_path / "empty").touch()
    assert drop_cached(str(tmp_path / "empty"))


def run_script(name: str, *args: str) -> Any:
    """What a script writes as JSON; it prints a table besides."""
    command = [sys.executable, str(SCRIPTS / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(Path(args[args.index("--json") + 1]).read_text())


@pytest.mark.fuse
def test_profiles_of_every_way_of_reading(h5py: Any, tmp_path: Path) -> None:
    asked = "lz4-packed-bf16/rename,contiguous-h5/packed,loopback"
    options = ("--size", "1MB", "--only", asked, "--json", str(tmp_path / "p.json"), "--work", str(tmp_path))
    found = run_script("profiles.py", *options)
    assert found["machine"]["cores"] == os.cpu_count()
    names = [(case["source"], case["operation"]) for case in found["cases"]]
    assert names == [("lz4-packed-bf16", "rename"), ("contiguous-h5", "packed qkv"), ("safetensors", "loopback")]
    for case in found["cases"]:
        assert list(case["ways"]) == ["cached-1", "cached-2", "direct-1", "direct-2"]
        assert all(0 < way["GB/s"]["min"] <= way["GB/s"]["max"] for way in case["ways"].values())
        assert all(way["CPU s/GB"]["median"] > 0 for way in case["ways"].values())
    assert not os.path.ismount(tmp_path / "mnt")


@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_the_cases_move_what_they_say(h5py: Any, tmp_path: Path, operation: str) -> None:
    """Each operation against NumPy, over contiguous tensors."""
    path = cases.write_source("contiguous-h5", str(tmp_path), 1)
    with h5py.File(path) as file:
        xs = [file[name][()].view(np.uint16) for name in sorted(file) if file[name].shape]
    file_of_case = cases.case_file(path, operation)
    out = bytearray(file_of_case.size)
    file_of_case.read_into(0, memoryview(out))
    found = np.frombuffer(out, np.uint16)
    parts, n = np.split(found, len(xs)), len(xs[0])
    half = cases.HEAD // 2
    if operation == "rename":
        assert np.array_equal(found, np.concatenate(xs).reshape(-1))
    elif operation == "rotary rows":  # interleaved pairs become two halves of a head
        assert np.array_equal(parts[0].reshape(n, -1)[:half], xs[0][: cases.HEAD : 2])
    elif operation == "transposed":
        assert np.array_equal(parts[0].reshape(-1, n), xs[0].T)
    elif operation == "packed qkv":
        heads = np.concatenate([x[: cases.HEAD] for x in xs[:3]])
        assert np.array_equal(found[: heads.size].reshape(heads.shape), heads)
    else:
        wide = (xs[0].astype(np.uint32) << 16).view(np.float32) * np.float32(0.7)
        short = (parts[0].astype(np.uint32) << 16).view(np.float32).reshape(wide.shape)
        assert np.allclose(short, wide, rtol=2**-8, atol=0)


def test_the_sources_are_stored_as_they_are_called(h5py: Any, tmp_path: Path) -> None:
    stored = {
        name: files.stored_plainly(cases.write_source(name, str(tmp_path), 1)) for name in list(cases.SOURCES)[:3]
    }
    assert stored == {"lz4-stored-f32": 1, "lz4-stored-bf16": 1, "lz4-packed-bf16": 0}
    path = cases.write_source("safetensors", str(tmp_path), 1)
    assert struct.unpack("<Q", Path(path).read_bytes()[:8])[0] < 4096


@pytest.mark.fuse
def test_growth_is_measured_row_by_row(h5py: Any, tmp_path: Path) -> None:
    sizes = ("--keys", "100,300", "--tensors", "1KiB,64KiB", "--models", "gpt2 7B", "--stream", "8MB")
    found = run_script("scale.py", *sizes, "--json", str(tmp_path / "s.json"), "--work", str(tmp_path))
    keys, models_ = found["keys"]["rows"], found["models"]["rows"]
    assert [50 < row["keys"] < 500 for row in keys] == [True, True]
    assert keys[1]["files"] > keys[0]["files"] > 0
    assert [len(found["keys"]["exponents"][cost]) for cost in ("mount s", "ls -l s", "read ms/tensor")] == [1, 1, 1]
    for table in ("tensors stored", "tensors packed"):
        assert [row["bytes"] for row in found[table]["rows"]] == [1024, 65536]
        assert all(row["GB/s"] > 0 and row["chunks"] >= 1 for row in found[table]["rows"])
    assert models_[0]["GB read"] == pytest.approx(0.008, rel=0.1)
    assert models_[0]["peak MiB"] >= models_[0]["RSS MiB"] > 10


def test_exponents_of_growth() -> None:
    rows = [{"n": n, "same": 7.0, "linear": 3.0 * n, "square": 0.5 * n * n} for n in (10, 100, 10_000)]
    assert growth.slopes(rows, "n", "same") == [0, 0]
    assert growth.slopes(rows, "n", "linear") == pytest.approx([1, 1])
    assert growth.slopes(rows, "n", "square") == pytest.approx([2, 2])
