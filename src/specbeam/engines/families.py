"""The table of model families that specbeam's own forwards run.

A row of `FAMILIES` names the parts of a layer in transformers. `architecture_of` reads the settings of one model from
its configuration, and `parts_of` returns the weights of a layer in a common order. An engine's forward reads nothing
else.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from specbeam.engines.packed import PackedLinear, matrices_of
from specbeam.engines.shared_tokens import SharedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Activation = Literal["silu", "gelu tanh", "gelu", "relu"]

# Activations by their names in transformers; some have several names.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu tanh",
    "gelu_new": "gelu tanh",
    "gelu_fast": "gelu tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
}
Matrix = Any  # a Tensor, float[outputs, inputs], or a `StoredMatrix` of this shape
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # angles are independent of the length of the text
ROPES = (*FIXED_ROPES, "longrope")  # angles do not change within `positions_of`
NO_TOKEN = -(1 << 60)
_MOST_SINES = 4096  # minimum number of positions of a model with sinusoidal positions
_MOST_BIASED = 1 << 15  # number of positions of a model with ALiBi whose configuration has no limit


class Numbers(NamedTuple):
    """The constants of a model besides its weights. The defaults are those of Llama.

    Attributes:
        attention_cap: c, if an attention score s becomes c * tanh(s / c); 0: no cap.
        embedding: factor of input embeddings, of tokens and of given embedding rows.
        residual: factor of a sublayer's output before it is added.
        logits_divisor: divisor of logits.
        logits_cap: the same as `attention_cap` for logits.
    """

    attention_cap: float = 0.0
    embedding: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0


class Norms(NamedTuple):
    """The names of a layer's norms in its module; "" for missing ones."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_inner: str = "post_attention_layernorm"
    after_inner: str = ""
    before_cross: str = ""
    after_cross: str = ""


_LLAMA_NORMS = Norms()


@dataclass(frozen=True)
class ModelFamily:
    """The parts of a family's layers, by their names in transformers. Defaults: Llama.

    The name of a module may be a path, such as "layer.0.layer_norm"; "" names the containing module itself.

    Attributes:
        name: the family's name.
        kind: `model_type` of its configurations.
        model: the class of its models.
        is_of: returns whether this row describes a configuration of this kind.
        body: the model's body, or its decoder in an encoder-decoder model; "": `base_model`.
        layers: the list of layers in the body.
        enter: the matrix between embeddings and hidden states of another width; "": none. It may be missing in a model.
        leave: the matrix between the final norm and the head, in the same case.
        final_norm: the norm after the last layer; "": none.
        first_norm: the norm before the first layer; "": none.
        attention, inner: the self-attention and the MLP of a layer.
        cross: the cross-attention between them, whose matrices have the names of those of attention; "": none.
        qkv: the matrices of queries, keys and values, or the one matrix of all three.
        out: the output matrix of attention.
        up: the first matrices of the MLP: gate and up, one matrix of both, or the matrix of an MLP without a gate.
        down: the last matrix of the MLP.
        norms: the norms of a layer.
        norm_of_sum: whether a norm after a sublayer is applied to the sum with its input instead of its output.
        norm: "rms"; "rms + 1", whose stored weight is one less; "layer", a LayerNorm with a bias.
        gated: whether the MLP has a gate.
        activation: the setting with the name of the activation; or this name, if configurations have no such setting.
        head_norms: norms of queries and keys after their matrices: "no", of each "head", of the "whole" width.
        linear: the class of matrices, if transformers defines one for the family; it computes what `nn.Linear` does.
        transposed: whether matrices are stored as [inputs, outputs].
        heads: the setting with the number of query heads.
        kv_heads: the setting with the number of KV heads, or a function of the configuration; "": the number of query heads.
        by_head: whether the rows of `qkv` are stored by KV head: its queries, its key and its value.
        parallel: the setting that lets the MLP read the input of attention instead of its output; "": none.
        positions: the module of positions that are added to embeddings; "": positions are rotary or biases of attention.
        distances: the module of attention biases by distance between tokens, in the attention of each layer or only of the
            first; "": no biases.
        alibi: returns the biases of attention by the position of a key, given the configuration, the number of positions
            and the model's type of floats, see `Architecture.biases`; None for a model without such biases.
        mixture: the setting by which the weights of a row's experts are divided by their sum; "always" if they always are;
            "": no experts.
        numbers: reads the constants from a configuration.
        refuses: returns the reason why this row does not describe models of a configuration; "" if it does.
    """

    name: str
    kind: str
    model: str
    is_of: Callable[[Any], bool] = lambda config: True
    body: str = ""
    layers: str = "layers"
    enter: str = ""
    leave: str = ""
    final_norm: str = "norm"
    first_norm: str = ""
    attention: str = "self_attn"
    cross: str = ""
    inner: str = "mlp"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    norms: Norms = _LLAMA_NORMS
    norm_of_sum: bool = False
    norm: Literal["rms", "rms + 1", "layer"] = "rms"
    gated: bool = True
    activation: str = "hidden_act"
    head_norms: Literal["no", "head", "whole"] = "no"
    linear: str = ""
    transposed: bool = False
    heads: str = "num_attention_heads"
    kv_heads: str | Callable[[Any], int] = "num_key_value_heads"
    by_head: bool = False
    parallel: str = ""
    positions: str = ""
    distances: str = ""
    alibi: Callable[[Any, int, torch.dtype], Tensor | None] = lambda config, positions, kind: None
    mixture: str = ""
    numbers: Callable[[Any], Numbers] = lambda config: Numbers()
    refuses: Callable[[Any], str] = lambda config: ""


def _gemma_numbers(config: Any) -> Numbers:
    return Numbers(
        # transformers caps only the scores of Gemma 2, and ignores the setting of Gemma 3.
        attention_cap=float(config.attn_logit_softcapping or 0) if config.model_type == "gemma2" else 0.0,
        logits_cap=float(config.final_logit_softcapping or 0),
    )


def _granite_numbers(config: Any) -> Numbers:
    return Numbers(
        embedding=float(config.embedding_multiplier),
        residual=float(config.residual_multiplier),
        logits_divisor=float(config.logits_scaling),
    )


def _scaled_numbers(config: Any) -> Numbers:
    return Numbers(embedding=config.d_model**0.5 if config.scale_embedding else 1.0)


def _t5_numbers(config: Any) -> Numbers:
    return Numbers(logits_divisor=config.d_model**0.5 if config.scale_decoder_outputs else 1.0)


def _umt5_numbers(config: Any) -> Numbers:
    return Numbers(logits_divisor=config.d_model**0.5 if config.tie_word_embeddings else 1.0)


def _refuses_both_ways(config: Any) -> str:
    if getattr(config, "use_bidirectional_attention", None):
        return "its tokens attend to later tokens (use_bidirectional_attention)"
    return ""


def _refuses_another_text(config: Any) -> str:
    return "it has cross-attention to another text (add_cross_attention)" if config.add_cross_attention else ""


# A post-norm decoder: its norms are applied to sums. Other families have norms before sublayers.
_BART = ModelFamily(
    "BART",
    "bart",
    "BartForConditionalGeneration",
    body="model.decoder",
    final_norm="",
    first_norm="layernorm_embedding",
    cross="encoder_attn",
    inner="",
    out="out_proj",
    up=("fc1",),
    down="fc2",
    norms=Norms("", "self_attn_layer_norm", "", "final_layer_norm", "", "encoder_attn_layer_norm"),
    norm_of_sum=True,
    norm="layer",
    gated=False,
    activation="activation_function",
    heads="decoder_attention_heads",
    kv_heads="",
    positions="embed_positions",
)
_MBART = replace(
    _BART,
    name="mBART",
    kind="mbart",
    model="MBartForConditionalGeneration",
    final_norm="layer_norm",
    norms=Norms("self_attn_layer_norm", "", "final_layer_norm", "", "encoder_attn_layer_norm", ""),
    norm_of_sum=False,
)
_M2M100 = replace(_MBART, name="M2M100", kind="m2m_100", model="M2M100ForConditionalGeneration", first_norm="")
_WHISPER = replace(_M2M100, name="Whisper", kind="whisper", model="WhisperForConditionalGeneration")
_T5 = ModelFamily(
    "T5",
    "t5",
    "T5ForConditionalGeneration",
    is_of=lambda config: not config.is_gated_act,
    body="decoder",
    layers="block",
    final_norm="final_layer_norm",
    attention="layer.0.SelfAttention",
    cross="layer.1.EncDecAttention",
    inner="layer.2.DenseReluDense",
    qkv=("q", "k", "v"),
    out="o",
    up=("wi",),
    down="wo",
    norms=Norms("layer.0.layer_norm", "", "layer.2.layer_norm", "", "layer.1.layer_norm", ""),
    gated=False,
    activation="dense_act_fn",
    kv_heads="",
    distances="relative_attention_bias",
    numbers=_t5_numbers,
)
_T5_GATED = replace(_T5, name="T5 1.1", is_of=lambda config: bool(config.is_gated_act), up=("wi_0", "wi_1"), gated=True)


def _refuses_some_layers(config: Any) -> str:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "only some of its layers have experts"
    if getattr(config, "clip_qkv", None):
        return "it clips queries, keys and values (clip_qkv)"
    return ""


def _bloom_alibi(config: Any, positions: int, kind: torch.dtype) -> Float[Tensor, "heads positions"]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor(torch.ones(1, positions), config.n_head, kind)[:, 0]


def _falcon_alibi(config: Any, positions: int, kind: torch.dtype) -> Float[Tensor, "heads positions"] | None:
    """Return the biases of a Falcon, which transformers rounds to bfloat16 in all types and divides like scores."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    if not config.alibi:
        return None
    mask = torch.ones(1, positions, dtype=torch.int64)
    return build_alibi_tensor(mask, config.num_attention_heads, kind)[:, 0] / config.head_dim**0.5


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _refuses_falcon(config: Any) -> str:
    if config.new_decoder_architecture and not config.parallel_attn:
        return "its MLP does not run parallel to attention (parallel_attn=False), but new_decoder_architecture asks for that"
    if not config.new_decoder_architecture and config.parallel_attn and config.num_ln_in_parallel_attn == 2:
        return "it has two norms (num_ln_in_parallel_attn=2), and only models with new_decoder_architecture use them"
    return ""


def _refuses_bloom(config: Any) -> str:
    if config.apply_residual_connection_post_layernorm:
        return "it adds sublayers to normed states (apply_residual_connection_post_layernorm)"
    if config.slow_but_exact and config.pretraining_tp > 1:
        return "transformers leaves out biases in it (slow_but_exact with pretraining_tp)"
    return ""


_OPT = ModelFamily(
    "OPT",
    "opt",
    "OPTForCausalLM",
    is_of=lambda config: bool(config.do_layer_norm_before),
    body="model.decoder",
    enter="project_in",
    leave="project_out",
    final_norm="final_layer_norm",
    inner="",
    out="out_proj",
    up=("fc1",),
    down="fc2",
    norms=Norms("self_attn_layer_norm", "", "final_layer_norm", ""),
    norm="layer",
    gated=False,
    activation="activation_function",
    kv_heads="",
    positions="embed_positions",
)
_FALCON = ModelFamily(
    "Falcon",
    "falcon",
    "FalconForCausalLM",
    is_of=lambda config: config.parallel_attn and not _has_two_norms(config),
    layers="h",
    final_norm="ln_f",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    norms=Norms("input_layernorm", "", "input_layernorm", ""),
    norm="layer",
    gated=False,
    activation="activation",
    linear="FalconLinear",
    kv_heads=_falcon_kv_heads,
    by_head=True,
    parallel="parallel_attn",
    alibi=_falcon_alibi,
    refuses=_refuses_falcon,
)


def _has_two_norms(config: Any) -> bool:
    return bool(config.new_decoder_architecture) and config.num_ln_in_parallel_attn != 1


_GEMMA_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_inner="pre_feedforward_layernorm",
    after_inner="post_feedforward_layernorm",
)
LLAMA = ModelFamily("Llama", "llama", "LlamaForCausalLM")
FAMILIES = (
    LLAMA,  # also SmolLM and SmolLM2
    ModelFamily("Mistral", "mistral", "MistralForCausalLM"),
    ModelFamily("Qwen2", "qwen2", "Qwen2ForCausalLM"),
    ModelFamily("Qwen3", "qwen3", "Qwen3ForCausalLM", head_norms="head"),
    ModelFamily("SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
    ModelFamily("Granite", "granite", "GraniteForCausalLM", numbers=_granite_numbers),
    ModelFamily("Phi-3", "phi3", "Phi3ForCausalLM", qkv=("qkv_proj",), up=("gate_up_proj",)),
    ModelFamily(
        "OLMo 2",
        "olmo2",
        "Olmo2ForCausalLM",
        head_norms="whole",
        norms=Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ),
    ModelFamily("Gemma", "gemma", "GemmaForCausalLM", norm="rms + 1", refuses=_refuses_both_ways),
    ModelFamily(
        "Gemma 2",
        "gemma2",
        "Gemma2ForCausalLM",
        norm="rms + 1",
        norms=_GEMMA_NORMS,
        activation="hidden_activation",
        numbers=_gemma_numbers,
        refuses=_refuses_both_ways,
    ),
    ModelFamily(
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        norm="rms + 1",
        norms=_GEMMA_NORMS,
        activation="hidden_activation",
        head_norms="head",
        numbers=_gemma_numbers,
        refuses=_refuses_both_ways,
    ),
    ModelFamily(
        "GPT-2",
        "gpt2",
        "GPT2LMHeadModel",
        layers="h",
        final_norm="ln_f",
        attention="attn",
        qkv=("c_attn",),
        out="c_proj",
        up=("c_fc",),
        down="c_proj",
        norms=Norms("ln_1", "", "ln_2", ""),
        norm="layer",
        gated=False,
        activation="activation_function",
        transposed=True,
        kv_heads="",
        positions="wpe",
        refuses=_refuses_another_text,
    ),
    ModelFamily(
        "GPT-NeoX",
        "gpt_neox",
        "GPTNeoXForCausalLM",
        final_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        out="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        norm="layer",
        gated=False,
        kv_heads="",
        by_head=True,
        parallel="use_parallel_residual",
    ),
    _OPT,
    replace(
        _OPT,
        name="OPT 350M",
        is_of=lambda config: not config.do_layer_norm_before,
        final_norm="",
        norms=Norms("", "self_attn_layer_norm", "", "final_layer_norm"),
        norm_of_sum=True,
    ),
    ModelFamily(
        "BLOOM",
        "bloom",
        "BloomForCausalLM",
        layers="h",
        final_norm="ln_f",
        first_norm="word_embeddings_layernorm",
        attention="self_attention",
        qkv=("query_key_value",),
        out="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        norm="layer",
        gated=False,
        activation="gelu_new",
        kv_heads="",
        by_head=True,
        alibi=_bloom_alibi,
        refuses=_refuses_bloom,
    ),
    _FALCON,
    replace(_FALCON, name="Falcon 40B", is_of=_has_two_norms, norms=Norms("ln_attn", "", "ln_mlp", "")),
    replace(_FALCON, name="Falcon RW", is_of=lambda config: not config.parallel_attn, norms=Norms(), parallel=""),
    replace(_BART, name="Marian", kind="marian", model="MarianMTModel", first_norm="", numbers=_scaled_numbers),
    _BART,
    _MBART,
    replace(
        _MBART,
        name="PEGASUS",
        kind="pegasus",
        model="PegasusForConditionalGeneration",
        first_norm="",
        numbers=_scaled_numbers,
    ),
    _M2M100,  # also NLLB
    _WHISPER,
    replace(_WHISPER, name="Whisper's decoder", model="WhisperForCausalLM"),
    _T5,
    _T5_GATED,  # also flan-T5
    replace(_T5_GATED, name="mT5", kind="mt5", model="MT5ForConditionalGeneration", numbers=lambda config: Numbers()),
    replace(_T5_GATED, name="umT5", kind="umt5", model="UMT5ForConditionalGeneration", numbers=_umt5_numbers),
    ModelFamily("Mixtral", "mixtral", "MixtralForCausalLM", mixture="always"),
    ModelFamily(
        "Qwen3-MoE",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        head_norms="head",
        mixture="norm_topk_prob",
        refuses=_refuses_some_layers,
    ),
    ModelFamily(
        "OLMoE",
        "olmoe",
        "OlmoeForCausalLM",
        head_norms="whole",
        mixture="norm_topk_prob",
        refuses=_refuses_some_layers,
    ),
)


def family_of(model: "PreTrainedModel") -> ModelFamily | None:
    """Return the row of a model in the table; None if it has none."""
    config = model.config
    name = type(model).__name__
    for family in FAMILIES:
        if family.kind == config.model_type and family.model == name and family.is_of(config):
            return family
    return None


def known_families() -> str:
    """Return the names of all families, for messages."""
    *names, last = [family.name for family in FAMILIES]
    return f"{', '.join(names)} and {last}"


def kv_heads_of(config: Any, family: ModelFamily = LLAMA) -> int:
    """Return the number of KV heads."""
    setting = family.kv_heads
    found = setting(config) if callable(setting) else getattr(config, setting, None) if setting else None
    return int(found or getattr(config, family.heads))


def _activation_of(config: Any, family: ModelFamily) -> str:
    """Return the name of the activation in transformers."""
    return str(getattr(config, family.activation, family.activation))


def head_size(config: Any, family: ModelFamily = LLAMA) -> int:
    """Return the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // getattr(config, family.heads))


def encoder_family(family: ModelFamily) -> ModelFamily:
    """Return the row of the encoder of an encoder-decoder family, whose layers have no cross-attention."""
    before_attention, after_attention, before_inner, after_inner, _, _ = (_of_encoder(name) for name in family.norms)
    return replace(
        family,
        body=family.body.replace("decoder", "encoder"),
        cross="",
        inner=_of_encoder(family.inner),
        norms=Norms(before_attention, after_attention, before_inner, after_inner),
        heads=family.heads.replace("decoder", "encoder"),
    )


def _of_encoder(path: str) -> str:
    return path.replace("layer.2", "layer.1")


def module_at(module: Any, path: str) -> Any:
    """Return the module at a path (see `ModelFamily`); None if there is none."""
    return reduce(lambda found, name: getattr(found, name, None), path.split(".") if path else [], module)


def body_of(model: "PreTrainedModel", family: ModelFamily) -> Any:
    """Return the module that holds the layers of a model, or of its decoder in an encoder-decoder model."""
    return module_at(model, family.body) if family.body else model.base_model


def layers_in(model: "PreTrainedModel", family: ModelFamily) -> list[Any]:
    """Return the layers of a model, or of its decoder in an encoder-decoder model."""
    return list(module_at(body_of(model, family), family.layers))


@dataclass(frozen=True, eq=False)
class Architecture:
    """The settings of a model that an engine needs besides its weights.

    Attributes:
        family: its row of the table.
        heads, kv_heads: numbers of query heads and KV heads.
        size: size of a head.
        eps: the epsilon of norms, added to the mean square.
        activation: activation of the MLP.
        parallel: whether the MLP reads the input of attention.
        scales: factor of attention scores, by layer.
        ropes: the table of rotary angles of each layer, an index into `tables`; -1: the layer has no positions.
        tables: the kind of layers that each table of angles is for; "" for all layers.
        kinds: the kind of attention of each layer, such as a sliding window.
        numbers: further constants.
        biases: float[heads, distances] of each layer, or one for all layers, added to attention scores by distance; the
            last bias is for all larger distances. Empty for models without biases.
        by_place: whether `biases` are by the position of the key instead.
        chosen: number of experts of a row; 0: no experts.
        divides: whether the weights of a row's experts are divided by their sum.
    """

    family: ModelFamily
    heads: int
    kv_heads: int
    size: int
    eps: float
    activation: Activation
    parallel: bool
    scales: tuple[float, ...]
    ropes: tuple[int, ...]
    tables: tuple[str, ...]
    kinds: tuple[str, ...]
    numbers: Numbers
    biases: tuple[Tensor, ...] = ()
    by_place: bool = False
    chosen: int = 0
    divides: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The kinds of attention, in the order of their first layers."""
        return list(dict.fromkeys(self.kinds))

    def at(self, layer: int) -> "Architecture":
        """Return the architecture of a single layer."""
        return replace(
            self,
            scales=(self.scales[layer],),
            ropes=(self.ropes[layer],),
            kinds=(self.kinds[layer],),
            biases=self.biases[layer:][:1] or self.biases[-1:],
        )


def llama_architecture(layers: int, heads: int, kv_heads: int, size: int, eps: float) -> Architecture:
    """Return the architecture of Llama layers, such as those of draft heads."""
    every = (1 / size**0.5,) * layers
    full = ("full_attention",) * layers
    return Architecture(LLAMA, heads, kv_heads, size, eps, "silu", False, every, (0,) * layers, ("",), full, Numbers())


def architecture_of(model: "PreTrainedModel", family: ModelFamily | None = None) -> Architecture:
    """Return the architecture of a model that `misfit_of_family` accepts.

    Args:
        family: None: the model's row of the table. `encoder_family` of that row: for the architecture of the encoder.
    """
    family = family or family_of(model)
    assert family is not None
    config: Any = model.config
    heads = getattr(config, family.heads)
    size = head_size(config, family)
    numbers = family.numbers(config)
    layers = layers_in(model, family)
    kinds = tuple(getattr(config, "layer_types", None) or ["full_attention"] * len(layers))
    modules = [module_at(layer, family.attention) for layer in layers]
    alibi = _alibi_of(model, family)
    ropes, tables = _ropes_of(config, family, kinds, is_rotary=alibi is None)
    turned = [getattr(module, "use_rope", True) for module in modules]
    return Architecture(
        family=family,
        heads=heads,
        kv_heads=kv_heads_of(config, family),
        size=size,
        eps=_eps_of(model, family),
        activation=ACTIVATIONS[_activation_of(config, family)],
        parallel=bool(family.parallel and getattr(config, family.parallel)),
        scales=tuple(_scale_of(module, family, size) for module in modules),
        ropes=tuple(rope if turns else -1 for rope, turns in zip(ropes, turned, strict=True)),
        tables=tables,
        kinds=kinds,
        numbers=numbers,
        biases=_biases_of(modules, family) if alibi is None else (alibi,),
        by_place=alibi is not None,
        chosen=int(config.num_experts_per_tok) if family.mixture else 0,
        divides=family.mixture == "always" or bool(family.mixture and getattr(config, family.mixture)),
    )


def _scale_of(module: Any, family: ModelFamily, size: int) -> float:
    """Return the factor of attention scores. T5's attention has none, and before transformers 5.15 no setting for it."""
    usual = 1.0 if family.distances else 1 / size**0.5
    return float(getattr(module, "scaling", usual))


def _alibi_of(model: "PreTrainedModel", family: ModelFamily) -> Float[Tensor, "heads positions"] | None:
    """Return a model's biases of attention by the position of a key; None if it has none.

    They are rounded as in transformers' forward in the type in which an engine computes: float32 on a CPU.
    """
    config = model.config
    positions = positions_of(config)
    if positions is None:
        return None
    kind = torch.float32 if model.device.type == "cpu" else model.dtype
    found = family.alibi(config, positions, kind)
    return None if found is None else found.float().to(model.device)


def has_alibi(config: Any) -> bool:
    """Return whether models of a configuration have biases of attention by the position of a key (ALiBi)."""
    return bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt")


def _biases_of(modules: list[Any], family: ModelFamily) -> tuple[Tensor, ...]:
    """Return `Architecture.biases`, given the attention modules of the layers."""
    if not family.distances:
        return ()
    owners = [one if getattr(one, family.distances, None) is not None else modules[0] for one in modules]
    return tuple(biases_by_distance(getattr(one, family.distances), one) for one in owners)


def biases_by_distance(table: Any, module: Any) -> Tensor:
    """Return the biases of attention scores by distance, float[heads, distances]; the last is for all larger distances.

    Encoders, whose tokens also attend to later ones, begin with the largest distinct distance ahead.

    Args:
        table: the embedding of distance ranges, with one number per head.
        module: the attention module.
    """
    ranges = module._relative_position_bucket(-distances_read(module), **bucket_settings(module))
    found: Tensor = table.weight.detach()[ranges]
    return found.t()


def distances_read(module: Any) -> Int64[Tensor, " distances"]:
    """Return the distances that an attention module tells apart, ascending; negative ones, of an encoder, look ahead."""
    most = module.relative_attention_max_distance
    return torch.arange(0 if module.is_decoder else -most, most + 1)


def bucket_settings(module: Any) -> dict[str, Any]:
    """Return the arguments of the function by which an attention module maps distances to ranges."""
    if "bidirectional" not in inspect.signature(module._relative_position_bucket).parameters:
        return {}
    return {
        "bidirectional": not module.is_decoder,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }


def _ropes_of(
    config: Any, family: ModelFamily, kinds: tuple[str, ...], is_rotary: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the index of each layer's table of angles, as if all layers had positions, and `Architecture.tables`."""
    if family.positions or family.distances or not is_rotary:
        return (-1,) * len(kinds), ("",)
    if len(_ropes_by_kind(config)) == 1:
        return (0,) * len(kinds), ("",)
    tables = tuple(sorted({*kinds}))
    return tuple(tables.index(kind) for kind in kinds), tables


def _ropes_by_kind(config: Any) -> list[Any]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_kind = [one for one in found.values() if isinstance(one, dict)]
    return by_kind or [found]


def positions_of(config: Any) -> int | None:
    """Return the maximum length of a text, including the prompt; None if the configuration has no limit.

    Stored keys remain valid up to this length; see `most_before_angles_change`.
    """
    stated = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    found = [int(most) for most in stated if most is not None][:1]
    changing = most_before_angles_change(config)
    limits = [*found, *([] if changing is None else [changing])]
    if not limits and has_alibi(config):
        return _MOST_BIASED
    return min(limits, default=None)


def most_before_angles_change(config: Any) -> int | None:
    """Return the length above which all tokens of a text have other rotary angles; None if there is none.

    "longrope" (arXiv 2402.13753) has two lists of factors, for texts up to a length and for longer ones. Stored keys contain
    their angles, so a text that crosses this length would need new keys, unless the lists are equal.
    """
    lengths = [
        int(rope["original_max_position_embeddings"])
        for rope in _ropes_by_kind(config)
        if rope.get("rope_type") == "longrope" and rope["short_factor"] != rope["long_factor"]
    ]
    return min(lengths, default=None)


def angles_of(rotary: Any, positions: int, device: torch.device, kind: str = "") -> Float[Tensor, "2 positions pairs"]:
    """Return cosine and sine of each rotary pair's angle at each position.

    Args:
        kind: the kind of layers; "" if all have the same angles.
    """
    places = torch.arange(positions, device=device)[None]
    of_kind = [kind] if kind else []
    cos, sin = rotary(torch.zeros(1, device=device), places, *of_kind)
    pairs = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]]).contiguous()


def angle_tables(model: "PreTrainedModel", of: Architecture, limit: int) -> list[Float[Tensor, "2 positions pairs"]]:
    """Return all tables of angles of a model; one table without pairs if its positions are not rotary.

    Args:
        limit: number of positions of a model with biases by distance.
    """
    body: Any = body_of(model, of.family)
    device = model.device
    if of.by_place:
        limit = of.biases[0].shape[1]
    if of.by_place or of.family.distances:
        return [torch.zeros(2, limit, 0, device=device)]
    if of.family.positions:
        return [torch.zeros(2, len(places_of(body, of)), 0, device=device)]
    positions = positions_of(model.config)
    assert positions is not None  # families with rotary positions have a limit
    return [angles_of(body.rotary_emb, positions, device, kind) for kind in of.tables]


def _eps_of(model: "PreTrainedModel", family: ModelFamily) -> float:
    """Return the epsilon of a model's norms, which they add to the mean square."""
    first = layers_in(model, family)[0]
    norm = module_at(first, next(name for name in family.norms if name))
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def misfit_of_family(model: "PreTrainedModel") -> str:
    """Return the reason why no row of the table describes a model; "" if one does.

    Hooks, adapters and rounded weights change a model's results, so they are misfits.
    """
    family = family_of(model)
    if family is None:
        return f"its family is not supported by this engine, which supports {known_families()}"
    config: Any = model.config
    if why := family.refuses(config):
        return why
    if (named := _activation_of(config, family)) not in ACTIVATIONS:
        return f"its activation is {named!r}, and this engine supports {', '.join(ACTIVATIONS)}"
    for rope in _ropes_by_kind(config):
        if (kind := rope.get("rope_type", "default")) not in ROPES:
            return f"its rope_type is {kind!r}, and this engine supports {', '.join(ROPES)}"
    head: Any = model.get_output_embeddings()
    if head.bias is not None:
        return "its head has a bias"
    return _misfit_of_modules(model, family)


def _misfit_of_modules(model: "PreTrainedModel", family: ModelFamily) -> str:
    """Return the reason why modules of a model are not those of its family; "" if they are."""
    modules = list(model.modules())
    if family.cross:  # `misfit_of_encoder` checks the encoder
        modules = [*body_of(model, family).modules(), model.get_output_embeddings()]
    return _misfit_of_these(modules, family) or _misfit_of_packed(model, family)


def misfit_of_encoder(model: "PreTrainedModel") -> str:
    """Return the reason why the encoder of a model of the table is not that of its family; "" if it is."""
    family = family_of(model)
    if family is None or not family.cross:
        return "its family is not supported by this engine"
    body = body_of(model, encoder_family(family))
    if body is None:
        return "it is a decoder without an encoder"
    return _misfit_of_these(list(body.modules()), family)


def _misfit_of_these(modules: list[Any], family: ModelFamily) -> str:
    """See `_misfit_of_modules`."""
    known = sys.modules.get("transformers.pytorch_utils")
    conv1d = () if known is None else (known.Conv1D,)  # not imported: no module of a model is one
    if any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in modules):
        return "its modules have hooks or a replaced forward"
    own = (nn.Linear, *conv1d) if family.transposed else (nn.Linear, _linear_of(family))
    whole = [one for one in modules if not isinstance(one, PackedLinear)]
    holds_matrix = [one for one in whole if hasattr(one, "weight") and hasattr(one, "in_features")]
    holds_matrix += [one for one in modules if isinstance(one, conv1d)]
    # Adapters and most rounded layers are modules of other classes; torchao keeps the modules and replaces their
    # tensors.
    if any(type(one) not in own or type(one.weight) is not nn.Parameter for one in holds_matrix):
        return "its matrices have adapters or are rounded"
    return ""


def _linear_of(family: ModelFamily) -> Any:
    """Return the class of a family's matrices."""
    if not family.linear:
        return nn.Linear
    return getattr(import_module(f"transformers.models.{family.kind}.modeling_{family.kind}"), family.linear)


def _misfit_of_packed(model: "PreTrainedModel", family: ModelFamily) -> str:
    """Return the reason why 4-bit matrices in the files of a model cannot be packed for an engine; "" if they can."""
    if not matrices_of(model):
        return ""
    if model.device.type == "cuda":
        return "its matrices have 4 bits, which the forward for GPUs does not read"
    if family.mixture:
        return "4-bit matrices of experts are not supported"
    if family.cross:
        return "4-bit decoders with cross-attention are not supported"
    layers = layers_in(model, family)
    for name in (family.enter, family.leave):
        if name and isinstance(module_at(body_of(model, family), name), PackedLinear):
            return f"{name} has 4 bits, and only matrices of layers may have them"
    for name in (*family.qkv, family.out, *family.up, family.down):
        found = {isinstance(_module_of(layer, name, family), PackedLinear) for layer in layers}
        if len(found) > 1:
            return f"{name} has 4 bits only in some layers"
    for names in (family.qkv, family.up):
        found = {isinstance(_module_of(layers[0], name, family), PackedLinear) for name in names}
        if len(found) > 1:
            return f"only some of {', '.join(names)} have 4 bits"
    return ""


def _module_of(layer: Any, name: str, family: ModelFamily) -> Any:
    is_inner = name in (*family.up, family.down)
    return getattr(module_at(layer, family.inner if is_inner else family.attention), name)


class LayerParts(NamedTuple):
    """The weights of one layer; missing parts are empty.

    An RMSNorm is its weight, [width]; a LayerNorm is its weight and bias, [2 * width]. Matrices are [outputs, inputs]; a
    matrix of small integers is a `StoredMatrix`, which an engine reads from its file when it packs it.
    """

    before_attention: Tensor
    after_attention: Tensor
    before_inner: Tensor
    after_inner: Tensor
    head_norms: Tensor  # [2, size]: norms of each head's queries and keys
    wide_norms: Tensor  # [(heads + kv_heads) * size]: norms of all queries, and of all keys
    qkv: list[Matrix]  # to be joined: queries, keys, values, in their stored order; see `rows_in_order`
    qkv_bias: Tensor
    out: Matrix
    out_bias: Tensor
    up: list[Matrix]  # to be joined: gate and up, or up only; for a mixture, gate and up of each expert in turn
    up_bias: Tensor
    down: Matrix  # for a mixture, a list of one per expert
    down_bias: Tensor
    cross: "CrossParts"
    router: Tensor  # [experts, hidden], scores the experts of each row; [0, 0] without experts


class CrossParts(NamedTuple):
    """The weights of a layer's cross-attention, as in `LayerParts`; empty if there is none."""

    before: Tensor
    after: Tensor
    query: Tensor
    query_bias: Tensor
    out: Tensor
    out_bias: Tensor


class SourceParts(NamedTuple):
    """The weights of one layer for the keys and values of a source."""

    both: list[Tensor]  # to be joined: keys, values
    bias: Tensor


def parts_of(layer: Any, of: Architecture) -> LayerParts:
    """Return the weights of a layer of a model or of a draft head."""
    family = of.family
    attention = module_at(layer, family.attention)
    inner = module_at(layer, family.inner)
    device = next(layer.parameters()).device
    norms = [norm_of(module_at(layer, name) if name else None, family).to(device) for name in family.norms]
    qkv = [getattr(attention, name) for name in family.qkv]
    up = [] if family.mixture else [getattr(inner, name) for name in family.up]
    out = getattr(attention, family.out)
    down = None if family.mixture else getattr(inner, family.down)
    nothing = next(layer.parameters()).new_zeros(0)
    of_heads = [norm_of(getattr(attention, name, None), family) for name in ("q_norm", "k_norm")]
    whole = family.head_norms == "whole"
    before_attention, after_attention, before_inner, after_inner, before_cross, after_cross = norms
    return LayerParts(
        before_attention=before_attention,
        after_attention=after_attention,
        before_inner=before_inner,
        after_inner=after_inner,
        head_norms=torch.stack([nothing, nothing] if whole else of_heads),
        wide_norms=torch.cat(of_heads) if whole else nothing,
        qkv=[_matrix(one, family) for one in qkv],
        qkv_bias=rows_in_order(_joined_bias(qkv, family, nothing), of),
        out=_matrix(out, family),
        out_bias=nothing if out.bias is None else out.bias,
        up=[*inner.experts.gate_up_proj] if down is None else [_matrix(one, family) for one in up],
        up_bias=torch.cat([nothing, *(one.bias for one in up if one.bias is not None)]),
        down=[*inner.experts.down_proj] if down is None else _matrix(down, family),
        down_bias=nothing if down is None or down.bias is None else down.bias,
        cross=_cross_parts(layer, family, nothing.new_zeros(0, len(_matrix(out, family))), before_cross, after_cross),
        router=inner.gate.weight if down is None else nothing.reshape(0, 0),
    )


def _joined_bias(linears: list[Any], family: ModelFamily, nothing: Tensor) -> Tensor:
    """Return the joined biases of matrices, with zeros for missing ones; empty if all are missing."""
    if all(one.bias is None for one in linears):
        return nothing
    biases = []
    for one in linears:
        zeros = nothing.new_zeros(len(_matrix(one, family)))
        biases.append(zeros if one.bias is None else one.bias)
    return torch.cat(biases)


def _cross_parts(layer: Any, family: ModelFamily, no_matrix: Tensor, before: Tensor, after: Tensor) -> CrossParts:
    """Return the weights of a layer's cross-attention.

    Args:
        no_matrix: [0, hidden], the matrices of a layer without it.
        before, after: the norms of the sublayer.
    """
    nothing = no_matrix.new_zeros(0)
    if not family.cross:
        return CrossParts(before, after, no_matrix, nothing, no_matrix, nothing)
    attention = module_at(layer, family.cross)
    query = getattr(attention, family.qkv[0])
    out = getattr(attention, family.out)
    biases = [_joined_bias([one], family, nothing) for one in (query, out)]
    return CrossParts(before, after, query.weight, biases[0], out.weight, biases[1])


def source_parts(layer: Any, of: Architecture) -> SourceParts:
    """Return a layer's weights for the keys and values of a source."""
    attention = module_at(layer, of.family.cross)
    both = [getattr(attention, name) for name in of.family.qkv[1:]]
    return SourceParts([one.weight for one in both], _joined_bias(both, of.family, both[0].weight.new_zeros(0)))


def norm_at(body: Any, path: str, family: ModelFamily) -> Tensor:
    """Return the weight of a norm of a body (see `LayerParts`); empty if the path is ""."""
    return norm_of(module_at(body, path) if path else None, family)


def norm_of(module: Any, family: ModelFamily) -> Tensor:
    """Return the weight of a norm (see `LayerParts`); empty if there is none."""
    weight = getattr(module, "weight", None)
    if weight is None:
        width = module.normalized_shape[0] if isinstance(module, nn.LayerNorm) else 0  # such a norm still has an effect
        return torch.cat([torch.ones(width), torch.zeros(width)])
    if family.norm == "rms + 1":
        return 1 + weight.float()
    if family.norm == "layer":
        bias = torch.zeros_like(weight) if module.bias is None else module.bias
        return torch.cat([weight, bias])
    found: Tensor = weight
    return found


def embedding_of(model: "PreTrainedModel", family: ModelFamily) -> Any:
    """Return the module of token embeddings, of the decoder in an encoder-decoder model."""
    return body_of(model, family).embed_tokens if family.cross else model.get_input_embeddings()


def own_scale(embedding: Any) -> float:
    """Return the factor by which a module of embeddings multiplies them."""
    found = getattr(embedding, "embed_scale", None)
    if isinstance(found, Tensor):
        found = found.to(embedding.weight.dtype)
    return 1.0 if found is None else float(found)


def places_of(body: Any, of: Architecture) -> Tensor:
    """Return the embeddings of positions, float[positions, hidden]; empty if there are none."""
    if not of.family.positions:
        return torch.zeros(0, 0)
    module = module_at(body, of.family.positions)
    if isinstance(module, nn.Embedding):
        return module.weight.detach()[int(getattr(module, "offset", 0)) :]
    first = int(module.padding_idx) + 1  # sinusoidal, without a limit
    known = max(int(module.num_positions), _MOST_SINES)
    found: Tensor = module.get_embedding(first + known, module.embedding_dim, module.padding_idx)
    return found[first:]


def unplaced_in(body: Any, family: ModelFamily) -> int:
    """Return the token without a position: the padding token of models that skip it in counting positions."""
    module = module_at(body, family.positions) if family.positions else None
    return NO_TOKEN if module is None or isinstance(module, nn.Embedding) else int(module.padding_idx)


def embeddings_of(model: "PreTrainedModel", family: ModelFamily) -> Tensor:
    """Return the embeddings of tokens as hidden states, [vocab, hidden], projected if the model projects them."""
    weight: Tensor = embedding_of(model, family).weight.detach()
    enter = matrix_at(model, family.enter, family)
    return weight if enter is None else nn.functional.linear(weight.float(), enter.float())


def head_of(model: "PreTrainedModel") -> Matrix:
    """Return the matrix of a model's head."""
    head: Any = model.get_output_embeddings()
    return head.matrix if isinstance(head, PackedLinear) else head.weight


def matrix_at(model: "PreTrainedModel", name: str, family: ModelFamily) -> Tensor | None:
    """Return a matrix of a model's body, such as `ModelFamily.enter`; None if there is none."""
    module = module_at(body_of(model, family), name) if name else None
    return None if module is None else module.weight.detach()


def logits_bias_of(model: Any) -> Tensor:
    """Return the bias of a model's logits, float[vocab]; empty if it is zero."""
    found = getattr(model, "final_logits_bias", None)
    bias: Tensor = torch.zeros(0) if found is None else found[0]
    return bias if bias.any() else bias[:0]


def bias_of_tokens(model: Any, shared: SharedTokens | None) -> Tensor:
    """Return the bias of a model's logits, float[vocab], by the target's tokens if it is a draft model with shared tokens.

    Tokens of the target that the model does not know get -inf. Empty if there is no bias.
    """
    own = logits_bias_of(model)
    return own if shared is None else shared.fitted_bias(own)


def _matrix(module: Any, family: ModelFamily) -> Matrix:
    if isinstance(module, PackedLinear):
        return module.matrix
    weight: Tensor = module.weight
    return weight.t() if family.transposed else weight


def rows_in_order(rows: Matrix, of: Architecture) -> Matrix:
    """Return a joined matrix with all queries first, then keys, then values; a copy if it is stored head by head."""
    if not of.family.by_head or len(rows) == 0:
        return rows
    if not isinstance(rows, Tensor):
        return rows.in_order(rows_in_order(torch.arange(len(rows)), of).tolist())
    group = of.heads // of.kv_heads
    by_head = rows.unflatten(0, (of.kv_heads, group + 2, of.size))
    return torch.cat([part.flatten(0, 2) for part in by_head.split([group, 1, 1], 1)])
