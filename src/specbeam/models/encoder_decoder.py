"""SCORE: encoder-decoder models of transformers: translation, summarisation, speech recognition."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from specbeam.core.answers import LOGITS
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.records import Needs, Scored
from specbeam.core.session import CacheOwner
from specbeam.engines.cpu.cache_words import WORDS, KVType
from specbeam.engines.cpu.encoder import CompiledEncoder
from specbeam.engines.cpu.source_passes import CompiledSourcePasses
from specbeam.engines.eligibility import has_own_encoder
from specbeam.engines.shared_tokens import SharedTokens, readable
from specbeam.engines.source import Source
from specbeam.engines.torch.source_passes import SourcePasses, decoder_layers, make_causal
from specbeam.models.engines import COMPILED
from specbeam.models.huggingface import CHUNK, EachNeeds, Forests, HuggingFaceLM, Sessions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbeam.engines.gpu.source_passes import GpuSourcePasses

MADE_UP_FRAMES = 24  # length of the synthetic source on which passes are checked and timed


class EncoderDecoderLM(HuggingFaceLM):
    """An encoder-decoder model that scores forests; `session.context[lm]` is the source of a session.

    The prompt of a session is the decoder's prompt: its start token and forced tokens. Each source is encoded once, and its
    cross-attention keys and values are stored once for all beams, draft nodes and samples.

    Args:
        chunk: prompt tokens of one session per pass.
        encoder: the encoder of another model, whose output this model shares; None: the model's own.
        engine: runs the decoder: "gpu", "compiled", "int8", "int4", "plain" or "auto"; see `HuggingFaceLM`. A compiled
            engine also runs the encoder, unless the encoder has hooks or modules that its family does not have.
        kv: "bfloat16" rounds the keys and values of self-attention and cross-attention; see `HuggingFaceLM`.
        shared: the tokens that a draft model shares with a target of another vocabulary; see `HuggingFaceLM`.

    Attributes:
        encoder: the encoder that reads sources for this model.
        input_name: input of the encoder: "input_ids", or "input_features" for audio.
        most_source: the maximum number of tokens of a source, or the fixed number of frames of a window of audio; None: no
            limit.
    """

    runner: "SourcePasses | CompiledSourcePasses | GpuSourcePasses"

    def __init__(
        self,
        model: "PreTrainedModel",
        chunk: int = CHUNK,
        encoder: nn.Module | None = None,
        engine: str = "auto",
        kv: KVType = "float32",
        shared: SharedTokens | None = None,
    ) -> None:
        if encoder is None and not has_own_encoder(model):
            raise NotSupported(
                f"{type(model).__name__} is a decoder without an encoder; it can only draft for a target that has one: "
                "load(target, draft=...)"
            )
        make_causal(model)
        super().__init__(model, chunk, engine, None, kv, shared)
        self.encoder: Any = self.runner.own_encoder() if encoder is None else encoder
        self._uses_own_encoder = encoder is None
        if encoder is None and (why := self.runner.misfit_of_encoder()):
            note = f"transformers' own forward runs the encoder of {self.model_name}: {why}"
            self.engine_note = f"{self.engine_note}; {note}" if self.engine_note else note
        module = self.encoder.module if isinstance(self.encoder, CompiledEncoder) else self.encoder
        self.input_name: Literal["input_ids", "input_features"] = "input_features" if _hears(module) else "input_ids"
        self.max_positions = self.runner.most_positions
        self.most_source = _most_source(module)

    def _new_twin(self) -> "EncoderDecoderLM":
        twin = EncoderDecoderLM(self.given_model, CHUNK, self.encoder, self.engine, self.kv, self.shared)
        twin._uses_own_encoder = self._uses_own_encoder
        return twin

    @property
    def slot_bytes(self) -> int:
        """The bytes of the self-attention keys and values of one token."""
        config = self.known.config
        heads = int(getattr(config, "decoder_attention_heads", None) or config.num_attention_heads)
        size = int(getattr(config, "d_kv", None) or config.d_model // heads)
        number = np.dtype(WORDS[self.kv]).itemsize if self.engine in COMPILED else int(self.known.dtype.itemsize)
        return 2 * decoder_layers(self.known) * heads * size * number

    @property
    def supports_runs(self) -> bool:
        return type(self) is EncoderDecoderLM and isinstance(self.runner, CompiledSourcePasses) and self._takes_steps

    def refuses(self, session: CacheOwner) -> str:
        """Return the reason why this model cannot take the inputs of a session; "" if it can."""
        if self not in getattr(session, "context", {}):
            return f"{self.model_name} needs a source for each prompt; set session.context[lm]"
        return super().refuses(session)

    def source_of(self, session: CacheOwner) -> Source:
        """Return the source of a session."""
        return getattr(session, "context", {})[self]

    def own_source(self, source: Source) -> Source:
        """Return a source of the target's tokens with unknown tokens replaced by this model's stand-in (`SharedTokens`).

        Returns `source` itself if this model knows all of its tokens.
        """
        shared = self.shared
        if shared is None or not self._uses_own_encoder or source.inputs is None or source.name != "input_ids":
            return source
        tokens = source.inputs[0].cpu().numpy()
        own = tokens.copy()
        if getattr(self.known.config, "share_encoder_decoder_embeddings", True):
            is_theirs = tokens < shared.vocab
            own[is_theirs] = shared.read_as[tokens[is_theirs]]
        own[own >= int(self.encoder.get_input_embeddings().weight.shape[0])] = shared.stand_in
        if (own == tokens).all():
            return source
        return Source("input_ids", torch.from_numpy(own)[None], keeps=source.keeps)

    def frames_of(self, session: CacheOwner) -> int:
        """Return the number of stored frames of a session's source; each takes `slot_bytes` bytes."""
        source = self.source_of(session)
        if source.inputs is None:
            return 0 if source.given is None else int(source.given.shape[1])
        length = int(source.inputs.shape[-1])
        return length // 2 if self.input_name == "input_features" else length  # the encoder takes every other frame

    def drop_sources(self) -> None:
        """Free all sources. No session may still read them."""
        self.runner.drop_sources()

    def made_up_source(self) -> Source:
        """Return a source of random encoder states, on which passes are checked and timed."""
        generator = torch.Generator().manual_seed(0)
        return Source.of_states(torch.randn(MADE_UP_FRAMES, self.known.config.d_model, generator=generator))

    def plain_logits(self, source: Source, path: list[int]) -> torch.Tensor:
        """Return the logits after a path by transformers' forward without a tree, float[vocab]."""
        own_path = readable(self.shared, np.array(path)).tolist()
        logits = self.runner.plain_logits(source.states_of(self.encoder), own_path)
        return logits if self.shared is None else self.shared.fitted_logits(logits)

    def logits_after(self, source: Source, path: list[int]) -> torch.Tensor:
        """Return the logits after a path by this model's engine, float[vocab]."""
        reader = SimpleNamespace(prompt=path, state={}, context={self: source})
        try:
            return self.extend([reader], [Forest.rooted([path[-1]])])[0].logits[0].clone()
        finally:
            self.close(reader)

    def reads_with(self, other: "EncoderDecoderLM") -> bool:
        """Return whether this model can reuse another model's encoder output."""
        return self.encoder is other.encoder

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        self._read_together(sessions)
        return super().extend(sessions, forests, needs)

    def fill(self, sessions: Sessions, needs: EachNeeds = None, most: int | None = None) -> list[bool]:
        self._read_together(sessions)
        return super().fill(sessions, needs, most)

    def _read_together(self, sessions: Sessions) -> None:
        """Encode the sources of new sessions in few passes if the encoder is compiled; other encoders read one by one."""
        if not isinstance(self.encoder, CompiledEncoder):
            return
        new = [self.source_of(one) for one in sessions if self not in one.state and not self.refuses(one)]
        if new:
            self.encoder.read_together(new)
            self.runner.read_ahead(new, self.encoder)

    def _cache(self, session: CacheOwner, needs: Needs = LOGITS) -> Any:
        """Return the session's cache; on the first call, create it and encode the source.

        If encoding fails, the session keeps no cache.
        """
        is_new = self not in session.state
        cache = super()._cache(session, needs)
        if is_new:
            try:
                self.runner.hold(cache, cache.context, self.encoder)
            except BaseException:
                self.close(session)
                raise
        return cache

    def close(self, session: CacheOwner) -> None:
        cache = session.state.get(self)
        super().close(session)
        if cache is not None:
            self.runner.let_go(cache, self.encoder)


def _hears(encoder: Any) -> bool:
    return getattr(encoder, "main_input_name", "input_ids") == "input_features"


def _most_source(encoder: Any) -> int | None:
    """Return the maximum number of tokens of an encoder, or the fixed number of frames for audio; None: no limit."""
    if _hears(encoder):
        return 2 * int(encoder.config.max_source_positions)
    positions = getattr(encoder, "embed_positions", None)
    if not isinstance(positions, nn.Embedding):
        return None
    return int(positions.weight.shape[0]) - int(getattr(positions, "offset", 0))


@torch.no_grad()
def have_equal_encoders(first: "PreTrainedModel", second: "PreTrainedModel") -> bool:
    """Return whether the encoders of two models have the same weights, as in a distilled Whisper and its teacher."""
    if not (has_own_encoder(first) and has_own_encoder(second)):
        return False
    weights = first.get_encoder().state_dict()
    others = second.get_encoder().state_dict()
    if weights.keys() != others.keys():
        return False
    return all(
        weight.shape == others[name].shape
        and weight.dtype == others[name].dtype
        and weight.device == others[name].device
        and torch.equal(weight, others[name])
        for name, weight in weights.items()
    )


def encoder_for(draft: "PreTrainedModel", target: EncoderDecoderLM) -> nn.Module | None:
    """Return the target's encoder if a draft model shares it; None if the draft model has its own.

    Raises `NotSupported` if the draft model has no encoder and does not fit the target's.
    """
    shared: nn.Module = target.encoder
    if has_own_encoder(draft):
        return shared if have_equal_encoders(draft, target.known) else None
    size = target.model.config.d_model
    if draft.config.d_model != size:
        raise NotSupported(
            f"the draft is a decoder for encoder states of size {draft.config.d_model}, and the target's encoder has size "
            f"{size}; give a draft that was distilled from this target, or one with its own encoder"
        )
    return shared
