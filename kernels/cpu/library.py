"""The compiled kernels: builds them once for this CPU, and calls them.

Owns: compiler, flags and the place of the result, the mirror of decoder.cpp's C interface, and `Cpu`, a set of threads
that runs it. Refuses to know: checkpoints, requests, and where the cache directory is.

    sources + compiler + CPU -> key -> <directory>/<key>.so    made by the first process that asks; others wait for it

Without a compiler, or where it fails, there is no `Cpu`, a log line says why, and the torch path runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.cpu.pages import LargePages, Reused

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).resolve().parent
_FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
_TUNED = ("-march=native",)
_COMPILERS = ("g++", "c++")
_BUILD_S = 180.0
_POLL_S = 0.1
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LEVELS = ("plain vectors", "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16")
_FAST_LEVELS = ("AVX2", "AMX bf16")
_PLAIN, _ADD, _GATED, _SCORES = range(4)
_WIDEST_HEAD = 256
_DEPTH = 32  # products of bf16 take so many features at a time

I64 = npt.NDArray[np.int64]


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here."""


class Packed(NamedTuple):
    """A weight as the kernels read it: opaque numbers that stand for `rows` output and `depth` input features."""

    data: torch.Tensor
    rows: int
    depth: int


class Contexts(NamedTuple):
    """What a step's sequences have in the pool: sequence i's blocks start at `table[table_starts[i]]`."""

    query_lens: I64
    context_lens: I64
    table: I64
    table_starts: I64

    @classmethod
    def of(cls, query_lens: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[I64]) -> Contexts:
        """Of sequences whose last `query_lens[i]` of `context_lens[i]` tokens are in the step."""
        sizes = np.fromiter(map(len, block_tables), dtype=np.int64, count=len(block_tables))
        return cls(
            np.array(query_lens, dtype=np.int64),
            np.array(context_lens, dtype=np.int64),
            np.concatenate(block_tables, dtype=np.int64) if len(block_tables) else np.empty(0, dtype=np.int64),
            np.cumsum(sizes) - sizes,
        )


class _Product(ctypes.Structure):
    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_long),
        ("columns", ctypes.c_long),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", _Product),
        ("output", _Product),
        ("gate_up", _Product),
        ("down", _Product),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("num_layers", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("dim", ctypes.c_long),
        ("hidden", ctypes.c_long),
        ("middle", ctypes.c_long),
        ("epsilon", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
    ]


class _Paged(ctypes.Structure):
    _fields_ = [
        ("pool", ctypes.c_void_p),
        ("layers", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("dim", ctypes.c_long),
        ("sequences", ctypes.c_long),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_long),
        ("token_ids", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("rows", ctypes.c_long),
        ("row_ids", ctypes.c_void_p),
    ]


class LayerWeights(NamedTuple):
    """One layer for `Cpu.model`; gate and up rows alternate by sixteens in `gate_up` (`interleaved`)."""

    attention_norm: torch.Tensor
    qk_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    qkv: tuple[Packed, torch.Tensor | None]
    output: tuple[Packed, torch.Tensor | None]
    gate_up: tuple[Packed, torch.Tensor | None]
    down: tuple[Packed, torch.Tensor | None]


class Model:
    """A decoder's weights in the form that `Cpu.step` takes; keeps alive what it points to."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        epsilon: float,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        layers: Sequence[LayerWeights],
    ) -> None:
        self.hidden = embedding.shape[1]
        self.layers = tuple(layers)
        self._kept = (embedding, norm)
        structs = (_Layer * len(layers))(
            *(
                _Layer(
                    layer.attention_norm.data_ptr(),
                    None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
                    layer.mlp_norm.data_ptr(),
                    _product(*layer.qkv),
                    _product(*layer.output),
                    _product(*layer.gate_up),
                    _product(*layer.down),
                )
                for layer in layers
            )
        )
        middle = layers[0].down[0].depth
        self.struct = _Model(
            len(layers),
            heads,
            kv_heads,
            dim,
            self.hidden,
            middle,
            epsilon,
            embedding.data_ptr(),
            norm.data_ptr(),
            structs,
        )


class Cpu:
    """The kernels and the threads that run them; one caller at a time. `tiles` False leaves AMX unused."""

    def __init__(self, library: ctypes.CDLL, threads: int, tiles: bool = True) -> None:
        self._library = library
        self._engine = library.baton_open(threads, int(tiles))
        self._memory = LargePages()

    def __del__(self) -> None:
        self._library.baton_close(self._engine)

    @property
    def instructions(self) -> str:
        """What the kernels were compiled for."""
        return _LEVELS[self._library.baton_level()]

    @property
    def multiplies_fast(self) -> bool:
        """Whether products are known to be faster than torch's for any number of rows: they are with AMX, and on CPUs
        that have AVX2 and nothing wider, where torch has no kernels for bf16."""
        return self.instructions in _FAST_LEVELS

    def attends(self, pool_NLK2SD: torch.Tensor) -> bool:
        """Whether `attend` takes such a pool."""
        return (
            pool_NLK2SD.device.type == "cpu"
            and pool_NLK2SD.dtype in _NUMBERS
            and pool_NLK2SD.is_contiguous()
            and self.attends_heads(pool_NLK2SD.shape[5])
        )

    def attends_heads(self, dim: int) -> bool:
        """Whether `attend` takes heads of so many features."""
        return dim % 16 == 0 and dim <= _WIDEST_HEAD

    def multiplies(self, depth: int, dtype: torch.dtype) -> bool:
        """Whether `pack` takes a weight of so many input features."""
        return dtype is torch.bfloat16 and depth % _DEPTH == 0

    def pack(self, weight_OI: torch.Tensor) -> Packed:
        """Packs a contiguous bf16 weight."""
        rows, depth = weight_OI.shape
        if not self.multiplies(depth, weight_OI.dtype):
            raise ValueError(f"weight {list(weight_OI.shape)} {weight_OI.dtype}: needs bf16 and a multiple of {_DEPTH}")
        data = self._memory.take(2 * self._library.baton_packed_size(rows, depth)).view(torch.bfloat16)
        self._library.baton_pack(weight_OI.contiguous().data_ptr(), rows, depth, data.data_ptr())
        return Packed(data, rows, depth)

    def linear(self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """x w^T + bias in bf16, rounded once."""
        out = torch.empty(len(x_TI), weight.rows, dtype=torch.bfloat16)
        self._multiply(x_TI, weight, bias_O, _PLAIN, out)
        return out

    def scores(self, x_TI: torch.Tensor, weight: Packed, memory: Reused) -> torch.Tensor:
        """x w^T as it was summed, in fp32."""
        out = memory.scores(len(x_TI), weight.rows)
        self._multiply(x_TI, weight, None, _SCORES, out)
        return out

    def add_linear(self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None, to_TO: torch.Tensor) -> None:
        """to += x w^T + bias, in place."""
        self._multiply(x_TI, weight, bias_O, _ADD, to_TO)

    def gated_linear(self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) * up of a product whose rows are `interleaved`."""
        out = torch.empty(len(x_TI), weight.rows // 2, dtype=torch.bfloat16)
        self._multiply(x_TI, weight, bias_O, _GATED, out)
        return out

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        """kernels/rms_norm.py for rows of a multiple of 16 features."""
        out = torch.empty_like(x_TD)
        self._library.baton_rms_norm(
            _NUMBERS[x_TD.dtype], x_TD.data_ptr(), weight_D.data_ptr(), *x_TD.shape, epsilon, out.data_ptr()
        )
        return out

    def store(
        self,
        qkv_TWD: torch.Tensor,
        qk_norm: torch.Tensor | None,
        epsilon: float,
        cosine_TD: torch.Tensor,
        sine_TD: torch.Tensor,
        pool_NLK2SD: torch.Tensor,
        layer: int,
        blocks_T: torch.Tensor,
        offsets_T: torch.Tensor,
    ) -> None:
        """Normalises and rotates queries in place; keys, likewise, and values go into the pool."""
        tokens, width, _ = qkv_TWD.shape
        paged = _paged(pool_NLK2SD, None)
        self._library.baton_store(
            self._engine,
            _NUMBERS[qkv_TWD.dtype],
            qkv_TWD.data_ptr(),
            tokens,
            width - 2 * pool_NLK2SD.shape[2],
            None if qk_norm is None else qk_norm.data_ptr(),
            epsilon,
            cosine_TD.data_ptr(),
            sine_TD.data_ptr(),
            ctypes.byref(paged),
            layer,
            blocks_T.data_ptr(),
            offsets_T.data_ptr(),
        )

    def attend(
        self, q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, contexts: Contexts, out_THD: torch.Tensor
    ) -> None:
        """kernels/paged_attention.py; heads of a row of q are contiguous, `out_THD` is."""
        paged = _paged(pool_NLK2SD, contexts)
        self._library.baton_attend(
            self._engine,
            _NUMBERS[q_THD.dtype],
            q_THD.data_ptr(),
            q_THD.stride(0),
            q_THD.shape[1],
            ctypes.byref(paged),
            layer,
            out_THD.data_ptr(),
        )

    def step(
        self,
        model: Model,
        token_ids_T: torch.Tensor,
        cosine_TD: torch.Tensor,
        sine_TD: torch.Tensor,
        blocks_T: torch.Tensor,
        offsets_T: torch.Tensor,
        pool_NLK2SD: torch.Tensor,
        contexts: Contexts,
        rows_R: torch.Tensor,
    ) -> torch.Tensor:
        """All layers of a decoder: writes KV into the pool and returns the final hidden state of some rows."""
        out = torch.empty(len(rows_R), model.hidden, dtype=torch.bfloat16)
        step = _Step(
            len(token_ids_T),
            token_ids_T.data_ptr(),
            blocks_T.data_ptr(),
            offsets_T.data_ptr(),
            cosine_TD.data_ptr(),
            sine_TD.data_ptr(),
            len(rows_R),
            rows_R.data_ptr(),
        )
        paged = _paged(pool_NLK2SD, contexts)
        self._library.baton_step(
            self._engine, ctypes.byref(model.struct), ctypes.byref(step), ctypes.byref(paged), out.data_ptr()
        )
        return out

    def _multiply(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None, finish: int, out: torch.Tensor
    ) -> None:
        x = x_TI.contiguous()
        product = _product(weight, bias_O)
        self._library.baton_product(self._engine, ctypes.byref(product), x.data_ptr(), len(x), finish, out.data_ptr())


def open_cpu(directory: Path, threads: int) -> Cpu | None:
    """The kernels, compiled into `directory` unless they are there; None, with a log line, where that fails."""
    try:
        library = load(build(directory))
    except BuildError as error:
        logger.warning("native CPU kernels are not to be had, torch computes alone: %s", error)
        return None
    cpu = Cpu(library, threads)
    logger.info("native CPU kernels: %s, %d threads", cpu.instructions, threads)
    return cpu


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and of up, stacked, in alternating sixteens: a column of each is then at hand at the same time."""
    rows = gate_up.shape[0] // 2
    return gate_up.view(2, rows // 16, 16, -1).transpose(0, 1).reshape(gate_up.shape)


def build(directory: Path, compilers: Sequence[str] = _COMPILERS, tuned: Sequence[str] = _TUNED) -> Path:
    """The compiled library's path; raises BuildError. `tuned` names the instructions that it may use."""
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no compiler ({', '.join(compilers)}) is installed")
    sources = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    digest = hashlib.sha256(repr((_FLAGS, tuple(tuned), _output([compiler, "--version"]), _cpu_features())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    target = directory / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "kernels.lock"):
            if not target.is_file():
                _compile(compiler, tuned, target)
    except OSError as error:
        raise BuildError(f"{target}: {error}") from error
    return target


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions declared; raises BuildError."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    pointer, long, integer, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
    declared: dict[str, tuple[Any, list[Any]]] = {
        "baton_level": (integer, []),
        "baton_open": (pointer, [integer, integer]),
        "baton_close": (None, [pointer]),
        "baton_packed_size": (long, [long, long]),
        "baton_pack": (None, [pointer, long, long, pointer]),
        "baton_product": (None, [pointer, pointer, pointer, long, integer, pointer]),
        "baton_rms_norm": (None, [integer, pointer, pointer, long, long, real, pointer]),
        "baton_store": (
            None,
            [pointer, integer, pointer, long, long, pointer, real, pointer, pointer, pointer, long, pointer, pointer],
        ),
        "baton_attend": (None, [pointer, integer, pointer, long, long, pointer, long, pointer]),
        "baton_step": (None, [pointer, pointer, pointer, pointer, pointer]),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compile(compiler: str, tuned: Sequence[str], target: Path) -> None:
    """Compiles beside the target, then renames: the target is there in full or not at all. Needs the lock."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=target.parent) as unfinished:
        result = Path(unfinished) / target.name
        command = [compiler, *_FLAGS, *tuned, "-o", str(result), str(_SOURCES / "decoder.cpp")]
        _output(command)
        os.replace(result, target)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, target)


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _cpu_features() -> str:
    """A directory may be shared by machines of several kinds: the flags that the system lists tell them apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} {flags}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the system drops it when the process dies, whatever it dies of."""
    end = time.monotonic() + _BUILD_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BuildError(f"{path}: still locked by another process after {_BUILD_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield


def _product(weight: Packed, bias_O: torch.Tensor | None) -> _Product:
    return _Product(weight.data.data_ptr(), None if bias_O is None else bias_O.data_ptr(), weight.depth, weight.rows)


def _paged(pool_NLK2SD: torch.Tensor, contexts: Contexts | None) -> _Paged:
    _, layers, kv_heads, _, block_size, dim = pool_NLK2SD.shape
    if contexts is None:
        return _Paged(pool_NLK2SD.data_ptr(), layers, kv_heads, block_size, dim, 0, None, None, None, None)
    return _Paged(
        pool_NLK2SD.data_ptr(),
        layers,
        kv_heads,
        block_size,
        dim,
        len(contexts.query_lens),
        contexts.query_lens.ctypes.data,
        contexts.context_lens.ctypes.data,
        contexts.table.ctypes.data,
        contexts.table_starts.ctypes.data,
    )
