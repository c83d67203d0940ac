"""Forks ranks from a process that has imported everything: milliseconds where a new interpreter takes 2 s.

The nursery is a program of its own, started once by each process of pytest. It imports torch, Triton and tunedcomm, and
from then on only forks: a child has its own session, environment, paths and output, and nothing of other children. It
starts no threads and touches no GPU; where there are GPUs the harness does without it, for CUDA does not survive forks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class Request:
    """One rank to fork."""

    folder: str
    log: str
    environment: dict[str, str]
    paths: tuple[str, ...]


class Forked:
    """A forked rank, as much of `subprocess.Popen` as the harness uses."""

    def __init__(self, home: _Nursery, pid: int) -> None:
        self._home, self.pid, self.returncode = home, pid, None

    returncode: int | None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the rank runs."""
        if self.returncode is None:
            self.returncode = self._home.ask(("poll", self.pid))
        return self.returncode

    def wait(self) -> int:
        """The exit code, once there is one."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class _Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._turn = threading.Lock()

    def ask(self, question: tuple[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)

    def fork(self, request: Request) -> Forked:
        """Start a rank."""
        return Forked(self, self.ask(("fork", request)))


@functools.cache
def nursery() -> _Nursery:
    """This process's nursery, which ends with it."""
    return _Nursery()


def _become(request: Request) -> None:
    """In the child: what a new interpreter would have been given; does not return."""
    os.setsid()
    with Path(os.devnull).open("rb") as nothing, Path(request.log).open("wb") as log:
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = request.paths
    import harness

    sys.argv[:] = [harness.__file__, request.folder]
    harness.main(Path(request.folder))


def _fork(request: Request, pipes: tuple[BinaryIO, BinaryIO]) -> int:
    pid = os.fork()
    if pid == 0:
        for pipe in pipes:
            os.close(pipe.fileno())
        try:
            _become(request)
        finally:
            os._exit(1)
    while os.getsid(pid) != pid:  # before that it could not be killed as a session
        time.sleep(0.0005)
    return pid


def _poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _keep_types(interpreter: Any, core: Any) -> None:
    """Make Triton's types once: what an operation costs is the description of its operands, not their numbers.

    Two blocks of one shape need no broadcast, and of sums of integers the check for overflow, which costs as much as
    five sums, is looked at by nobody unless kernels are debugged.
    """
    from triton.language.semantic import TritonSemantic

    def keep(cls: Any, key: Any, complete: Any) -> None:
        made, make = {}, cls.__init__

        def init(self: Any, *args: Any) -> None:
            known = made.get(name := key(*args))
            if known is None:
                make(self, *args)
                made[name] = dict(vars(self))
            else:
                vars(self).update(known)
                complete(self, *args)

        cls.__init__ = init

    def complete(self: Any, handle: Any, type_: Any) -> None:
        self.handle, self.type, self.dtype = handle, type_, type_.scalar

    keep(core.block_type, lambda of, shape: (of.name, *(getattr(n, "value", n) for n in shape)), lambda *_: None)
    keep(core.tensor, lambda _, type_: type_.name, complete)

    arrays, array_of, broadcast = {}, interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value

    def kept_array_of(type_: Any) -> Any:
        if (name := type_.scalar.name) not in arrays:
            arrays[name] = array_of(type_)
        return arrays[name]

    def broadcast_unless_alike(self: Any, a: Any, b: Any) -> Any:
        alike = a.type.is_block() and b.type.is_block() and list(a.type.shape) == list(b.type.shape)
        return (a, b) if alike else broadcast(self, a, b)

    interpreter._get_np_dtype = kept_array_of
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _prepare_interpreter() -> None:
    """Take out of every launch what Triton's interpreter does over and over: half of a small kernel's time.

    It replaces the functions of triton.language at every call of a function by another one, though once a launch would
    do, and translates each function at its first call. A Triton that is built otherwise is left as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_all, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch_all is not None and scope is not None:

        def patch(fn: Any) -> Any:
            seen = (value for value in fn.__globals__.values() if value is tl or value is tl.core)
            return patch_all(fn) if any(tl.core.is_builtin(language.load) for language in seen) else scope()

        interpreter._patch_lang = patch
    with contextlib.suppress(AttributeError, ImportError):
        _keep_types(interpreter, tl.core)
    for name, module in list(sys.modules.items()):
        if name.startswith("tunedcomm.kernels"):
            for value in list(vars(module).values()):
                if isinstance(value, interpreter.InterpretedFunction):
                    value.rewrite()


def main() -> None:
    """Answer until nobody asks any more."""
    # Children write to files of their own; what this process prints must not get into its answers.
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import harness  # noqa: F401 - for the children
    import torch._dynamo
    import torch.distributed  # noqa: F401

    from tunedcomm import kernels
    from tunedcomm.spec import ops, variants

    kernels.discover()
    _prepare_interpreter()
    for op in ops():  # the hashes are kept for the life of a process
        for variant in variants(op).values():
            kernels.source_hash(variant)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            kind, what = pickle.load(questions)
            answer = _fork(what, (questions, answers)) if kind == "fork" else _poll(what)
            pickle.dump(answer, answers)
            answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
