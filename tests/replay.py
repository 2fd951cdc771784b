"""What a CUDA graph needs of a function, tried on a CPU: no host that waits, tensors that stay."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Notes what a host would have to wait for."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, self.calls = function.overloadpacket.__name__, self.calls + 1
        if name in ("_local_scalar_dense", "nonzero", "equal", "item", "unique", "masked_select"):
            self.found.append(name)
        if name == "index" and any(
            x is not None and x.dtype == torch.bool for x in (args[1] if len(args) > 1 else ())
        ):
            self.found.append("a mask as an index")
        return function(*args, **(kwargs or {}))


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors_in(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return (
        [tensor for part in x for tensor in tensors_in(part)] if isinstance(x, tuple | list) else []
    )


class Tape(TorchDispatchMode):
    """A CUDA graph's stand-in: while recording, operations are noted and what they changed is set
    back, as nothing runs then; `replay` does them again, on the same tensors. Numbers of the host
    stay as they were when it was recorded."""

    def __init__(self):
        super().__init__()
        self.done = []  # (function, arguments, named arguments, results)
        self.before = {}  # of each storage that was written: a tensor of it, and what it held
        self.replays = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for x in tensors_in(args) if function._schema.is_mutable else []:
            whole = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            self.before.setdefault(storage(x), (whole, whole.clone()))
        results = function(*args, **kwargs)
        self.done.append((function, args, kwargs, results))
        return results

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for function, args, kwargs, results in self.done:
            given = {storage(x) for x in tensors_in(args)}
            again = function(*args, **kwargs)
            for old, new in zip(tensors_in(results), tensors_in(again), strict=True):
                if storage(old) not in given:  # neither a view nor changed in place
                    old.detach().copy_(new)


@contextlib.contextmanager
def recording(tape: Tape):
    """torch.cuda.graph's stand-in."""
    generator = torch.get_rng_state()
    with tape:
        yield
    for whole, held in tape.before.values():
        whole.copy_(held)
    torch.set_rng_state(generator)


def no_graphs_but_tapes(monkeypatch) -> list[Tape]:
    """CUDA graphs are tapes from now on; those that are made."""
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Tape()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return made
