"""The kernels as machine code: compiled by numba once, kept, and called through their C interface without it.

Owns that interface: numba passes an array as eight or more plain arguments and returns a status beside the
result. It is checked against what numba has made whenever a kernel is compiled. Refuses to know what the kernels
do, and does not check what it is given: `rows` and `words` do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from ninfer_convert.encode.interface import SIGNATURES
from ninfer_convert.encode.kernel_cache import cache_directory, load_entry, save_entry

_EXTERNAL = {"memset", "memcpy", "memmove", "NRT_MemInfo_call_dtor"}
"""What the machine code may call. The last is numba's, for arrays that numba has allocated: no kernel has any."""

SETTINGS_FILE = ".numba_config.yaml"
"""numba reads it in the working directory."""

_lock = threading.RLock()

_announcements: list[Callable[[], None]] = []


class Kernel:
    """One entry point; it is loaded, or else compiled, when it is first called. Safe from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameters = SIGNATURES[name]
        self._function: Callable[..., int] | None = None
        self._engine: Any = None

    def __call__(self, *arguments: Any) -> int:
        """Runs the kernel, without the interpreter lock. Arrays must be as the signature says, and stay alive."""
        function = self._function or self.load()
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        flat = [item for argument in arguments for item in _flat(argument)]
        status = function(ctypes.addressof(result), ctypes.addressof(error), *flat)
        if status:
            raise RuntimeError(f"kernel {self.name} ended with status {status}")
        return result.value

    def load(self) -> Callable[..., int]:
        """Returns the machine code as a function, from the kernel cache if it is there."""
        with _lock:
            if self._function is None:
                content = load_entry(self.entry())
                if content is None:
                    content = self._compile()
                    save_entry(self.entry(), content)
                self._function = self._link(content)
            return self._function

    def entry(self) -> str:
        """Returns the name it is kept under, with a digest of everything but the source that decides what it is."""
        key = (llvmlite.__version__, _numba_version(), self.parameters, _target(), _settings())
        return f"{self.name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"

    def _compile(self) -> bytes:
        """Returns the symbol of the function, and an object file."""
        while _announcements:
            _announcements.pop()()
        import numba

        # A setting for debugging numba programs: no interpreter runs these loops in anyone's lifetime.
        numba.config.DISABLE_JIT = False  # type: ignore[attr-defined]
        from ninfer_convert.encode import kernels

        dispatcher = getattr(kernels, self.name)
        dispatcher.compile(f"int64({', '.join(self.parameters)})")
        (result,) = dispatcher.overloads.values()
        symbol = result.fndesc.llvm_func_name
        _require_interface(llvm.parse_assembly(result.library.get_llvm_str()), symbol, self.parameters)
        return symbol.encode() + b"\0" + result.library._get_compiled_object()  # type: ignore[no-any-return]

    def _link(self, content: bytes) -> Callable[..., int]:
        symbol, _, object_file = content.partition(b"\0")
        engine = _new_engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
        engine.finalize_object()
        self._engine = engine
        types = [kind for parameter in self.parameters for kind in _c_types(parameter)]
        made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *types)
        return made(engine.get_function_address(symbol.decode()))


def _flat(argument: Any) -> Sequence[Any]:
    if isinstance(argument, int | float):
        return (argument,)
    # Nothing owns it and nothing is its parent, as far as numba is concerned.
    data = argument.__array_interface__["data"][0]
    return (None, None, argument.size, argument.itemsize, data, *argument.shape, *argument.strides)


def _rank(parameter: str) -> int:
    return parameter.count(":") - 1 if "[" in parameter else 0


def _c_types(parameter: str) -> Iterator[Any]:
    if not (rank := _rank(parameter)):
        yield ctypes.c_float if parameter == "float32" else ctypes.c_int64
        return
    yield from (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    yield from [ctypes.c_int64] * (2 * rank)


def _llvm_types(parameter: str) -> Iterator[str]:
    names = {ctypes.c_float: "float", ctypes.c_int64: "i64", ctypes.c_void_p: "ptr"}
    yield from (names[kind] for kind in _c_types(parameter))


def _require_interface(module: Any, symbol: str, parameters: Sequence[str]) -> None:
    """Raises RuntimeError unless a compiled function is called as `Kernel` calls it, and calls nothing unknown."""
    types = [str(each.type) for each in module.get_function(symbol).arguments]
    found = ["ptr" if name.endswith("*") else name for name in types]
    if found != ["ptr", "ptr", *(kind for parameter in parameters for kind in _llvm_types(parameter))]:
        raise RuntimeError(f"numba {_numba_version()} passes arguments in another way: {', '.join(found)}")
    declared = {each.name for each in module.functions if each.is_declaration}
    if unknown := [name for name in declared if name not in _EXTERNAL and not name.startswith("llvm.")]:
        raise RuntimeError(f"numba {_numba_version()} needs {', '.join(sorted(unknown))} at run time")


@functools.cache
def _numba_version() -> str:
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        import numba

        return str(numba.__version__)


@functools.cache
def _target() -> tuple[str, str, str]:
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _settings() -> list[tuple[str, str]]:
    """Returns numba's own settings, such as the name of a processor to compile for: variables, and its file."""
    found = [item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR"]
    file = Path(SETTINGS_FILE)
    with contextlib.suppress(OSError):
        if file.is_file():
            found.append((file.name, file.read_bytes().hex()))
    return sorted(found)


def _new_engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.address_of_symbol("NRT_MemInfo_call_dtor") is None:
        llvm.add_symbol("NRT_MemInfo_call_dtor", ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


KERNELS: Mapping[str, Kernel] = MappingProxyType({name: Kernel(name) for name in SIGNATURES})


def warm() -> None:
    """Loads every kernel, or compiles and keeps it; a run does either where it first needs one."""
    for kernel in KERNELS.values():
        kernel.load()


def announce(tell: Callable[[], None]) -> None:
    """Has something called once, before the first kernel is compiled, which takes seconds."""
    _announcements[:] = [tell]


def kept() -> tuple[Path | None, dict[str, bool]]:
    """Returns where kernels are kept, if anywhere, and whether each one is there, intact and for this machine."""
    return cache_directory(), {kernel.name: load_entry(kernel.entry()) is not None for kernel in KERNELS.values()}
