"""The model class of lm-evaluation-harness: its tasks decoded by any method, with beams and drafts.

Importing this module registers the class as the model "specbeam"; ``specbeam evaluate harness`` does so.
"""

import logging
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specbeam import Method, Pair, generate, load
from specbeam.doors import method_from
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.evaluate.perplexity import LOGITS_PER_PASS, batches_of, score_tokens

LOG = logging.getLogger("specbeam.evaluate")
MOST_NEW_TOKENS = 256  # default of a task, as for the harness's other models; or half of the positions, if fewer


@register_model("specbeam")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A pair of models for lm-evaluation-harness. The target computes log-likelihoods; a method decodes texts.

    Args:
        pretrained: the target, as for `specbeam.load`.
        draft: the draft model, as for `specbeam.load`.
        method: a recipe by name. By default the fastest kind that fits the task: `num_beams` above 1 is a beam
            search, else greedy search or sampling, each drafted by the draft model if there is one.
        temperature: overrides the task's, for methods that sample: most tasks set `do_sample: false`, which is
            temperature 0.
        seed: seed of all draws.
        batch_size: number of texts decoded at the same time.
        max_length: maximum number of tokens of prompt and text; by default the models' positions.
        add_bos_token: whether prompts begin with the tokenizer's special tokens, as in `specbeam.generate`.
        device, dtype, quantize, engine: see `specbeam.load`.
        settings: settings of the method, by name.
    """

    def __init__(
        self,
        pretrained: "str | Pair" = "bundled",
        draft: str | None = None,
        method: str | None = None,
        temperature: float | None = None,
        seed: int = 0,
        batch_size: int | str = 32,
        max_length: int | None = None,
        add_bos_token: bool = True,
        device: str | None = None,
        dtype: str = "auto",
        quantize: Any = None,
        engine: Any = "auto",
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            LOG.warning("device %s (the harness's default) is not available; the models are on the CPU", device)
            device = None
        if isinstance(pretrained, Pair):
            self.pair = pretrained
        else:
            self.pair = load(pretrained, draft, dtype=dtype, device=device, quantize=quantize, engine=engine)
        if self.pair.tokenizer is None:
            raise BadSetting("the tasks of the harness are texts, but this pair has no tokenizer; load it with one")
        if settings and method is None:
            raise BadSetting(f"{', '.join(settings)} are settings of a method, but there is no method; add method=...")
        self.tokenizer = self.pair.tokenizer
        self.method = None
        if method is not None:
            self.method = method_from(method, [f"{name}={value}" for name, value in settings.items()])
        self.temperature = temperature
        self.seed = int(seed)
        self.batch_size = 32 if batch_size == "auto" else int(batch_size)
        self.add_bos_token = add_bos_token
        room = self.pair.room(0)
        self.max_length = int(max_length or room or 2048)

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self.pair.eos[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before texts that have no context: the beginning, or else the end token."""
        start = self.tokenizer.bos_token_id
        return int(start) if start is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The name that identifies the tokenizer in the harness."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat by the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **given: Any) -> list[int]:
        """Return the token ids of a text, without a second beginning token if the text has one."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        start = self.tokenizer.bos_token
        if add_special_tokens is None and start is not None and string.startswith(start):
            special = False
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **given: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request log p of its continuation, and whether greedy search would write it."""
        contexts = [context for _, context, _ in requests]
        continuations = [continuation for _, _, continuation in requests]
        # The last token is only predicted, so a text may have one token more than the model has positions.
        texts = [
            [*context, *continuation][-self.max_length - 1 :]
            for context, continuation in zip(contexts, continuations, strict=True)
        ]
        found = [(0.0, True)] * len(texts)
        for batch in batches_of([len(text) for text in texts], LOGITS_PER_PASS // self.pair.target.vocab):
            scored = score_tokens([texts[number] for number in batch], self.pair)
            for number, (logp, is_likeliest) in zip(batch, scored, strict=True):
                stop = len(texts[number]) - 1
                start = max(stop - len(continuations[number]), 0)
                found[number] = (float(logp[start:stop].sum()), bool(is_likeliest[start:stop].all()))
        for (strings, _, _), answer in zip(requests, found, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return log p of whole texts, in windows of the model's positions; each token is predicted once."""
        totals = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            asked = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logp for logp, _ in self._loglikelihood_tokens(asked))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the first of its stop texts."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            wanted = requests[numbers[0]].args[1]
            method, options = self.method_and_options(wanted)
            prompts = [self._prompt(requests[number].args[0], options["max_new_tokens"]) for number in numbers]
            found = generate(self.pair, prompts, method, seed=self.seed, batch_size=self.batch_size, **options)
            for number, generation in zip(numbers, found, strict=True):
                text = postprocess_generated_text(generation.text, options["stop_strings"], None)
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        """Return the last tokens of a context that leave room for the text; the prefix token for an empty context."""
        ids = self.tok_encode(context) or [self.prefix_token_id]
        room = self.max_length - new_tokens
        if room < 1:
            raise BadSetting(
                f"a task asks for {new_tokens} new tokens, but the models have {self.max_length} positions"
            )
        if len(ids) > room:
            LOG.warning("a context of %d tokens is cut to its last %d", len(ids), room)
        return ids[-room:]

    def method_and_options(self, wanted: dict[str, Any]) -> tuple[Method, dict[str, Any]]:
        """Return the method and the options of `specbeam.generate` for a task.

        Raises `NotSupported` or `BadSetting` if that is not possible.
        """
        asked = dict(normalize_gen_kwargs(wanted, min(MOST_NEW_TOKENS, self.max_length // 2)))
        draws = asked.pop("do_sample")
        temperature = asked.pop("temperature", None) if draws else 0.0
        asked.pop("temperature", None)
        beams = int(asked.pop("num_beams", 1) or 1)
        method = self._method(beams, draws)
        options = {
            "max_new_tokens": asked.pop("max_gen_toks"),
            "stop_strings": [text for text in asked.pop("until") if text] or None,
            **{name: value for name, value in asked.items() if value is not None},
        }
        if not method.greedy:
            options["temperature"] = temperature if self.temperature is None else self.temperature
        elif draws:
            raise NotSupported(f"a task samples (do_sample), but {method.name} does not; choose another method")
        return method, options

    def _method(self, beams: int, draws: bool) -> Method:
        if self.method is not None:
            if beams not in (1, self.method.beams):
                raise BadSetting(f"a task asks for {beams} beams, but {self.method.name} has {self.method.beams}")
            return self.method
        has_draft = self.pair.draft is not None
        if beams > 1:
            if draws:
                raise NotSupported(
                    "a task samples with beams; choose a method: method=beam_sampling or dsbd, with beams=..."
                )
            return method_from("speculative_beam_search" if has_draft else "beam_search", [f"beams={beams}"])
        return method_from("speculative_sampling" if has_draft else "sampling", [])
