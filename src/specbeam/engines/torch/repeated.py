"""Passes with tensor parallelism: rank 0 sends its operations, and all ranks run them on their shards.

Tries, dice, clocks and requests exist only on rank 0. Before each pass, and before each change of the store, rank 0 sends
the operation; each rank holds a shard of the weights, and the keys and values of its heads.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from specbeam.core.errors import NotSupported
from specbeam.core.records import ExtraInputs, Needs
from specbeam.engines.kv.masks import Mask, additive
from specbeam.engines.kv.store import Place
from specbeam.engines.kv.torch_store import KVStore
from specbeam.engines.torch.passes import NO_EXTRAS, PaddedPasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END, AWAKE, RUN, RESERVE, MOVE_CACHE, COPY_SLOTS, CLEAR_CACHE = range(7)
HEADER = 64  # length of a header: the operation, the number of arrays, and the rank and dimensions of each
TIMEOUT_S = 30.0


class Channel:
    """Sends the operations of rank 0 to the other ranks of the default group, in arrays of integers.

    If a rank is lost, the job ends: each other rank prints a message and exits with code 1, within `TIMEOUT_S`. When idle,
    rank 0 sends keep-alive messages three times in that time.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        # A group of its own: messages are on the host, but the model's tensors may be on GPUs.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._ended = threading.Event()
        if self.rank == 0:
            threading.Thread(target=self._stay_awake, name="specbeam ranks", daemon=True).start()

    def send(self, verb: int, *arrays: Sequence[Any] | np.ndarray) -> None:
        """Send an operation and its int64 arrays to the other ranks."""
        given = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
        shapes = [number for array in given for number in (array.ndim, *array.shape)]
        header = np.zeros(HEADER, dtype=np.int64)
        header[: 2 + len(shapes)] = [verb, len(given), *shapes]
        content = np.concatenate([array.ravel() for array in given]) if given else np.zeros(0, dtype=np.int64)
        with self._lock, ending_the_job("sending to the other ranks"):
            dist.broadcast(torch.from_numpy(header), 0, group=self._group)
            if content.size:
                dist.broadcast(torch.from_numpy(content), 0, group=self._group)
            self._last = time.monotonic()

    def receive(self) -> tuple[int, list[np.ndarray]]:
        """Wait for the next operation of rank 0; return the operation and its arrays."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._group)
        verb, count, *rest = header.tolist()
        shapes = []
        for _ in range(count):
            ndim = rest[0]
            shapes.append(rest[1 : 1 + ndim])
            rest = rest[1 + ndim :]
        sizes = [int(np.prod(shape)) for shape in shapes]
        content = torch.zeros(sum(sizes), dtype=torch.int64)
        if sum(sizes):
            dist.broadcast(content, 0, group=self._group)
        ends = np.cumsum([0, *sizes])
        numbers = content.numpy()
        return verb, [
            numbers[start:stop].reshape(shape) for start, stop, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
        ]

    def close(self) -> None:
        """Let the other ranks end. Further calls do nothing."""
        if not self._ended.is_set():
            self._ended.set()
            self.send(END)

    def _stay_awake(self) -> None:
        while not self._ended.wait(TIMEOUT_S / 6):
            if time.monotonic() - self._last > TIMEOUT_S / 3:
                self.send(AWAKE)


@contextmanager
def ending_the_job(what: str) -> Iterator[None]:
    """A context in which any exception ends the process with a message.

    The ranks are then in different states, so no session can continue; their launcher may restart them
    (``torchrun --max-restarts``).
    """
    try:
        yield
    except Exception as error:
        end_job(what, error)


def end_job(what: str, error: BaseException) -> NoReturn:
    """Print the failed operation of a rank, and end the process even if threads are waiting."""
    said = " ".join(str(error).split())[:300]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with suppress(OSError, ValueError):
        print(
            f"specbeam: rank {rank} failed while {what}, so the job ends; another rank was lost, or this one cannot "
            f"continue: {type(error).__name__}: {said}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(1)


class RepeatedStore(KVStore):
    """The keys and values of the heads of rank 0; the other ranks mirror its operations."""

    def __init__(self, layers: int, channel: Channel) -> None:
        super().__init__(layers)
        self._channel = channel

    def grow(self, caches: int, slots: int) -> None:
        self._channel.send(RESERVE, [caches, slots])
        super().grow(caches, slots)

    def move_cache(self, source: int, goal: int, extent: int) -> None:
        self._channel.send(MOVE_CACHE, [source, goal, extent])
        super().move_cache(source, goal, extent)

    def clear_cache(self, cache: int) -> None:
        self._channel.send(CLEAR_CACHE, [cache])
        super().clear_cache(cache)

    def copy_slots(self, source: int, slots: np.ndarray, goal: int, goal_slots: np.ndarray) -> None:
        self._channel.send(COPY_SLOTS, [source, goal], slots, goal_slots)
        super().copy_slots(source, slots, goal, goal_slots)

    def take(self, cache: int, slots: np.ndarray) -> list[Any]:
        raise NotSupported("sharded models have no prefix cache; serve with --prefix-cache-mb 0")


class RepeatedPasses(PaddedPasses):
    """The passes of a model whose weights are sharded over the ranks, on rank 0."""

    takes_vectors = False

    def __init__(self, model: "PreTrainedModel", caches: list[Any], channel: Channel) -> None:
        super().__init__(model, caches)
        self.channel = channel
        self.store = RepeatedStore(model.config.get_text_config().num_hidden_layers, channel)
        self.captured = None  # replaying a graph would send no operations

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        if needs.states:
            return "a model sharded over several ranks returns no hidden states; use a draft model"
        return super().lacks(needs)

    def refuses(self, context: object) -> str:
        return "a model sharded over several ranks takes only tokens"

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        return "a model sharded over several ranks takes no extra rows of a draft head"

    def _call_model(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        masks: Mask,
        wanted: int,
        extras: Mapping[str, torch.Tensor] = NO_EXTRAS,
    ) -> torch.Tensor:
        assert not extras
        place = self.store.place
        rows = place.caches
        which = rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.arange(rows.start, rows.stop)
        inputs = torch.stack([ids, places, place.slots]).cpu().numpy()
        packed, kinds = _packed(masks)
        numbers = [int(isinstance(rows, slice)), place.extent, wanted, kinds]
        self.channel.send(RUN, numbers, which, inputs, packed)
        with ending_the_job("running a pass together"):
            return super()._call_model(ids, places, masks, wanted)


def _packed(masks: Mask) -> tuple[np.ndarray, int]:
    """Return the slots that each row attends to, as bits of int64, by kind of layers; and the number of kinds."""
    each = [*masks.values()] if isinstance(masks, dict) else [masks]
    seen = [mask if mask.dtype == torch.bool else mask == 0 for mask in each]
    bits = np.packbits(torch.stack(seen).cpu().numpy().ravel())
    padded = np.zeros(-(-bits.size // 8) * 8, dtype=np.uint8)
    padded[: bits.size] = bits
    return padded.view(np.int64), len(each) if isinstance(masks, dict) else 0


class Follower(PaddedPasses):
    """The passes of a rank that follows rank 0. It has no sessions, only the keys and values of its heads."""

    def __init__(self, model: "PreTrainedModel", channel: Channel) -> None:
        super().__init__(model, [])
        self.captured = None
        self._channel = channel

    @torch.inference_mode()
    def follow(self) -> None:
        """Run the operations of rank 0 until it ends. An error ends this process with a message."""
        with ending_the_job("waiting for rank 0, or following it"):
            while True:
                verb, arrays = self._channel.receive()
                if verb == END:
                    return
                self._do(verb, arrays)

    def _do(self, verb: int, arrays: list[np.ndarray]) -> None:
        if verb == RUN:
            self._run_pass(*arrays)
        elif verb == RESERVE:
            caches, slots = arrays[0].tolist()
            self.store.reserve(caches, slots)
        elif verb == MOVE_CACHE:
            self.store.move_cache(*arrays[0].tolist())
        elif verb == CLEAR_CACHE:
            self.store.clear_cache(int(arrays[0][0]))
        elif verb == COPY_SLOTS:
            source, goal = arrays[0].tolist()
            self.store.copy_slots(source, arrays[1], goal, arrays[2])

    def _run_pass(self, numbers: np.ndarray, which: np.ndarray, inputs: np.ndarray, packed: np.ndarray) -> None:
        is_slice, extent, wanted, kinds = numbers.tolist()
        ids, places, slots = torch.from_numpy(inputs).to(self.device)
        batch, width = ids.shape
        rows: Any = slice(int(which[0]), int(which[-1]) + 1) if is_slice else torch.from_numpy(which).to(self.device)
        self.store.place = Place(rows, slots, extent)
        shape = (max(kinds, 1), batch, 1, width, extent)
        bits = np.unpackbits(packed.view(np.uint8), count=int(np.prod(shape)))
        seen = torch.from_numpy(bits.astype(bool).reshape(shape)).to(self.device)
        each = [self._native(one) for one in seen]
        masks: Mask = dict(zip(self.masks.windows, each, strict=True)) if kinds else each[0]
        self._call_model(ids, places, masks, wanted)

    def _native(self, seen: torch.Tensor) -> torch.Tensor:
        """Return a mask in the form that the model's attention takes."""
        return additive(seen, self.masks.dtype) if self.masks.implementation == "eager" else seen
