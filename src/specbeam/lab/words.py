"""Names that users give to benchmarks. Imports nothing, so that the command line knows them before torch is imported."""

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
BUDGETS = (5, 10, 21, 30)  # nodes of `bench efficiency`
BASELINES = ("transformers", "ctranslate2")  # of `bench speed`
