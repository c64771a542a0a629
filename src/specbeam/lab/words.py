"""Names that users give to benchmarks, and numbers in words.

Imports nothing, so that the command line knows them before torch is imported.
"""

# A method of `bench cliffs` with its settings -> the mode of transformers that it replaces.
CLIFF_METHODS = {
    "sampling": "sampling",
    "beam_sampling": "beam_sampling",
    "dsbd": "beam_sampling",
    "dsbd width=dynamic": "beam_sampling",
    "beam_search": "beam_search",
    "speculative_beam_search": "beam_search",
    "speculative_sampling": "assisted",
    "greedy": "greedy",
}
CLIFF_OPTIONS = (
    "none", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "stop_strings", "grammar", "stream", "audit",
)  # fmt: skip
CLIFF_KINDS = ("trained", "random")  # of prompts
HOST_METHODS = (
    "beam_sampling",
    "dsbd",
    "dsbd dynamic",
    "beam_search",
    "speculative_beam_search",
    "sampling",
    "speculative_sampling",
)
FUZZ_WORLDS = (
    "every method", "no draft", "words", "forms", "short context", "the target drafts", "padded draft", "padded target",
    "two tokens", "200,000 tokens", "qwen3", "gemma2", "gpt2", "mistral", "opt", "bloom", "mixtral", "falcon", "phi",
    "int8", "int4", "int8 drafts", "int4 drafts", "bfloat16 keys", "swift", "memory",
    "eagle3 head", "peagle head", "dspark head", "eagle head", "fspad head", "medusa head", "chimera head", "specdiff head",
    "eesd head", "bita head", "hidden_transfer head", "bart", "marian", "t5", "whisper",
)  # fmt: skip
PAPERS = ("dsbd", "mtad", "rsd")  # of `bench paper`
BUDGETS = (5, 10, 21, 30)  # nodes of `bench efficiency`
BASELINES = ("transformers", "ctranslate2")  # of `bench speed`
# Models of `bench anchors`: the name of a model's folder -> its hub id.
ANCHOR_MODELS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "whisper-base": "openai/whisper-base",
}
ANCHOR_BITS = (16, 8, 4)  # of their weights
ANCHOR_MODES = ("greedy", "beam_search")
ANCHOR_RIVALS = ("transformers", "ctranslate2", "llama.cpp", "faster-whisper")


def of_rounds(number: int) -> str:
    """Return what a figure of rounds states, such as "median of 7 rounds, smallest to largest"."""
    return "1 round" if number == 1 else f"median of {number} rounds, smallest to largest"
