"""Tiny draft heads for tiny models, trained for a few steps so that some of their proposals are right.

1. `teach` trains a tiny model to follow a rule: each token mostly decides the next. No head can predict a random model.
2. The model continues random prompts. Its own choices are the targets of the head, its hidden states the input.
3. The head computes all slots of these texts at once, by dense causal attention, and learns what the model chose. It
   then continues from its own states, as it does when it proposes more than one token.

transformers computes the hidden states, so a head also shows whether the engine captures the right ones.

As a program it makes both models in the folders eagle3 and mtp of a given folder, for `make chaos`.
"""

from __future__ import annotations

import copy
import fcntl
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.attention.base import ATTENTION_NAME, AttentionParams, register_attention
from splitserve.engine.draft_fit import EAGLE3_ARCHITECTURES
from splitserve.engine.heads.eagle3 import Eagle3Head
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.heads.mtp import load_mtp
from support.tiny_models import TinyKind, make_tiny_model

NUM_TEXTS, PROMPT_TOKENS, TEXT_TOKENS = 48, 4, 24
# Steps of the optimizer.
NUM_STEPS = 60
# Number of consecutive proposals for which a head is trained.
NUM_PROPOSALS = 2


@dataclass(frozen=True)
class TaughtModel:
    """Folders of a served model and of its trained head."""

    model: Path
    algorithm: SpeculativeAlgorithm
    # None: the head is in the model's checkpoint.
    head: Path | None = None

    @property
    def options(self) -> list[str]:
        """Return the options of a worker."""
        draft_model = [] if self.head is None else ["--speculative-draft-model", str(self.head)]
        return ["--speculative-algorithm", str(self.algorithm), *draft_model]


def taught_with_eagle3(folder: Path) -> TaughtModel:
    """Make a tiny Llama and its head. The head proposes the 200 tokens that the model samples most often."""
    model = teach(make_tiny_model("llama", folder / "model"))
    return TaughtModel(
        model, SpeculativeAlgorithm.EAGLE3, make_eagle3_head(model, folder / "head", draft_vocab_size=200)
    )


def taught_with_mtp(folder: Path, kind: TinyKind = "deepseek_v3") -> TaughtModel:
    """Make a tiny model with an MTP layer, in the format of Qwen unless it is a DeepSeek-V3."""
    model = teach(make_tiny_model(kind, folder / "model"))
    return TaughtModel(add_mtp_layer(model, folder / "scratch"), SpeculativeAlgorithm.MTP)


def taught_once(folder: Path, make: Callable[[Path], TaughtModel]) -> TaughtModel:
    """Return the model that the first process that needs it has made in `folder`, because training takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "made.pickle"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(make(folder)))
    found: TaughtModel = pickle.loads(made.read_bytes())
    return found


@dataclass(frozen=True)
class _Texts:
    """Texts of a served model, [NUM_TEXTS, TEXT_TOKENS], and what it computed for each token."""

    token_ids: torch.Tensor
    # The model's greedy choice after each token.
    choices: torch.Tensor
    # States from the embedding to the last layer, and behind the last norm: [NUM_TEXTS, TEXT_TOKENS, hidden_size].
    layers: Sequence[torch.Tensor]
    final: torch.Tensor


class _DenseAttention:
    """StepAttention over whole texts of one length, without a pool."""

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        q, k, v = (x.reshape(self._num_texts, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=params.scaling)
        return out.transpose(1, 2).flatten(0, 1)


def teach(model: Path, num_steps: int = NUM_STEPS) -> Path:
    """Train the model in folder `model` to follow a rule, save it there, and return that folder."""
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                # Weights of tiny models are so large that training is slow.
                parameter.mul_(0.2)
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_steps):
        token_ids = _text_by_rule(generator)
        loss = cross_entropy(target(token_ids[:, :-1]).logits.flatten(0, 1), token_ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    target.save_pretrained(model)
    return model


def _text_by_rule(generator: torch.Generator) -> torch.Tensor:
    """Return texts in which most tokens follow from the token before, and some are random."""
    columns = [torch.randint(0, 256, (NUM_TEXTS,), generator=generator)]
    while len(columns) < TEXT_TOKENS:
        is_random = torch.rand(NUM_TEXTS, generator=generator) < 0.15
        random = torch.randint(0, 256, (NUM_TEXTS,), generator=generator)
        columns.append(torch.where(is_random, random, (columns[-1] * 5 + 17) % 256))
    return torch.stack(columns, dim=1)


def make_eagle3_head(
    model: Path, folder: Path, *, num_steps: int = NUM_STEPS, draft_vocab_size: int | None = None
) -> Path:
    """Train an EAGLE-3 head for the model in folder `model`, save its checkpoint in `folder`, and return that."""
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    served = target.config
    texts = _texts_of(target)
    tokens = _frequent(texts, draft_vocab_size or served.vocab_size)
    config = transformers.LlamaConfig(
        vocab_size=served.vocab_size,
        hidden_size=served.hidden_size,
        intermediate_size=2 * served.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=served.max_position_embeddings,
        tie_word_embeddings=False,
        architectures=[EAGLE3_ARCHITECTURES[0]],
        draft_vocab_size=len(tokens),
        target_hidden_size=served.hidden_size,
        # Tiny models have too few layers for the default.
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [0, served.num_hidden_layers - 2, served.num_hidden_layers - 1]
        },
    )
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = Eagle3Head(config, target)
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
        _train(head, texts, num_steps, list(head.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    state = {name.replace("layer.", "midlayer.", 1): tensor for name, tensor in head.state_dict().items()}
    is_drafted = torch.zeros(served.vocab_size, dtype=torch.bool)
    is_drafted[tokens] = True
    save_file({**state, "t2d": is_drafted}, folder / "model.safetensors")
    return folder


def add_mtp_layer(model: Path, scratch: Path, *, num_steps: int = 30) -> Path:
    """Add a trained MTP layer to the checkpoint of a tiny DeepSeek-V3 or Qwen in folder `model`, and return that.

    `scratch`: a folder for files in between.
    """
    config = transformers.AutoConfig.from_pretrained(model)
    file, names = model / "model.safetensors", _MtpNames.of(config)
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = _texts_of(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tensors = load_file(file) | _random_mtp_layer(config, names, scratch)
    if not names.is_qwen:
        config.num_nextn_predict_layers = target.config.num_nextn_predict_layers = 1
        config.save_pretrained(model)
    save_file(tensors, file, {"format": "pt"})
    head = load_mtp(model, "tiny", target, torch.float32, torch.device("cpu"))
    # Weights that the checkpoint has in the same form. Experts, for example, are joined when they are loaded.
    trained = {
        path: parameter
        for name, parameter in head.named_parameters()
        if (path := names.path(name)) in tensors and tensors[path].shape == parameter.shape
    }
    _train(head, texts, num_steps, list(trained.values()))
    save_file(tensors | {path: tensor.detach().clone() for path, tensor in trained.items()}, file, {"format": "pt"})
    return model


@dataclass(frozen=True)
class _MtpNames:
    """Names of the tensors of an MTP layer in a checkpoint."""

    is_qwen: bool
    # Of the decoder layer's tensors, and of the others.
    layer: str
    prefix: str

    @classmethod
    def of(cls, config: Any) -> _MtpNames:
        if config.model_type.startswith("qwen"):
            return cls(True, "mtp.layers.0.", "mtp.")
        prefix = f"model.layers.{config.num_hidden_layers}."
        return cls(False, prefix, prefix)

    def path(self, name: str) -> str:
        """Return the name in the checkpoint of a parameter of MtpHead."""
        if name.startswith("body.layers.0."):
            return self.layer + name.removeprefix("body.layers.0.")
        own = name.replace("body.norm", "shared_head.norm")
        if self.is_qwen:
            own = {
                "enorm.weight": "pre_fc_norm_embedding.weight",
                "hnorm.weight": "pre_fc_norm_hidden.weight",
                "eh_proj.weight": "fc.weight",
                "shared_head.norm.weight": "norm.weight",
            }.get(own, own)
        return self.prefix + own


def _random_mtp_layer(config: Any, names: _MtpNames, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a random MTP layer, as in a checkpoint: those of a model with one layer, renamed."""
    own = copy.deepcopy(config)
    own.num_hidden_layers, own.first_k_dense_replace, own.initializer_range = 1, 0, 0.05
    own.vocab_size, own.pad_token_id = 1, None
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[-1:]
    transformers.AutoModelForCausalLM.from_config(own, dtype=torch.float32).save_pretrained(scratch)
    layer = "model.layers.0."
    tensors = {
        names.layer + name.removeprefix(layer): tensor
        for name, tensor in load_file(scratch / "model.safetensors").items()
        if name.startswith(layer)
    }
    found = dict(pair for item in tensors.items() for pair in _by_expert(*item))
    size = config.hidden_size
    found |= {names.path(f"{name}.weight"): torch.ones(size) for name in ("enorm", "hnorm", "body.norm")}
    return found | {names.path("eh_proj.weight"): 0.05 * torch.randn(size, 2 * size)}


def _by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor as DeepSeek's checkpoints have it: with a tensor for each expert."""
    path, _, kind = name.rpartition(".")
    if not path.endswith(".experts"):
        yield name, tensor
        return
    for i, weight in enumerate(tensor):
        parts = weight.chunk(2) if kind == "gate_up_proj" else (weight,)
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        yield from ((f"{path}.{i}.{k}.weight", part.contiguous()) for k, part in zip(kinds, parts, strict=True))


def _texts_of(target: Any) -> _Texts:
    generator = torch.Generator().manual_seed(3)
    # Bytes only: the tiny tokenizer's special tokens follow them.
    prompts = torch.randint(0, 256, (NUM_TEXTS, PROMPT_TOKENS), generator=generator)
    with torch.no_grad():
        token_ids = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_length=TEXT_TOKENS,
            min_length=TEXT_TOKENS,
            do_sample=False,
        )
        out = target(token_ids, output_hidden_states=True)
        final = target.base_model(token_ids).last_hidden_state
    return _Texts(token_ids, out.logits.argmax(-1), out.hidden_states, final)


def _frequent(texts: _Texts, count: int) -> torch.Tensor:
    """Return the `count` most frequent choices of the model, in ascending order."""
    return texts.choices.flatten().bincount(minlength=count).topk(count).indices.sort().values


def _train(head: DraftHead, texts: _Texts, num_steps: int, parameters: Sequence[torch.nn.Parameter]) -> None:
    after = head.after_layers()
    hidden = torch.cat([texts.layers[layer + 1] for layer in after], dim=-1) if after else texts.final
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(num_steps):
        loss = torch.zeros(())
        states = head.fuse(hidden[:, :-1].flatten(0, 1)).view(NUM_TEXTS, TEXT_TOKENS - 1, -1)
        for count in range(1, NUM_PROPOSALS + 1):
            # Slot i - 1 reads token i and the states before it.
            token_ids, choices = texts.token_ids[:, count:], texts.choices[:, count:]
            positions = torch.arange(count - 1, TEXT_TOKENS - 1).repeat(NUM_TEXTS)
            attention = _DenseAttention(NUM_TEXTS)
            out = head.step(token_ids.flatten(), states.flatten(0, 1), positions, attention)
            logits = head.logits(out)
            chosen = choices.flatten()
            is_drafted = logits.gather(1, chosen[:, None])[:, 0].isfinite()
            loss = loss + cross_entropy(logits[is_drafted], chosen[is_drafted])
            states = out.view(*states.shape)[:, :-1]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    taught_with_eagle3(Path(sys.argv[1], "eagle3"))
    taught_with_mtp(Path(sys.argv[1], "mtp"))
