"""Sampling parameters of a request, and the checks of their values."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarSpec

_MASK64 = (1 << 64) - 1
# Larger than any vocabulary, and a number that fits messages.
MAX_TOP_K = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters of one sample of one request, resolved: no value is optional here.

    The order of application is: logit bias, repetition/frequency/presence penalty, min-tokens mask, grammar,
    temperature, then the top-k, top-p and min-p filters on the tempered distribution.
    """

    max_new_tokens: int = 128
    # With fewer output tokens, neither EOS, stop ids nor stop strings end the request.
    min_new_tokens: int = 0
    # 0 means greedy.
    temperature: float = 1.0
    # -1 (or 0) switches the filter off.
    top_k: int = -1
    top_p: float = 1.0
    # Tokens with a probability below min_p x the largest probability are dropped.
    min_p: float = 0.0
    # > 1 makes tokens of prompt and output less likely (CTRL, arXiv:1909.05858).
    repetition_penalty: float = 1.0
    # Subtracted once per occurrence in the output.
    frequency_penalty: float = 0.0
    # Subtracted once if the token occurs in the output.
    presence_penalty: float = 0.0
    # token id -> value added to its logit.
    logit_bias: dict[int, float] = field(default_factory=dict)
    # Counter-based randomness: the variate at position p depends on (seed, p) alone. Always set; see `sample_seed`.
    seed: int = 0
    # The front end's detokenizer matches stop strings; the scheduler has no text.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # Keep the matched stop string (or the stop token's text) in the output.
    include_stop: bool = False
    # Constraint on the output; None: no constraint. Its end ends the request, whatever min_new_tokens is.
    grammar: GrammarSpec | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the ids of earlier tokens, not only on their logits and number."""
        is_penal = self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return is_penal or self.grammar is not None

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first parameter that is out of range."""
        token_rule = f"token ids must be in [0, {vocab_size})"
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "it must be at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "it must be in [0, max_new_tokens]"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "it must be in [0, 100]"),
            ("top_k", -1 <= self.top_k <= MAX_TOP_K, f"it must be -1 (off) or in [1, {MAX_TOP_K}]"),
            ("top_p", 0.0 < self.top_p <= 1.0, "it must be in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "it must be in [0, 1]"),
            # Far smaller values make logits infinite.
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 10.0, "it must be in [0.01, 10]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "it must be in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "it must be in [-2, 2]"),
            ("logit_bias", all(0 <= t < vocab_size for t in self.logit_bias), token_rule),
            ("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "values must be in [-100, 100]"),
            ("stop_token_ids", all(0 <= t < vocab_size for t in self.stop_token_ids), token_rule),
        )
        for name, ok, rule in checks:
            if not ok:
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}: {rule}", param=name)


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of sample number `sample` of a request with seed `seed`: sample 0 keeps it, the others differ."""
    return seed & _MASK64 if sample == 0 else mix64(seed & _MASK64, sample)


def prompt_seed(seed: int, prompt: int) -> int:
    """Return the seed of prompt number `prompt` of a batch with one seed. Prompt 0 keeps it, the others differ."""
    return seed & _MASK64 if prompt == 0 else mix64(mix64(seed & _MASK64, _MASK64), prompt)


def mix64(a: int, b: int) -> int:
    """Mix two 64-bit integers into one (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    z = (a + (b + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
